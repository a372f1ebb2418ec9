"""Run all checks on an engine or a server, and write the verdict to a file protected by a digest."""

import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

from volley.bench.run import without_drafter
from volley.certify import checks
from volley.certify.checks import Check, Questions
from volley.certify.options import CertifyConfig
from volley.certify.sampled import check_server, check_way, ways
from volley.certify.subject import EngineSubject, NotOffered, ServerFailure, ServerSubject, TooBusy
from volley.engine.engine import Engine
from volley.errors import EndpointError
from volley.files import write_atomically
from volley.models.checkpoints.certificate import digest
from volley.models.checkpoints.certificate import read_certificate as read_certificate
from volley.models.layers.fingerprint import drafter_fingerprint, target_fingerprint

Say = Callable[[str], None]
Steps = list[tuple[str, Callable[[], Sequence[Check]]]]
"""Names of checks, each with the function that runs it."""
LONG_TOKENS, LONG_CHARACTERS = 400, 1600
"""Length of the prompts that a prefix cache should find, in tokens and in characters."""
NONCE_CHARACTERS = 64
"""Maximum length of the prefix that makes a prompt new to a cache."""

FINDINGS = {
    "greedy": "acceptance: greedy answers are not the target's",
    "prefix cache": "prefix cache: a prompt found in the cache is answered otherwise",
    "concurrency 8": "concurrency: requests that are served at once change each other",
    "concurrency 32": "concurrency: requests that are served at once change each other",
    "top_k": "top_k is ignored",
    "top_p": "top_p is ignored",
    "penalties": "penalties are ignored",
    "stop": "stop texts are not honoured",
    "bonus": "bonus tokens behind whole drafts are not drawn from the target's distribution",
    "sampled": "acceptance at temperatures above 0 is biased",
    "sampled at T = 0.6": "temperature: the draft's probabilities are not those its tokens were drawn with",
    "sampled with top_p, top_k and penalties": "truncation or penalties bias sampled output",
    "sampled trees": "trees: sampled draft trees are accepted by a rule that is biased on them",
    "seeds": "seeds do not repeat answers",
}
"""Finding for the first failed check, in this order: an earlier fault explains the later ones."""


REQUIRED = {"greedy", "sampled"}
"""Checks that must be judged for the verdict "lossless"."""
OPTIONAL = {"top_k", "top_p", "penalties", "stop", "seeds"}
"""Checks of fields that a server may lack."""


@dataclass
class Certificate:
    """Subject, checks and outcome of a certification."""

    subject: dict[str, Any]
    checks: list[Check]
    settings: dict[str, Any]
    seconds: float = 0.0
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def verdict(self) -> str:
        """Return the verdict, which is not "lossless" if a required check could not be judged."""
        judged = {check.name for check in self.checks if check.judged}
        return "not lossless" if self.failed else "lossless" if judged >= REQUIRED else "undecided"

    @property
    def finding(self) -> str | None:
        """Return the likeliest fault: that of the first failed check in the order of ``FINDINGS``."""
        names = {check.name.rpartition(": ")[2] for check in self.failed if "broke" not in check.facts}
        broke = (f"{check.name}: the server breaks down" for check in self.failed if "broke" in check.facts)
        return next((what for name, what in FINDINGS.items() if name in names), next(broke, None))

    def to_json(self) -> dict[str, Any]:
        body = {
            "volley": _version("volley-llm"),
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "date": self.date,
            "verdict": self.verdict,
            "finding": self.finding,
            "subject": self.subject,
            "settings": self.settings,
            "seconds": round(self.seconds, 1),
            "checks": [{**asdict(check), "outcome": check.outcome} for check in self.checks],
        }
        return {**body, "sha256": digest(body)}

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")


def certify_pair(engine: Engine, prompts: Sequence[list[int]], config: CertifyConfig, say: Say = print) -> Certificate:
    """Check an engine and its drafter against its target alone. ``prompts`` are token ids.

    A diffusion language model without a drafter drafts for itself: its mode ``self`` is checked against autoregressive decoding.
    """
    started, plain = time.monotonic(), without_drafter(engine)
    chosen = list(prompts[: config.prompts_used])
    greedy = checks.greedy_params(config.max_tokens)
    subject, reference = EngineSubject(engine), EngineSubject(plain)
    answers = reference.ask(chosen, greedy, len(chosen))
    texts = [[*prompt, *map(int, reply.tokens)] for prompt, reply in zip(chosen, answers, strict=True)]
    most = min(LONG_TOKENS, engine.snapshot().max_tokens - 2 * config.max_tokens)
    longer = _lengthened(texts, most)
    tie = checks.tie_between(engine.target.dtype)
    exact = engine.core.inexact is None or engine.target.dtype == torch.float32
    questions = Questions(
        subject, reference, chosen, longer, lambda asked, _: list(asked), greedy, max(tie, 1e-3), exact
    )
    before, mode = engine.config, engine.procedures.default_mode
    engine.procedures.default_mode = "self" if engine.core.proposer is None else "autoregressive"
    if engine.core.proposer is not None:
        engine.block_size = engine.core.proposer.block_size
    found = []
    try:
        for _, check in (*_before_sampling(questions), *_parameters(questions)):
            found += [_said(one, say) for one in check()]
        engine.reconfigure(before)
        todo = ways(engine, config.max_tokens)
        for way in todo:
            found += [_said(check, say) for check in check_way(engine, chosen, way, config, 4 * len(todo))]
        found.append(_said(checks.check_seeds(questions), say))
    finally:
        engine.reconfigure(before)
        engine.procedures.default_mode = mode
    return Certificate(_pair_facts(engine), found, asdict(config), time.monotonic() - started)


def certify_server(
    url: str,
    prompts: Sequence[str],
    config: CertifyConfig,
    *,
    plain: str | None = None,
    model: str | None = None,
    key: str | None = None,
    say: Say = print,
) -> Certificate:
    """Check a server by its answers alone, or against a second server that decodes plainly."""
    started = time.monotonic()
    with ExitStack() as clients:
        subject = clients.enter_context(closing(ServerSubject(url, model, key)))
        reference = (
            clients.enter_context(closing(ServerSubject(plain, model, key, EndpointError)))
            if plain is not None
            else None
        )
        tie = _settled(subject, reference, prompts[: config.prompts_used], config)
        facts = {"url": url, "model": subject.model, **subject.software(), "top_logprobs": subject.top, "tie": tie}
        facts["plain"] = plain
        if reference is not None:
            facts |= {f"plain_{name}": text for name, text in reference.software().items()}
        found = [_said(check, say) for check in _server_checks(subject, reference, prompts, config, tie)]
    return Certificate(facts, found, asdict(config), time.monotonic() - started)


def _settled(
    subject: ServerSubject, reference: ServerSubject | None, prompts: Sequence[str], config: CertifyConfig
) -> float:
    """Set both servers to the most log-probabilities they return. Return the largest gap of logits that the subject's rounding
    can close."""
    for one in (subject, *([reference] if reference is not None else [])):
        one.find_top(prompts[0])
    try:
        return checks.tie_of(subject.ask(prompts, checks.greedy_params(config.max_tokens), checks.AT_ONCE))
    except (ServerFailure, TooBusy):  # the checks will report it
        return checks.TIE


def _lengthened(texts: Sequence[Any], length: int) -> list[Any]:
    """Extend each text by the others in turn, and cut it at ``length``."""
    found = []
    for index, text in enumerate(texts):
        whole, others = text, itertools.cycle([*texts[index + 1 :], *texts[: index + 1]])
        while len(whole) < length:
            whole = whole + next(others)
        found.append(whole[: max(length, len(text))])
    return found


def _server_checks(
    subject: ServerSubject,
    reference: ServerSubject | None,
    prompts: Sequence[str],
    config: CertifyConfig,
    tie: float,
) -> Iterator[Check]:
    """Yield the checks of a server. A check during which the server fails counts as failed, and the next one is tried if it
    still answers."""
    chosen, greedy = list(prompts[: config.prompts_used]), checks.greedy_params(config.max_tokens)
    nonce = f"{time.time_ns():x}"

    def fresh(asked: Sequence[str], number: int) -> list[str]:
        return [f"{nonce} {number} {index}. {prompt}" for index, prompt in enumerate(asked)]

    length = LONG_CHARACTERS
    if subject.context_length is not None:  # a token may be a single character
        length = min(length, subject.context_length - config.max_tokens - NONCE_CHARACTERS)
    longer = _lengthened([f"{prompt} " for prompt in chosen], length)
    questions = Questions(subject, reference, chosen, longer, fresh, greedy, tie)
    todo: Steps = [
        *_before_sampling(questions),
        ("sampled", lambda: check_server(subject, reference, lambda _: chosen, greedy, config, 4)),
        *_fields(questions),
    ]
    elsewhere = {} if reference is None else dict(_fields(replace(questions, subject=reference)))
    for name, check in todo:
        try:
            found = check()
            if name in elsewhere and not _all_passed(found) and _fails_too(elsewhere[name]):
                found = [Check(name, True, "not offered: plain decoding ignores it too", judged=False)]
            yield from found
        except NotOffered as error:
            if name not in OPTIONAL:
                raise
            yield Check(name, True, f"not offered by this server: {error}", judged=False)
        except TooBusy as error:
            yield Check(name, True, f"the server was too busy: {error}", judged=False)
        except ServerFailure as error:
            yield Check(name, False, f"the server broke down: {error}", facts={"broke": True})
            if not subject.is_there():
                return


def _before_sampling(questions: Questions) -> Steps:
    return [
        ("greedy", lambda: [checks.check_greedy(questions)]),
        ("prefix cache", lambda: [checks.check_prefix_cache(questions)]),
        ("concurrency 8", lambda: [checks.check_concurrency(questions, 8)]),
        ("concurrency 32", lambda: [checks.check_concurrency(questions, 32)]),
    ]


def _parameters(questions: Questions) -> Steps:
    return [
        ("top_k", lambda: [checks.check_narrow(questions, "top_k", top_k=1)]),
        ("top_p", lambda: [checks.check_top_p(questions)]),
        ("penalties", lambda: [checks.check_penalties(questions)]),
        ("stop", lambda: [checks.check_stop(questions)]),
    ]


def _fields(questions: Questions) -> Steps:
    """Return the checks of fields that some servers ignore."""
    return [*_parameters(questions), ("seeds", lambda: [checks.check_seeds(questions)])]


def _all_passed(found: Sequence[Check]) -> bool:
    return all(check.passed for check in found)


def _fails_too(check: Callable[[], Sequence[Check]]) -> bool:
    """Return whether plain decoding fails a check too. A refusal, or a busy server, counts as no."""
    try:
        return not _all_passed(check())
    except (NotOffered, TooBusy):
        return False


def _said(check: Check, say: Say) -> Check:
    chance = "" if check.p_value is None else f" (p = {check.p_value:.2g})"
    say(f"  {check.outcome}  {check.name}: {check.detail}{chance}")
    return check


def _pair_facts(engine: Engine) -> dict[str, Any]:
    facts: dict[str, Any] = {"target": target_fingerprint(engine.target.model), "dtype": str(engine.target.dtype)}
    facts["exact"] = "yes" if engine.core.inexact is None else f"no: {engine.core.inexact}"
    if engine.drafter is not None:
        facts["drafter"] = drafter_fingerprint(engine.drafter)
    elif engine.target.diffusion is not None:
        facts["mode"] = "self"
    return facts


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
