"""Recurrent layers of transformers' models on volley's states: the modules are unchanged; two of their functions are wrapped.

Each recurrent layer calls a causal convolution and a rule that carries a state from token to token; short convolutions have no
rule. Both are functions of the layer's Python module, looked up at each call. Wrappers replace them, once in a process. A wrapper
calls the function that it wraps, unless a volley target is running a pass.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from volley.errors import UnsupportedModelError
from volley.memory.recurrent_store import RecurrentLayout

FAMILIES = frozenset(
    [
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),  # gated delta nets
        "kimi_linear",  # Kimi delta attention
        *("nemotron_h", "bamba", "granitemoehybrid", "falcon_h1"),  # Mamba-2
        *("lfm2", "lfm2_moe"),  # short convolutions
    ]
)
"""Types of text models whose recurrent layers volley computes; the tests compare each with transformers' own tokens."""
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_WITH_RULE = RECURRENT_LAYERS - {"conv"}
_REASONS = {
    "jamba": "Mamba-1 layers",
    "mamba": "Mamba-1 layers",
    "falcon_mamba": "Mamba-1 layers",
    "zamba": "Mamba-1 layers",
    "zamba2": "attention layers that share their weights",
    "mamba2": "no attention layer that prefixes could be shared by",
    "minimax": "lightning attention with a cache of its own",
    "qwen4_exp": "further convolution states and an indexer",
    "inkling": "further convolution states and an indexer",
    "glm5_next": "an indexer",
    "recurrent_gemma": "a recurrence of its own",
    "rwkv": "a recurrence of its own",
    "xlstm": "a recurrence of its own",
    "zaya": "a recurrence of its own",
}
"""Reasons for refusing models, by the type without "_text"."""


class LayerPass(Protocol):
    """Computation of the recurrent layers of one pass; see ``memory/recurrent_pass.py``."""

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def scan(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor | None) -> Tensor: ...


_current: ContextVar[LayerPass | None] = ContextVar("recurrent_pass", default=None)


@contextmanager
def running(own: LayerPass | None) -> Iterator[None]:
    """Let ``own`` compute the recurrent layers of all passes in the body."""
    token = _current.set(own)
    try:
        yield
    finally:
        _current.reset(token)


def check_family(model_type: str, layer_types: set[str]) -> None:
    """Refuse a model whose recurrent layers volley does not compute."""
    named = _REASONS.get(model_type.removesuffix("_text"))
    if named or (layer_types & RECURRENT_LAYERS and model_type not in FAMILIES):
        reason = named or (f"layers of type {', '.join(sorted(layer_types & RECURRENT_LAYERS))}")
        raise UnsupportedModelError(
            f"{model_type} has {reason}, whose states volley cannot roll back. Use a target whose layers are all attention, "
            f"or one of the families {', '.join(sorted(FAMILIES))}"
        )


# -- the functions of transformers' modules ----------------------------------------------------------------------------
def wrap_functions(model: PreTrainedModel) -> None:
    """Wrap the functions that the recurrent layers of ``model`` call."""
    for name in {type(layer).__module__ for layer in model.modules()}:
        functions = vars(sys.modules[name])
        if "causal_conv1d_fn" in functions:
            for function, wrapper in _WRAPPERS.items():
                if function in functions and not hasattr(functions[function], "wrapped_by_volley"):
                    functions[function] = _wrapped(functions[function], wrapper)


def _wrapped(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        return function(*args, **kwargs) if current is None else wrapper(current, *args, **kwargs)

    choose.wrapped_by_volley = True  # type: ignore[attr-defined]
    return choose


def _convolve(
    current: LayerPass,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve ``hidden_states [1, C, T]`` with ``weight [C, K]``."""
    outputs = current.convolve(hidden_states[0].T, weight, bias).to(hidden_states.dtype)
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.T[None]


def _delta_rule(
    current: LayerPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule (``g [1, T, heads]``) or Kimi delta attention (``g [1, T, heads, keys]``)."""
    queries, keys, values, decays, betas = (x[0].float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        queries, keys = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) for x in (queries, keys))
    queries = queries * queries.shape[-1] ** -0.5
    decays = decays if decays.ndim == 3 else decays[..., None]
    return current.scan(queries, keys, values, decays, betas[..., None])[None].to(query.dtype), None


def _mamba2_scan(
    current: LayerPass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Scan ``hidden_states [1, T, heads, d]`` with ``dt [1, T, heads]``, ``A [heads]``, ``B, C [1, T, groups, n]``."""
    heads = hidden_states.shape[2]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].float()
    keys, queries = (x[0].float().repeat_interleave(heads // x.shape[2], dim=1) for x in (B, C))
    inputs = hidden_states[0].float()
    outputs = current.scan(queries, keys, inputs * steps[..., None], (A.float() * steps)[..., None], None)
    return (outputs if D is None else outputs + D[:, None] * inputs).contiguous()[None]


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
}


class LayoutProbe:
    """Recorder of the state shapes of a model's layers; its outputs have the right shape and no meaning."""

    def __init__(self) -> None:
        self._convolutions: list[tuple[int, int]] = []
        self._rules: list[tuple[int, int, int]] = []

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._convolutions.append((weight.shape[1] - 1, weight.shape[0]))
        return inputs.float()

    def scan(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor | None) -> Tensor:
        self._rules.append((keys.shape[1], keys.shape[2], values.shape[2]))
        return values

    def layout(self, layer_types: list[str]) -> RecurrentLayout:
        """Return the recorded shapes; UnsupportedModelError if a recurrent layer has not called its convolution or its rule."""
        recurrent = [kind for kind in layer_types if kind in RECURRENT_LAYERS]
        with_rule = [kind for kind in recurrent if kind in _WITH_RULE]
        if len(self._convolutions) != len(recurrent) or len(self._rules) != len(with_rule):
            raise UnsupportedModelError(
                f"{len(recurrent)} recurrent layers called {len(self._convolutions)} convolutions "
                f"and {len(self._rules)} rules that volley knows, so volley cannot keep all of their states; "
                "use a target whose layers are all attention"
            )
        return RecurrentLayout(tuple(self._convolutions), tuple(self._rules))
