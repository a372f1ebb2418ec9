"""Stop strings, also those that spell tokens which the text does not show: token by token and whole."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from volley.decode.stops import StopFinder, hidden_tokens

HIDDEN = {7: "<|end|>", 8: "<|user|>", 9: "<s>"}


def outcome(stops: Sequence[str], tokens: Sequence[int | str]) -> tuple[str, list[str], bool]:
    """The text of hidden ``tokens`` and pieces up to a stop string; what is shown after each; whether it stopped."""
    finder, text, shown = StopFinder(stops, HIDDEN), "", list[str]()
    for token in tokens:
        known = len(text)
        text += token if isinstance(token, str) else ""
        end = finder.find(text, known, token if isinstance(token, int) else 0)
        if end is not None:
            return text[:end], [*shown, text[:end]], True
        shown.append(text[: finder.ready(text)])
    return text, shown, False


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "stopped"),
    [
        ("<|end|>", ["a", 7, "b"], "a", True),
        ("<|end|>", ["a", 8, 9, "b"], "ab", False),
        ("<|end|><|user|>", ["a", 7, "b", 7, 8, "c"], "ab", True),
        ("<|end|><|user|>", [7, 9, 8], "", False),  # another token between the two
        ("stop<|end|>", ["a sto", "p", 7, "b"], "a ", True),
        ("stop<|end|>", ["stop", 8, 7, "stop"], "stopstop", False),
        ("<|user|>\nHi", ["a", 8, "\nH", "i there"], "a", True),
        ("a<s>b", ["xa", 9, "bc"], "x", True),
        ("<|end|>", ["a <|en", "d|> b"], "a ", True),  # written as text
        ("ab", ["a", 7, "b"], "", True),  # a string without special tokens is looked for in the text that is shown
    ],
)
def test_where_a_text_stops(stop: str, tokens: list[int | str], text: str, stopped: bool) -> None:
    found, shown, has_stopped = outcome([stop], tokens)
    assert (found, has_stopped) == (text, stopped)
    assert all(found.startswith(some) for some in shown), "nothing that is shown is taken back"


def test_an_end_that_may_begin_a_stop_string_is_held_back() -> None:
    _, shown, _ = outcome(["b<|end|>c", "zz"], ["ab", 8, "b", 7, "d", "z"])
    assert shown == ["a", "ab", "ab", "ab", "abbd", "abbd"]


PIECES = st.one_of(st.sampled_from([7, 8, 9]), st.text("ab", min_size=1, max_size=2))
STOPS = st.lists(PIECES, min_size=1, max_size=3)


def spelled(pieces: Sequence[int | str]) -> str:
    return "".join(HIDDEN[piece] if isinstance(piece, int) else piece for piece in pieces)


@given(st.lists(STOPS, min_size=1, max_size=2), st.lists(PIECES, max_size=12))
def test_the_slow_way_finds_the_same(stops: list[list[int | str]], tokens: list[int | str]) -> None:
    """Search the whole text after each token: the spelled one for strings that spell a token, else the shown one."""
    strings = [spelled(stop) for stop in stops]
    spelling = [
        string for string, stop in zip(strings, stops, strict=True) if any(isinstance(own, int) for own in stop)
    ]
    plain = [string for string in strings if string not in spelling]
    expected, stopped = "".join(piece for piece in tokens if isinstance(piece, str)), False
    for count in range(1, len(tokens) + 1):
        full = spelled(tokens[:count])
        shown = "".join(piece for piece in tokens[:count] if isinstance(piece, str))
        ends = [shown.find(stop) for stop in plain if stop in shown]
        for at in (full.find(stop) for stop in spelling if stop in full):
            before = full[:at]
            for name in HIDDEN.values():
                before = before.replace(name, "")
            ends.append(len(before))
        if ends:
            expected, stopped = shown[: min(ends)], True
            break
    found, partly, has_stopped = outcome(strings, tokens)
    assert (found, has_stopped) == (expected, stopped)
    assert all(found.startswith(some) for some in partly)


def test_which_tokens_a_text_does_not_show() -> None:
    own = Tokenizer(models.BPE({chr(97 + i): i for i in range(7)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.add_special_tokens(["<|end|>"])
    own.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own)
    assert hidden_tokens(tokenizer, (), skip_special_tokens=True) == {7: "<|end|>"}
    assert hidden_tokens(tokenizer, (), skip_special_tokens=False) == {}
    assert hidden_tokens(tokenizer, {7, 8}, skip_special_tokens=False) == {7: "<|end|>", 8: "<tool_call>"}
    assert hidden_tokens(None, {7}, skip_special_tokens=True) == {}
