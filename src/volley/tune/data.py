"""Collect the responses that a drafter is tuned on, and split them by prompt into training and held-out responses."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from volley.engine.engine import Engine
from volley.errors import InputError
from volley.files import write_atomically
from volley.models.targets.target import Target, load_tokenizer
from volley.train.collect import CollectConfig, EngineSource, Source, collect, make_jobs
from volley.train.collect import Progress as Collected
from volley.train.data import asked, encode_rows, prompt_ids, read_rows
from volley.train.endpoint import EndpointSource
from volley.train.options import LONGEST
from volley.tune.options import TuneConfig

LEAST_PROMPTS = 4
WANTED_RESPONSES = 1000
MOST_SAMPLES = 8
HELD_OUT_SHARE = 0.1
MOST_HELD_OUT = 64
ANSWER_TOKENS = 64
"""Tokens of an answer to a held-out prompt. A held-out prompt must leave that many tokens of the target's context."""


def plan_collection(config: TuneConfig, out: Path) -> CollectConfig:
    """Plan the collection. Few prompts are answered several times, at temperatures above 0; answers at 0 would be equal."""
    once = CollectConfig(
        prompts=config.prompts,
        out=out,
        limit=config.limit,
        max_tokens=config.max_tokens,
        seed=config.seed,
        temperatures=config.temperatures,
        thinking=config.thinking,
    )
    jobs, warm = make_jobs(once), [t for t in config.temperatures if t > 0]
    prompts = len(jobs)
    _check_different(len({json.dumps([job.messages, job.conversation.turns]) for job in jobs}), "there are")
    samples = max(1, min(MOST_SAMPLES, -(-WANTED_RESPONSES // max(1, prompts))))
    if samples == 1 or not warm:
        return once
    cycle = [t for t in config.temperatures if t == 0][:1]
    cycle += [warm[i % len(warm)] for i in range(samples - len(cycle))]
    return replace(once, temperatures=tuple(cycle), samples=samples)


def _check_different(prompts: int, what: str) -> None:
    if prompts < LEAST_PROMPTS:
        raise InputError(
            f"{what} {prompts} different prompts; a drafter is judged on others than it learns from, so give at least "
            f"{LEAST_PROMPTS}"
        )


def digests(config: TuneConfig) -> list[str]:
    """Return the SHA-256 of each file of prompts or responses. A run refuses to continue with other files."""
    files = [path for path in (*config.prompts, *config.data) if Path(path).is_file()]
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files]


def run_collection(
    config: TuneConfig, target: Callable[[], Target], out: Path, report: Callable[[str], None]
) -> list[str]:
    """Answer every prompt that ``out`` lacks. Return the reasons why some were not answered."""
    planned, (source, pace) = plan_collection(config, out), _source(config, target)
    end = collect(planned, source, lambda now: report(progress_line(now, pace)))
    report(progress_line(end, pace))
    return source.refusals


@dataclass(frozen=True)
class Pace:
    """Expected pace of a source, before its first response."""

    at_once: int
    """Number of responses that are generated together."""
    longest_seconds: float | None = None
    """Seconds of that many responses of the maximum length, divided by their number; ``None`` for an endpoint."""


def progress_line(now: Collected, pace: Pace) -> str:
    """Return a line with the number of responses and the minutes left. An unfinished response counts as half done."""
    left = now.total - now.skipped - now.finished
    line = f"{now.total - left} of {now.total} responses"
    if not now.finished:
        at_most = "" if pace.longest_seconds is None else f", about {left * pace.longest_seconds / 60:.1f} min at most"
        return line + at_most
    half = min(pace.at_once, left) / 2
    minutes = (left - half) * now.seconds / (now.finished + half) / 60
    return f"{line}, {now.tokens_per_second:.0f} tokens/s, about {minutes:.1f} min left"


def _source(config: TuneConfig, target: Callable[[], Target]) -> tuple[Source, Pace]:
    if config.endpoint is None:
        engine = Engine(target())
        running = engine.capacity.max_running
        longest = config.max_tokens * engine.cycle_seconds(1, running) / running
        source = EngineSource(engine, config.target, config.thinking, most_tokens=engine.snapshot().max_tokens)
        return source, Pace(running, longest)
    raw = not load_tokenizer(config.target).chat_template
    key = os.environ.get("OPENAI_API_KEY")
    endpoint = EndpointSource(config.endpoint, config.model, key, config.thinking, raw=raw)
    return endpoint, Pace(endpoint.concurrency)


def part(paths: tuple[str, ...], out: Path, load: Callable[[], Target]) -> dict[str, Any]:
    """Write ``train.jsonl`` and ``held-out.jsonl`` to ``out``. All responses to a prompt are in one of them.

    Rows with fewer than two response tokens are left out. Held-out prompts are answered once more, so a prompt that fills the
    target's context is used for training only. The target is loaded to check that.
    """
    rows = read_rows(paths)
    keys = [asked(row) for row in rows]
    _check_different(len(set(keys)), "the responses answer")
    target = load()
    tokenizer, context = target.tokenizer, target.context_length
    assert tokenizer is not None, "a loaded target has a tokenizer"
    documents = encode_rows(tokenizer, rows, min(LONGEST, context), set(target.stop_token_ids))
    groups: dict[str, list[dict[str, Any]]] = {}
    fitting = set[str]()
    for key, row, document in zip(keys, rows, documents, strict=True):
        if len(document) - document.response_start >= 2:
            groups.setdefault(key, []).append(row)
            if document.response_start <= context - ANSWER_TOKENS:
                fitting.add(key)
    _check_different(len(groups), "responses of two tokens or more answer")
    held = set(sorted(fitting)[: min(MOST_HELD_OUT, max(2, int(HELD_OUT_SHARE * len(groups))))])
    if len(held) < 2:
        raise InputError(
            f"{len(held)} prompts leave {ANSWER_TOKENS} tokens of the target's context of {context}, and two must judge; "
            "give shorter ones"
        )
    sides = {"held-out.jsonl": [row for key in sorted(held) for row in groups[key]]}
    sides["train.jsonl"] = [row for key, rows in groups.items() if key not in held for row in rows]
    for name, rows in sides.items():
        write_atomically(out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    rows = sides["train.jsonl"]
    return {"prompts": len(groups), "held_out_prompts": len(held), "rows": len(rows), "tokens": sum(map(_size, rows))}


def _size(row: dict[str, Any]) -> int:
    """Return the number of tokens of prompt and response, or an estimate if only the text is known."""
    ids = [*row.get("prompt_token_ids", ()), *row.get("response_token_ids", ())]
    return len(ids) or sum(len(message["content"]) for message in row["messages"]) // 3


def held_out_prompts(out: Path, tokenizer: PreTrainedTokenizerBase, most: int) -> list[list[int]]:
    """Return the token ids of each prompt once, with or without thinking, as it was answered.

    An engine holds ``most`` tokens of one request. Prompts after which no answer fits are left out.
    """
    rows = read_rows([out / "held-out.jsonl"])
    found = [list(ids) for ids in dict.fromkeys(tuple(prompt_ids(tokenizer, row)) for row in rows)]
    fitting = [ids for ids in found if len(ids) <= most - ANSWER_TOKENS]
    if not fitting:
        raise InputError(
            f"no prompt that is held out leaves {ANSWER_TOKENS} of the {most} tokens that an engine holds of one; "
            "give shorter ones"
        )
    return fitting
