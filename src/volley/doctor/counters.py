"""Draft counters of a server: its real acceptance by position."""

import re
from collections import defaultdict
from dataclasses import dataclass

import httpx

from volley.errors import InputError

_SAMPLE = re.compile(r"(?:volley|vllm):spec_decode_num_(\w+?)(?:_total)?\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_ENOUGH = 20
"""Minimum number of drafts that reached a position."""


@dataclass(frozen=True)
class Counters:
    """Counters of a server. ``acceptance`` holds, per position, the share of drafts of that length that kept at least that
    many tokens."""

    drafts: int
    acceptance: list[float]


def read_counters(url: str) -> Counters:
    """Read the counters of a server (``http://host:8000``), volley's or vLLM's, in Prometheus' text format.

    Raises InputError without a server, with too few drafts to judge, or with several served models.
    """
    where = f"{url.removesuffix('/').removesuffix('/v1').removesuffix('/metrics')}/metrics"
    try:
        answer = httpx.get(where, timeout=30)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise InputError(f"{where} gives no metrics ({error}); name a server like http://host:8000") from error
    return parse_counters(answer.text, where)


def parse_counters(text: str, where: str) -> Counters:
    """Parse the counters in a server's metrics."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    models, drafts, drafted = set[str](), 0, 0
    for name, labels, value in _SAMPLE.findall(text):
        named = dict(_LABEL.findall(labels))
        models.add(named.get("model_name", ""))
        if name == "drafts":
            drafts = int(float(value))
        elif name == "draft_tokens":
            drafted = int(float(value))
        elif name in ("accepted_tokens_per_pos", "draft_tokens_per_pos"):
            found[name][int(named["position"])] = float(value)
    if len(models) > 1:
        raise InputError(f"{where} is of {len(models)} models ({', '.join(sorted(models))}); ask a server of one")
    reached, kept = found["draft_tokens_per_pos"], found["accepted_tokens_per_pos"]
    if not reached and drafted < drafts * len(kept):
        raise InputError(
            f"{where} counts drafts of different lengths without a count per position; serve with blocks of one "
            "length (--policy fixed) to judge its acceptance"
        )
    acceptance = []
    for position in range(max(kept, default=-1) + 1):
        times = reached.get(position, 0.0) if reached else drafts
        if times < _ENOUGH:
            break
        acceptance.append(kept.get(position, 0.0) / times)
    if not acceptance:
        raise InputError(f"{where} has counted {drafts} drafts, too few to judge; send it more requests first")
    return Counters(drafts, acceptance)
