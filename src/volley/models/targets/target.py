"""Any Hugging Face causal LM on volley's pages: the model is unchanged, only its attention function is volley's.

The function is registered once with transformers' ``AttentionInterface``. The batch reaches it through the model's keyword
arguments, so nothing is global and one process can hold many targets.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from volley.config import KVDtype
from volley.errors import CheckpointError, UnsupportedModelError, VolleyError
from volley.files import find_target
from volley.memory.attention import AttentionOptions
from volley.memory.batch import RaggedBatch
from volley.memory.device import sum_in_fp32, usable_device
from volley.memory.kernels import attention_for, launching
from volley.memory.kv_store import KVStore, LatentShape, make_store
from volley.memory.recurrent_pass import RecurrentPass
from volley.memory.recurrent_store import RecurrentLayout
from volley.models.layers.accelerate import accelerate
from volley.models.layers.fused import CosineTable, FusedDecoder, is_gated_layer
from volley.models.layers.host_memory import forget_libraries, returning_memory, trim
from volley.models.layers.products import is_linear
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.folders import check_files
from volley.models.targets.latent import LatentAttention, attach_latents
from volley.models.targets.loading import auto_tokenizer, choose_weights, load_config, load_for_codes, reading
from volley.models.targets.recurrent import RECURRENT_LAYERS, LayoutProbe, check_family, running, wrap_functions
from volley.models.targets.rehearsal import made_up
from volley.models.targets.taps import Taps, decoder_layers
from volley.models.targets.traits import turns_by_length
from volley.native import Product, TargetWeights, cap
from volley.tensors import dtype_of

TARGET_FILES = "config.json, model.safetensors and tokenizer files"
AttentionCall = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"}
_STATELESS_LAYERS = {"moe", "mlp"}
_INDEXER = "an indexer that chooses which keys a token sees, with a cache of its own that volley does not keep on pages"
_ALIBI = "ALiBi, biases by distance that do not pass through transformers' AttentionInterface"
_REASONS = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3_vl", "axk2", "hy_v4"), _INDEXER),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    "mllama_text_model": "layers that attend to an image, which volley does not read",
}
"""Reasons for refusing models, by the type without "_text"."""


def _volley_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    volley_call: AttentionCall | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with transformers' signature: queries ``[1, heads, T, d]``, keys and values ``[1, kv_heads, T, d]``.

    The store has one width for keys and values; the narrower ones are padded with zeros, which do not change the result. Layers
    with latents (``models/targets/latent.py``) have one key for all heads, which is the value as well.
    """
    if volley_call is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not get the keywords that its model is called with, so volley cannot put its K/V on "
            "pages. Use another target"
        )
    if attention_mask is not None:  # transformers makes none for this function
        raise UnsupportedModelError(
            f"{type(module).__name__} gives attention a mask of its own, which volley would ignore. Use another target"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    latent: LatentAttention | None = getattr(module, "volley_latent", None)
    if latent is not None and latent.serves(query, key, value, scale):
        own, shared = latent.absorb(query, key)
        keys = shared[0].transpose(0, 1)
        return latent.expand(volley_call(layer, own[0].transpose(0, 1), keys, keys, options)[None]), None
    width, widest = value.shape[-1], max(value.shape[-1], key.shape[-1])
    if width != key.shape[-1]:
        query, key, value = (pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return volley_call(layer, *rows, options)[None, ..., :width].contiguous(), None  # AfMoE calls view on it


AttentionInterface.register("volley", _volley_attention)  # without a mask function, so transformers builds no masks


class _ShapeProbe:
    """Plain causal attention that records which layers call it, with their K/V shapes and windows."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.windowed, self.again = set[int](), set[int]()
        """Layers with a window, and layers that called more than once."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self.windowed |= set() if options.window is None else {layer}
        self.again |= {layer} & set(self.shapes)
        self.shapes[layer] = LatentShape((k.shape[1], k.shape[2])) if v is k else (k.shape[1], k.shape[2])
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1)


class Ends(NamedTuple):
    """Scales and cap that a family applies to embeddings before its layers and to logits after its head."""

    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read transformers' names in a config; :meth:`Target._fusion_agrees` detects a family with another meaning."""
        found = {name: getattr(config, name, None) for name in cls._fields}
        return cls(**{name: float(value) for name, value in found.items() if isinstance(value, int | float)})

    def enter(self, embeddings: Tensor) -> Tensor:
        """Return the states ``[T, H]`` before the first layer."""
        return embeddings if self.embedding_multiplier == 1.0 else embeddings * self.embedding_multiplier

    def leave(self, logits: Tensor) -> Tensor:
        """Return the logits ``[T, V]`` of a head's outputs, which are overwritten."""
        if self.logits_scaling != 1.0:
            logits = logits / self.logits_scaling
        if self.final_logit_softcapping is not None:
            cap(logits, self.final_logit_softcapping)
        return logits


class Target:
    """Causal LM whose K/V are in a :class:`KVStore`; made by :meth:`from_pretrained` or around a loaded model."""

    can_be_tapped = True
    """True if a drafter can read the states of its layers."""
    world = 1
    """Number of processes that hold it."""
    takes_feedback = False
    """True if canvases get their last prediction as self-conditioning input (:meth:`feedback`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        diffusion: BlockDiffusion | None = None,
    ) -> None:
        """Wrap a loaded ``model``; ``diffusion`` makes it a block-diffusion language model."""
        check_config(model.config)
        self.diffusion = diffusion
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.device = next(p.device for p in model.parameters() if p.device.type != "meta")
        """Device it runs on; the model's own copies of fused weights are on the meta device."""
        if self.device.type == "cuda":
            sum_in_fp32()
        self.attention = attention_for(self.device)
        text = model.config.get_text_config()
        self.num_layers = len(decoder_layers(model))
        self.hidden_size: int = text.hidden_size
        self.context_length = _context_length(text)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self.vocab_size: int = self._head.weight.shape[0]
        mask = None if diffusion is None else diffusion.mask_token_id
        if mask is not None and not 0 <= mask < self.vocab_size:
            raise CheckpointError(
                f"the mask token of its canvases is {mask}, and the vocabulary has {self.vocab_size} tokens; name the "
                "model's own in config.json (mask_token_id), or in the BlockDiffusion that you give"
            )
        self.stop_token_ids = _stop_token_ids(model.generation_config, model.config, tokenizer)
        self._ends = Ends.of(text)
        self.fused: FusedDecoder | None = None
        """All layers in one call, if they are fused and nothing is computed between them; used with supported K/V pools."""
        self._cosines: dict[str | None, CosineTable] = {}  # by type of layer
        self._attach()
        self.kv_shapes, self.recurrent = self._probe()
        fused = FusedDecoder.of_layers(list(decoder_layers(model)))
        if fused is not None and self._fusion_agrees(fused):
            self.fused = fused

    def _attach(self) -> None:
        name = type(self.model).__name__
        given = signature(type(self.model).forward).parameters
        self._keeps_rows = "logits_to_keep" in given  # otherwise the model computes logits of every row
        if "position_ids" not in given:
            raise UnsupportedModelError(
                f"{name} takes no position_ids: it counts the tokens of a cache of its own, which volley does not use. "
                "Use another target"
            )
        wrap_functions(self.model)
        attach_latents(self.model)
        try:
            self.model.set_attn_implementation("volley")
        except (ValueError, KeyError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{name} does not route attention through transformers' AttentionInterface ({error}); "
                "volley cannot put its K/V on pages"
            ) from error

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @torch.inference_mode()
    def _probe(self) -> tuple[list[tuple[int, int]], RecurrentLayout]:
        """Return each attention's K/V shape and the recurrent layout; refuse a model that keeps state anywhere else."""
        text = self.model.config.get_text_config()
        types = list(getattr(text, "layer_types", None) or ["full_attention"] * self.num_layers)[: self.num_layers]
        probe, recurrent = _ShapeProbe(), LayoutProbe()
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        with running(recurrent):
            self.run_probe(tokens, positions, probe)
        expected = [layer for layer, kind in enumerate(types) if kind in _ATTENTION_LAYERS]
        absent = sorted(set(expected) - set(probe.shapes))
        if absent:
            raise UnsupportedModelError(
                f"layers {absent} of {type(self.model).__name__} do not call the attention interface: they keep state "
                "that cannot be rolled back by dropping pages. Use a target whose layers are all attention"
            )
        if probe.again:
            raise UnsupportedModelError(
                f"layers {sorted(probe.again)} of {type(self.model).__name__} call attention more than once with values of their "
                "own, and volley keeps the K/V of one call. Use another target"
            )
        hidden = _hidden_windows(self.model, types) - probe.windowed
        if hidden:
            raise UnsupportedModelError(
                f"layers {sorted(hidden)} of {type(self.model).__name__} have a sliding window of {text.sliding_window} tokens "
                "that does not reach the attention function. Use another target, or one whose window is its whole context"
            )
        called = sorted(probe.shapes)  # LongCat-Flash has two attentions in each layer, with numbers of their own
        self._places = {layer: place for place, layer in enumerate(called)}
        return [probe.shapes[layer] for layer in called], recurrent.layout(types)

    @property
    def is_regular(self) -> bool:
        """Return whether a pass launches the same operations for any tokens of this number; a GPU tries unknown layers."""
        if self.recurrent or turns_by_length(self.model.config):
            return False
        is_known = is_linear(self._head) and all(map(is_gated_layer, decoder_layers(self.model)))
        return is_known or (self.device.type == "cuda" and not self._waits)

    @cached_property
    @torch.inference_mode()
    def _waits(self) -> bool:
        """Return whether a pass waits for the GPU."""
        batch, store = made_up([5], self.kv_shapes, self.dtype, self.device, causal=True, context=0)
        rows = torch.arange(5, device=self.device)
        return launching.waits(lambda: self.forward(batch, store, rows), self.device)

    def use_long_factors(self) -> None:
        """Use a longrope model's long factors at every position, so that its whole context can be used.

        transformers uses the long factors only for texts beyond the original context. Call this before an engine is made. Raise
        UnsupportedModelError if the model has no long factors.
        """
        text = self.model.config.get_text_config()
        rotary: Any = getattr(self.model.get_decoder(), "rotary_emb", None)
        if getattr(rotary, "rope_type", None) != "longrope":
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no second set of rotary factors for long contexts (longrope); leave the "
                "option out"
            )
        beyond = text.rope_parameters["original_max_position_embeddings"] + 1
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](text, self.device, seq_len=beyond)
        rotary.original_inv_freq = frequencies  # transformers restores these for short texts
        rotary.register_buffer("inv_freq", frequencies, persistent=False)
        self.context_length = _context_length(text, with_long_factors=True)

    @property
    def remedy_for_long_prompts(self) -> str:
        """Return the remedy for a prompt that exceeds the context."""
        longest = _context_length(self.model.config.get_text_config(), with_long_factors=True)
        if longest <= self.context_length:
            return "shorten the prompt"
        return f"shorten the prompt, or have {longest} with long factors (--long-context, Target.use_long_factors)"

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Refuse a prompt for which the model needs more than its tokens."""

    def run_probe(self, token_ids: Tensor, positions: Tensor, call: AttentionCall) -> None:
        """Run a pass over ``token_ids [1, T]`` whose attention is ``call``."""
        self.model(input_ids=token_ids, position_ids=positions, use_cache=False, volley_call=call)

    def feedback(self, logits: Tensor) -> Tensor | None:
        """Return the self-conditioning input ``[L, H]`` for the prediction ``logits [L, V]``; ``None`` if the model has none."""
        return None

    def make_store(self, kv_dtype: KVDtype, num_slots: int) -> KVStore:
        """Make a store for its K/V of ``num_slots`` tokens."""
        return make_store(kv_dtype, self.kv_shapes, num_slots, self.dtype, self.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return input embeddings ``[T, H]`` of ``token_ids [T]``."""
        embeddings: Tensor = self._embedding(token_ids)
        return embeddings

    @property
    def ends_are_fused(self) -> bool:
        """Return whether the last norm and the head are kernels, too."""
        norm: Any = self.model.get_decoder().norm
        return isinstance(vars(self._head).get("forward"), Product) and "forward" in vars(norm)

    @property
    def kept_head(self) -> Tensor | Product:
        """Return the head's matrix ``[V, H]`` as it is in memory, perhaps packed or quantised."""
        forward = vars(self._head).get("forward")
        return forward if isinstance(forward, Product) else self._head.get_parameter("weight").detach()

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits ``[T, V]`` of normed hidden states ``[T, H]``."""
        logits: Tensor = self._head(hidden)
        return logits

    def forward(
        self,
        batch: RaggedBatch,
        store: KVStore,
        rows: Tensor,
        taps: Taps | None = None,
        states: RecurrentPass | None = None,
    ) -> Tensor:
        """Return logits ``[R, V]`` at batch rows ``rows [R]``; put the batch's K/V in ``store``, tapped states in ``taps``.

        ``states`` computes the recurrent layers, if there are any, from the states before each segment; without it every
        segment begins with zeros and leaves nothing.
        """
        if self.fused is not None and self.fused.serves(store):
            return self._fused_forward(self.fused, batch, store, rows, taps)
        places = self._places

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            return self.attention(batch, store, places[layer], q, k, v, options)

        if states is None and self.recurrent:
            states = RecurrentPass(batch, self.recurrent)
        with running(states):
            output = self.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=rows,
                volley_call=attend,
            )
        logits: Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]

    def _fused_forward(
        self, decoder: FusedDecoder, batch: RaggedBatch, store: KVStore, rows: Tensor, taps: Taps | None
    ) -> Tensor:
        base: Any = self.model.get_decoder()
        states, end = self._ends.enter(self.embed(batch.token_ids)), max(own.end for own in batch.segments)
        for kind in {rotary.kind for rotary in decoder.rotaries} - self._cosines.keys():
            self._cosines[kind] = CosineTable(base.rotary_emb, kind)
        turns = [self._cosines[rotary.kind](states, batch.positions, end) for rotary in decoder.rotaries]
        states, features = decoder(states, turns, batch, store, () if taps is None else taps.layer_ids)
        if taps is not None:
            taps.leave(features)
        chosen = states if len(rows) == len(states) else states[rows]
        return self._ends.leave(self.head(base.norm(chosen)))

    @torch.inference_mode()
    def _fusion_agrees(self, decoder: FusedDecoder) -> bool:
        """Return whether logits equal those of the model's own forward; some models scale or norm elsewhere."""
        batch, store = made_up([5], self.kv_shapes, self.dtype, self.device, causal=True, context=0)
        if not decoder.serves(store):
            return False
        rows = torch.tensor([0, 4])  # all five would take memory for the logits of five tokens
        expected = self.forward(batch, store, rows).float()
        found = self._fused_forward(decoder, batch, store, rows, None).float()
        return bool((found - expected).norm() <= 2**-5 * expected.norm())

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "auto",
        weights: TargetWeights = "auto",
    ) -> Self:
        """Load model and tokenizer from a folder, the hub or a GGUF file, or by the name of a bundled model.

        On a CPU ``weights`` can be quantised; "auto" keeps the quantised weights of a GGUF file.
        """
        path, device = find_target(path), usable_device(device)
        dtype = dtype_of(dtype)
        with returning_memory():
            with reading_target(path):
                kind = choose_weights(path, weights, device, dtype)
                check_config(load_config(path, causal=True))
                check_files(path)
                model, fill = load_for_codes(path, dtype, kind, device)
            tokenizer = load_tokenizer(path)
            trim()  # what made the tokenizer takes more memory than it does
            forget_libraries()
            model.eval()
            accelerate(model, kind, release=True, fill=fill)
            return cls(model, tokenizer)


def _hidden_windows(model: PreTrainedModel, types: Sequence[str]) -> set[int]:
    """Return layers with a window shorter than the context, by their ``types`` or by the masks that transformers would make."""
    text: Any = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if not window or window >= _context_length(text):
        return set()
    if getattr(text, "layer_types", None):
        return {layer for layer, kind in enumerate(types) if kind == "sliding_attention"}
    masked = hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    return set(range(len(types))) if masked else set()


@contextmanager
def reading_target(path: str | Path) -> Iterator[None]:
    """Turn errors of reading a target from ``path`` into volley's errors with their remedies."""
    with reading(path, "the target", f"give a hub name or a folder with {TARGET_FILES}"):
        try:
            yield
        except VolleyError:
            raise
        except ValueError as error:
            raise UnsupportedModelError(
                f"{path}: transformers cannot load this as a causal LM ({error}); give a hub name or a folder of one"
            ) from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    with reading(path, "the tokenizer", "put the target's tokenizer files there again"):
        tokenizer = auto_tokenizer(path)
    if not tokenizer("a")["input_ids"]:  # transformers' result for a folder without tokenizer files
        raise CheckpointError(f"{path} has no tokenizer that knows any text; put the target's tokenizer files there")
    return tokenizer


def check_config(config: Any) -> None:
    """Refuse, before weights are read, an architecture whose layers keep state that volley cannot roll back."""
    text = config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ())
    reason = _REASONS.get(text.model_type.removesuffix("_text")) or (_ALIBI if getattr(text, "alibi", False) else None)
    if reason:
        raise UnsupportedModelError(
            f"{text.model_type} has {reason}. Use a target with full or sliding-window attention, or its latent form (MLA)"
        )
    check_family(text.model_type, types)
    others = sorted(types - _ATTENTION_LAYERS - _STATELESS_LAYERS - RECURRENT_LAYERS)
    if "chunked_attention" in others:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type chunked_attention: where a chunk begins does not reach the attention "
            "function, and its other layers scale queries by their place in the pass, not in the text. Use another target"
        )
    if others:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {', '.join(others)}; only full and sliding-window attention and the "
            "recurrent layers of some families can be rolled back. Use a target whose layers are all of these"
        )
    if types and not types & _ATTENTION_LAYERS:
        raise UnsupportedModelError(
            f"{config.model_type} has no attention layer, and volley keeps prefixes on pages of K/V. Use a target with some"
        )
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type} is an encoder-decoder; volley decodes causal LMs")


def _context_length(text: Any, *, with_long_factors: bool = False) -> int:
    """Return the number of positions whose rotary frequencies depend only on the position.

    A longrope model changes all frequencies when a sequence outgrows the original context, but K/V on pages and other requests
    in the batch must not change. So the original context is the limit, unless the long factors apply at every position.
    """
    limit: int = getattr(text, "max_position_embeddings", None) or 2**31
    rope = getattr(text, "rope_parameters", None) or {}
    for own in (rope, *rope.values()):
        if isinstance(own, dict) and (original := own.get("original_max_position_embeddings")):
            if own.get("rope_type") == "longrope" and not with_long_factors:
                limit = min(limit, original)
            if own.get("rope_type") == "yarn":  # model cards say to add the yarn factor and change nothing else
                limit = max(limit, int(original * own.get("factor", 1)))
    return limit


def _stop_token_ids(
    generation: GenerationConfig | None, config: Any, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    values = [getattr(source, "eos_token_id", None) for source in (generation, config.get_text_config(), tokenizer)]
    return frozenset(token for value in values for token in ([value] if isinstance(value, int) else value or []))
