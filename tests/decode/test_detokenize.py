"""Tokens become text as they come, and no character is ever taken back."""

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.conftest import byte_tokenizer
from volley.decode.detokenize import Detokenizer


@pytest.mark.slow
@given(text=st.text(max_size=20), noise=st.lists(st.integers(0, 255), max_size=8), cut=st.integers(0, 20))
def test_text_is_never_taken_back_and_complete_at_the_end(text: str, noise: list[int], cut: int) -> None:
    """Bytes as tokens: characters span tokens, and some byte strings are no text at all."""
    raw = text.encode()
    raw = raw[:cut] + bytes(noise) + raw[cut:]
    tokens = byte_ids(raw)
    detokenizer = Detokenizer(tokenizer())
    pieces = [detokenizer.push(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]
    assert "".join(pieces) == raw.decode(errors="replace")


@given(
    runs=st.lists(st.tuples(st.text(max_size=12), st.lists(st.integers(0, 255), max_size=3)), max_size=4),
    is_last=st.booleans(),
)
def test_tokens_together_are_the_text_of_each_after_the_other(runs: list[tuple[str, list[int]]], is_last: bool) -> None:
    tokens = [byte_ids(text.encode() + bytes(noise)) for text, noise in runs]
    together, single = Detokenizer(tokenizer()), Detokenizer(tokenizer())
    told, expected = "", ""
    for place, run in enumerate(tokens):
        ends = is_last and place == len(tokens) - 1
        told += together.push_all(run, last=ends)
        expected += "".join(single.push(token, last=ends and i == len(run) - 1) for i, token in enumerate(run))
        if not ends:
            assert expected.startswith(told)
    assert told + together.flush() == expected + single.flush()


@given(text=st.text(st.sampled_from("a é😀"), max_size=20), cut=st.integers(0, 20))
def test_texts_of_vocabularies_that_mark_words_and_fall_back_to_bytes(text: str, cut: int) -> None:
    """Tokenizers of Llama 2's type drop a first space and mark each byte of an unfinished character."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a"]
    fast = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(known)}, merges=[], byte_fallback=True))
    last = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(last)
    words = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>")
    marked = "▁" + text.replace(" ", "▁")
    pieces = [[piece] if piece in known else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in marked]
    cut = min(cut, len(pieces))
    before, after = (
        words.convert_tokens_to_ids([p for each in part for p in each]) for part in (pieces[:cut], pieces[cut:])
    )
    detokenizer = Detokenizer(words, before=before)
    told = [detokenizer.push(token, last=i == len(after) - 1) for i, token in enumerate(after)]
    assert "".join(told) == text[max(0, cut - 1) :]
    assert Detokenizer(words, before=before).push_all(after, last=True) == "".join(told)


@functools.cache
def tokenizer() -> Any:
    return byte_tokenizer()


def byte_ids(raw: bytes) -> list[int]:
    """Tokens of single bytes, however invalid, spelled as byte-level BPE spells them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = tokenizer().get_vocab()
    return [vocabulary[letters[byte]] for byte in raw]


@given(token_ids=st.lists(st.integers(0, 259), max_size=12), skips=st.booleans())
def test_texts_are_those_of_the_tokenizer(token_ids: list[int], skips: bool) -> None:
    """Both transformers' own tokenizers and one that decodes by itself."""

    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **options: Any) -> str:
            return str(super()._decode(*given, **options)).upper()

    for kind in (tokenizer(), Shouting(tokenizer_object=tokenizer().backend_tokenizer)):
        detokenizer = Detokenizer(kind, skip_special_tokens=skips)
        expected = kind.decode(token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        assert detokenizer.peek(token_ids, "_") == expected


def test_special_tokens_are_not_text() -> None:
    detokenizer = Detokenizer(tokenizer())
    ids = [*byte_ids(b"a"), tokenizer().convert_tokens_to_ids("<|im_end|>"), *byte_ids(b"b")]
    assert "".join(detokenizer.push(token) for token in ids) == "ab"


def test_without_a_tokenizer_every_text_is_empty() -> None:
    detokenizer = Detokenizer(None)
    assert [detokenizer.push(token, last=token == 2) for token in range(3)] == ["", "", ""]
    assert detokenizer.push_all([1, 2]) == ""


def test_a_look_ahead_keeps_nothing() -> None:
    detokenizer, euro = Detokenizer(tokenizer()), "€".encode()
    detokenizer.push(byte_ids(b"a")[0])
    assert detokenizer.push(byte_ids(euro)[0]) == ""
    rest = byte_ids(euro[1:] + b"!")
    assert detokenizer.peek([*rest, None, None, *byte_ids(b"b")], "_") == "€!__b"
    assert detokenizer.peek([None, *byte_ids(b"b")], "_") == "_b"
    assert "".join(detokenizer.push(token) for token in rest) == "€!"


def test_a_token_whose_text_fails_once_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer, tokens = Detokenizer(tokenizer()), byte_ids(b"abc")
    assert detokenizer.push(tokens[0]) == "a"
    with monkeypatch.context() as patch:
        patch.setattr(detokenizer, "decode", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            detokenizer.push(tokens[1])
    assert [detokenizer.push(token) for token in tokens[1:]] == ["b", "c"]
