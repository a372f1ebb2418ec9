"""Diagnosis of low acceptance.

Each suspected fault is tested by undoing it: if a drafter drafts much better with its taps moved by one layer, its taps are
wrong. A healthy pair yields no findings.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from volley.chat import own_template, template_digest
from volley.doctor.acceptance import MOST_ANCHORS, Walk, walk
from volley.engine.chains import accepted_lengths, mean_length
from volley.engine.engine import Engine
from volley.errors import CheckpointError, ConfigError, InputError
from volley.files import read_json
from volley.models.checkpoints.formats import drafter_folder
from volley.models.diagnosis import diagnose
from volley.models.drafters.drafter import Drafter
from volley.params import SamplingParams
from volley.train.data import Row, encode_rows, prompt_ids, read_rows
from volley.train.documents import Document
from volley.train.features import FrozenTarget
from volley.train.losses import with_bias
from volley.train.options import LONGEST
from volley.train.shape import choose_mask_token

MUCH = 1.1
"""Ratio above which two τ count as different."""
SAME = 0.01
"""Largest relative change of the drafter's K/V in the prefix cache; they should be read as they were written."""
CACHED = 4
"""Number of texts, the longest, on which the prefix cache is tested."""
CLEAR = 0.01
"""Relative decrease of the drafter's cross-entropy by which a change counts as the remedy, unless chance explains it."""
SURE = 2.5
"""Significance, in standard errors of the mean difference over blocks, whose tokens overlap."""
DOCUMENTS = 24
BEYOND = 1.25
"""Ratio of a text's length to the longest training row's from which the text shows acceptance beyond training."""
CHANGES = 10
"""Maximum number of walks with one setting changed: the head, taps either way, rotary settings, the mask."""
FAR = 8
"""Number of texts examined beyond the longest training row."""
THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
FREQUENT = 0.01
"""Share of a text's tokens above which a token counts as frequent."""
ROWS = 64
"""Rows of a drafter's head that are compared with the target's."""


@dataclass(frozen=True)
class Finding:
    """Fault of a pair, its evidence, and its remedy."""

    name: str
    evidence: str
    remedy: str


_T = TypeVar("_T")
Suspect = tuple[float, Finding]
"""A finding, and the draft's cross-entropy with the fault undone."""


@dataclass(frozen=True)
class Examination:
    """Findings about a pair. ``expected`` is the drafter's τ on the given answers, ``measured`` that of decoding their
    prompts."""

    findings: list[Finding]
    expected: float
    measured: float | None


class Doctor:
    """A pair, the target's answers to prompts like those served, and the records of the drafter's training."""

    def __init__(
        self,
        target: str,
        drafter: Path,
        data: Sequence[str | Path],
        *,
        temperature: float | None = None,
        block_size: int | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Load a pair. ``temperature`` and ``block_size`` are those served, if known; ``say`` receives progress messages.

        Raises CheckpointError with every problem that :func:`volley.models.diagnosis.diagnose` finds in the files.
        """
        if block_size is not None and block_size < 2:
            raise ConfigError(f"block_size is {block_size}; it must be at least 2, the anchor and a token")
        if temperature is not None and temperature < 0:
            raise ConfigError(f"temperature is {temperature}; it must be 0 or more")
        self._say, self.rows = say, evenly(read_rows(data), DOCUMENTS)
        if problems := diagnose(drafter, target).problems:
            raise CheckpointError(f"{drafter}: {'; '.join(problems)}")
        self.path, self.temperature, self.served_block = target, temperature, block_size
        self.folder, self.report = drafter, _beside(drafter, "training_report.json")
        trained: dict[str, Any] = self.report.get("options", {})
        dtype = getattr(torch, str(trained.get("dtype", "float32")))
        self.target = FrozenTarget(target, dtype, torch.device("cpu"))
        self.drafter = Drafter.from_pretrained(drafter, dtype)
        if not self.drafter.config.is_trained_here:
            raise ConfigError(
                f"{drafter} is of a type that volley does not train, and the doctor only examines types that it trains; "
                "compare its acceptance with the figures of the program that it comes from"
            )
        self.trained_length: int | None = self.report.get("data", {}).get("longest")
        self.seen = MOST_ANCHORS + self.drafter.config.block_size
        """Number of answer tokens that blocks at ``MOST_ANCHORS`` anchors cover."""
        longest = max(LONGEST, int(BEYOND * (self.trained_length or 0)) + self.seen)
        longest = min(longest, getattr(self.target.text_config, "max_position_embeddings", None) or longest)
        documents = encode_rows(self.target.tokenizer, self.rows, longest, self.target.stop_token_ids)
        self.whole = [document for document in documents if len(document) - document.response_start > 2]
        self.documents = [self._from(document, document.response_start) for document in self.whole]
        if not self.documents:
            raise InputError(
                f"none of {len(self.rows)} rows, spread over the data, has three tokens of an answer within {longest} tokens; "
                "collect responses with `volley collect`, or give shorter prompts"
            )
        vocab = self.target.vocab_size
        if any(int(document.token_ids.max()) >= vocab for document in self.documents):
            raise InputError(f"a row has a token id outside the target's vocabulary of {vocab}; collect it again")
        say(f"drafting from every position of {len(self.documents)} answers")
        started = time.perf_counter()
        self.as_it_is = self._walk()
        seconds = time.perf_counter() - started
        say(f"that took {seconds:.0f} s; up to {CHANGES} changed settings take about as long each")

    def _from(self, document: Document, start: int) -> Document:
        """Return ``document`` with its answer beginning at ``start``, cut to the part that is examined."""
        return Document(document.token_ids[: start + self.seen], start)

    def _walk(
        self, drafter: Drafter | None = None, documents: Sequence[Document] | None = None, **changes: Any
    ) -> Walk:
        """Run a walk at the served temperature with some settings changed."""
        texts = self.documents if documents is None else documents
        return walk(drafter or self.drafter, self.target, texts, temperature=self.temperature or 0.0, **changes)

    def examine(self, engine: Engine | None = None) -> Examination:
        """Return all findings, the likeliest first. ``engine`` runs the pair as it is served; without one nothing is decoded."""
        # A wrong setting makes other changes look good too: the change that helps most names the fault.
        suspects = [each for check in (self._head, self._taps, self._rotary, self._mask) for each in check()]
        likeliest = [min(suspects, key=lambda suspect: suspect[0])[1]] if suspects else []
        checks: list[Callable[[], Iterator[Finding]]] = [
            self._weights,
            lambda: iter(likeliest),
            self._mask_in_text,
            self._template,
            self._context,
            self._temperatures,
            self._block_size,
        ]
        findings = [finding for check in checks for finding in check()]
        measured = None
        if engine is not None:
            self._say("decoding the prompts")
            measured = self._decode(engine)
            findings += self._prefix_cache(engine)
        return Examination(findings, self.as_it_is.tau, measured)

    def _better(self, changed: Walk) -> bool:
        """Return whether a change significantly improves the drafts, so that the drafter was made for it."""
        before, after = self.as_it_is.losses, changed.losses
        gains = [old - new for old, new in zip(before, after, strict=True)]
        mean = sum(gains) / len(gains)
        spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / max(1, len(gains) - 1) / len(gains))
        return mean > CLEAR * self.as_it_is.loss and mean > SURE * spread

    def _suspect(self, changed: Walk, name: str, change: str, remedy: str) -> Iterator[Suspect]:
        """Yield a finding with the loss of a changed walk if the drafter was made for that change."""
        if self._better(changed):
            before = self.as_it_is
            taus = f"τ {before.tau:.2f} as it is, {changed.tau:.2f} so"
            evidence = f"{change}: {taus}; cross-entropy {before.loss:.2f} and {changed.loss:.2f}"
            yield changed.loss, Finding(name, evidence, remedy)

    def _weights(self) -> Iterator[Finding]:
        trained = self.report.get("fingerprints", {}).get("target") or self.drafter.config.target_fingerprint
        trained = trained or _certified_target(self.folder)
        if trained is not None and trained != self.target.fingerprint:
            yield Finding(
                "another target's weights",
                "the target's weights are not those that the drafter was trained on (a fine-tune, or a quantised copy)",
                "use the target it was trained on, or run volley tune for this one",
            )

    def _head(self) -> Iterator[Suspect]:
        drafter = self.drafter
        if drafter.lm_head is None:
            return
        head = self.target.head
        if drafter.d2t is not None:
            ids = drafter.d2t + torch.arange(len(drafter.d2t))
            own, there = drafter.lm_head.weight.float(), head[:, : drafter.config.hidden_size].float()
            if _is_misplaced(own, there, ids):
                yield (
                    -math.inf,
                    Finding(
                        "wrong d2t",
                        "rows of the drafter's head are the target's of other tokens than d2t says",
                        "export the drafter again; d2t holds target id minus draft id",
                    ),
                )
                return

        def of_target(states: Tensor) -> Tensor:
            return with_bias(states, head) @ head.t()

        yield from self._suspect(
            self._walk(logits=of_target),
            "replaced head",
            "with the target's own head",
            "leave the drafter's head out: volley export --to sglang --target TARGET",
        )

    def _taps(self) -> Iterator[Suspect]:
        own, depth = self.drafter.config.target_layer_ids, len(self.target.model.get_decoder().layers)
        for shift in (-1, 1):
            taps = [tap + shift for tap in own]
            if min(taps) < -1 or max(taps) >= depth:
                continue
            yield from self._suspect(
                self._walk(taps=taps),
                "taps shifted by one",
                f"with taps {taps} instead of {list(own)}",
                "correct target_layer_ids in config.json: 0-based layers whose output is tapped",
            )

    def _rotary(self) -> Iterator[Suspect]:
        config = self.drafter.config
        rope = getattr(self.target.text_config, "rope_parameters", None) or {}
        candidates = {float(rope["rope_theta"])} if rope.get("rope_theta") else set[float]()
        for theta in sorted(candidates | set(THETAS) - {config.rope_theta}):
            other = Drafter(replace(config, rope_theta=theta)).to(self.drafter.fc.weight.dtype)
            other.load_state_dict(self.drafter.state_dict())
            yield from self._suspect(
                self._walk(other.eval()),
                "rotary settings",
                f"with rope_theta {theta:g} instead of {config.rope_theta:g}",
                "correct rope_theta in config.json",
            )

    def _mask(self) -> Iterator[Suspect]:
        own = self.drafter.config.mask_token_id
        usual = choose_mask_token(
            self.target.tokenizer, self.target.model.get_input_embeddings().weight, self.documents, None
        )
        if usual != own:
            yield from self._suspect(
                self._walk(mask=usual),
                "mask token",
                f"with token {usual} instead of {own}",
                "correct mask_token_id in config.json",
            )

    def _mask_in_text(self) -> Iterator[Finding]:
        own = self.drafter.config.mask_token_id
        tokens = torch.cat([document.token_ids for document in self.documents])
        share = float((tokens == own).float().mean())
        if share > FREQUENT:
            yield Finding(
                "mask token in text",
                f"{share:.1%} of the text is the mask token {own}",
                "train again with --mask-token-id of a token that no text uses",
            )

    def _template(self) -> Iterator[Finding]:
        facts = self.report.get("data", {})
        tokenizer = self.target.tokenizer
        template, now = own_template(tokenizer), template_digest(tokenizer)
        seen = {row.get("chat_template") for row in self.rows} - {None, True}
        learnt = facts.get("chat_templates", [])
        if learnt and not {str(now), "None"} & set(learnt):
            yield Finding(
                "chat template",
                "the drafter was trained on prompts of another template than this tokenizer has",
                "serve with the template that the drafter was trained on, or collect and train again",
            )
        elif seen and seen != {now}:
            yield Finding(
                "chat template",
                "the answers were given to prompts of another template than this tokenizer has",
                "serve with the template that the drafter was trained on, or collect and train again",
            )
        is_dated = "strftime_now" in str(template)  # the prompt depends on the date
        other = [row for row in self.rows if not is_dated and _differs(row, tokenizer)]
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
        longest = self.trained_length
        if longest is None or not (beyond := [d for d in self.whole if len(d) > max(BEYOND * longest, longest + 2)]):
            return
        later = [self._from(document, max(longest, document.response_start)) for document in evenly(beyond, FAR)]
        far, near = self._walk(documents=later), Walk()
        for document, chances in zip(self.documents, self.as_it_is.chances, strict=True):
            near.chances.append(chances[: max(0, longest - document.response_start)])
        if far.tokens and (not near.tokens or far.tau < near.tau / MUCH):
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
        if served is None:
            return
        if served > own:
            yield Finding(
                "block size",
                f"blocks of {served}, and the drafter was trained on blocks of {own}",
                f"serve with blocks of {own}",
            )
        elif self.as_it_is.tau > MUCH * (cut := self.as_it_is.tau_with(served)):
            yield Finding(
                "block size",
                f"τ {cut:.2f} with blocks of {served}, {self.as_it_is.tau:.2f} with the drafter's own of {own}",
                f"serve with blocks of {own}, or let the policy decide",
            )

    def _decode(self, engine: Engine) -> float:
        """Return τ of decoding the prompts with chains of the drafter's block, for as many tokens as their answers have."""
        room = engine.snapshot().max_tokens
        documents = [document for document in self.documents if len(document) <= room]
        prompts = [document.token_ids[: document.response_start].tolist() for document in documents]
        answered = [len(document) - document.response_start for document in documents]
        params = [
            SamplingParams(temperature=self.temperature or 0.0, max_tokens=min(count, MOST_ANCHORS))
            for count in answered
        ]
        return mean_length(accepted_lengths(engine, prompts, params))

    def _prefix_cache(self, engine: Engine) -> Iterator[Finding]:
        """Compare the drafter's K/V of the same texts, computed and from the prefix cache."""
        if engine.core.draft_model is None or engine.core.draft_model.window is not None:
            return
        room = engine.snapshot().max_tokens
        known = [document.token_ids.tolist() for document in self.documents if len(document) + 2 <= room]
        texts = sorted(known, key=len)[-CACHED:]
        wrong = 0
        for text in texts:
            engine.reset_prefix_cache()
            cold, _ = _draft_context(engine, text)
            warm, cached = _draft_context(engine, text)
            cold, warm = cold[:, :cached], warm[:, :cached]
            wrong += float((warm - cold).norm()) > SAME * float(cold.norm())
        if wrong:
            yield Finding(
                "prefix-cache holes",
                f"the drafter's K/V of {wrong} of {len(texts)} texts differ when they come from the cache",
                "report it with the counters of the server; --no-prefix-caching avoids it",
            )


def evenly(found: Sequence[_T], most: int) -> list[_T]:
    """Return at most ``most`` of ``found`` at equal distances, because files are often ordered by source."""
    count = min(most, len(found))
    return [found[place * len(found) // count] for place in range(count)]


def _draft_context(engine: Engine, token_ids: Sequence[int]) -> tuple[Tensor, int]:
    """Return the drafter's keys and values ``[2 · layers, T, kv_heads, head_dim]`` of a prompt, and the number of cached
    tokens."""
    assert engine.core.draft_model is not None
    request = engine.add_request(list(token_ids), SamplingParams(max_tokens=2, ignore_eos=True))
    while request.num_output == 0:
        engine.step()
    engine.core.kv_manager.settle()
    layers = range(engine.core.draft_model.drafter.config.num_hidden_layers)
    store, table = engine.core.draft_model.store, request.draft_table
    found = [store.extract(layer, table, 0, len(token_ids)) for layer in layers]
    engine.abort(request)
    return torch.stack([part.float() for pair in found for part in pair]), request.stats.cached_tokens


def _beside(drafter: Path, name: str) -> dict[str, Any]:
    """Return a JSON file of a drafter or of the run that made it; empty if there is none."""
    inside = drafter_folder(drafter)
    for folder in (drafter, inside, inside.parent, drafter / "train"):
        try:
            return read_json(folder / name)
        except CheckpointError:
            continue
    return {}


def _certified_target(drafter: Path) -> str | None:
    """Return the fingerprint of the target that a drafter was certified with."""
    found: str | None = _beside(drafter, "certificate.json").get("subject", {}).get("target")
    return found


def _differs(row: Row, tokenizer: Any) -> bool:
    """Return whether a row's own prompt differs from the tokenizer's encoding of its messages."""
    if "prompt_token_ids" not in row or not row.get("messages"):
        return False
    bare: Row = {key: row[key] for key in ("messages", "thinking") if key in row}
    return list(row["prompt_token_ids"]) != prompt_ids(tokenizer, bare)


def _is_misplaced(own: Tensor, head: Tensor, ids: Tensor) -> bool:
    """Return whether the drafter's ``own`` head has rows of the target's head under other tokens than ``ids``."""
    own, head = own.detach(), head.detach()
    chosen = torch.linspace(0, len(own) - 1, min(ROWS, len(own))).long()
    normal = torch.nn.functional.normalize
    likeness = normal(own[chosen], dim=-1) @ normal(head, dim=-1).t()
    nearest, stated = likeness.max(dim=-1).values, likeness[torch.arange(len(chosen)), ids[chosen]]
    return float(nearest.median()) > 0.95 and float(stated.median()) < 0.9
