"""Speculation under grammars: greedy answers are masked plain decoding's own, sampled ones have its distribution."""

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.chi_square import chi_square_p
from tests.conftest import byte_tokenizer
from tests.tiny import Answers, Pair, answered, eager_model, random_drafter, target_config, teach
from volley import Engine, Grammar, SamplingParams
from volley.decode.rules import Constraint, allowed_probs
from volley.decode.sampling import token_probs
from volley.decode.work import Proposal
from volley.errors import ConfigError, InputError
from volley.models.checkpoints.checkpoint import HeadConfig
from volley.models.targets.target import Target
from volley.procedures import speculative
from volley.proposers import constrained

END, COUNT = 2, 60
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "category": {"enum": ["small", "smaller", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 3},
    },
    "required": ["category", "count", "s"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.json_schema(SCHEMA, whitespace="")
PROMPTS = [[40, 50, 60], [77], [100, 101, 9, 9, 30, 41], [200, 33]]
DRAFTER = {"vocab_size": 260, "mask_token_id": 3}


def make_pair(tokenizer: PreTrainedTokenizerFast, seed: int, drafter: dict[str, Any], **changes: Any) -> Pair:
    hf = eager_model(target_config(eos_token_id=END, **changes), seed)
    return Pair(Target(copy.deepcopy(hf), tokenizer), random_drafter(seed + 1, **drafter), hf)


@functools.cache
def pair() -> Pair:
    return make_pair(byte_tokenizer(), 0, DRAFTER, vocab_size=260)


def allowed(vocabulary: LLTokenizer, grammar: str, text: Sequence[int], size: int) -> list[int]:
    """The tokens that may follow, from a matcher that reads the whole text anew; the end token alone: it is complete."""
    matcher = LLMatcher(vocabulary, grammar)
    assert not text or matcher.consume_tokens(list(text))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits[:size]).tolist()


def masked(logits: Tensor, tokens: list[int]) -> Tensor:
    rows = torch.full_like(logits, -torch.inf)
    rows[tokens] = logits[tokens]
    return rows


def slowly(prompt: Sequence[int]) -> list[int]:
    """transformers' own logits of the whole text for every token, masked by a matcher that reads the whole text anew."""
    vocabulary = from_tokenizer(byte_tokenizer(), n_vocab=260, eos_token=END)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    output: list[int] = []
    while len(output) < COUNT and (tokens := allowed(vocabulary, grammar, output, 260)) != [END]:
        with torch.inference_mode():
            logits = pair().hf(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1]
        output.append(int(masked(logits, tokens).argmax()))
    return output


@functools.cache
def expected() -> Answers:
    return {tuple(prompt): slowly(prompt) for prompt in PROMPTS}


def answers(engine: Engine, **params: Any) -> list[list[int]]:
    own = SamplingParams(**{"grammar": GRAMMAR, "max_tokens": COUNT, **params})
    results = answered(engine, PROMPTS, own)
    for result in results:
        assert result.finish_reason == "stop"
        jsonschema.validate(json.loads(result.text), SCHEMA)
    return [result.token_ids for result in results]


OPTIONS: list[dict[str, Any]] = [
    {"block_size": 1},
    {"policy": "fixed"},
    {"policy": "goodput"},
    {"policy": "fixed", "denoising_steps": 2},
    {"tree_nodes": 16},
    {"policy": "fixed", "page_size": 4, "num_pages": 28, "max_batch_tokens": 9},
    {"tree_nodes": 12, "page_size": 4, "num_pages": 28},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_greedy_is_masked_plain_decoding(options: dict[str, Any]) -> None:
    engine = Engine(pair().target, pair().drafter, **options)
    teach(engine, expected())
    assert answers(engine) == list(expected().values())


def test_pages_ran_out_above() -> None:
    engine = Engine(pair().target, pair().drafter, **OPTIONS[5])
    results = list(engine.generate(PROMPTS, SamplingParams(grammar=GRAMMAR, max_tokens=COUNT)))
    assert sum(result.stats.preemptions for result in results) > 0


def test_drafts_are_accepted_along_what_the_grammar_forces() -> None:
    """An untaught drafter knows nothing, yet long parts of the answer have no other way to go."""
    engine = Engine(pair().target, pair().drafter, policy="fixed")
    (bound,) = engine.generate(PROMPTS[0], SamplingParams(grammar=GRAMMAR, max_tokens=COUNT))
    (free,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=COUNT))
    assert bound.stats.acceptance_length > 1.5 * free.stats.acceptance_length


def test_forced_tokens_need_no_drafter() -> None:
    engine = Engine(pair().target, policy="goodput")
    (result,) = engine.generate(PROMPTS[0], SamplingParams(grammar=GRAMMAR, max_tokens=COUNT))
    assert result.token_ids == expected()[tuple(PROMPTS[0])]
    assert max(result.stats.accepted_lengths) >= len('","count":')


SAMPLED = {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.4, "logit_bias": {50: 3.0}, "logprobs": True}


@functools.cache
def plain_sampled() -> list[list[int]]:
    return answers(Engine(pair().target), **SAMPLED)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_seed_gives_the_tokens_of_plain_decoding(options: dict[str, Any]) -> None:
    engine = Engine(pair().target, pair().drafter, **options)
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain_sampled(), strict=True)})
    assert answers(engine, **SAMPLED) == plain_sampled()


@pytest.mark.slow
def test_each_request_has_its_own_grammar_and_some_have_none() -> None:
    greedy = SamplingParams(max_tokens=24)
    each = [
        greedy,
        replace(greedy, grammar=GRAMMAR),
        replace(greedy, grammar=Grammar.regex("[0-9]{20}")),
        replace(greedy, grammar=Grammar.choice(["left", "right"]), temperature=1.0, seed=3),
        replace(greedy, temperature=1.0, seed=3),
        replace(greedy, grammar=Grammar.regex("[0-9]{20}"), ignore_eos=True, frequency_penalty=2.0),
    ]
    for options in ({"policy": "fixed"}, {"policy": "fixed", "denoising_steps": 2}, {"tree_nodes": 9}):
        together = list(Engine(pair().target, pair().drafter, **options).generate([PROMPTS[2]] * len(each), each))
        for result, params in zip(together, each, strict=True):
            (alone,) = Engine(pair().target).generate(PROMPTS[2], params)
            assert result.token_ids == alone.token_ids
            assert result.finish_reason == alone.finish_reason
        assert together[2].text.isdigit()
        assert together[3].text in ("left", "right")


def test_the_model_ends_its_text_only_where_the_grammar_accepts_it() -> None:
    """The end token is what this request wants above all."""
    eager = {END: 100.0}
    for pattern, text in (("(ab)+", "ab"), ("[a-z]{3}[0-9]*", None)):
        params = SamplingParams(grammar=Grammar.regex(pattern), max_tokens=20, logit_bias=eager)  # type: ignore[arg-type]
        (result,) = Engine(pair().target, pair().drafter, policy="fixed").generate([7, 8], params)
        assert result.token_ids[-1] == END
        assert result.text == text if text else (len(result.text) == 3 and result.text.isalpha())
        (longer,) = Engine(pair().target, pair().drafter).generate([7, 8], replace(params, ignore_eos=True))
        assert len(longer.token_ids) == 20
        assert END not in longer.token_ids


def test_log_probabilities_are_those_of_the_unmasked_distribution() -> None:
    params = SamplingParams(grammar=Grammar.choice(["left"]), max_tokens=9, logprobs=True, top_logprobs=2)
    (result,) = Engine(pair().target, pair().drafter, policy="fixed").generate([9], params)
    assert result.text == "left"
    with torch.inference_mode():
        logits = pair().hf(input_ids=torch.tensor([[9, *result.token_ids]])).logits[0, :-1].log_softmax(-1)
    wanted = [float(row[token]) for row, token in zip(logits, result.token_ids, strict=True)]
    assert result.logprobs == pytest.approx(wanted, abs=1e-4)
    assert result.top_logprobs is not None
    assert [top[0][0] for top in result.top_logprobs] == logits.argmax(dim=-1).tolist()


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs() -> None:
    engine = Engine(pair().target)
    with pytest.raises(ConfigError, match="at /items: Invalid type: x"):
        engine.add_request([1], SamplingParams(grammar=Grammar.json_schema({"items": {"type": "x"}})))
    with pytest.raises(ConfigError, match=r"SamplingParams.grammar is .*; it must be a Grammar"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]
    assert not engine.has_work


def test_rules_that_leave_nothing_are_an_error_and_no_wrong_token() -> None:
    class NoDigits(Constraint):
        def __init__(self, *_: Any) -> None: ...

        def take(self, token_id: int) -> None: ...

        def mask(self, path: Sequence[int]) -> Any:
            return np.packbits(np.arange(260) < 1, bitorder="little")

        def num_allowed(self, token_ids: Sequence[int]) -> int:
            return 0

    params = SamplingParams(grammar=Grammar.regex("[0-9]+"), rules=(NoDigits,))
    with pytest.raises(InputError, match="breaks the grammar"):
        list(Engine(pair().target, pair().drafter).generate([5], params))


# -- the distribution --------------------------------------------------------------------------------------------------

V, TOKENS, SEEDS = 7, 4, 1500
PROMPT = [1, 3, 2 + 2, 5]
PIECES = ["a", "b", "<end>", "c", "ab", "ca", "<mask>"]
PATTERN = "[ab]{1,3}(c|ca)?[ab]?b*"
LAW = SamplingParams(temperature=1.3, max_tokens=TOKENS, grammar=Grammar.regex(PATTERN))


@functools.cache
def few_pieces() -> PreTrainedTokenizerFast:
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("c", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<mask>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@functools.cache
def small(*, head: bool = False) -> Pair:
    extra: dict[str, Any] = {"head": HeadConfig(type="residual", rank=4, candidates=3)} if head else {}
    drafter = {"vocab_size": V, "block_size": 4, "mask_token_id": 6, **extra}
    made = make_pair(few_pieces(), 2, drafter, vocab_size=V, initializer_range=0.2)
    for weight in made.drafter.head.parameters() if made.drafter.head else ():
        weight.mul_(4)  # transitions that matter
    return made


@functools.cache
def exact_law(**changes: Any) -> dict[tuple[int, ...], float]:
    """The probability of every answer: transformers' logits for every prefix, masked by a matcher that reads it anew."""
    params = replace(LAW, **changes)
    vocabulary, grammar = from_tokenizer(few_pieces(), n_vocab=V), LLMatcher.grammar_from_regex(PATTERN)
    laws: dict[tuple[int, ...], float] = {}

    def follow(prefix: tuple[int, ...], chance: float) -> None:
        tokens = allowed(vocabulary, grammar, prefix, V) if END not in prefix else [END]
        if tokens == [END] or len(prefix) == TOKENS:
            laws[prefix] = chance
            return
        with torch.inference_mode():
            logits = small().hf(input_ids=torch.tensor([[*PROMPT, *prefix]]), use_cache=False).logits[0, -1]
        for token, p in enumerate(token_probs(masked(logits, tokens)[None], params)[0].tolist()):
            if p > 0:
                follow((*prefix, token), chance * p)

    follow((), 1.0)
    assert sum(laws.values()) == pytest.approx(1, abs=1e-5)
    assert len(laws) > 40
    return laws


def likelihood(
    *, head: bool = False, changes: dict[str, Any] | None = None, seeds: int = SEEDS, **options: Any
) -> float:
    """How probable the answers of many seeds are under the exact distribution."""
    chosen = small(head=head)
    room = {"max_running": 256, "max_batch_tokens": 4096, "num_pages": 600, "page_size": 8}  # also for everybody's tree
    options = {"policy": "fixed", **room, **options}
    engine = Engine(chosen.target, chosen.drafter, **options)
    params, laws = replace(LAW, **(changes or {})), exact_law(**(changes or {}))
    results = list(engine.generate([PROMPT] * seeds, [replace(params, seed=seed) for seed in range(seeds)]))
    assert sum(n - 1 for result in results for n in result.stats.accepted_lengths) > 0.2 * seeds
    places = {answer: place for place, answer in enumerate(laws)}
    counts = torch.zeros(len(laws))
    for result in results:
        counts[places[tuple(result.token_ids)]] += 1
    return chi_square_p(counts, torch.tensor(list(laws.values())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"verification": "rejection"}, {"top_p": 0.8, "draft_temperature": 0.6}),
        ({"verification": "rejection", "head": True}, {}),
        ({"verification": "coupled"}, {}),
        ({"tree_nodes": 8, "head": True}, {"top_k": 3}),
        ({"denoising_steps": 2}, {}),
        ({"policy": "goodput", "verification": "rejection"}, {}),
    ],
    ids=str,
)
def test_the_distribution_of_whole_answers_is_the_masked_targets(
    options: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert likelihood(changes=changes, **options) > 1e-3


Walk = Callable[..., Proposal]


def scored_without_masks(honest: Walk) -> Walk:
    """Drafts are drawn under the masks and scored as if there were none."""

    def walk(following: Any, work: Any, *more: Any, **options: Any) -> Proposal:
        proposal = honest(following, work, *more, **options)
        before = [work.request.anchor, *proposal.token_ids]
        rows = [following.logits(at, before[at], None) for at in range(len(proposal.token_ids))]
        proposal.draft_probs = token_probs(torch.cat(rows), work.request.params) if rows else None
        return proposal

    return walk


@pytest.mark.slow
def test_drafts_scored_without_their_masks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrained, "walk_constrained", scored_without_masks(constrained.walk_constrained))
    assert likelihood(verification="rejection", seeds=4000) < 1e-6


@pytest.mark.slow
def test_a_bonus_token_without_its_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(bound: Any, logits: Tensor, paths: Any, params: SamplingParams) -> Tensor:
        probs = allowed_probs(bound, logits, paths, params)
        return torch.cat([probs[:-1], token_probs(logits[-1:], params)]) if len(paths) > 1 else probs

    monkeypatch.setattr(speculative, "allowed_probs", forgetful)
    with pytest.raises((InputError, KeyError)):
        likelihood(verification="rejection")


@pytest.mark.slow
def test_masks_of_the_accepted_text_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposal, "paths", property(lambda own: [()] * (len(own.token_ids) + 1)))
    with pytest.raises((InputError, KeyError)):
        likelihood(verification="rejection")
