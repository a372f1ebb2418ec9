"""Make requests from prompts, and refuse those that can never be answered."""

import secrets
from collections.abc import Iterable

from volley.decode.detokenize import Detokenizer
from volley.decode.grammars import Grammars
from volley.decode.rules import make_rules
from volley.decode.sampling import PositionNoise
from volley.decode.stops import StopFinder, hidden_tokens
from volley.errors import InputError
from volley.memory.kv_cache import BlockTable, PagePool
from volley.models.targets.target import Target
from volley.params import SamplingParams
from volley.procedures.request import Procedure, Request
from volley.procedures.text import TextWriter


def make_request(
    request_id: int,
    token_ids: list[int],
    params: SamplingParams,
    procedure: Procedure,
    target: Target,
    pool: PagePool,
    grammars: Grammars,
) -> Request:
    """Make a request for the prompt ``token_ids [n]``, with an empty block table.

    Raises :class:`InputError` if the prompt does not fit the context, or has tokens outside the vocabulary;
    :class:`CapacityError` if ``pool`` has too few pages; :class:`ConfigError` if its grammar cannot be used.
    """
    target.check_prompt(token_ids)
    limit = target.context_length
    if len(token_ids) + min(params.max_tokens, 1) > limit:
        raise InputError(
            f"the prompt has {len(token_ids)} tokens and the target's context is {limit}; {target.remedy_for_long_prompts}"
        )
    check_tokens(target, [token for token, _ in params.logit_bias], "logit_bias")
    check_tokens(target, params.stop_token_ids, "stop_token_ids")
    asked = min(len(token_ids) + params.max_tokens, limit)
    pool.check_fits(asked)
    most = procedure.most_tokens(len(token_ids), min(limit, pool.num_pages * pool.page_size), params)
    max_length = min(asked, most)
    rules = make_rules(params, token_ids, target.vocab_size, target.device)
    if params.grammar is not None:  # the last rule: it forbids tokens whatever other rules did to their logits
        rules = (*rules, grammars.rule(params.grammar, ignore_eos=params.ignore_eos))
    table, seed = BlockTable(pool.page_size), params.seed
    if seed is None:  # at temperature 0 it is fixed, because DiffusionGemma's canvas begins with noise even there
        seed = secrets.randbits(63) if params.temperature else 0
    ends = (frozenset() if params.ignore_eos else target.stop_token_ids) | frozenset(params.stop_token_ids)
    hides, stops = params.skip_special_tokens, None
    if params.stop:
        stops = StopFinder(params.stop, hidden_tokens(target.tokenizer, ends, skip_special_tokens=hides))
    return Request(
        request_id=request_id,
        token_ids=token_ids,
        params=params,
        noise=PositionNoise(seed),
        max_length=max_length,
        stop_token_ids=ends,
        writer=TextWriter(Detokenizer(target.tokenizer, skip_special_tokens=hides, before=token_ids), ends, stops),
        table=table,
        draft_table=table,
        procedure=procedure,
        pool_slots=pool.num_pages * pool.page_size,
        rules=rules,
    )


def check_tokens(target: Target, token_ids: Iterable[int], field: str | None = None) -> None:
    """Refuse token ids of a ``field`` that are outside the target's vocabulary; without a ``field`` they come from a prompt."""
    size, what = target.vocab_size, f"{field}: " if field else ""
    if wrong := [token for token in token_ids if not 0 <= token < size]:
        remedy = (
            f"leave it out, or give ids from 0 to {size - 1}"
            if field
            else "encode the prompt with the target's tokenizer"
        )
        raise InputError(
            f"{what}token id {wrong[0]} is outside the target's vocabulary of {size}; {remedy}", field=field
        )
