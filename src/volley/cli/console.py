"""Output of the ``generate`` and ``demo`` commands: streamed answers, their statistics, and a comparison with plain decoding."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from volley.bench.run import without_drafter
from volley.bench.ties import first_difference, tied_logits
from volley.errors import ConfigError
from volley.prompts import Conversation, Message
from volley.types import DiffusionMode, DiffusionParams, GenerationResult, SamplingParams

if TYPE_CHECKING:
    from volley.engine.engine import Engine
    from volley.train.collect import Progress

_Way = tuple["Engine", SamplingParams]

DEMO_PROMPTS = {
    "math": "A baker makes 4 trays of 12 rolls each morning and sells 35 of them. The rest are packed in bags of 13. "
    "How many bags does she fill?",
    "code": "Write a function to find the largest number in a list and return it together with its index.",
    "command help": "How do I use `tar`?",
}
SMOLLM2_PROMPTS = {
    "question": "What is the difference between weather and climate?",
    "code": "Write a Python function that tells whether a word is a palindrome, and explain it.",
    "editing": "Correct the spelling of this text and repeat it: Yesterday I went to the libary to borow a book about "
    "the histry of trains. The libarian was very helpfull and showed me three diferent books.",
}
DEMO_TOKENS = 128
DEMO_TURNS = 3
WARM_UP = SamplingParams(max_tokens=16)
"""Parameters of a first call that absorbs one-time costs before anything is timed."""
_CAUSAL_MODES: tuple[DiffusionMode, DiffusionMode] = ("self", "autoregressive")
DRAFTED = "green"
SKETCHED = "dim"


class Paper:
    """Terminal text followed by a sketch that can be erased."""

    def __init__(self, out: Console) -> None:
        self._out, self._column, self._rows = out, 0, -1

    def write(self, text: str, style: str = "") -> None:
        """Replace the sketch by final text."""
        self._erase()
        text = text.expandtabs(8)
        self._out.print(Text(text, style=style), end="", soft_wrap=True)
        for letter in text:
            size = cell_len(letter)
            begins = letter == "\n" or self._column + size > self._out.width
            self._column = size if begins else self._column + size
        self._out.file.flush()

    def sketch(self, text: str) -> None:
        """Replace the sketch by ``text``, as much as the terminal can show."""
        self._erase()
        width, height = self._out.size
        if self._column >= width:  # the terminal may or may not have begun the next row
            return
        rows, column = [""], self._column
        for letter in text.expandtabs(8):
            size = cell_len(letter)
            if letter == "\n" or column + size >= width:
                rows.append("")
                column = 0
            rows[-1] += letter if letter.isprintable() else ""
            column += size
        self._rows = min(len(rows), height - 1) - 1
        self._out.print(Text("\n".join(rows[: self._rows + 1]), style=SKETCHED), end="", soft_wrap=True)
        self._out.file.flush()

    def _erase(self) -> None:
        if self._rows >= 0:
            up, right = (f"\x1b[{n}{way}" if n else "" for n, way in ((self._rows, "A"), (self._column, "C")))
            self._out.file.write(f"{up}\r{right}\x1b[J")
            self._rows = -1


def stream(engine: "Engine", prompt: Any, params: SamplingParams, out: Console) -> GenerationResult:
    """Print an answer as it arrives. On a terminal, drafted text is coloured and drafts of a canvas are dim."""
    chunks, paper = engine.stream(prompt, params), Paper(out)
    while True:
        try:
            chunk = next(chunks)
        except StopIteration as end:
            out.print()
            out.file.flush()
            result: GenerationResult = end.value
            return result
        if chunk.draft is None:
            paper.write(chunk.text, DRAFTED if chunk.from_draft else "")
        elif out.is_terminal:
            paper.sketch(chunk.draft.text)


def describe(result: GenerationResult) -> str:
    """Return one line about an answer."""
    stats = result.stats
    gain = f"{stats.tokens_per_pass:.2f} tokens a pass" if stats.denoising_steps else f"τ {stats.acceptance_length:.2f}"
    return (
        f"{gain} · {stats.decode_tokens_per_second:.1f} tokens/s · "
        f"{stats.output_tokens} tokens · first after {1000 * stats.time_to_first_token:.0f} ms · {result.finish_reason}"
    )


@dataclass(frozen=True)
class Comparison:
    """Results of one prompt decoded both ways, one after the other."""

    speculative: GenerationResult
    plain: GenerationResult

    @property
    def identical(self) -> bool:
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def speedup(self) -> float:
        plain = self.plain.stats.decode_tokens_per_second
        return self.speculative.stats.decode_tokens_per_second / plain if plain else 0.0


BUG = "The tokens were NOT identical to plain decoding's: this is a bug, please report it."


def explain_difference(engine: "Engine", compared: Comparison, prompt: Any) -> str | None:
    """Return why greedy tokens differ if the two tokens' logits tie, else ``None``."""
    mine, answer = compared.speculative.token_ids, compared.plain.token_ids
    at = first_difference(mine, answer)
    if at is None or at == min(len(mine), len(answer)):
        return None
    tie = tied_logits(engine, [*engine.encode(prompt), *answer[:at]], engine.target.dtype, (mine[at], answer[at]))
    if tie is None:
        return None
    return (
        f"The tokens were identical up to token {at}, where the target's logits of both tokens ({tie[0]:.4g} and {tie[1]:.4g}) "
        "tie to within rounding; float32 tells them apart."
    )


def passes(engine: "Engine", results: Sequence[GenerationResult]) -> dict[str, list[float]]:
    """Return the additional figures for answers of a diffusion language model."""
    if engine.target.diffusion is None:
        return {}
    return {"tokens_per_pass": [result.stats.tokens_per_pass for result in results]}


def check_comparable(engine: "Engine", params: SamplingParams) -> None:
    """Refuse a comparison whose outputs need not be equal."""
    if engine.procedures.mode(params) == "diffusion":
        verified = "add --diffusion mode=self to verify them, or " if "self" in engine.procedures.by_mode else ""
        raise ConfigError(
            f"--compare is with plain decoding, whose text canvases do not write; {verified}leave --compare out"
        )


def compare(engine: "Engine", plain: "Engine", prompt: Any, params: SamplingParams, turns: int = 1) -> Comparison:
    """Decode with both engines, one after the other, with nothing cached. Return the turn with the median speedup."""
    ways = (engine, params), (plain, replace(params, diffusion=None))
    return median_turn([_compare(prompt, *ways) for _ in range(turns)])


def compare_modes(engine: "Engine", prompt: Any, params: SamplingParams, turns: int = 1) -> Comparison:
    """Compare a diffusion language model that drafts for itself with one that writes one token at a time."""
    modes = [(engine, replace(params, diffusion=DiffusionParams(mode=mode))) for mode in _CAUSAL_MODES]
    return median_turn([_compare(prompt, *modes) for _ in range(turns)])


def median_turn(turns: Sequence[Comparison]) -> Comparison:
    """Return the turn with the median speedup, or one whose tokens differ, if there is one."""
    ordered = sorted(turns, key=lambda turn: turn.speedup)
    return next((turn for turn in ordered if not turn.identical), ordered[len(ordered) // 2])


def _compare(prompt: Any, speculative: _Way, plain: _Way) -> Comparison:
    results = []
    for engine, params in (plain, speculative):
        engine.reset_prefix_cache()
        results += list(engine.generate([prompt], params))
    return Comparison(speculative=results[1], plain=results[0])


def comparison_table(rows: dict[str, Comparison]) -> Table:
    table = Table()
    table.add_column("prompt")
    gain = "tokens a pass" if any(row.speculative.stats.denoising_steps for row in rows.values()) else "τ"
    for name in ("tokens", gain, "plain tokens/s", "volley tokens/s", "speedup", "identical"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        speculative, plain = row.speculative.stats, row.plain.stats
        table.add_row(
            name,
            str(speculative.output_tokens),
            f"{speculative.tokens_per_pass:.2f}",
            f"{plain.decode_tokens_per_second:.1f}",
            f"{speculative.decode_tokens_per_second:.1f}",
            f"{row.speedup:.2f}×",
            "yes" if row.identical else "NO",
        )
    return table


def demo(engine: "Engine", out: Console, prompts: Mapping[str, str] = DEMO_PROMPTS) -> bool:
    """Stream three answers and measure both ways of decoding on each. Return False if tokens differed without a tie."""
    rows = _answer_each(
        prompts,
        lambda prompt, params: stream(engine, prompt, params, out),
        partial(compare, engine, without_drafter(engine)),
        out,
    )
    out.print()
    if out.is_terminal:
        out.print(Text.assemble("Text in ", ("this colour", DRAFTED), " was drafted, the rest is the target's own.\n"))
    return _report(engine, prompts, rows, out)


def demo_diffusion(engine: "Engine", out: Console) -> bool:
    """Show three answers while they are denoised, then let the model draft for itself. Return False if that changed a token
    without a tie."""

    def paint(prompt: list[Message], params: SamplingParams) -> None:
        canvases = DiffusionParams(mode="diffusion", stream_drafts=True)
        painted = stream(engine, prompt, replace(params, diffusion=canvases), out).stats
        passes = painted.denoising_steps + painted.commit_passes
        out.print(f"{painted.output_tokens} tokens in {passes} passes: {painted.tokens_per_pass:.2f} tokens a pass")

    rows = _answer_each(DEMO_PROMPTS, paint, partial(compare_modes, engine), out)
    out.print(
        "\nThe model drafts a canvas and verifies it causally, compared with one token at a time:\n", soft_wrap=True
    )
    return _report(engine, DEMO_PROMPTS, rows, out)


def _answer_each(
    prompts: Mapping[str, str],
    answer: Callable[[list[Message], SamplingParams], object],
    compare: Callable[..., Comparison],
    out: Console,
) -> dict[str, Comparison]:
    """Answer each of the demo's prompts, and compare two ways of decoding on it."""
    rows, params = dict[str, Comparison](), SamplingParams(max_tokens=DEMO_TOKENS)
    for name, text in prompts.items():
        prompt: list[Message] = [{"role": "user", "content": text}]
        if not rows:
            compare(prompt, WARM_UP)
        out.print(Text(f"\n{text}", style="bold"), soft_wrap=True)
        answer(prompt, params)
        rows[name] = compare(prompt, params, DEMO_TURNS)
    return rows


def _report(engine: "Engine", prompts: Mapping[str, str], rows: dict[str, Comparison], out: Console) -> bool:
    """Print the demo's results as a table. Return False if tokens differed without a tie."""
    out.print(comparison_table(rows))
    out.print(f"Each row is the median of {DEMO_TURNS} turns by its speedup.")
    explained = True
    for name, row in rows.items():
        if not row.identical:
            prompt = [{"role": "user", "content": prompts[name]}]
            explanation = explain_difference(engine, row, prompt)
            explained = explained and explanation is not None
            out.print(f"{name}: {explanation or BUG}")
    if all(row.identical for row in rows.values()):
        out.print("The tokens were identical to plain decoding's.")
    return explained


def answer_all(
    engine: "Engine",
    conversations: Sequence[Conversation],
    params: SamplingParams,
    *,
    raw: bool,
    thinking: bool | None = None,
) -> Iterator[tuple[Conversation, list[Message], list[GenerationResult]]]:
    """Answer every turn of every conversation, all conversations at once, turn by turn, and yield them in order.

    A conversation ends before a turn that does not fit the context.
    """
    chats: list[list[Message]] = [list(c.messages) for c in conversations]
    results: list[list[GenerationResult]] = [[] for _ in conversations]
    for turn in range(max(c.num_answers for c in conversations)):
        asked = [i for i, c in enumerate(conversations) if len(results[i]) == turn < c.num_answers]
        prompts = [
            engine.encode(conversations[i].raw if raw else chats[i], thinking=None if raw else thinking) for i in asked
        ]
        each = [params] * len(prompts)
        if turn:
            rooms = [engine.room(len(prompt), params) for prompt in prompts]
            asked, prompts = list(compress(asked, rooms)), list(compress(prompts, rooms))
            each = [params.within(room) for room in rooms if room]
        for i, result in zip(asked, engine.generate(prompts, each), strict=True):
            results[i].append(result)
            chats[i].append({"role": "assistant", "content": result.text})
            if turn < len(conversations[i].turns):
                chats[i].append({"role": "user", "content": conversations[i].turns[turn]})
    yield from zip(conversations, chats, results, strict=True)


def progress(out: Console) -> Callable[["Progress"], None]:
    """Return a function that prints the progress of a collection at intervals: on a terminal in place, elsewhere line by line."""
    between, end = (0.2, "\r") if out.is_terminal else (10.0, "\n")
    shown = -between

    def show(now: "Progress") -> None:
        nonlocal shown
        if now.seconds - shown >= between:
            shown = now.seconds
            out.print(now.describe(), end=end)

    return show


def stdout() -> Console:
    """Return a console for answers on standard output, without markup, emoji codes or highlighting."""
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, markup=False, emoji=False)
