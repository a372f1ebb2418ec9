"""Why is acceptance low?

Each suspect is looked at by what it would change: a drafter that drafts much better with its taps moved by one was given wrong
taps. Healthy pairs get silence.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from volley.doctor.acceptance import Walk, walk, with_bias
from volley.engine.engine import Engine
from volley.errors import CheckpointError, InputError
from volley.files import read_json
from volley.models.drafter import Drafter
from volley.models.formats import drafter_folder
from volley.train.data import Row, encode_rows, prompt_ids, read_rows
from volley.train.features import FrozenTarget
from volley.train.shape import choose_mask_token
from volley.types import SamplingParams

MUCH = 1.1
"""How much a τ must differ from another."""
SAME_DRAFTS = 1.02
"""A cache that is whole gives the same drafts; rounding changes few."""
CLEAR = 0.01
"""A change that lowers the drafter's cross-entropy by this share is what was wrong, if chance does not explain it."""
SURE = 2.5
"""Standard errors of the mean difference over blocks, whose tokens overlap."""
DOCUMENTS = 24
LONGEST = 1024
THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
FREQUENT = 0.01
"""Share of a text's tokens."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, how it shows, and what to do about it."""

    name: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Examination:
    """``expected`` is the τ that the drafter would have on the answers given, ``measured`` that of decoding their prompts."""

    findings: list[Finding]
    expected: float
    measured: float | None


class Doctor:
    """A pair, answers of the target to prompts like those served, and what the training noted about itself."""

    def __init__(
        self,
        target: str,
        drafter: Path,
        data: Sequence[str | Path],
        *,
        temperature: float | None = None,
        block_size: int | None = None,
    ) -> None:
        """``temperature`` and ``block_size`` are those that are served with, where they are known."""
        self.path, self.temperature, self.served_block = target, temperature, block_size
        self.report = _training_report(drafter)
        trained: dict[str, Any] = self.report.get("options", {})
        dtype = getattr(torch, str(trained.get("dtype", "float32")))
        self.target = FrozenTarget(target, dtype, torch.device("cpu"))
        self.drafter = Drafter.from_pretrained(drafter, dtype)
        self.rows = read_rows(data)[:DOCUMENTS]
        documents = encode_rows(self.target.tokenizer, self.rows, LONGEST, self.target.stop_token_ids)
        self.documents = [document for document in documents if len(document) - document.response_start > 2]
        if not self.documents:
            raise InputError("no row has an answer of three tokens; collect responses with `volley collect` first")
        vocab = self.target.vocab_size
        if any(int(document.token_ids.max()) >= vocab for document in self.documents):
            raise InputError(f"a row has a token id outside the target's vocabulary of {vocab}; collect it again")
        self.as_it_is = walk(self.drafter, self.target, self.documents)

    def examine(self, engine: Engine | None = None) -> Examination:
        """All findings, the likeliest first. ``engine`` is the pair as it is served; without one nothing is decoded."""
        checks: list[Callable[[], Iterator[Finding]]] = [
            self._weights,
            self._head,
            self._taps,
            self._rotary,
            self._mask,
            self._template,
            self._context,
            self._temperatures,
            self._block_size,
        ]
        findings = [finding for check in checks for finding in check()]
        measured = None
        if engine is not None:
            measured, cold, warm = self._decode(engine)
            findings += self._prefix_cache(cold, warm)
        return Examination(findings, self.as_it_is.tau, measured)

    def _better(self, changed: Walk) -> bool:
        """Whether a change is what the drafter was made for."""
        before, after = self.as_it_is.losses, changed.losses
        gains = [old - new for old, new in zip(before, after, strict=True)]
        mean = sum(gains) / len(gains)
        spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / max(1, len(gains) - 1) / len(gains))
        return mean > CLEAR * sum(before) / len(before) and mean > SURE * spread

    def _gain(self, changed: Walk) -> str:
        losses = [sum(walk.losses) / len(walk.losses) for walk in (self.as_it_is, changed)]
        taus = f"τ {self.as_it_is.tau:.2f} as it is, {changed.tau:.2f} so"
        return f"{taus}; cross-entropy {losses[0]:.2f} and {losses[1]:.2f}"

    def _weights(self) -> Iterator[Finding]:
        trained = self.report.get("fingerprints", {}).get("target")
        if trained is not None and trained != self.target.fingerprint:
            yield Finding(
                "another target's weights",
                "the target's weights are not those that the drafter was trained on (a fine-tune, or a quantised copy)",
                "use the target it was trained on, or run volley tune for this one",
            )

    def _head(self) -> Iterator[Finding]:
        drafter = self.drafter
        if drafter.lm_head is None:
            return
        head = self.target.head
        if drafter.d2t is not None:
            ids = drafter.d2t + torch.arange(len(drafter.d2t))
            own, there = drafter.lm_head.weight.float(), head[:, : drafter.config.hidden_size].float()
            if _is_misplaced(own, there, ids):
                yield Finding(
                    "wrong d2t",
                    "rows of the drafter's head are the target's of other tokens than d2t says",
                    "export the drafter again; d2t holds target id minus draft id",
                )
                return

        def of_target(states: Tensor) -> Tensor:
            return with_bias(states, head) @ head.t()

        changed = walk(drafter, self.target, self.documents, logits=of_target)
        if self._better(changed):
            yield Finding(
                "replaced head",
                f"with the target's own head: {self._gain(changed)}",
                "leave the drafter's head out: volley export --to sglang --target TARGET",
            )

    def _taps(self) -> Iterator[Finding]:
        own, depth = self.drafter.config.target_layer_ids, len(self.target.model.get_decoder().layers)
        for shift in (-1, 1):
            taps = [tap + shift for tap in own]
            if min(taps) < -1 or max(taps) >= depth:
                continue
            changed = walk(self.drafter, self.target, self.documents, taps=taps)
            if self._better(changed):
                yield Finding(
                    "taps shifted by one",
                    f"with taps {taps} instead of {list(own)}: {self._gain(changed)}",
                    "correct target_layer_ids in config.json: 0-based layers whose output is tapped",
                )

    def _rotary(self) -> Iterator[Finding]:
        config = self.drafter.config
        rope = getattr(self.target.text_config, "rope_parameters", None) or {}
        candidates = {float(rope["rope_theta"])} if rope.get("rope_theta") else set[float]()
        best: tuple[float, Walk] | None = None
        for theta in sorted(candidates | set(THETAS) - {config.rope_theta}):
            other = Drafter(replace(config, rope_theta=theta)).to(self.drafter.fc.weight.dtype)
            other.load_state_dict(self.drafter.state_dict())
            changed = walk(other.eval(), self.target, self.documents)
            if self._better(changed) and (best is None or sum(changed.losses) < sum(best[1].losses)):
                best = theta, changed
        if best is not None:
            yield Finding(
                "rotary settings",
                f"with rope_theta {best[0]:g} instead of {config.rope_theta:g}: {self._gain(best[1])}",
                "correct rope_theta in config.json",
            )

    def _mask(self) -> Iterator[Finding]:
        own = self.drafter.config.mask_token_id
        tokens = torch.cat([document.token_ids for document in self.documents])
        share = float((tokens == own).float().mean())
        if share > FREQUENT:
            yield Finding(
                "mask token in text",
                f"{share:.1%} of the text is the mask token {own}",
                "train again with --mask-token-id of a token that no text uses",
            )
        usual = choose_mask_token(
            self.target.tokenizer, self.target.model.get_input_embeddings().weight, self.documents, None
        )
        if usual != own:
            changed = walk(self.drafter, self.target, self.documents, mask=usual)
            if self._better(changed):
                yield Finding(
                    "mask token",
                    f"with token {usual} instead of {own}: {self._gain(changed)}",
                    "correct mask_token_id in config.json",
                )

    def _template(self) -> Iterator[Finding]:
        facts = self.report.get("data", {})
        tokenizer = self.target.tokenizer
        template = tokenizer.chat_template
        now = hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else False
        seen = {row.get("chat_template") for row in self.rows} - {None, True}
        if seen and seen != {now}:
            yield Finding(
                "chat template",
                "the answers were given to prompts of another template than this tokenizer has",
                "serve with the template that the drafter was trained on, or collect and train again",
            )
        other = [row for row in self.rows if _differs(row, tokenizer)]
        if not seen - {now} and len(other) > len(self.rows) / 2:
            yield Finding(
                "chat template",
                f"{len(other)} of {len(self.rows)} prompts are not what the template makes of their messages",
                "serve with the template that the drafter was trained on, or collect and train again",
            )
        trained = facts.get("thinking")
        modes = sorted({str(row.get("thinking")) for row in self.rows})
        if trained is not None and not set(modes) <= set(trained):
            yield Finding(
                "thinking mode",
                f"served with thinking {', '.join(modes)}, trained with {', '.join(trained)}",
                "collect in the mode that is served, and train again",
            )

    def _context(self) -> Iterator[Finding]:
        longest = self.report.get("data", {}).get("longest")
        beyond = [d for d in self.documents if longest is not None and len(d) > 1.25 * longest]
        if not beyond:
            return
        far, near = Walk(), Walk()
        for document, gained in zip(self.documents, self.as_it_is.gained, strict=True):
            edge = max(0, longest - document.response_start)
            near.gained.append(gained[:edge])
            far.gained.append(gained[edge:])
        if far.cycles() and (not near.cycles() or far.tau < near.tau / MUCH):
            yield Finding(
                "context beyond training",
                f"trained on at most {longest} tokens; τ {near.tau:.2f} within and {far.tau:.2f} beyond",
                "collect longer responses, and train with --max-length of what is served",
            )

    def _temperatures(self) -> Iterator[Finding]:
        trained = self.report.get("data", {}).get("temperatures")
        served = self.temperature
        if served is None or not trained or min(trained) - 0.2 <= served <= max(trained) + 0.2:
            return
        yield Finding(
            "temperature not trained for",
            f"served at {served:g}, trained on responses at {', '.join(f'{t:g}' for t in trained)}",
            f"collect with --temperatures {served:g} too, and train again",
        )

    def _block_size(self) -> Iterator[Finding]:
        own, served = self.drafter.config.block_size, self.served_block
        if served is not None and served < own and self.as_it_is.reaching(served - 1) > 0.5:
            yield Finding(
                "block size",
                f"blocks of {served}, and {self.as_it_is.reaching(served - 1):.0%} of cycles accept all of one",
                f"serve with blocks of {own}, or let the policy decide",
            )

    def _decode(self, engine: Engine) -> tuple[float, float, float]:
        """τ of decoding the prompts with chains of the drafter's block; then of going on behind the answers, cold and warm."""
        prompts = [prompt_ids(self.target.tokenizer, row) for row in self.rows]
        params = SamplingParams(temperature=self.temperature or 0.0, max_tokens=64, seed=0)
        before, taus = engine.config, list[float]()
        engine.block_size = engine.proposer.block_size if engine.proposer else 1
        try:
            for cold, longest in ((True, 64), (True, 16), (False, 16)):
                if cold:
                    engine.reset_prefix_cache()
                results = list(engine.generate(prompts, replace(params, max_tokens=longest)))
                lengths = [length for result in results for length in result.stats.accepted_lengths]
                taus.append(sum(lengths) / max(1, len(lengths)))
                if longest == 64:
                    prompts = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
        finally:
            engine.reconfigure(before)
        return taus[0], taus[1], taus[2]

    def _prefix_cache(self, cold: float, warm: float) -> Iterator[Finding]:
        if warm < cold / SAME_DRAFTS:
            yield Finding(
                "prefix-cache holes",
                f"τ {cold:.2f} for new prompts and {warm:.2f} for those found in the cache",
                "report it with the counters of the server; --no-prefix-caching avoids it",
            )


def _training_report(drafter: Path) -> dict[str, Any]:
    inside = drafter_folder(drafter)
    for folder in (drafter, inside, inside.parent, drafter / "train"):
        try:
            return read_json(folder / "training_report.json")
        except CheckpointError:
            continue
    return {}


def _differs(row: Row, tokenizer: Any) -> bool:
    """Whether a row's own prompt is not what the tokenizer makes of its messages."""
    if "prompt_token_ids" not in row or not row.get("messages"):
        return False
    bare: Row = {key: row[key] for key in ("messages", "thinking") if key in row}
    return list(row["prompt_token_ids"]) != prompt_ids(tokenizer, bare)


def _is_misplaced(own: Tensor, head: Tensor, ids: Tensor, looked_at: int = 64) -> bool:
    """Whether rows of the drafter's ``own`` head are rows of the target's, but not those of the tokens ``ids`` they stand for."""
    own, head = own.detach(), head.detach()
    chosen = torch.linspace(0, len(own) - 1, min(looked_at, len(own))).long()
    normal = torch.nn.functional.normalize
    likeness = normal(own[chosen], dim=-1) @ normal(head, dim=-1).t()
    nearest, stated = likeness.max(dim=-1).values, likeness[torch.arange(len(chosen)), ids[chosen]]
    return float(nearest.median()) > 0.95 and float(stated.median()) < 0.9
