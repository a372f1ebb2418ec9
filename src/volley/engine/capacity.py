"""Choose how many requests, tokens and K/V pages an engine holds: defaults that fit the device."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from volley.config import CapacityConfig, DecodingConfig
from volley.engine.kv_manager import draft_span, num_rings, ring_pages
from volley.memory.device import Device, find_device, memory_bytes, peak_bytes
from volley.memory.kv_store import bytes_per_token
from volley.models.drafters.drafter import Drafter
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.rehearsal import made_up, spread
from volley.models.targets.target import Target

log = logging.getLogger(__name__)
PAGE_SIZE = 16
_CPU = (64, 512)  # most running requests, most tokens of a pass
_GPU = (256, 4096)
_SHARE = 0.9  # share of the free GPU memory that K/V take, after weights and a pass
_RINGS = 0.25  # share of the same memory that draft rings may take; more running requests leave fewer pages for the target's K/V
_RINGS_OF_KV = 0.5  # share of ``kv_mib`` that draft rings may take
_BESIDE = CapacityConfig(kv_mib=4096, max_running=32)


def beside_others(device: torch.device) -> CapacityConfig:
    """Return sizes for an engine that shares a GPU with other engines or a training. By default an engine takes all free
    memory."""
    return _BESIDE if device.type == "cuda" else CapacityConfig()


@dataclass(frozen=True, kw_only=True)
class Capacity(CapacityConfig):
    """Engine sizes without open fields."""

    max_running: int
    max_batch_tokens: int
    page_size: int
    num_pages: int


def fit(
    config: CapacityConfig,
    device: Device,
    *,
    per_token: int,
    per_ring: int,
    context_length: int,
    pass_bytes: Callable[[int], int],
) -> Capacity:
    """Fill in the sizes that ``config`` leaves open, so that they fit ``device``.

    ``per_token`` is the number of K/V bytes of one token, ``per_ring`` that of one draft ring. ``pass_bytes(tokens)`` measures
    the memory of a pass; it is called on a GPU only.
    """
    given = {field.name: getattr(config, field.name) for field in fields(CapacityConfig)}
    most_running, most_tokens = _CPU if device.free_bytes is None else _GPU
    given["max_running"] = running = config.max_running or most_running
    given["max_batch_tokens"] = batch = config.max_batch_tokens or most_tokens
    given["page_size"] = page_size = config.page_size or PAGE_SIZE
    given["cuda_graphs"] = config.cuda_graphs and device.type == "cuda"
    if config.kv_mib is not None:
        most = max(1, int(_RINGS_OF_KV * config.kv_mib * 2**20) // max(1, per_ring) - num_rings(0))
        if running > most:
            log.warning(
                "at most %d requests run at once: draft rings for %d would take too much of kv_mib", most, running
            )
            given["max_running"] = running = most
        left = config.kv_mib * 2**20 - num_rings(running) * per_ring
        given["num_pages"] = max(1, int(left // (per_token * page_size)))
        given["kv_mib"] = None
    elif config.num_pages is None:
        if device.free_bytes is None:
            # 64k tokens, or fewer if their K/V would exceed both 1 GiB and an eighth of memory; unwritten K/V use none.
            tokens = min(2**16, max(2**30, memory_bytes(torch.device("cpu")) // 8) // per_token)
        else:
            left = device.free_bytes - pass_bytes(batch)
            if config.max_running is None and per_ring:
                fitting = int(_RINGS * left) // per_ring - num_rings(0)
                given["max_running"] = running = max(1, min(running, fitting))
            tokens = max(0, int(_SHARE * (left - num_rings(running) * per_ring))) // per_token
        given["num_pages"] = -(-max(tokens, min(context_length, 4096)) // page_size)
    return Capacity(**given)


def fit_engine(config: CapacityConfig, decoding: DecodingConfig, target: Target, drafter: Drafter | None) -> Capacity:
    """Call :func:`fit` with the sizes of these models, on the target's device."""
    per_token, per_ring = bytes_per_token(decoding.kv_dtype, target.kv_shapes, target.dtype), 0
    page_size, device = config.page_size or _page_size(target.diffusion), find_device(target.device)
    if drafter is not None:
        own = bytes_per_token(decoding.draft_kv_dtype, drafter.kv_shapes, target.dtype)
        span = draft_span(drafter, decoding, cuda_graphs=config.cuda_graphs and device.type == "cuda")
        if span.window is None:
            per_token += own
        else:
            per_ring = own * page_size * ring_pages(span.reach, span.window, page_size)
    return fit(
        replace(config, page_size=page_size),
        device,
        per_token=per_token,
        per_ring=per_ring,
        context_length=target.context_length,
        pass_bytes=lambda tokens: pass_bytes(target, tokens),
    )


def _page_size(family: BlockDiffusion | None) -> int:
    """Return a page size that is a multiple of the block with bidirectional attention; only such pages can be shared."""
    if family is None or family.has_causal_context:
        return PAGE_SIZE
    length = family.settings.canvas_length or 1
    return -(-PAGE_SIZE // length) * length


@torch.inference_mode()
def pass_bytes(target: Target, tokens: int) -> int:
    """Measure the peak GPU memory of a target pass over ``tokens``, with a distribution for every token."""
    lengths = spread(tokens, -(-tokens // min(tokens, target.context_length)))
    batch, store = made_up(lengths, target.kv_shapes, target.dtype, target.device, causal=True, context=0)
    rows = torch.arange(len(batch), device=target.device)
    return peak_bytes(target.device, lambda: target.forward(batch, store, rows).float().softmax(dim=-1))
