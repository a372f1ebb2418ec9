"""Compile grammars for a tokenizer with llguidance, and mask logits by them.

A matcher stands at the end of the output. It follows the paths of a draft and rolls back. Each row of a verification gets the
mask of its own path, before temperature and truncation, as in plain decoding. Drafts are made under the same masks, so draft
and target have the same support.
"""

import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from textwrap import shorten
from typing import Any

import numpy as np

from volley.decode.rules import Bits, Constraint, is_in
from volley.decode.schemas import enforceable
from volley.errors import ConfigError, InputError
from volley.grammar import Grammar

_KEPT = 256  # most compiled grammars in the cache
_LONGEST_MESSAGE = 300
_MASK_WORK = 50_000  # most expressions that the lexer may derive for one mask: about 50 ms
_TRIAL_TOKENS = 8
_MOST_TRIALS = 32  # most parts of a schema that are compiled to find the invalid one


class Grammars:
    """Compiles grammars for one tokenizer and caches the most recent ones. It is thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> None:
        """Compile for ``tokenizer``. ``vocab_size`` is the width of the target's logits; ``end_token_ids`` end a text that its
        grammar accepts."""
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(end_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._vocabulary: Any = None
        self._kept: Bits = np.empty(0, dtype=np.uint8)

    def rule(self, grammar: Grammar, *, ignore_eos: bool = False) -> "GrammarRule":
        """Make the rule of one request. Raises :class:`ConfigError` if the grammar cannot be compiled.

        With ``ignore_eos`` no end token is allowed, and the text goes on until no token can follow.
        """
        matcher = self.compile(grammar).deep_copy()
        return GrammarRule(matcher, self._kept, [] if ignore_eos else self._ends)

    def compile(self, grammar: Grammar) -> Any:
        """Return the matcher of a grammar before its first token. It is shared: copy it before use."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_tokenizer()
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
            self._try_out(matcher, grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _try_out(self, matcher: Any, grammar: Grammar) -> None:
        """Generate the beginning of a random text, so that a grammar that becomes too complex is refused before it is used."""
        chance, rule = random.Random(0), GrammarRule(matcher.deep_copy(), self._kept, [])
        try:
            if (mask := rule.mask([])) is None:
                raise ConfigError(f"the {grammar.kind} grammar allows no text; say what the text may be")
            for _ in range(_TRIAL_TOKENS):
                byte = int(chance.choice(mask.nonzero()[0]))
                rule.take(byte * 8 + chance.choice([bit for bit in range(8) if mask[byte] >> bit & 1]))
                if (mask := rule.mask([])) is None:
                    break
        except InputError as error:
            raise ConfigError(
                f"the {grammar.kind} grammar is too complex after a few tokens: {error}; bound repetitions lower, or split it"
            ) from None

    def _compile(self, grammar: Grammar) -> Any:
        matcher = self._matcher(_text_for_library(grammar))
        if matcher.is_error():
            problem = _first_line(matcher.get_error())
            if grammar.kind == "json_schema":
                pointer, problem = self._locate(_schema_of(grammar), grammar.whitespace, problem)
                raise ConfigError(f"the JSON schema cannot be used, at {pointer or 'its root'}: {problem}")
            raise ConfigError(f"the {grammar.kind} grammar cannot be used: {problem}")
        return matcher

    def _read_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise InputError("a grammar needs the target's tokenizer; load the target from a folder that has one")
        try:
            import llguidance.hf
        except ImportError:
            raise ConfigError(
                "grammars need the llguidance package; install it: pip install 'llguidance>=1.9,<2'"
            ) from None
        size = -(-max(self._vocab_size, len(self._tokenizer)) // 64) * 64  # masks consist of 64-bit words
        try:
            vocabulary = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._ends or None)
            vocabulary = _with_added_text(vocabulary, self._tokenizer)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"llguidance cannot read this tokenizer ({error}); grammars need a target with a fast tokenizer"
            ) from None
        kept = np.ones(size, dtype=np.uint8)
        kept[self._vocab_size :] = 0
        kept[vocabulary.eos_tokens] = 0
        self._kept = np.packbits(kept, bitorder="little")
        return vocabulary

    def _matcher(self, text: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=4 * _MASK_WORK, step_lexer_fuel=_MASK_WORK)
        return LLMatcher(self._vocabulary, text, log_level=0, limits=limits)

    def _locate(self, schema: dict[str, Any], whitespace: str, problem: str) -> tuple[str, str]:
        """Return the JSON pointer of the innermost part of a schema that does not compile alone, and the reason."""
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        part, pointer, trials = schema, "", _MOST_TRIALS
        while True:
            for place, inner in _parts_of(part):
                trials -= 1
                matcher = self._matcher(_schema_text({**shared, **inner}, whitespace)) if trials > 0 else None
                if matcher is not None and matcher.is_error():
                    part, pointer, problem = inner, f"{pointer}/{place}", _first_line(matcher.get_error())
                    break
            else:
                return pointer, problem


class _Vocabulary:
    """A vocabulary of llguidance with other special tokens."""

    bos_token_id = None

    def __init__(self, known: Any, special_token_ids: list[int], added: Collection[str]) -> None:
        """Wrap the vocabulary ``known``. ``added`` are the added tokens that are text."""
        self._known, self.special_token_ids = known, special_token_ids
        self._added = re.compile("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")")
        self.eos_token_id = known.eos_token
        self.tokens = [known.decode_bytes([token]) for token in range(known.vocab_size)]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("it takes text")  # this tells llguidance not to pass bytes
        tokens: list[int] = self._known.tokenize_str(text)
        if self._text(tokens) == text.encode():
            return tokens
        told: list[int] = []  # a normalizer may put a space behind each added token
        for part in filter(None, self._added.split(text)):
            tokens = self._known.tokenize_str(part)
            told += tokens if self._text(tokens) == part.encode() else self._known.greedy_tokenize(part)
        return told

    def _text(self, tokens: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in tokens)


def _with_added_text(vocabulary: Any, tokenizer: Any) -> Any:
    """Return a vocabulary in which added tokens that are not special are text.

    llguidance treats each added token of the form ``<...>`` as special. Qwen's ``<tool_call>`` and ``</think>`` are text.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    special = {*tokenizer.all_special_ids, *vocabulary.eos_tokens}
    plain = {token for token, own in tokenizer.added_tokens_decoder.items() if not own.special} - special
    if not any(vocabulary.is_special_token(token) for token in plain if token < vocabulary.vocab_size):
        return vocabulary
    kept = [
        token for token in range(vocabulary.vocab_size) if vocabulary.is_special_token(token) and token not in plain
    ]
    texts = {str(own) for token, own in tokenizer.added_tokens_decoder.items() if token in plain}
    wrapped = TokenizerWrapper(_Vocabulary(vocabulary, kept, texts))
    return LLTokenizer(wrapped, n_vocab=vocabulary.vocab_size, eos_token=list(vocabulary.eos_tokens))


def _text_for_library(grammar: Grammar) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match grammar.kind:
        case "json_schema":
            return _schema_text(_schema_of(grammar), grammar.whitespace)
        case "regex":
            text = LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            options = [json.dumps(option, ensure_ascii=False) for option in json.loads(grammar.source)]
            text = LLMatcher.grammar_from_lark("start: " + " | ".join(options))
        case "lark":
            text = LLMatcher.grammar_from_lark(grammar.source)
        case "ebnf":
            try:
                text = LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.source))
            except Exception as error:  # the converter raises bare Exception
                told = shorten(str(error) or type(error).__name__, _LONGEST_MESSAGE)
                raise ConfigError(f"the ebnf grammar cannot be used: {told}") from None
    return str(text)


def _schema_of(grammar: Grammar) -> dict[str, Any]:
    try:
        return enforceable(json.loads(grammar.source))
    except RecursionError:
        raise ConfigError("the JSON schema cannot be read; nest it less deeply, with $defs and $ref") from None


def _schema_text(schema: dict[str, Any], whitespace: str) -> str:
    from llguidance import LLMatcher

    spaces = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    options: Any = {"lenient": False, **spaces}  # these override what the schema asks for in x-guidance
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the JSON schema cannot be read ({error}); nest it less deeply, with $defs and $ref"
        ) from None


def _parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly inside a schema, each with the last part of its JSON pointer."""
    for key, value in schema.items():
        if key in ("const", "enum", "default", "examples"):
            continue
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if key in ("properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"):
            for name, inner in inside:
                if isinstance(inner, dict):
                    yield f"{key}/{str(name).replace('~', '~0').replace('/', '~1')}", inner
        elif isinstance(value, dict):
            yield key, value


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return shorten(f"{lines[0]} {reason}", _LONGEST_MESSAGE, placeholder=" …") if lines else "it is not valid"


class GrammarRule(Constraint):
    """Grammar of one request.

    The matcher does not know end tokens: they are allowed if it accepts the text. A request whose text cannot go on ends
    without one.
    """

    title = "a grammar"

    def __init__(self, matcher: Any, kept: Bits, end_token_ids: Sequence[int]) -> None:
        """Mask by ``matcher``. ``kept`` are the tokens that a grammar may allow, as bits in 64-bit words."""
        self._matcher, self._keeps, self._kept = matcher, kept, kept.view(np.uint64)
        self._ends = end_token_ids
        self._at: list[int] = []  # path at which the matcher stands
        self._masks: dict[tuple[int, ...], Bits | None] = {}
        self._runs: dict[tuple[int, ...], list[int]] = {}  # forced tokens after each path
        self._allowed: set[tuple[int, ...]] = {()}  # paths known to be allowed; some have no mask yet
        self._words = np.zeros_like(self._kept)
        self._address = self._words.ctypes.data, self._words.nbytes

    def take(self, token_id: int) -> None:
        self._masks.clear()
        self._runs.clear()
        self._allowed = {()}
        if token_id in self._ends:
            return
        if self._at[:1] == [token_id]:
            del self._at[0]
            if self._at:  # the matcher is further along this path, so the text can go on
                return
        else:
            self._go_to([])
            if not self._matcher.consume_token(token_id):
                raise InputError(
                    f"token {token_id} breaks the grammar ({_first_line(self._matcher.get_error())}); another rule or bias "
                    "of the request may leave no allowed token, or the grammar is too complex"
                )
        self.is_complete = self._matcher.is_stopped() or (self._matcher.is_accepting() and self.mask([]) is None)

    def mask(self, path: Sequence[int]) -> Bits | None:
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._find_mask(key)
        return self._masks[key]

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Return True if ``token_id`` may follow ``path``. Without a cached mask the matcher checks the one token, which is
        several times faster."""
        key = tuple(path)
        if key in self._masks or token_id in self._ends or not is_in(token_id, self._keeps):
            return super().allows(path, token_id)
        self._step_back(key)
        rest = key[len(self._at) :]
        if any(token in self._ends for token in rest):
            return False
        num_valid = int(self._matcher.validate_tokens([*rest, token_id]))
        if num_valid >= len(rest):
            self._go_to(key)
        if num_valid <= len(rest):
            return False
        forced = self._matcher.compute_ff_tokens()  # a mask allows one tokenization of forced text
        if forced and forced[0] != token_id:
            return False
        if key in self._allowed:
            self._allowed.add((*key, token_id))
        return True

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return forced tokens with one call to the matcher and without a mask. Forced text is found whatever its
        tokenization."""
        key = tuple(path)
        if key not in self._runs:
            self._runs[key] = self._find_run(key)
        return self._runs[key]

    def _find_run(self, path: tuple[int, ...]) -> list[int]:
        if any(token in self._ends for token in path):
            return []
        self._go_to(path)
        run: list[int] = list(takewhile(lambda token: is_in(token, self._keeps), self._matcher.compute_ff_tokens()))
        self._allowed.update((*path, *run[: count + 1]) for count in range(len(run)))
        return run

    def _find_mask(self, path: tuple[int, ...]) -> Bits | None:
        if path not in self._allowed:
            before = self.mask(path[:-1])
            if before is None or path[-1] in self._ends or not is_in(path[-1], before):
                return None
        self._go_to(path)
        self._matcher.unsafe_compute_mask_ptr(*self._address)
        if self._matcher.is_error():
            raise InputError(f"the grammar is too complex here ({_first_line(self._matcher.get_error())}); simplify it")
        words = self._words & self._kept
        if not np.bitwise_or.reduce(words):
            return None
        mask: Bits = words.view(np.uint8)
        if self._ends and self._matcher.is_accepting():
            for end in self._ends:
                mask[end >> 3] |= 1 << (end & 7)
        return mask

    def _go_to(self, path: Sequence[int]) -> None:
        """Move the matcher to an allowed path."""
        self._step_back(path)
        self._matcher.consume_tokens(list(path[len(self._at) :]))
        self._at = list(path)

    def _step_back(self, path: Sequence[int]) -> None:
        """Roll the matcher back to the last node that its path shares with ``path``."""
        common = 0
        while common < min(len(path), len(self._at)) and path[common] == self._at[common]:
            common += 1
        if common < len(self._at):
            self._matcher.rollback(len(self._at) - common)
        self._at = self._at[:common]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        self._go_to([])
        return int(self._matcher.validate_tokens(list(token_ids)))
