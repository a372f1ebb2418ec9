"""A difference from plain decoding is a bug unless the target's own logits tie at the very place."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.conftest import TinyPair
from volley import Engine
from volley.cli.console import Comparison, Paper, answer_all, demo_diffusion, explain_difference, median_turn
from volley.models.targets.families import JOINT
from volley.models.targets.target import Target
from volley.prompts import Conversation
from volley.types import MASKED, GenerationResult, GenerationStats, SamplingParams


def answer(token_ids: list[int]) -> GenerationResult:
    return GenerationResult("", token_ids, "length", GenerationStats())


CASES = [
    (torch.bfloat16, 0.0, True),
    (torch.bfloat16, 0.125, True),
    (torch.bfloat16, 1.0, False),
    (torch.float32, 0.125, False),
    (torch.float32, 1e-6, True),
]


@pytest.mark.parametrize(("dtype", "gap", "tied"), CASES)
def test_only_a_tie_explains_a_difference(dtype: torch.dtype, gap: float, tied: bool) -> None:
    asked: list[list[int]] = []

    def next_logits(token_ids: list[int]) -> torch.Tensor:
        asked.append(token_ids)
        return torch.tensor([3.0, 16.0, 16.0 - gap, -2.0])

    engine: Any = SimpleNamespace(
        encode=lambda prompt: prompt, next_logits=next_logits, target=SimpleNamespace(dtype=dtype)
    )
    explanation = explain_difference(engine, Comparison(answer([5, 6, 1, 9]), answer([5, 6, 2, 8])), [1, 2])
    other = explain_difference(engine, Comparison(answer([5, 6, 0, 9]), answer([5, 6, 1, 8])), [1, 2])
    assert asked == [[1, 2, 5, 6]] * 2
    assert other is None, "a third token, whatever ties there"
    assert (explanation is not None) == tied
    assert explanation is None or "token 2" in explanation


@pytest.mark.slow
def test_the_diffusion_demo_leaves_only_text_on_a_terminal(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volley.cli.console.DEMO_TOKENS", 14)
    target = Target.from_pretrained(tiny_pair.target, torch.float32)
    target.diffusion = replace(JOINT, mask_token_id=3)
    engine, screen = Engine(target), Screen(200)
    out = Console(file=screen, force_terminal=True, width=200, height=40, highlight=False, markup=False, emoji=False)
    written = []
    monkeypatch.setattr(screen, "write", lambda text, write=screen.write: (written.append(text), write(text))[1])
    assert demo_diffusion(engine, out)
    assert any(MASKED in text for text in written), "canvases are shown while they are denoised"
    assert MASKED not in screen.shown, "and taken back"
    assert screen.shown.count("tokens a pass") == 3


@pytest.mark.slow
def test_next_logits_are_the_targets_and_leave_no_page_behind(tiny_pair: TinyPair) -> None:
    engine = Engine.from_pretrained(tiny_pair.target, tiny_pair.drafter, dtype=torch.float32)
    prompt = [10, 20, 30, 40, 50]
    (result,) = engine.generate(prompt)
    for size in (1, 7):
        expected = result.token_ids[size]
        assert int(engine.next_logits([*prompt, *result.token_ids[:size]]).argmax()) == expected
    assert engine.snapshot().pages_used == 0
    engine.check_integrity()


# -- a terminal --------------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """What a terminal of a few columns shows of what is written: letters, line feeds, and the sequences that sketches need."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.row, self.column = columns, 0, 0
        self.rows: list[list[str]] = [[]]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for way, number, letter in re.findall(r"\x1b\[([\d;]*)([ACJm])|([^\x1b])", text):
            self._sequence(number, int(way or 1) if number != "m" else 0) if number else self._put(letter)
        return len(text)

    def _sequence(self, kind: str, count: int) -> None:
        if kind == "A":
            self.row -= count
            assert self.row >= 0
        elif kind == "C":
            self.column = min(self.columns - 1, self.column + count)
        elif kind == "J":
            self.rows[self.row :] = [self.rows[self.row][: self.column]]

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n" or self.column == self.columns:  # a full row is left only for the next letter
            self.row, self.column = self.row + 1, 0
            self.rows += [[]] * (self.row == len(self.rows))
            if letter != "\n":
                self._put(letter)
        else:
            row = self.rows[self.row] = [*self.rows[self.row], *" " * self.columns][
                : max(len(self.rows[self.row]), self.column)
            ]
            row[self.column : self.column + 1] = [letter]
            self.column += 1

    @property
    def shown(self) -> str:
        return "\n".join("".join(row) for row in self.rows)


@given(
    pieces=st.lists(st.tuples(st.text("ab \n", max_size=25), st.text("xyz\n\x07", max_size=60)), max_size=8),
    columns=st.integers(4, 12),
)
def test_sketches_leave_nothing_behind(pieces: list[tuple[str, str]], columns: int) -> None:
    written, plain = Screen(columns), Screen(columns)
    out = Console(
        file=written, force_terminal=True, width=columns, height=6, highlight=False, markup=False, emoji=False
    )
    paper = Paper(out)
    for text, sketch in pieces:
        paper.write(text)
        plain.write(text)
        paper.sketch(sketch)
        paper.sketch(sketch[::-1])
        if sketch.strip("\n\x07") and plain.column + 1 < columns:
            assert written.shown != plain.shown
    paper.write("")
    assert written.shown == plain.shown
    assert (written.row, written.column) == (plain.row, plain.column)


def test_the_median_turn_is_shown_unless_tokens_differ_in_another() -> None:
    turns = [Comparison(timed([1, 2], speed), timed([1, 2], 10)) for speed in (5, 40, 12)]
    assert median_turn(turns).speedup == pytest.approx(1.2)
    odd = Comparison(timed([1, 3], 90), timed([1, 2], 10))
    assert median_turn([*turns, odd]) is odd


def timed(token_ids: list[int], per_second: float) -> GenerationResult:
    stats = GenerationStats(output_tokens=len(token_ids), total_seconds=(len(token_ids) - 1) / per_second)
    return GenerationResult("", token_ids, "length", stats)


def test_a_conversation_ends_before_a_turn_without_room() -> None:
    asked: list[list[tuple[int, int]]] = []

    class Engine:
        def encode(self, chat: Any, thinking: bool | None = None) -> list[int]:
            return [0] * sum(len(message["content"]) for message in chat)

        def room(self, num_prompt: int, params: SamplingParams) -> int:
            return max(0, (20 - num_prompt) // 3 * 3)  # of canvases

        def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationResult]:
            asked.append([(len(prompt), own.max_tokens) for prompt, own in zip(prompts, params, strict=True)])
            return [GenerationResult("12345678", [0] * 8, "length", GenerationStats()) for _ in prompts]

    long, short = (Conversation(text, ({"role": "user", "content": text},), ("b", "c")) for text in ("a" * 12, "a"))
    found = list(answer_all(Engine(), [long, short], SamplingParams(max_tokens=12), raw=False))  # type: ignore[arg-type]
    assert asked == [[(12, 12), (1, 12)], [(10, 9)], []]
    assert [len(results) for _, _, results in found] == [1, 2]
