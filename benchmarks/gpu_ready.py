"""What volley would ask of a GPU, found without one: operations, waits, kernels' resources, pools, and the floor by bytes.

    python -m benchmarks.gpu_ready                     tables, and the bars that are missed
    python -m benchmarks.gpu_ready --json OUT          the figures as JSON too
    python -m benchmarks.gpu_ready --no-kernels        without compiling kernels (about a minute)

Operations and waits are counted on a pretended device (``pretended_gpu.py``), with as many layers as Qwen3-8B and a drafter of
five, at a tiny width: neither depends on it. Launches are those of the same steps with CUDA graphs, where a replay is one.
Waits are counted for what users send as well (greedy, sampled, trees, …), with few layers, and so is what the device has left to
do when the last wait of a step ends. Bars on them hold for greedy and sampled requests; of what is launched before the last read
for plain decoding and for chains of one size through graphs; the others are figures.
Kernels are compiled ahead of time. The floor counts bytes and FLOPs of Qwen3-8B and a drafter in DFlash's published shape (16
positions) on a device that copies 4.3 TB/s and multiplies 790 TFLOP/s in bf16: no kernel and no launch is in it. Ends with status
1 and names the bars that are missed, if any is.
"""

import argparse
import copy
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.pretended_gpu import Counts, move, pretended_cuda
from volley import Engine, SamplingParams
from volley.config import CapacityConfig
from volley.engine.capacity import fit
from volley.engine.runner import Runner
from volley.files import write_atomically
from volley.memory.device import Device
from volley.memory.graphs import MOST_ROWS
from volley.models.checkpoints.checkpoint import DrafterConfig, HeadConfig
from volley.models.drafters.drafter import Drafter
from volley.models.layers.fused import recognise
from volley.models.layers.joined import JoinedLayer
from volley.models.targets.target import Target
from volley.policies.cost import PassCost
from volley.proposers.block import BlockProposer

LAYERS, DRAFT_LAYERS, TAPS, BLOCK = 36, 5, 5, 16
HIDDEN, INNER, VOCAB, KV, DIM = 4096, 12288, 151936, 1024, 128
BANDWIDTH, FLOPS = 4.3e12, 790e12
GIB = 2**30
BARS = {
    "waits a step": 1,
    "waits before the last read": 0,
    "launches left behind the last read": 1,
    "launches a layer": 12,
    "spilled bytes": 0,
    "pool on 139 GiB": 500_000,
    "floor of the ratio": 1.09,
}
PLAIN = "fixed:1"
POLICIES = (PLAIN, f"fixed:{BLOCK}", "goodput")
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LENGTH = 600  # of a prompt: attention joins parts of its keys


@dataclass(frozen=True)
class Sent:
    """What users send, and how the engine is set for it."""

    params: dict[str, Any]
    options: dict[str, Any]
    is_gated: bool = False
    head: HeadConfig | None = None


SENT = {
    "greedy": Sent({}, {}, is_gated=True),
    "T = 1": Sent({"temperature": 1.0}, {}, is_gated=True),
    "T = 1, seed": Sent({"temperature": 1.0, "seed": 3}, {}, is_gated=True),
    "top-p": Sent({"temperature": 1.0, "top_p": 0.9}, {}, is_gated=True),
    "trees": Sent({}, {"tree_nodes": BLOCK}),
    "penalties": Sent({"presence_penalty": 0.5, "repetition_penalty": 1.1}, {}),
    "log-probabilities": Sent({"logprobs": True, "top_logprobs": 2}, {}),
    "Markov head": Sent({}, {}, head=HeadConfig(type="markov", rank=4)),
}


@dataclass(frozen=True)
class WaitCount:
    """Means of a step with CUDA graphs."""

    sent: str
    policy: str
    requests: int
    drafted: float
    """Tokens that a request drafts."""
    waits: float
    before_last: float
    """Waits after which the step waits once more: the device may have been idle meanwhile."""
    left: int
    """The fewest launches that the device had left when the host had a step's results: those of the next pass, if it was launched
    ahead of reading them; with 0 the device idles until the host has prepared one."""
    places: dict[str, float]
    is_gated: bool


@dataclass(frozen=True)
class StepCount:
    policy: str
    requests: int
    operations: float
    """On the device, of one step."""
    layer_operations: int
    """Of them, one decoder layer of the target."""
    waits: float
    copies: float
    places: dict[str, float]
    """Waits by kind and place."""
    launches: float
    """Of one step with CUDA graphs, whose replay is one."""
    captured: float
    """Operations in the graphs that a step replays."""


def models(
    layers: int = LAYERS, draft_layers: int = DRAFT_LAYERS, head: HeadConfig | None = None
) -> tuple[Any, Drafter]:
    torch.manual_seed(0)
    config = Qwen3Config(
        **TINY, vocab_size=64, num_hidden_layers=layers, max_position_embeddings=1024, eos_token_id=None
    )
    shape = DrafterConfig(
        **TINY,
        vocab_size=64,
        num_hidden_layers=draft_layers,
        num_target_layers=layers,
        block_size=BLOCK,
        mask_token_id=3,
        target_layer_ids=tuple(range(1, layers, 8))[:TAPS],
        head=head,
    )
    return AutoModelForCausalLM.from_config(config).eval(), Drafter(shape).eval().requires_grad_(False)


def on_device(model: Any, drafter: Drafter) -> tuple[Target, Drafter]:
    """Both as they are loaded on a GPU. Kernels compute nothing here, so what a layer is was found on the CPU."""
    seen = recognise(model.model.layers[0], model.model.rotary_emb)
    assert seen is not None
    model, drafter = move(copy.deepcopy(model)), move(copy.deepcopy(drafter))
    for layer in model.model.layers:
        layer.forward = JoinedLayer(layer, seen)
    target = Target(model)
    drafter.fuse()
    return target, drafter


def decoding(
    model: Any,
    drafter: Drafter,
    policy: str,
    requests: int,
    sent: Sent = SENT["greedy"],
    *,
    length: int = LENGTH,
    cuda_graphs: bool = True,
) -> Engine:
    """An engine all of whose requests decode."""
    options = {"num_pages": 8192, "policy": policy, "cuda_graphs": cuda_graphs, **sent.options}
    engine = Engine(model, None if policy == PLAIN else drafter, **options)
    params = SamplingParams(max_tokens=400, ignore_eos=True, **sent.params)
    for number in range(requests):
        engine.add_request([(number + i) % 64 for i in range(length)], params)
    while engine.scheduler.waiting or not all(own.is_decoding for own in engine.scheduler.running):
        engine.step()
    engine.step()
    return engine


def count_steps(
    model: Any,
    drafter: Drafter,
    policy: str,
    requests: int,
    steps: int = 4,
) -> StepCount:
    """Means over some steps in which all requests decode."""
    with pretended_cuda() as counts, floors_as_costs():
        target, own = on_device(model, drafter)
        engine = decoding(target, own, policy, requests)
        counts.clear()
        for _ in range(steps):
            engine.step()
        launches, captured = counts.operations.total() / steps, counts.replayed.total() / steps
        entered = note_entries(target.model.model.layers[6:8], counts)  # between them no state is tapped
        engine = decoding(target, own, policy, requests, cuda_graphs=False)
        counts.clear()
        for _ in range(steps):
            entered.clear()
            engine.step()
        places = {f"{kind}, {where}": times / steps for (kind, where), times in counts.waits.most_common()}
        return StepCount(
            policy,
            requests,
            counts.operations.total() / steps,
            entered[1] - entered[0],
            counts.waits.total() / steps,
            counts.copies.total() / steps,
            places,
            launches,
            captured,
        )


def count_waits(model: Any, drafter: Drafter, name: str, policy: str, requests: int, steps: int = 4) -> WaitCount:
    """Means over some steps in which all ``requests`` of one kind of :data:`SENT` decode. Waits do not depend on layers."""
    drafted, left, waits, before = list[int](), list[int](), Counter[tuple[str, str]](), 0
    with pretended_cuda() as counts, floors_as_costs():
        engine = decoding(*on_device(model, drafter), policy, requests, SENT[name], length=40)
        engine.on_verified.append(lambda _, proposal, __: drafted.append(len(proposal.token_ids)))
        for _ in range(steps):
            counts.clear()
            engine.step()
            waits += counts.waits
            before += max(0, counts.waits.total() - 1)
            left.append(counts.left[-1])
    places = {f"{kind}, {where}": times / steps for (kind, where), times in waits.most_common()}
    own = (mean(drafted), waits.total() / steps, before / steps, min(left), places)
    return WaitCount(name, policy, requests, *own, SENT[name].is_gated)


def all_waits(requests: Sequence[int]) -> Iterator[WaitCount]:
    """Of all that users send, with each policy that it makes a difference to."""
    for name, sent in SENT.items():
        pair = models(2, 1, sent.head)
        for policy in POLICIES[sent.head is not None or "tree_nodes" in sent.options :]:
            yield from (count_waits(*pair, name, policy, number) for number in requests)


@contextmanager
def floors_as_costs() -> Iterator[None]:
    """Passes take what they would at least take on a device, so that a policy decides as it does there."""
    draft = draft_seconds(DRAFT_LAYERS, LENGTH, VOCAB)
    with (
        mock.patch.object(Runner, "seconds", lambda _, tokens, requests: target_seconds(tokens, LENGTH * requests)),
        mock.patch.object(BlockProposer, "seconds", return_value=draft),
        mock.patch.object(PassCost, "observe"),
    ):
        yield


def note_entries(layers: Any, counts: Counts) -> list[int]:
    """Operations so far whenever one of ``layers`` is entered."""
    entered: list[int] = []

    def note(_: nn.Module, __: Any) -> None:
        entered.append(counts.operations.total())

    for layer in layers:
        layer.register_forward_pre_hook(note)
    return entered


def drafter_bytes() -> int:
    """Add up the bytes of a drafter's layers and of its injection's own copies."""
    return 2 * (drafter_size() + DRAFT_LAYERS * 2 * HIDDEN * KV)


def pool_tokens(gib: int) -> int:
    """Tokens of the default pool beside Qwen3-8B and its drafter, if a pass of 4,096 tokens takes its logits thrice."""
    weights = 2 * (LAYERS * layer_size() + 2 * HIDDEN * VOCAB) + drafter_bytes()
    device = Device("cuda", gib * GIB - weights)
    capacity = fit(
        CapacityConfig(),
        device,
        per_token=2 * 2 * KV * (LAYERS + DRAFT_LAYERS),
        per_ring=0,
        context_length=40960,
        pass_bytes=lambda tokens: tokens * VOCAB * (2 + 4 + 4),
    )
    return capacity.num_pages * capacity.page_size


def layer_size() -> int:
    """Weights of a decoder layer."""
    return 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INNER


def drafter_size(layers: int = DRAFT_LAYERS) -> int:
    return layers * layer_size() + TAPS * HIDDEN * HIDDEN


def seconds(weights: float, rows: int) -> float:
    return max(2 * weights / BANDWIDTH, 2 * weights * rows / FLOPS)


def target_seconds(rows: int, context: int) -> float:
    kv = context * LAYERS * 2 * KV * 2 / BANDWIDTH
    return seconds(LAYERS * layer_size() + HIDDEN * VOCAB, rows) + kv


def draft_seconds(layers: int, context: int, head_rows: int) -> float:
    """Compute the least time of one draft pass and one injection of a block."""
    body = seconds(drafter_size(layers), BLOCK) + seconds(layers * 2 * HIDDEN * KV, BLOCK)
    head = seconds(HIDDEN * head_rows, BLOCK)
    return body + head + context * layers * 2 * KV * 2 / BANDWIDTH


DRAFTERS = {
    "published: 5 layers, bf16, the target's head": (5, VOCAB),
    "5 layers, bf16, own head of 32k tokens": (5, 32768),
    "2 layers, bf16, own head of 32k tokens": (2, 32768),
}
"""Layers, and rows of the head."""


def roofline(context: int = 1024) -> list[dict[str, Any]]:
    """Floors in milliseconds, one request."""
    plain, verify = target_seconds(1, context), target_seconds(BLOCK, context)
    rows = []
    for name, (layers, head_rows) in DRAFTERS.items():
        draft = draft_seconds(layers, context, head_rows)
        times = {"T_plain": 1e3 * plain, "T_verify": 1e3 * verify, "T_draft": 1e3 * draft}
        rows.append({"drafter": name, **times, "ratio": (draft + verify) / plain})
    return rows


def kernel_resources() -> list[Any]:
    """Of every kernel and architecture."""
    from benchmarks.kernel_resources import SHARED, cases, compiled

    return [compiled(case, arch) for arch in SHARED for case in cases()]


def missed(report: dict[str, Any]) -> list[str]:
    """The bars that the figures do not reach."""
    found = []
    for step in report["steps"]:
        name = f"{step['policy']}, {step['requests']} requests"
        for figure, bar in (("waits", "waits a step"), ("layer_operations", "launches a layer")):
            if step[figure] > BARS[bar]:
                found.append(f"{name}: {step[figure]:g} {bar}, at most {BARS[bar]}")
    for own in report["waits"]:
        if own["is_gated"] and own["before_last"] > BARS["waits before the last read"]:
            found.append(
                f"{own['policy']}, {own['sent']}, {own['requests']} requests: {own['before_last']:g} waits before the last read, "
                f"at most {BARS['waits before the last read']}"
            )
        if _is_launched_ahead(own) and own["left"] < BARS["launches left behind the last read"]:
            found.append(
                f"{own['policy']}, {own['sent']}, {own['requests']} requests: no pass is launched before the last is read"
            )
    for own in report["kernels"]:
        if not own["fits"]:
            found.append(f"{own['kernel']} on sm_{own['arch']}: {own['spilled']} bytes spilled, {own['shared']} shared")
    if report["pool_tokens"]["139"] < BARS["pool on 139 GiB"]:
        found.append(
            f"{report['pool_tokens']['139']} tokens in the pool on 139 GiB, at least {BARS['pool on 139 GiB']}"
        )
    best = min(row["ratio"] for row in report["roofline"])
    if best > BARS["floor of the ratio"]:
        found.append(f"floor of the ratio {best:.3f}, at most {BARS['floor of the ratio']}")
    return found


def _is_launched_ahead(own: dict[str, Any]) -> bool:
    """Whether a step is of a kind that is to be launched before the last one is read."""
    is_small = own["requests"] * BLOCK <= MOST_ROWS
    return own["is_gated"] and (own["policy"] == PLAIN or (own["policy"], is_small) == (f"fixed:{BLOCK}", True))


def show(report: dict[str, Any]) -> None:
    print(
        "| policy | requests | operations | of them a layer | waits | asynchronous copies "
        "| launches with graphs | captured |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for step in report["steps"]:
        names = ("operations", "layer_operations", "waits", "copies", "launches", "captured")
        figures = " | ".join(f"{step[name]:.1f}" for name in names)
        print(f"| {step['policy']} | {step['requests']} | {figures} |")
    for step in report["steps"]:
        _show_places(step, step["policy"])
    print(
        "| sent | policy | requests | drafted | waits | before the last read | launches left behind it | gated |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for own in report["waits"]:
        figures = " | ".join(f"{own[name]:.1f}" for name in ("drafted", "waits", "before_last", "left"))
        print(
            "| {sent} | {policy} | {requests}".format(**own), figures, "yes |" if own["is_gated"] else "no |", sep=" | "
        )
    for own in report["waits"]:
        _show_places(own, f"{own['sent']}, {own['policy']}")
    for own in report["kernels"]:
        print("sm_{arch} {kernel}: {registers} registers, {spilled} spilled, {shared} bytes shared".format(**own))
    for gib, tokens in report["pool_tokens"].items():
        print(f"pool on {gib} GiB: {tokens:,} tokens")
    print(f"published drafter: {report['drafter_bytes'] / GIB:.2f} GiB")
    for row in report["roofline"]:
        times = "plain {T_plain:.2f}, verify {T_verify:.2f}, draft {T_draft:.2f} ms".format(**row)
        print(f"{row['drafter']}: {times}; ratio {row['ratio']:.3f}")


def _show_places(counted: dict[str, Any], name: str) -> None:
    print(f"waits of {name}, {counted['requests']} requests")
    for where, times in counted["places"].items():
        print(f"    {times:5.1f}  {where}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go as JSON")
    parser.add_argument("--no-kernels", action="store_true", help="do not compile kernels")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    pair = models()
    report: dict[str, Any] = {
        "steps": [asdict(count_steps(*pair, policy, n)) for policy in POLICIES for n in options.requests],
        "waits": [asdict(own) for own in all_waits(options.requests)],
        "kernels": [] if options.no_kernels else [{**asdict(own), "fits": own.fits} for own in kernel_resources()],
        "pool_tokens": {str(gib): pool_tokens(gib) for gib in (80, 139)},
        "drafter_bytes": drafter_bytes(),
        "roofline": roofline(),
    }
    report["missed"] = missed(report)
    show(report)
    if options.json is not None:
        write_atomically(options.json, json.dumps(report, indent=1) + "\n")
    for line in report["missed"]:
        print(f"missed: {line}")
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
