"""Compute features of each position with the frozen target: tapped hidden states and, if requested, its final states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from volley.errors import CheckpointError, VolleyError
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.device import leave_out_cudnn_attention, memory_bytes
from volley.memory.kv_cache import BlockTable
from volley.models.drafters.export import TargetEnds
from volley.models.layers.accelerate import accelerate
from volley.models.layers.fingerprint import target_fingerprint
from volley.models.targets.loading import choose_weights, load_causal_lm
from volley.models.targets.taps import Taps
from volley.models.targets.target import Target, load_tokenizer
from volley.train.documents import Document, pad


@dataclass(frozen=True)
class Features:
    """Features of right-padded documents: tapped states ``taps [D, S, taps · H]`` and, if the loss compares with the
    target's distributions, the target's final states ``final [D, S, H]`` at response positions."""

    taps: Tensor
    final: Tensor | None


MEMORY = 0.25
"""Share of a machine's memory for remembered features."""
KEPT = torch.bfloat16
"""Dtype of remembered features: that of most targets in serving, with half of fp32's bytes."""
PAGE = 16
"""Tokens of a K/V page while documents are read."""
FINAL = -2
"""Number that stands for the final states among layer ids, in which -1 is the embedding."""


class FrozenTarget:
    """Target for training: dense, frozen, without a K/V cache."""

    served: Target | None = None
    """Target for decoding, if it is a GGUF file whose quantised weights the kernels keep. Its features differ from the dense
    ones, and are computed faster."""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device, served: Target | None = None) -> None:
        try:
            if choose_weights(path, "auto", device, torch.bfloat16) != "bf16":
                self.served = served or Target.from_pretrained(path, device=device)
            model = _load(path, dtype)
            self.tokenizer = load_tokenizer(path)
        except VolleyError:
            raise
        except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder
            raise CheckpointError(
                f"cannot load the target {path!r} ({error}); give a causal LM with its tokenizer"
            ) from None
        self.fingerprint = target_fingerprint(model)
        self.pass_weights = _pass_weights(model)
        leave_out_cudnn_attention()
        self.model: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        accelerate(self.model)  # as in the engine, so that features are rounded as in decoding
        self.text_config: Any = model.config.get_text_config()
        self.device = device
        self.dtype = dtype
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]
        self.head = self._head()
        self.softcap: float | None = getattr(self.text_config, "final_logit_softcapping", None)
        self.remembered = FeatureMemory(int(MEMORY * memory_bytes(device)))

    def _head(self) -> Tensor:
        """Return the head ``[V, H]`` times the model's logit scale; ``[V, H + 1]`` with a bias as the last column."""
        layer = self.model.get_output_embeddings()
        head: Tensor = layer.weight.detach()
        bias = getattr(layer, "bias", None)
        if bias is not None:
            head = torch.cat([head, bias.detach()[:, None]], dim=1)
        scale = getattr(self.text_config, "logit_scale", None) or 1.0
        scale /= getattr(self.text_config, "logits_scaling", None) or 1.0
        scale *= getattr(self.text_config, "lm_head_multiplier", None) or 1.0
        return head if scale == 1.0 else head * scale

    @property
    def plain_ends(self) -> TargetEnds | None:
        """Return embedding and head as matrices; ``None`` if logits also have a bias, a scale or a cap."""
        ends = target_ends(self.model)
        return ends if self.softcap is None and self.head.data_ptr() == ends.head.data_ptr() else None

    @property
    def stop_token_ids(self) -> set[int]:
        stops = self.model.generation_config.eos_token_id if self.model.generation_config else None
        found = set(stops) if isinstance(stops, list) else {stops}
        return {token for token in found | {self.tokenizer.eos_token_id} if token is not None}

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded


def target_ends(model: PreTrainedModel) -> TargetEnds:
    """Return the matrices of a model's embedding and head."""
    return TargetEnds(model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach())


def _pass_weights(model: PreTrainedModel) -> int:
    """Return the number of weights that a pass reads: all but an untied embedding."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(map(torch.numel, model.parameters())) - (0 if embedding is head else torch.numel(embedding))


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with fused attention if its architecture supports it; models with attention sinks, for example, do not."""
    try:
        return load_causal_lm(path, dtype, "sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load_causal_lm(path, dtype, "eager")


@torch.no_grad()
def read_served(target: Target, documents: Sequence[Document], layer_ids: Sequence[int]) -> Tensor:
    """Return the tapped states ``[D, S, taps · H]`` of right-padded documents, as the engine computes them for a prompt."""
    segments, pages = [], 0
    for document in documents:
        first, pages = pages, pages - (-len(document) // PAGE)
        segments.append(Segment(BlockTable(PAGE, range(first, pages)), 0, len(document)))
    batch = RaggedBatch(segments, torch.cat([document.token_ids for document in documents]).long())
    with Taps(target.model, layer_ids) as taps:
        target.forward(batch, target.make_store("auto", pages * PAGE), torch.tensor([0]), taps)
        return pad_sequence(list(torch.split(taps.take()[0], list(map(len, documents)))), batch_first=True)


class FeatureSource(Protocol):
    """Source of features: runs the target in every step (:class:`OnlineFeatures`) or once (:class:`RememberedFeatures`)."""

    target: FrozenTarget
    layer_ids: tuple[int, ...]
    with_final: bool

    def __call__(self, documents: Sequence[Document], indices: Sequence[int]) -> Features:
        """Return the features of ``documents``, which have these ``indices`` in the data."""
        ...


class OnlineFeatures:
    """Runs the target on each batch. With ``with_final``, features include the final states of response positions."""

    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int], with_final: bool) -> None:
        self.target = target
        self.layer_ids = tuple(layer_ids)
        self.with_final = with_final

    @torch.no_grad()
    def __call__(self, documents: Sequence[Document], indices: Sequence[int]) -> Features:
        """Return the features of ``documents``, which have these ``indices`` in the data."""
        if self.target.served is not None and not self.with_final:
            return Features(read_served(self.target.served, documents, self.layer_ids).to(self.target.dtype), None)
        token_ids = pad(documents).to(self.target.device)
        with Taps(self.target.model, self.layer_ids) as tapped:
            hidden = self.target.model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
            return Features(tapped.take(), hidden if self.with_final else None)


class FeatureMemory:
    """Cache of documents' states ``[S, H]`` by layer, of at most ``budget`` bytes.

    States that do not fit are not kept. Nothing is evicted for them, because a training reads documents in turn and needs the
    oldest next.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.size = 0
        self._known: dict[bytes, dict[int, Tensor]] = {}

    def of(self, document: Document) -> dict[int, Tensor]:
        """Return the states by layer; the final ones are under ``FINAL``."""
        return self._known.get(document.token_ids.numpy().tobytes(), {})

    def add(self, document: Document, states: dict[int, Tensor]) -> None:
        """Add ``states`` if they fit."""
        size = sum(state.nbytes for state in states.values())
        if self.size + size <= self.budget:
            self._known.setdefault(document.token_ids.numpy().tobytes(), {}).update(states)
            self.size += size

    def clear(self) -> None:
        self._known, self.size = {}, 0


class RememberedFeatures:
    """Runs the target only for states that :attr:`FrozenTarget.remembered` lacks. All trainings of a target share that cache.

    Documents are read one at a time, so that the features of one do not depend on which others are cached. :meth:`read` reads
    many together.
    """

    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int], with_final: bool) -> None:
        self.target, self.layer_ids, self.with_final = target, tuple(layer_ids), with_final
        self.online: FeatureSource = OnlineFeatures(target, layer_ids, with_final)

    def __call__(self, documents: Sequence[Document], indices: Sequence[int]) -> Features:
        """Return the features of ``documents``, which have these ``indices`` in the data."""
        found, dtype = [self._states(document) for document in documents], self.target.dtype
        taps = [torch.cat([states[layer] for layer in self.layer_ids], dim=-1).to(dtype) for states in found]
        final = [states[FINAL].to(dtype) for states in found] if self.with_final else []
        return Features(pad_sequence(taps, batch_first=True), pad_sequence(final, batch_first=True) if final else None)

    def read(self, documents: Sequence[Document]) -> None:
        """Read ``documents`` in one pass, which is faster than one pass for each, and cache their features."""
        made = self.online(documents, range(len(documents)))
        for row, document in enumerate(documents):
            self._remember(document, made, row)

    def _states(self, document: Document) -> dict[int, Tensor]:
        known = self.target.remembered.of(document)
        if known.keys() >= {*self.layer_ids, *([FINAL] if self.with_final else [])}:
            return known
        return self._remember(document, self.online([document], [0]), 0)

    def _remember(self, document: Document, made: Features, row: int) -> dict[int, Tensor]:
        known, taps = self.target.remembered.of(document), made.taps[row, : len(document)]
        states = dict(zip(self.layer_ids, taps.chunk(len(self.layer_ids), dim=-1), strict=True))
        if made.final is not None:
            states[FINAL] = made.final[row, : len(document)]
        states = {key: own.to(KEPT, copy=True) for key, own in states.items()}
        self.target.remembered.add(document, {key: own for key, own in states.items() if key not in known})
        return states
