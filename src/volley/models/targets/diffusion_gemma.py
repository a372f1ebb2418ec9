"""DiffusionGemma on volley's pages: context tokens and canvas tokens go through one stack of layers in one pass.

transformers has two module trees over the same weights, an *encoder* (causal, writes K/V) and a *decoder* (bidirectional, with
self-conditioning). Their layers differ in one buffer, ``layer_scalar``. Here the encoder's layers run for all rows, and each row
uses the scalar of its mode. Rows with feedback are the decoder's.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerBase

from volley.errors import InputError
from volley.memory.attention import AttentionOptions
from volley.memory.batch import RaggedBatch
from volley.memory.device import most_together, usable_device
from volley.memory.kv_store import KVStore
from volley.memory.recurrent_pass import RecurrentPass
from volley.memory.upload import upload
from volley.models.layers.accelerate import accelerate
from volley.models.quantised.decoded import Twins
from volley.models.quantised.scheme import load_model
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.loading import keep_codes, straight_to
from volley.models.targets.taps import Taps
from volley.models.targets.target import AttentionCall, Target, load_tokenizer
from volley.models.targets.traits import turns_by_length
from volley.params import DiffusionParams

_DEFAULTS = DiffusionParams(
    strategy="entropy_renoise",
    max_steps=48,
    entropy_bound=0.1,
    t_min=0.4,
    t_max=0.8,
    stability_threshold=1,
    confidence_threshold=0.005,
)


class _Turns:
    """Cosines and sines of rotary embeddings. A CPU looks them up by position, which is cheaper than computing them."""

    def __init__(self, rotary: Any, kinds: Iterable[str], *, are_kept: bool) -> None:
        """Take the layer types ``kinds`` with their own embeddings. ``are_kept`` is false if tokens depend on each other."""
        self._rotary, self._kinds, self._are_kept = rotary, sorted(set(kinds)), are_kept
        self._tables: tuple[int, dict[str, tuple[Tensor, Tensor]]] = 0, {}
        """Tables and their number of positions, set together: engines that share a target may run in several threads."""

    def __call__(self, states: Tensor, positions: Tensor, end: int | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Return ``[1, T, d]`` for ``states [1, T, H]`` at ``positions [1, T]``, all below ``end`` if that is known."""
        if end is None or not self._are_kept:
            return self._compute(states, positions)
        size, tables = self._tables
        if size < end:
            size = max(end, 2 * size)
            tables = self._compute(states, torch.arange(size)[None])
            self._tables = size, tables
        return {
            kind: (cos.index_select(1, positions[0]), sin.index_select(1, positions[0]))
            for kind, (cos, sin) in tables.items()
        }

    def _compute(self, states: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {kind: self._rotary(states, positions, kind) for kind in self._kinds}


_TWINS = Twins("model.decoder.", "model.encoder.language_model.", own=".layer_scalar")


class DiffusionGemma(Target):
    can_be_tapped = False
    takes_feedback = True

    def __init__(
        self, model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self._encoder = model.model.encoder.language_model
        self._decoder = model.model.decoder
        pairs = list(zip(self._encoder.layers, self._decoder.layers, strict=True))
        self._scalars = [(reads.layer_scalar, denoises.layer_scalar) for reads, denoises in pairs]
        text = model.config.get_text_config()
        self._one_pass = Lock()
        """Lock of a pass: layers hold the scalars of one pass, and engines that share a target may run in several threads."""
        self._kinds: list[str] = text.layer_types[: len(pairs)]
        are_kept = next(model.parameters()).device.type == "cpu" and not turns_by_length(model.config)
        self._turns = _Turns(self._encoder.rotary_emb, self._kinds, are_kept=are_kept)
        rules = BlockDiffusion(
            mask_token_id=None, has_causal_context=True, writes_causally=True, defaults=_defaults(model)
        )
        super().__init__(model, tokenizer, rules)

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        if self.model.config.image_token_id in token_ids:
            raise InputError("the prompt has images, which volley cannot give to DiffusionGemma; leave them out")

    def run_probe(self, token_ids: Tensor, positions: Tensor, call: AttentionCall) -> None:
        with self._one_pass:
            self._encode(self.embed(token_ids), positions, None, call)

    def forward(
        self,
        batch: RaggedBatch,
        store: KVStore,
        rows: Tensor,
        taps: Taps | None = None,
        states: RecurrentPass | None = None,
    ) -> Tensor:
        """Return logits ``[R, V]`` (fp32) at batch rows ``rows [R]``, and store the K/V of the whole batch in ``store``."""

        assert self.diffusion is not None
        symmetric = self.diffusion.symmetric_window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            options = options._replace(symmetric=symmetric)
            return self.attention(batch, store, layer, q, k, v, options)

        hidden, static = self.embed(batch.token_ids), batch.static_feedback
        hidden, denoised = self._condition(hidden, batch) if static is None else self._condition_some(hidden, *static)
        end = max(segment.end for segment in batch.segments)
        with self._one_pass:
            self._set_scalars(denoised)
            try:
                found = self._encode(hidden[None], batch.positions[None], end, attend)
            finally:
                self._set_scalars(False)
        return self.head(found[0, rows])

    def _condition(self, hidden: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor | bool]:
        """Add the canvases' feedback to ``hidden [T, H]``; also return the mask ``[T]`` of canvas rows, or one bool for all."""
        denoised = np.zeros(len(batch), dtype=np.bool_)
        feedback = list[Tensor]()
        for segment, end in zip(batch.segments, batch.offsets[1:], strict=True):
            if segment.feedback is not None:
                denoised[end - len(segment.feedback) : end] = True
                feedback.append(segment.feedback)
        if not feedback:
            return hidden, False
        signal = torch.cat(feedback).to(hidden.dtype)[None]  # quantised layers expect [1, T, H]
        if denoised.all():
            return self._decoder.self_conditioning(hidden[None], signal)[0], True
        canvases = upload(denoised.nonzero()[0], hidden.device)
        hidden[canvases] = self._decoder.self_conditioning(hidden[None, canvases], signal)[0]
        return hidden, upload(denoised, self.device)

    def _condition_some(self, hidden: Tensor, denoised: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all rows both ways and select on the device, because the host does not know which rows are canvases'."""
        conditioned = self._decoder.self_conditioning(hidden[None], signal.to(hidden.dtype)[None])[0]
        return torch.where(denoised[:, None], conditioned, hidden), denoised

    def _encode(self, states: Tensor, positions: Tensor, end: int | None, call: AttentionCall) -> Tensor:
        """Return normed states ``[1, T, H]`` after all layers, without the masks and the cache of the encoder's own forward."""
        turns = self._turns(states, positions, end)
        for layer, kind in zip(self._encoder.layers, self._kinds, strict=True):
            states = layer(states, position_embeddings=turns[kind], volley_call=call)
        normed: Tensor = self._encoder.norm(states)
        return normed

    def _set_scalars(self, denoised: Tensor | bool) -> None:
        """Set the scalar of each row for the next pass: the decoder's for the rows ``denoised [T]``, for all, or for none."""
        for layer, (reads, denoises) in zip(self._encoder.layers, self._scalars, strict=True):
            if isinstance(denoised, bool):
                scalar = denoises if denoised else reads
            else:
                scalar = torch.where(denoised[None, :, None], denoises, reads)
            layer._buffers["layer_scalar"] = scalar  # the module's __setattr__ takes as long as a small matmul

    def head(self, hidden: Tensor) -> Tensor:
        """Logits ``[T, V]`` (fp32, capped) of normed hidden states ``[T, H]``."""
        cap: float = self.model.final_logit_softcapping
        return super().head(hidden).float().div_(cap).tanh_().mul_(cap)

    def feedback(self, logits: Tensor) -> Tensor:
        """Return the mean embedding ``[L, H]`` under the distribution of ``logits [L, V]``."""
        weight = self._decoder.embed_tokens.weight
        dtype = weight.dtype
        if dtype == logits.dtype:
            probs = logits.softmax(dim=-1)
        else:
            probs = torch.empty_like(logits, dtype=dtype)
            size = max(1, most_together(logits.device) // logits.shape[-1])
            for kept, rows in zip(torch.split(probs, size), torch.split(logits, size), strict=True):
                kept.copy_(rows.to(dtype).softmax(dim=-1, dtype=torch.float32))
        mean: Tensor = torch.matmul(probs, weight) * self._decoder.embed_tokens.embed_scale.to(dtype)
        return mean

    @classmethod
    def from_folder(cls, path: str | Path, dtype: torch.dtype, device: str | torch.device) -> Self:
        """Load model and tokenizer from a folder or the hub."""
        where, config = usable_device(device), AutoConfig.from_pretrained(path)
        model: DiffusionGemmaForBlockDiffusion = load_model(
            DiffusionGemmaForBlockDiffusion, path, config, dtype, _TWINS, **straight_to(where)
        )
        target = cls(model.to(where).eval(), load_tokenizer(path))
        whole = model.model
        whole.decoder.layers = nn.ModuleList()  # the encoder's layers serve both, and the decoder may hold copies
        whole.encoder.vision_tower = whole.encoder.embed_vision = None  # images are refused
        keep_codes(model, path, _TWINS)
        accelerate(model, release=True)
        return target


def _defaults(model: DiffusionGemmaForBlockDiffusion) -> DiffusionParams:
    """Return the checkpoint's own settings over transformers' defaults."""
    own = model.generation_config
    sampler = own.sampler_config
    said = DiffusionParams(
        canvas_length=model.config.canvas_length,
        max_steps=own.max_denoising_steps,
        entropy_bound=None if sampler is None else sampler.entropy_bound,
        t_min=own.t_min,
        t_max=own.t_max,
        stability_threshold=own.stability_threshold,
        confidence_threshold=own.confidence_threshold,
    )
    return said.over(_DEFAULTS)
