"""The DFlash drafter: a few Qwen3-style layers that turn ``[anchor, MASK, …]`` into hidden states in one pass.

Its context is the target's hidden states: ``C = RMSNorm(fc(taps))`` is projected by every layer's ``k_proj`` and ``v_proj`` and
cached (K/V injection, DFlash §4.1). Embedding and head are the target's unless the checkpoint brings its own. The caller passes
``attend``, which owns keys and values: a dense mask in training, the page pool in serving.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from volley.errors import CheckpointError, ConfigError
from volley.files import read_json, weight_files, write_atomically
from volley.memory import kernels
from volley.memory.attention import AttentionOptions
from volley.models.checkpoints.checkpoint import Checkpoint, DrafterConfig
from volley.models.checkpoints.formats import drafter_folder, read_checkpoint
from volley.models.drafters.convolution import BlockConvolution
from volley.models.drafters.domino import DominoHead
from volley.models.drafters.frequent import FrequentHead
from volley.models.drafters.heads import (
    ConfidenceHead,
    MarkovTables,
    Projection,
    ResidualHead,
    Selector,
    SequentialHead,
)
from volley.models.gguf.file import is_gguf
from volley.models.layers.accelerate import accelerate, release_weight, share
from volley.models.layers.empty_weights import empty_weights
from volley.models.layers.fingerprint import sample
from volley.models.layers.fused import fits, layer_shape, products_of
from volley.models.layers.host_memory import MappedFiles
from volley.models.layers.merged import MergedWeights
from volley.models.layers.products import recoded_head
from volley.models.targets.loading import drafter_path
from volley.native import Product, Weights
from volley.native.decoder import LayerShape, LayerWeights
from volley.tensors import check_weights, save_tensors

MergedKV = tuple[Callable[[Tensor], Tensor], Tensor]
"""Map ``[T, H] -> [T, 2 · layers · kv_heads · d]``, keys before values, and the weights ``[layers, d]`` of the keys' norms."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention: ``attend(layer, queries [T, heads, d], keys [T, kv_heads, d], values [T, kv_heads, d]) -> [T, heads, d]``."""


class Rotary:
    """Cosines and sines by absolute position, always fp32: rounded frequencies erode acceptance with position."""

    def __init__(self, config: DrafterConfig) -> None:
        from transformers import Qwen3Config  # not needed without a drafter
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
        self.length = config.max_position_embeddings + config.block_size  # a block may begin at the last position
        try:
            shape = Qwen3Config(
                head_dim=config.head_dim,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=rope,
            )
            self.source = Qwen3RotaryEmbedding(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"drafter config: transformers cannot use the rope parameters {rope} ({error!r})"
            ) from None
        self._tables: dict[tuple[torch.dtype, torch.device, int], tuple[Tensor, Tensor]] = {}
        """Tables by dtype, device and length; CUDA graphs may still read shorter ones."""

    def cover(self, length: int) -> None:
        """Extend the tables to positions below ``length``: a target's context may be longer than its drafter's."""
        self.length = max(self.length, length)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[T, 1, head_dim]`` of ``positions [T]``; see :meth:`cover` for positions past the context."""
        key = (dtype, positions.device, self.length)
        if key not in self._tables:
            with torch.inference_mode(False), torch.no_grad():
                every = torch.arange(self.length, device=positions.device)[None]
                cos, sin = self.source.to(positions.device)(torch.empty(0, dtype=dtype, device=positions.device), every)
            self._tables[key] = (cos[0, :, None], sin[0, :, None])
        cos, sin = self._tables[key]
        return cos[positions], sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to ``x [..., T, heads, d]`` in the half-split layout of Llama and Qwen."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def split_heads(self, x: Tensor) -> Tensor:
        """Reshape ``[..., heads · d]`` to ``[..., heads, d]``."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries ``[T, heads, d]`` of block states ``[T, H]``."""
        return rotate(self.q_norm(self.split_heads(self.q_proj(x))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """K and V ``[T, kv_heads, d]`` of block states or context features ``[T, H]``; both use the same projections."""
        keys = rotate(self.k_norm(self.split_heads(self.k_proj(x))), cos, sin)
        return keys, self.split_heads(self.v_proj(x))


class DraftMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)
        self.attention_conv, self.mlp_conv = _make_convolution(config), _make_convolution(config)

    def take(self, products: LayerWeights[Product]) -> None:
        """Compute with these linear kernels, so that all ways to run the layer share one copy of the weights."""
        attention, mlp = self.self_attn, self.mlp
        share([attention.q_proj, attention.k_proj, attention.v_proj], products.project)
        share([mlp.gate_proj, mlp.up_proj], products.gate_up)
        attention.o_proj.forward = products.output  # type: ignore[method-assign, assignment]
        mlp.down_proj.forward = products.down  # type: ignore[method-assign, assignment]


def _make_convolution(config: DrafterConfig) -> BlockConvolution | None:
    if config.conv_kernel_size is None or config.conv_group_size is None:
        return None
    return BlockConvolution(config.hidden_size, config.conv_kernel_size, config.conv_group_size)


def _around(
    convolution: BlockConvolution | None, x: Tensor, places: Tensor | None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a sublayer's input for ``x [T, H]``, and the function to apply to its output."""
    if convolution is None:
        return x, lambda output: output
    assert places is not None, "convolutions must know where a block begins"
    found: tuple[Tensor, Callable[[Tensor], Tensor]] = convolution(x, places)
    return found


def _make_head(config: DrafterConfig) -> SequentialHead | DominoHead | None:
    head = config.head
    if head is None:
        return None
    rows = config.draft_vocab_size or config.vocab_size
    if head.type == "domino":
        assert head.state is not None
        return DominoHead(config.hidden_size, head.state, head.rank, rows, head.uncorrected)
    if head.type == "selector":
        return Selector(config.hidden_size, config.vocab_size, head.rank)
    if head.type == "dspark":
        return MarkovTables(config.vocab_size, rows, head.rank)
    return ResidualHead(config.hidden_size, head.rank, with_context=head.type == "residual")


def read_drafter(path: Path | str) -> tuple[Path, Checkpoint]:
    """Read a drafter given by folder or hub name; return its folder and its checkpoint."""
    folder = drafter_folder(drafter_path(path))
    return folder, read_checkpoint(folder)


def find_drafter(path: Path | str) -> Path:
    """Return the folder or file of a drafter, without reading its weights; refuse one that is not there."""
    folder = drafter_folder(drafter_path(path))
    if not is_gguf(folder):
        read_json(folder / "config.json")
    return folder


def _release(part: nn.Module, files: MappedFiles) -> None:
    """Release the weights of ``part`` that linear kernels hold copies of."""
    for module in part.modules():
        if isinstance(module, nn.Linear) and "forward" in vars(module) and not module.weight.is_meta:
            release_weight(module, files)


def _read_again(drafter: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Read released weights from their files again."""
    given_up = {name: own for name, own in drafter.named_parameters() if own.is_meta and hasattr(own, "sample")}
    if not given_up:
        return
    folder = cast(Path, drafter.folder)
    found = read_checkpoint(folder).tensors
    for name, own in given_up.items():
        if name not in found or found[name].shape != own.shape or not torch.equal(sample(found[name]), sample(own)):
            raise CheckpointError(
                f"{folder} holds other weights than when it was loaded ({name}); load the drafter again"
            )
        state[prefix + name] = found[name].to(own.dtype)


class Drafter(nn.Module):
    """Drafter for one target. Weight names are z-lab's; embedding and head are the target's.

    Three modules are optional. A sequential head (``head.*``) corrects a position's logits by the previous token
    (``heads.py``). A checkpoint with an embedding and a head of its own has ``embed_tokens`` and ``lm_head``. With a reduced
    vocabulary, row i of ``lm_head`` is the token ``i + d2t[i]``.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.folder: Path | None = None  # the folder it was loaded from
        width = config.target_hidden_size or config.hidden_size
        self.fc = nn.Linear(config.num_taps * width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.head = _make_head(config)
        self.confidence_head = None if config.confidence_width is None else ConfidenceHead(config.confidence_width)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.lm_head: nn.Linear | None = None
        self.d2t: Tensor | None
        rows = config.draft_vocab_size
        if rows is not None:
            self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        reduced = rows is not None and rows < config.vocab_size
        self.register_buffer("d2t", torch.zeros(rows or 0, dtype=torch.long) if reduced else None)
        self.fused: tuple[list[LayerWeights[Product]], LayerShape] | None = None
        """Copies of the layers' weights for :class:`FusedDecoder`, set by :meth:`fuse`."""
        self.merged: list[MergedWeights] = []
        """Layers with merged projections, set by :meth:`fuse` on a GPU."""
        self.own_head: Projection | None = None
        """The target's head, quantised or reduced to frequent tokens, if drafts come from that."""
        self.merged_kv: MergedKV | None = None
        """Merged K/V projections for injection, made before the layers' weights are released."""
        self.register_state_dict_post_hook(_read_again)  # type: ignore[no-untyped-call]

    def fuse(self, weights: Weights = "bf16", head: Tensor | Product | None = None, *, release: bool = False) -> None:
        """Run the drafter on this machine's fast kernels; it must not be trained afterwards.

        If ``weights`` are quantised, the target's ``head [V, H]`` is quantised too, or shared if it already is. ``release`` frees
        the CPU weights that kernels have copies of; ``merged_kv`` must exist then. ``state_dict`` reads them from the drafter's
        folder again, for a fingerprint.
        """
        if weights != "bf16" and head is not None and self.lm_head is None:
            self.own_head = recoded_head(head, weights)
        layers, files = list(self._layers()), MappedFiles()
        device, is_plain = self.fc.weight.device, self._has_plain_layers
        if is_plain and kernels.usable(device):
            self.merge()
        elif is_plain and device.type == "cpu" and all(fits(layer, weights) for layer in layers):
            shape = layer_shape(layers[0], AttentionOptions(self.config.head_dim**-0.5))
            self.fused = ([], shape)
            for layer in layers:
                products = products_of(layer, weights, files)
                layer.take(products)
                files.forget_all(layer)
                self.fused[0].append(products)
                if release:
                    _release(layer, files)
        accelerate(self, weights)
        files.forget_all(self)
        if release and device.type == "cpu":
            for part in (self.fc, self.layers, *([] if self.lm_head is None else [self.lm_head])):
                _release(part, files)

    def merge(self) -> None:
        """Merge the projections of each layer; the layer's own weights become views of the merged ones."""
        options = AttentionOptions(self.config.head_dim**-0.5)
        self.merged = [MergedWeights(layer, layer_shape(layer, options)) for layer in self._layers()]

    @property
    def _has_plain_layers(self) -> bool:
        """Return whether the layers compute like Qwen3's: no convolutions, and inputs of one width."""
        return self.config.conv_kernel_size is None and self.config.eagle is None

    @property
    def drafted(self) -> Tensor | None:
        """Tokens of a reduced vocabulary, one for each row of the head."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def frequent_head(self) -> FrequentHead | None:
        """The target's head for frequent tokens, if drafts come from it."""
        return self.own_head if isinstance(self.own_head, FrequentHead) else None

    def _layers(self) -> Iterator[DraftLayer]:
        return cast(Iterator[DraftLayer], iter(self.layers))

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """List ``(kv_heads, head_dim)`` of every layer; all are equal."""
        return [(self.config.num_key_value_heads, self.config.head_dim)] * self.config.num_hidden_layers

    def windows(self, bound: int | None = None) -> list[int | None]:
        """Tokens of context that each layer attends to before the block, at most ``bound``; ``None`` for all."""
        sliding = [
            self.config.sliding_window if kind == "sliding_attention" else None for kind in self.config.layer_types
        ]
        return [min((size for size in (own, bound) if size is not None), default=None) for own in sliding]

    def context_kv(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K and V ``[T, kv_heads, d]`` of every layer for tapped features ``[T, taps · H]`` at ``positions [T]``."""
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(positions, context.dtype)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self._layers()]

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend, places: Tensor | None = None) -> Tensor:
        """Final hidden states ``[T, H]`` for block embeddings ``[T, H]`` at absolute ``positions [T]``.

        ``places [T]`` count within each block, from 0; convolutions need them.
        """
        hidden = embeddings
        cos, sin = self.rotary(positions, hidden.dtype)
        if self.merged:
            for index, merged in enumerate(self.merged):
                rows = merged.before(hidden, cos[:, 0], sin[:, 0])
                hidden = merged.after(hidden, attend(index, *merged.split(rows)).flatten(-2))
            final: Tensor = self.norm(hidden)
            return final
        for index, layer in enumerate(self._layers()):
            normed, finish = _around(layer.attention_conv, layer.input_layernorm(hidden), places)
            queries = layer.self_attn.queries(normed, cos, sin)
            mixed = attend(index, queries, *layer.self_attn.keys_values(normed, cos, sin))
            hidden = hidden + finish(layer.self_attn.o_proj(mixed.flatten(-2)))
            normed, finish = _around(layer.mlp_conv, layer.post_attention_layernorm(hidden), places)
            hidden = hidden + finish(layer.mlp(normed))
        output: Tensor = self.norm(hidden)
        return output

    def embed(self, token_ids: Tensor, of_target: Projection) -> Tensor:
        """Input embeddings ``[T, H]`` of ``token_ids [T]``; ``of_target`` gives the target's."""
        embeddings: Tensor = of_target(token_ids) if self.embed_tokens is None else self.embed_tokens(token_ids)
        return embeddings

    def logits(self, hidden: Tensor, of_target: Projection) -> Tensor:
        """Logits ``[T, V]`` of final states ``[T, H]``, −∞ outside a reduced vocabulary; ``of_target`` is the target's head."""
        if self.lm_head is None:
            return self._capped((self.own_head or of_target)(hidden))
        own = self._capped(self.lm_head(hidden))
        if self.drafted is None:
            return own
        return own.new_full((len(own), self.config.vocab_size), -torch.inf).index_copy(1, self.drafted, own)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        if cap is None:
            return logits
        capped = (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)
        return capped if self.frequent_head is None else capped.masked_fill_(logits == -torch.inf, -torch.inf)

    @classmethod
    def from_pretrained(cls, path: Path | str, dtype: torch.dtype = torch.bfloat16) -> Self:
        """Load a folder or hub name in any format of ``formats.py``; every missing, unknown or misshapen weight is an error that
        names it.
        """
        folder, checkpoint = read_drafter(path)
        if checkpoint.config.eagle is not None:
            raise ConfigError(
                f"{path} is an EAGLE-3 drafter, which volley decodes and measures with (generate, serve, bench) and does nothing "
                "else with; give a block drafter"
            )
        return cls.from_checkpoint(folder, checkpoint, dtype)

    @classmethod
    def from_checkpoint(cls, path: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> Self:
        """Make a drafter from the checkpoint that was read from folder ``path``."""
        with empty_weights():
            drafter = cls(checkpoint.config)
        check_weights(weight_files(path)[0], drafter.state_dict(), checkpoint.tensors)
        drafter.load_state_dict(checkpoint.tensors, assign=True)
        drafter.folder = path
        return drafter.to(dtype).eval()

    def save_pretrained(self, path: Path | str) -> None:
        """Write ``config.json`` and bf16 ``model.safetensors``, each atomically."""
        path = Path(path)
        write_atomically(path / "config.json", json.dumps(self.config.to_json(), indent=2) + "\n")
        weights = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in self.state_dict().items()}
        save_tensors(path / "model.safetensors", weights, {"format": "pt"})
