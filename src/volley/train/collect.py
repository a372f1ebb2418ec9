"""Collect a target's own responses, on which a drafter is trained (DFlash §4.2).

Prompts become jobs. A source answers them: the engine here, or an endpoint (``endpoint.py``). Each answer of a finished job is
one line of a JSONL journal: OpenAI messages that end with the response. The ``key`` of a line names its job. So an interrupted
run drops the lines of an unfinished job, skips the finished ones and continues.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import Any, Protocol

from volley.chat import check_template, encode_chat, template_digest
from volley.errors import ConfigError, InputError
from volley.files import appending
from volley.params import SamplingParams
from volley.prompts import Conversation, Message, check_training, load_prompts
from volley.results import GenerationResult


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """Prompts to ask, and how to ask them."""

    prompts: tuple[str, ...]
    """Prompt files (JSONL with ``prompt``, ``messages`` or ``turns``), training datasets by name, or ``builtin``."""
    out: Path
    """The JSONL file to append to; what it already holds is not asked again."""
    data_dir: Path | None = None
    """Folder with the named datasets' files; without it they come from the hub."""
    limit: int | None = None
    """Prompts taken from each source."""
    temperatures: tuple[float, ...] = (0.0,)
    """Cycled over prompts and samples."""
    samples: int = 1
    """Responses for each prompt."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this share of the probability."""
    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest."""
    max_tokens: int = 512
    """Longest response."""
    seed: int = 0
    """With it, equal runs draw equal responses."""
    system: str | None = None
    """System message put before prompts that have none."""
    thinking: bool | None = None
    """Passed to the chat template as ``enable_thinking``; left out, the template decides."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("collect has no prompts; name at least one prompt file or dataset")
        if self.samples < 1:
            raise ConfigError(f"samples is {self.samples}; it must be at least 1")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not self.temperatures:
            raise ConfigError("temperatures is empty; give at least one, such as 0")
        if self.samples > 1 and not any(self.temperatures):
            raise ConfigError(f"{self.samples} samples at temperature 0 are the same text; add a higher temperature")
        check_training(self.prompts)


@dataclass(frozen=True)
class Answer:
    """One response. Only the engine's responses have token ids."""

    text: str
    finish_reason: str
    output_tokens: int
    prompt_token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None


@dataclass
class CollectJob:
    """One conversation to be answered once, turn by turn."""

    key: str
    conversation: Conversation
    sample: int
    params: SamplingParams
    messages: list[Message]
    """Messages so far, with the answers and the user's further turns."""
    answers: list[Answer] = field(default_factory=list)

    def add(self, answer: Answer) -> bool:
        """Add an answer. Return True if the conversation is complete."""
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)
        if len(self.answers) == self.conversation.num_answers:
            return True
        self.messages.append({"role": "user", "content": self.conversation.turns[len(self.answers) - 1]})
        return False


class Source(Protocol):
    """Source of answers."""

    name: str
    """Model that answers. A journal holds the answers of one model."""
    chat_template: str | bool
    """Digest of the template that was applied here; ``True`` if the endpoint applies its own, ``False`` if there is none."""
    refusals: list[str]
    """Reasons why prompts of the last run were not answered."""

    def run(self, jobs: Iterable[CollectJob], done: Callable[[CollectJob], None]) -> int:
        """Answer every job, and call ``done`` when each finishes. Return the number of jobs that were given up."""
        ...


@dataclass(frozen=True)
class Progress:
    """Progress of a run. ``tokens_per_second`` counts response tokens of this run only."""

    finished: int
    skipped: int
    """Number of jobs that the journal held already."""
    total: int
    output_tokens: int
    seconds: float
    failed: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def describe(self) -> str:
        """Describe the progress in one line."""
        line = f"{self.skipped + self.finished}/{self.total} responses · {self.output_tokens} tokens"
        line += f" · {self.tokens_per_second:.0f} tokens/s"
        return line + (f" · {self.skipped} were there" if self.skipped else "")


class Journal:
    """Append-only output file. Rows after the last complete job are from an interrupted write, and are cut off."""

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self.keys: set[str] = set()
        try:
            if path.exists():
                self._recover(model)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); name another file as out") from None

    def _recover(self, model: str) -> None:
        with self.path.open("r+b") as file:
            position = whole = 0
            for number, line in enumerate(file, 1):
                position += len(line)
                if line.endswith(b"\n") and self._admit(line, number, model):
                    whole = position
            file.truncate(whole)

    def _admit(self, line: bytes, number: int, model: str) -> bool:
        """Return True if this row completes its job. Raise InputError if it is not from a collection, or from another model."""
        try:
            row = json.loads(line)
            key, found, complete = row["key"], row["model"], bool(row["turn"] == row["turns"])
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.path} line {number} was not written by volley collect; choose another out"
            ) from None
        if found != model:
            raise ConfigError(
                f"{self.path} holds responses of {found!r}, not of {model!r}; a drafter learns one target, "
                "so choose another out"
            )
        if complete:
            self.keys.add(key)
        return complete

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Append all rows of one job."""
        with appending(self.path):
            self._file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
            self._file.flush()
        self.keys.add(rows[-1]["key"])

    def close(self) -> None:
        with suppress(OSError):  # ``append`` has raised the error of a failed write
            os.fsync(self._file.fileno())
            self._file.close()


def make_jobs(config: CollectConfig) -> list[CollectJob]:
    """Make the jobs in order: one for each distinct conversation and sample."""
    jobs: dict[str, CollectJob] = {}
    conversations = [c for source in config.prompts for c in load_prompts(source, config.data_dir, config.limit)]
    for index, conversation in enumerate(conversations):
        messages = list(conversation.messages)
        if config.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system})
        for sample in range(config.samples):
            temperature = config.temperatures[(index * config.samples + sample) % len(config.temperatures)]
            sampling = [temperature, config.top_p, config.top_k, config.min_p, config.max_tokens, config.seed]
            asked = json.dumps([messages, conversation.turns, config.thinking, sample, *sampling])
            key = hashlib.sha256(asked.encode()).hexdigest()[:16]
            params = SamplingParams(
                temperature=temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
                max_tokens=config.max_tokens,
                seed=int(key, 16) >> 1,
            )
            jobs.setdefault(key, CollectJob(key, conversation, sample, params, list(messages)))
    return list(jobs.values())


def to_rows(job: CollectJob, source: Source, thinking: bool | None) -> list[dict[str, Any]]:
    """Return the journal's lines for a finished job, one per answer: OpenAI messages and their sampling parameters."""
    rows = []
    first = len(job.messages) + 2 - 2 * len(job.answers)  # messages up to the first answer; each turn adds two
    for turn, answer in enumerate(job.answers, 1):
        row: dict[str, Any] = {
            "key": job.key,
            "id": job.conversation.id,
            "sample": job.sample,
            "turn": turn,
            "turns": len(job.answers),
            "messages": job.messages[: first + 2 * (turn - 1)],
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
            "top_k": job.params.top_k,
            "min_p": job.params.min_p,
            "max_tokens": job.params.max_tokens,
            "seed": job.params.seed,
            "thinking": None if thinking is None else "on" if thinking else "off",
            "chat_template": source.chat_template,
            "model": source.name,
            "finish_reason": answer.finish_reason,
            "output_tokens": answer.output_tokens,
        }
        if answer.response_token_ids is not None:
            row["prompt_token_ids"] = answer.prompt_token_ids
            row["response_token_ids"] = answer.response_token_ids
        rows.append(row)
    return rows


def collect(config: CollectConfig, source: Source, report: Callable[[Progress], None] | None = None) -> Progress:
    """Answer every job that the journal lacks. A run may be interrupted and repeated."""
    jobs = make_jobs(config)
    journal = Journal(config.out, source.name)
    missing = [job for job in jobs if job.key not in journal.keys]
    skipped, finished, output_tokens, started = len(jobs) - len(missing), 0, 0, time.perf_counter()

    def tell() -> None:
        if report is not None:
            report(Progress(finished, skipped, len(jobs), output_tokens, time.perf_counter() - started))

    def done(job: CollectJob) -> None:
        nonlocal finished, output_tokens
        journal.append(to_rows(job, source, config.thinking))
        finished += 1
        output_tokens += sum(answer.output_tokens for answer in job.answers)
        tell()

    tell()
    try:
        failed = source.run(missing, done)
    finally:
        journal.close()
    return Progress(finished, skipped, len(jobs), output_tokens, time.perf_counter() - started, failed)


def check_single(job: CollectJob) -> None:
    """Refuse a chat if prompts are sent without a template."""
    if job.conversation.num_answers > 1 or len(job.messages) > 1:
        raise InputError(
            f"prompt {job.conversation.id} is a chat; a model without a chat template takes single prompts: give rows of "
            "'prompt', without a system message"
        )


class BatchGenerator(Protocol):
    """Part of ``Engine`` that collecting needs."""

    @property
    def tokenizer(self) -> Any: ...

    def room(self, num_prompt: int, params: SamplingParams) -> int: ...

    def generate(self, prompts: Any, params: Any) -> "Iterator[GenerationResult]": ...


class EngineSource:
    """Source that answers with the engine, ``batch`` conversations at a time; unfinished ones join the next batch."""

    def __init__(
        self,
        engine: BatchGenerator,
        name: str,
        thinking: bool | None = None,
        batch: int = 1024,
        most_tokens: int | None = None,
    ) -> None:
        """Answer with ``engine``. ``most_tokens`` limits a prompt and its answer together."""
        check_template(engine.tokenizer, thinking)
        self.engine = engine
        self.name = name
        self.thinking = thinking
        self.batch = batch
        self.most_tokens = most_tokens or sys.maxsize
        self.refusals: list[str] = []
        """Reasons why prompts were not answered."""
        self.chat_template: str | bool = template_digest(engine.tokenizer)

    def _room(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Return the most tokens that an answer may have; 0 or less if none fit."""
        return min(self.engine.room(len(prompt), params), self.most_tokens - len(prompt))

    def run(self, jobs: Iterable[CollectJob], done: Callable[[CollectJob], None]) -> int:
        jobs = list(jobs)
        if self.chat_template is False:
            for job in jobs:
                check_single(job)
        fresh, open_jobs, refused, self.refusals = iter(jobs), list[CollectJob](), 0, []
        turns = max((job.conversation.num_answers for job in jobs), default=1)
        at_once = max(1, self.batch // turns)  # if the run is killed, unfinished conversations are lost
        while batch := open_jobs + list(islice(fresh, at_once - len(open_jobs))):
            prompts = [encode_chat(self.engine.tokenizer, job.messages, thinking=self.thinking) for job in batch]
            rooms = [self._room(ids, job.params) for job, ids in zip(batch, prompts, strict=True)]
            fits = [room > 0 for room in rooms]
            refused += fits.count(False)
            batch, prompts = list(compress(batch, fits)), list(compress(prompts, fits))
            left = [room for room in rooms if room > 0]
            params = [job.params.within(room) for job, room in zip(batch, left, strict=True)]
            results = self.engine.generate(prompts, params)
            open_jobs = []
            for job, prompt, result in zip(batch, prompts, results, strict=True):
                ids = list(result.token_ids)
                if job.add(Answer(result.text, result.finish_reason, len(ids), prompt, ids)):
                    done(job)
                else:
                    open_jobs.append(job)
        if refused:
            self.refusals.append(
                f"{refused} prompts do not fit in {self.most_tokens} tokens, the target's context or the room for its K/V; give "
                "shorter ones"
            )
        return refused
