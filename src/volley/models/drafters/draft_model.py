"""Drafter bound to its K/V store and its target's embedding and head, for volley's engine and other engines."""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from volley import native
from volley.errors import ConfigError, MismatchError
from volley.files import published_drafter
from volley.memory.attention import Attention, AttentionOptions
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_store import KVStore
from volley.memory.native_attention import native_attention
from volley.models.drafters.domino import BoundRecurrent, DominoHead
from volley.models.drafters.drafter import Attend, Drafter, read_drafter
from volley.models.drafters.eagle import drafter_class
from volley.models.drafters.frequent import FrequentHead, pays
from volley.models.drafters.heads import BoundHead, MarkovTables, Projection
from volley.models.drafters.inject import Injection, merge_kv
from volley.models.layers.fused import FusedDecoder
from volley.models.layers.host_memory import returning_memory
from volley.models.layers.products import choose_draft_weights
from volley.models.targets.loading import load_config
from volley.models.targets.target import Target, reading_target
from volley.native import WantedDraftWeights

log = logging.getLogger("volley")

Inject = Callable[[Tensor, Tensor, slice | Tensor], None]
"""Write the drafter's K/V of tokens: ``inject(features [T, F], positions [T], kv_slots [T])``."""


class DraftModel:
    reads_next = False
    """True if the K/V of a token also depend on the next token (:meth:`with_next`)."""

    def __init__(
        self,
        drafter: Drafter,
        store: KVStore,
        attention: Attention,
        embed: Projection,
        head: Projection,
        window: int | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """Bind a drafter to the target's ``embed`` and ``head``; with a ``window`` a block sees only so many tokens before it.

        ``compiled`` runs its layers through ``torch.compile``. Raise ConfigError if there is no compiler for that.
        """
        config = drafter.config
        self._compiled = CompiledDrafter(drafter) if compiled else None
        self.drafter, self.store, self.embed, self.head = drafter, store, embed, head
        self.window, self.windows = window, drafter.windows(window)
        self.block_size = config.block_size
        """Largest block that it drafts, anchor included."""
        self.taps = config.target_layer_ids
        """Layers of the target whose states the drafter reads."""
        self._attention = attention
        self._decoders: WeakKeyDictionary[Drafter, FusedDecoder] = WeakKeyDictionary()
        self._inject = self.make_injection()
        self.bound_head: BoundHead | BoundRecurrent | None = None
        with returning_memory():
            self._bind_head()

    def _bind_head(self) -> None:
        drafter, config, embed, head = self.drafter, self.drafter.config, self.embed, self.head
        if isinstance(drafter.head, DominoHead):
            self.bound_head = BoundRecurrent(drafter.head, lambda ids: drafter.embed(ids, embed), drafter.drafted)
        elif drafter.head is not None and config.head is not None:
            self.bound_head = BoundHead(
                *(drafter.head, config.head.candidates, embed, head, config.vocab_size, drafter.drafted),
                drafter.frequent_head,
            )

    def see(self, token_ids: Iterable[int]) -> None:
        """Note tokens of a request's text: a frequent head drafts the tokens seen last."""
        frequent = self.drafter.frequent_head
        if frequent is None:
            return
        frequent.see(token_ids)
        if isinstance(self.bound_head, BoundHead):
            self.bound_head.catch_up()

    def make_injection(self) -> Inject:
        """Make the function that projects features into K/V."""
        return Injection(self.drafter, self.store)

    def with_next(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """Add to features ``[T, taps · H]`` the inputs from the next tokens ``token_ids [T]``, if the drafter reads these."""
        return features

    @property
    def device(self) -> torch.device:
        return self.drafter.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.drafter.fc.weight.dtype

    def keep(self, features: Tensor, positions: Tensor, kv_slots: slice | Tensor) -> None:
        """Project the target's features ``[T, taps · H]`` of accepted tokens into K/V at ``kv_slots [T]``."""
        self._inject(features, positions, kv_slots)

    def states(self, segments: list[Segment], token_ids: Tensor) -> Tensor:
        """Return final states ``[Σ k, H]`` of the draft positions of blocks ``token_ids [Σ 1 + k]``, each an anchor and masks.

        If the drafter samples from the anchor, a block has one mask fewer and the anchor is its first draft position. A block's
        own K/V are scratch after those of its context.
        """
        rows = self.draft_rows(segments)
        batch, drafting = RaggedBatch.on_device(segments, token_ids.tolist(), rows, self.device)
        states = self.block_states(batch, self.store)
        if len(segments) == 1:
            return states[len(states) - len(rows) :]
        return states.index_select(0, drafting) if len(rows) < len(states) else states

    def draft_rows(self, segments: Sequence[Segment]) -> list[int]:
        """Return the rows of blocks that are draft positions: all rows, or all but the anchors if these do not draft."""
        ends = np.cumsum([segment.length for segment in segments])
        rows = np.arange(ends[-1])
        if not self.drafter.config.sample_from_anchor:
            rows = np.delete(rows, np.concatenate(([0], ends[:-1])))
        return rows.tolist()  # type: ignore[no-any-return]

    @property
    def is_regular(self) -> bool:
        """Return whether a pass launches the same operations for any blocks of the same number and sizes."""
        is_plain = not self.drafter.config.causal_layers and self.drafter.config.conv_kernel_size is None
        return is_plain and self._compiled is None

    def block_states(self, batch: RaggedBatch, store: KVStore) -> Tensor:
        """Return final states ``[T, H]`` of every token of ``batch``, whose contexts' K/V are in ``store``."""
        drafter = self.drafter
        scale, causal = drafter.config.head_dim**-0.5, drafter.config.causal_layers
        if causal:
            segments = [replace(segment, causal=True) for segment in batch.segments]
            in_order = RaggedBatch(segments, batch.token_ids, batch.positions)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = in_order if causal and causal[layer] else batch
            return self._attention(seen, store, layer, q, k, v, AttentionOptions(scale, self.windows[layer]))

        embeddings, decoder = drafter.embed(batch.token_ids, self.embed), self._decoder(drafter)
        if decoder is not None and self._attention is native_attention and decoder.serves(store) and not causal:
            cos, sin = drafter.rotary(batch.positions, embeddings.dtype)
            final, _ = decoder(embeddings, [(cos[:, 0], sin[:, 0])], batch, store)
            normed: Tensor = drafter.norm(final)
            return normed
        places = None
        if drafter.config.conv_kernel_size is not None:
            places = torch.cat([torch.arange(segment.length) for segment in batch.segments]).to(self.device)
        run = self._compiled or drafter
        states: Tensor = run(embeddings, batch.positions, attend, places)
        return states

    def accept_rates(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the confidence head's acceptance probabilities ``[R]`` at positions with states ``hidden [R, H]``.

        ``before [R]`` are the tokens before the positions.
        """
        head, tables = self.drafter.confidence_head, self.drafter.head
        assert head is not None
        rows = hidden[:, :0]
        if isinstance(tables, MarkovTables):
            rows = tables.markov_w1(before)
        rates: Tensor = head(hidden, rows)
        return rates

    def _decoder(self, drafter: Drafter) -> FusedDecoder | None:
        if drafter.fused is None:
            return None
        if drafter not in self._decoders:
            self._decoders[drafter] = FusedDecoder(*drafter.fused, self.windows)
        return self._decoders[drafter]

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[R, V]`` of final states ``[R, H]``."""
        return self.drafter.logits(states, self.head)


def _unset(*_: object) -> Tensor:
    raise AssertionError("a pass sets its attention")


class CompiledDrafter:
    """A drafter whose layers run through ``torch.compile``, for any number of tokens; attention stays as it is."""

    def __init__(self, drafter: Drafter) -> None:
        if drafter.norm.weight.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise ConfigError("compile needs a C++ compiler, and none is found; install g++, or leave compile out")
        self._attend: Attend = _unset
        aside = torch.compiler.disable(lambda *given: self._attend(*given))  # type: ignore[no-untyped-call]
        self._run = torch.compile(lambda *given: drafter(*given[:2], aside, *given[2:]), dynamic=True)

    def __call__(self, embeddings: Tensor, positions: Tensor, attend: Attend, places: Tensor | None) -> Tensor:
        self._attend = attend
        states: Tensor = self._run(embeddings, positions, places)
        return states


def load_drafter(
    path: str | Path | Drafter, target: Target, weights: WantedDraftWeights, *, compiled: bool = False
) -> Drafter:
    """Load a drafter for ``target``, on its device and in its dtype, with ``weights`` in a format for this CPU.

    An already loaded drafter keeps bf16 weights and drafts all tokens; other ``weights`` then raise ConfigError. A drafter that
    will be ``compiled`` keeps the target's dtype as well, and is not put on volley's kernels.
    """
    if compiled and weights not in ("auto", "bf16"):
        raise ConfigError(f"a compiled drafter has no {weights} weights; leave draft_weights or compile out")
    if isinstance(path, Drafter):
        if weights not in ("auto", "bf16"):
            raise ConfigError("draft_weights says how a drafter is loaded; give its folder instead of a loaded one")
        moved = path if path.norm.weight.device == target.device else path.to(target.device)
        return moved.to(target.dtype).eval()
    kind = "bf16" if compiled else choose_draft_weights(weights, target.kept_head, target.device, target.dtype)
    has_bias = getattr(target.model.get_output_embeddings(), "bias", None) is not None  # quantised weights lack it
    head: Tensor | native.Product | None = None if has_bias else target.kept_head
    with returning_memory():
        folder, checkpoint = read_drafter(path)
        drafter = drafter_class(checkpoint.config).from_checkpoint(folder, checkpoint, target.dtype).to(target.device)
        del checkpoint  # it holds another reference to the weights
        if drafter.lm_head is None and drafter.config.eagle is None and pays(head):
            assert isinstance(head, native.Product)
            stops = sorted(token for token in target.stop_token_ids if 0 <= token < target.vocab_size)
            drafter.own_head, head = FrequentHead(head, kind, stops), None
        if target.device.type == "cpu" and drafter.fc.weight.dtype == torch.bfloat16 and drafter.config.eagle is None:
            drafter.merged_kv = merge_kv(drafter)
        if not compiled:
            drafter.fuse(kind, None if kind == "bf16" else head, release=True)
    return drafter


def bundled_drafter(target: str | Path | Target) -> str | None:
    """Return the name of the bundled drafter of ``target``, a model in memory or the place of its files, if there is one."""
    if isinstance(target, Target):
        config = target.model.config
    else:
        with reading_target(target):
            config = load_config(target)
    text = config.get_text_config()
    name = published_drafter(*(getattr(text, own, 0) for own in ("hidden_size", "vocab_size", "num_hidden_layers")))
    if name is not None:
        log.warning("the bundled drafter %s drafts; 'none' in its place drafts by prompt lookup alone", name)
    return name


def check_pair(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target, or a target that no drafter can draft for."""
    if not target.can_be_tapped:
        raise MismatchError(
            f"{type(target).__name__} denoises canvases and gives a drafter no states of its layers; leave the drafter out, and "
            "use DiffusionParams(mode='self') for drafts of its own"
        )
    if target.diffusion is not None and not target.diffusion.writes_causally:
        raise MismatchError(
            "a row of this target's logits predicts its own token, not the next one, so it verifies no drafter's tokens; leave "
            "the drafter out, and use DiffusionParams(mode='self') for drafts of its own"
        )
    drafter.config.check_target(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers
    )
