"""Requests with stop strings that spell special tokens: whole and streamed, with and without drafts."""

import pytest

from volley import Engine, SamplingParams
from volley.files import REFERENCE

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(REFERENCE / "target", REFERENCE / "drafter")


def forced(
    engine: Engine, *, stop: tuple[str, ...], skips: bool, written: list[str], **fields: object
) -> SamplingParams:
    """Parameters under which exactly ``written`` is written, whose parts are tokens: a rule forces one after the other."""
    tokens = [engine.tokenizer.convert_tokens_to_ids(part) for part in written]
    rules = (lambda *_: _InTurn(tokens),)
    return SamplingParams(max_tokens=len(tokens), stop=stop, skip_special_tokens=skips, rules=rules, **fields)  # type: ignore[arg-type]


class _InTurn:
    is_complete = False
    title = ""

    def __init__(self, tokens: list[int]) -> None:
        self.left = list(tokens)

    def take(self, token_id: int) -> None:
        self.left.pop(0)

    def apply(self, logits, paths):  # type: ignore[no-untyped-def]
        for row, path in zip(logits, paths, strict=True):
            if len(path) < len(self.left):
                row[self.left[len(path)]] = float("inf")
        return logits


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("stop", "text", "taken"),
    [
        ("<|im_start|>", "ab", 3),
        ("b<|im_start|>", "a", 3),
        ("<|im_start|>a", "ab", 4),
        ("<|im_start|>c", None, 6),
    ],
)
def test_a_stop_string_that_spells_a_special_token(
    engine: Engine, stop: str, text: str | None, taken: int, skips: bool, streamed: bool, size: int
) -> None:
    engine.block_size = size
    written = ["a", "b", "<|im_start|>", "a", "b", "a"]
    params = forced(engine, stop=(stop,), skips=skips, written=written)
    if streamed:
        chunks = []
        stream = engine.stream(CHAT, params)
        while True:
            try:
                chunks.append(next(stream).text)
            except StopIteration as end:
                result = end.value
                break
        assert "".join(chunks) == result.text
    else:
        (result,) = engine.generate([CHAT], params)
    everything = "ababa" if skips else "ab<|im_start|>aba"
    assert result.text == (everything if text is None else text)
    assert (result.finish_reason, len(result.token_ids)) == ("length" if text is None else "stop", taken)


def test_an_end_token_that_ends_nothing_stops_by_its_text(engine: Engine) -> None:
    (end,) = {"<|im_end|>"} & set(engine.tokenizer.get_vocab())
    params = forced(engine, stop=(end,), skips=True, written=["a", end, "b"], ignore_eos=True)
    (result,) = engine.generate([CHAT], params)
    assert (result.text, result.finish_reason, len(result.token_ids)) == ("a", "stop", 2)
