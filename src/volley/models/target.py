"""Any Hugging Face causal LM on volley's pages: the model runs as it is, only its attention function is volley's.

The function is registered once with transformers' ``AttentionInterface``; the batch reaches it through the model's keyword
arguments, so nothing is global and one process can hold many targets.
"""

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import AttentionMaskInterface

from volley.errors import CheckpointError, ConfigError, UnsupportedModelError, VolleyError
from volley.memory.attention import AttentionOptions
from volley.memory.batch import RaggedBatch
from volley.memory.kernels import attention_for
from volley.memory.kv_store import KVStore
from volley.models.accelerate import accelerate
from volley.models.loading import auto_tokenizer, load_causal_lm, load_config
from volley.models.taps import decoder_layers

AttentionCall = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


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
    volley_call: AttentionCall,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: queries ``[1, heads, T, d]``, keys and values ``[1, kv_heads, T, d]``."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return volley_call(layer, *rows, options)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The batch's segments say who sees what; transformers need not build masks."""


AttentionInterface.register("volley", _volley_attention)
AttentionMaskInterface.register("volley", _no_mask)


class _ShapeProbe:
    """Runs plain causal attention once and notes which layers called and with what K/V shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        if k.shape != v.shape:
            raise UnsupportedModelError(
                f"layer {layer} has keys of shape {list(k.shape[1:])} and values of {list(v.shape[1:])}; "
                "volley's pool stores both in one shape"
            )
        self.shapes[layer] = (k.shape[1], k.shape[2])
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1)


class Target:
    """A causal LM whose K/V live in a :class:`KVStore`; made by :meth:`from_pretrained` or around a loaded model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        check_config(model.config)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.attention = attention_for(model.device)
        text = model.config.get_text_config()
        self.num_layers = len(decoder_layers(model))
        self.hidden_size: int = text.hidden_size
        self.context_length = _context_length(text)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self.vocab_size: int = self._head.weight.shape[0]
        self.stop_token_ids = _stop_token_ids(model.generation_config, model.config, tokenizer)
        self._attach()
        self.kv_shapes = self._probe()

    def _attach(self) -> None:
        name = type(self.model).__name__
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

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @torch.inference_mode()
    def _probe(self) -> list[tuple[int, int]]:
        """K/V shape per layer; refuses a model some of whose layers keep state that is not in the pages."""
        probe = _ShapeProbe()
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        self.model(input_ids=tokens, position_ids=positions, use_cache=False, volley_call=probe)
        absent = sorted(set(range(self.num_layers)) - set(probe.shapes))
        if absent:
            raise UnsupportedModelError(
                f"layers {absent} of {type(self.model).__name__} do not call the attention interface: they keep state "
                "that cannot be rolled back by dropping pages. Use a target whose layers are all attention"
            )
        return [probe.shapes[layer] for layer in range(self.num_layers)]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings ``[T, H]`` of ``token_ids [T]``."""
        embeddings: Tensor = self._embedding(token_ids)
        return embeddings

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix ``[V, H]``."""
        return self._head.get_parameter("weight").detach()

    def head(self, hidden: Tensor) -> Tensor:
        """Logits ``[T, V]`` of normed hidden states ``[T, H]``."""
        logits: Tensor = self._head(hidden)
        return logits

    def forward(self, batch: RaggedBatch, store: KVStore, rows: Tensor) -> Tensor:
        """Logits ``[R, V]`` at batch rows ``rows [R]``; K/V of the whole batch end in ``store``."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            return self.attention(batch, store, layer, q, k, v, options)

        output = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            volley_call=attend,
        )
        logits: Tensor = output.logits[0]
        return logits

    @classmethod
    def from_pretrained(
        cls, path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
    ) -> Self:
        """Load model and tokenizer from a folder, the hub or a GGUF file."""
        device = usable_device(device)
        try:
            check_config(load_config(path))
            model = load_causal_lm(path, dtype)
            tokenizer = load_tokenizer(path)
        except VolleyError:
            raise
        except ValueError as error:
            raise UnsupportedModelError(
                f"{path}: transformers cannot load this as a causal LM ({error}); give a hub name or a folder of one"
            ) from error
        except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder
            raise CheckpointError(
                f"{path}: the target cannot be read ({error}); give a hub name or a folder with config.json, "
                "model.safetensors and tokenizer files"
            ) from error
        model = model.to(device).eval()
        accelerate(model)
        return cls(model, tokenizer)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    tokenizer = auto_tokenizer(path)
    if not tokenizer("a")["input_ids"]:  # what transformers makes of a folder without tokenizer files
        raise CheckpointError(f"{path} has no tokenizer that knows any text; put the target's tokenizer files there")
    return tokenizer


def usable_device(name: str | torch.device) -> torch.device:
    """A device that this machine has; an error that says why otherwise."""
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # torch raises either, and lists every device it was ever built for
        reason = shorten(str(error), 80, placeholder=" …")
        raise ConfigError(
            f"device {str(name)!r} cannot be used here ({reason}); use cpu, or one that torch sees"
        ) from None


def check_config(config: Any) -> None:
    """Refuse, before weights are read, an architecture whose layers are not all attention."""
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if others:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {', '.join(others)}; only full and sliding-window attention can be "
            "put on pages and rolled back by dropping them. Use a target whose layers are all of these two types"
        )
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type} is an encoder-decoder; volley decodes causal LMs")


def _context_length(text: Any) -> int:
    """Positions whose rotary frequencies depend on nothing but the position.

    A longrope model changes all frequencies once a sequence outgrows the original context, which K/V already on pages
    (and other requests of the batch) must not feel; such a model is used within its original context.
    """
    limits = [getattr(text, "max_position_embeddings", None) or 2**31]
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    return min(limits)


def _stop_token_ids(
    generation: GenerationConfig | None, config: Any, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    found: set[int] = set()
    for source in (generation, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)
