"""A grammar's masks against a matcher that was never rolled back, its ends, and what it says of grammars that cannot be used."""

import functools
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import byte_tokenizer
from volley.decode.grammars import GrammarRule, Grammars
from volley.decode.rules import Bits, allowed_choice, is_in, only_token
from volley.errors import ConfigError, InputError
from volley.files import REFERENCE
from volley.grammar import WHITESPACE, Grammar

END = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["plain", "planned", "other"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "compact": Grammar.json_schema(SCHEMA, whitespace=""),
    "regex": Grammar.regex(r"(ab|a)*c?"),
    "choice": Grammar.choice(["yes", "yes, sir", 'no "way" – ever 😀\n']),
    "lark": Grammar.lark('start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'),
    "ebnf": Grammar.ebnf('root ::= "-" item ("," item)*\nitem ::= [a-z]+ | "é"'),
}


@functools.cache
def bundled() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(REFERENCE / "target")


@functools.cache
def grammars() -> Grammars:
    return Grammars(bundled(), len(bundled()), {END})


@functools.cache
def vocabulary() -> LLTokenizer:
    return from_tokenizer(bundled(), n_vocab=len(bundled()), eos_token=END)


def library_text(name: str) -> str:
    """The grammars above in the library's own words, written here a second time."""
    if name in ("schema", "compact"):
        spaces: Any = {"whitespace_pattern": WHITESPACE} if name == "schema" else {"whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(SCHEMA, overrides=spaces)
    if name == "regex":
        return LLMatcher.grammar_from_regex(r"(ab|a)*c?")
    return LLMatcher.grammar_from_lark(
        {
            "choice": r'start: "yes" | "yes, sir" | "no \"way\" – ever 😀\n"',
            "lark": GRAMMARS["lark"].source,
            "ebnf": 'start: "-" item ("," item)*\nitem: /[a-z]/+ | "é"',
        }[name]
    )


def slow_mask(matcher: LLMatcher, path: Sequence[int], size: int) -> set[int]:
    """The tokens after ``path``, from a matcher that begins anew and has been nowhere else."""
    matcher.reset()
    assert not path or matcher.consume_tokens(list(path))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:size]).tolist())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def tokens_in(bits: Bits) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_those_of_a_matcher_that_was_never_rolled_back(name: str) -> None:
    chance, size = random.Random(name), len(bundled())
    slow = LLMatcher(vocabulary(), library_text(name))
    for _ in range(4):
        rule, taken = grammars().rule(GRAMMARS[name]), list[int]()
        while not rule.is_complete and len(taken) < 24:
            for _ in range(3):  # draft paths, each some way along and back
                path: list[int] = []
                while len(path) < chance.randint(0, 5) and (mask := rule.mask(path)) is not None:
                    path.append(chance.choice(tokens_in(mask)))
                mask = rule.mask(path)
                if END in path:
                    assert mask is None
                    continue
                expected = slow_mask(slow, [*taken, *path], size)
                assert mask is None if expected == {END} else set(tokens_in(mask)) == expected  # type: ignore[arg-type]
            mask = rule.mask([])
            assert mask is not None
            token = chance.choice([t for t in tokens_in(mask) if t != END] or [END])
            rule.take(token)
            taken.append(token)
            assert rule.is_complete == (slow_mask(slow, taken, size) == {END})


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_token_is_allowed_if_the_mask_of_its_path_has_it(name: str) -> None:
    """All tokens after the text so far and after paths that turn off it, asked of a rule that has no masks."""
    chance, size = random.Random(name), len(bundled())
    rule, plain = grammars().rule(GRAMMARS[name]), grammars().rule(GRAMMARS[name])
    seen = {True: 0, False: 0}
    for _ in range(6):
        path: list[int] = []
        for _ in range(3):
            mask = plain.mask(path)
            expected = set() if mask is None else set(tokens_in(mask))
            for token in {*expected, *chance.sample(range(size), 300)} - {END}:  # the end is looked for in the mask
                rule.allows(path[: chance.randint(0, len(path))], chance.randrange(3, size))  # the matcher comes back
                assert rule.allows(path, token) == (token in expected), (path, token)
                seen[token in expected] += 1
            assert not rule.allows([*path, END], chance.randrange(3, size))
            path.append(chance.choice([*expected, chance.randrange(size)]))
        mask = plain.mask([])
        if mask is None or not (left := [token for token in tokens_in(mask) if token != END]):
            break
        token = chance.choice(left)
        for own in (rule, plain):
            own.take(token)
    assert min(seen.values()) > 10


@pytest.mark.parametrize("name", GRAMMARS)
def test_forced_tokens_are_the_only_ones_of_their_masks(name: str) -> None:
    chance, count = random.Random(name), 0
    rule, plain = grammars().rule(GRAMMARS[name]), grammars().rule(GRAMMARS[name])
    for _ in range(20):
        path: list[int] = []
        while len(path) < 20 and (mask := plain.mask(path)) is not None:
            forced = rule.forced(path)
            for token in forced:
                mask = plain.mask(path)
                assert mask is not None
                assert tokens_in(mask) == [token]
                path.append(token)
            count += len(forced)
            if (left := [token for token in tokens_in(mask) if token != END]) and not forced:
                path.append(chance.choice(left))
            elif not forced:
                break
        assert rule.forced([*path, END]) == []
    assert count > 20 or name in ("regex", "lark", "ebnf"), "these force next to nothing"


def test_a_row_whose_best_token_is_allowed_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = bundled().encode('{"name": "a", "kind": "plain", "sizes": [1, 20]}')
    rule = grammars().rule(GRAMMARS["schema"])
    paths = [tuple(answer[:count]) for count in range(len(answer))]
    logits = torch.zeros(len(paths), len(bundled()))

    def choices(logits: torch.Tensor, best: list[int]) -> list[int]:
        return [allowed_choice([rule], *each) for each in zip(logits, best, paths, strict=True)]

    with monkeypatch.context() as context:
        context.setattr(GrammarRule, "mask", lambda *_: pytest.fail("a mask was computed"))
        assert choices(logits, answer) == answer
    wrong = [*answer[:5], END, *answer[6:]]
    logits[5, answer[5]] = 1.0
    assert choices(logits, wrong) == answer


def test_a_forbidden_path_has_no_mask() -> None:
    rule = grammars().rule(GRAMMARS["regex"])
    (a, z) = (bundled().encode(text)[0] for text in "az")
    assert rule.mask([z]) is None
    assert rule.mask([z, a]) is None
    assert rule.mask([a]) is not None
    assert rule.num_allowed([a, a, z, a]) == 2
    with pytest.raises(InputError, match=f"token {z} breaks the grammar"):
        rule.take(z)


def test_the_text_may_end_where_the_grammar_accepts_it_and_nowhere_else() -> None:
    (yes, comma) = (bundled().encode(text) for text in ("yes", "yes,"))
    rule = grammars().rule(GRAMMARS["choice"])
    for tokens, may_end in (([], False), (yes, True), (comma, False)):
        mask = rule.mask(tokens)
        assert mask is not None
        assert is_in(END, mask) == may_end
    stubborn = grammars().rule(GRAMMARS["choice"], ignore_eos=True).mask(yes)
    assert stubborn is not None
    assert not is_in(END, stubborn)


def test_a_rule_keeps_the_end_out_of_its_matcher() -> None:
    """A consumed end would not be counted when the matcher is rolled back."""
    rule = grammars().rule(GRAMMARS["regex"])
    (a,) = bundled().encode("a")
    before = rule.mask([a])
    assert rule.mask([a, END]) is None
    assert rule.mask([a, END, a]) is None
    rule.take(a)
    assert before is not None
    assert np.array_equal(rule.mask([]), before)  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "ends"), [(260, {2}), (300, {2, 0}), (200, {2}), (260, set())])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(width: int, ends: set[int]) -> None:
    tokenizer = byte_tokenizer()
    rule = Grammars(tokenizer, width, ends).rule(Grammar.regex("[a-z]+"))
    (a,) = tokenizer.encode("a")
    letters = {token for token in map(tokenizer.convert_tokens_to_ids, "abcdefghijklmnopqrstuvwxyz") if token < width}
    for path, expected in (([], letters), ([a], letters | ends)):
        mask = rule.mask(path)
        assert mask is not None
        assert set(tokens_in(mask)) == expected


def test_a_grammar_is_compiled_once_and_requests_do_not_share_their_place() -> None:
    own = Grammars(byte_tokenizer(), 260, {2})
    assert own.compile(Grammar.regex("ab+")) is own.compile(Grammar.regex("ab+"))
    one, other = (own.rule(Grammar.regex("ab+")) for _ in range(2))
    (a,) = byte_tokenizer().encode("a")
    one.take(a)
    assert one.mask([a]) is None
    assert other.mask([a]) is not None


BAD: list[tuple[Any, str]] = [
    (
        lambda: Grammar.json_schema({"properties": {"a/b": {"items": {"type": "strin"}}}}),
        r"at /properties/a~1b/items: Invalid type: strin",
    ),
    (
        lambda: Grammar.json_schema({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}),
        r'at /anyOf/1: Unimplemented keys: \["uniqueItems"\]',
    ),
    (
        lambda: Grammar.json_schema({"$defs": {"x": {"pattern": "("}}, "properties": {"y": {"$ref": "#/$defs/x"}}}),
        r"at /(\$defs/x|properties/y): regex parse error: error: unclosed group",
    ),
    (lambda: Grammar.json_schema({"$ref": "#/nope"}), r"at its root: Pointer '/nope' does not exist"),
    (lambda: Grammar.json_schema({"x-guidance": {"lenient": True}, "not": {}}), r'Unimplemented keys: \["not"\]'),
    (lambda: Grammar.json_schema({"minItems": 3, "maxItems": 2, "type": "array"}), "Unsatisfiable schema"),
    (lambda: Grammar.json_schema("[" * 10**5), "the JSON schema is not JSON"),
    (lambda: Grammar.json_schema('{"a": '), "the JSON schema is not JSON: Expecting value: line 1 column 7"),
    (lambda: Grammar.json_schema("3"), "the JSON schema is a int; give an object"),
    (lambda: Grammar.json_schema({"const": float("nan")}), "cannot be written as JSON"),
    (lambda: Grammar.json_schema(False), "which nothing satisfies"),
    (lambda: Grammar.regex("a("), r"the regex grammar cannot be used: .*unclosed group"),
    (lambda: Grammar.regex("(?=a)"), "look-around"),
    (lambda: Grammar.regex("()"), "the regex grammar allows no text"),
    (lambda: Grammar.regex(""), "the regex grammar is empty"),
    (lambda: Grammar.regex("\ud800"), "lone surrogate"),
    (lambda: Grammar.regex("a" * 300_000), "has 300000 characters; give at most 262144"),
    (lambda: Grammar.lark("start: foo"), 'the lark grammar cannot be used: .*unknown name: "foo"'),
    (lambda: Grammar.ebnf("root = 3"), "the ebnf grammar cannot be used: Expected ::= at line 1"),
    (lambda: Grammar.ebnf("root ::= " + "(" * 10**5), "the ebnf grammar cannot be used: .*recursion"),
    (lambda: Grammar.regex("a{1000000}"), "too complex after a few tokens: .*bound repetitions lower"),
    (lambda: Grammar.regex("((a{1000}){1000}){1000}"), "too complex"),
    (lambda: Grammar.regex("(a?){500}a{500}"), "too complex"),
    (lambda: Grammar.json_schema(nested(400)), "the JSON schema cannot be read .*nest it less deeply"),
    (lambda: Grammar.choice([]), "choices are one or more texts"),
    (lambda: Grammar.choice(["a", ""]), "choices are one or more texts"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_what_cannot_be_used_is_said_and_where(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grammars().rule(make())


def test_no_tokenizer_and_no_library_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="needs the target's tokenizer"):
        Grammars(None, 50, set()).compile(GRAMMARS["regex"])
    with pytest.raises(InputError, match="llguidance cannot read this tokenizer"):
        Grammars(["a", "b"], 50, set()).compile(GRAMMARS["regex"])
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ConfigError, match=r"install it: pip install 'llguidance>=1.9,<2'"):
        Grammars(bundled(), 50, set()).compile(GRAMMARS["regex"])


def test_a_mask_that_takes_too_long_is_an_error_of_the_request() -> None:
    class Broken:
        """A matcher that has reached its limits."""

        def unsafe_compute_mask_ptr(self, *_: Any) -> None: ...

        def consume_tokens(self, _: Any) -> None: ...

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "ParserTooComplex\nmore"

    with pytest.raises(InputError, match=r"too complex here \(ParserTooComplex\)"):
        GrammarRule(Broken(), np.full(8, 255, dtype=np.uint8), []).mask([])


def test_sets_of_tokens() -> None:
    for tokens in ([0], [7], [8], [39], [0, 1], [3, 30], []):
        bits = np.zeros(40, dtype=np.uint8)
        bits[tokens] = 1
        packed = np.packbits(bits, bitorder="little")
        assert [token for token in range(40) if is_in(token, packed)] == tokens
        if tokens:
            assert only_token(packed) == (tokens[0] if len(tokens) == 1 else None)
