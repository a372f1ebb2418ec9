"""DiffusionGemma here and by transformers' own generate: time of answers, passes over canvases, and the sampler's memory.

    python -m benchmarks.diffusion_speed generate --repeats 3
    python -m benchmarks.diffusion_speed generate --device cuda --shapes small large
    python -m benchmarks.diffusion_speed memory
    python -m benchmarks.diffusion_speed canvas --shapes real --device cuda --json FILE

Random weights, canvases of 64 tokens, fp32; the large shape, which wants a GPU, in bf16. ``generate``: alone, a canvas takes all
its passes, so that both do the same work; eight at once are padded by transformers, and canvases settle after unequal passes,
which random numbers decide: those of each program. Both take turns. ``memory``: what becomes of the logits of one denoising
pass of 256 slots over a vocabulary of 262,144. ``canvas``: seconds of a denoising step of 256 slots and of its
sampler, which gets the logits, and the sampler's memory. The real shape is DiffusionGemma 26B-A4B's with two of its layers,
one of each type; it wants 6 GB, and minutes for each step on two cores.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig

from tests.conftest import byte_tokenizer
from tests.diffusion_gemma import random_model
from volley import DiffusionParams, Engine, SamplingParams
from volley.memory.device import give_back, synchronise
from volley.models.targets.diffusion_gemma import DiffusionGemma

CANVAS = 64
CANVASES = 3
STEPS = 8
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 64,
        "moe_intermediate_size": 64,
        "per_layer_config": {n: {"head_dim": 64, "num_key_value_heads": 2} for n in (1, 3, 5)},
        "initializer_range": 0.02,
    },
    "large": {
        "vocab_size": 262_144,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "sliding_window": 1024,
        "num_experts": 32,
        "top_k_experts": 4,
        "moe_intermediate_size": 512,
        "per_layer_config": {n: {"head_dim": 128, "num_key_value_heads": 8} for n in (5, 11)},
        "initializer_range": 0.004,
    },
    "real": {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 512,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "per_layer_config": {1: {"head_dim": 512, "num_key_value_heads": 2}},
        "initializer_range": 0.004,
    },
}


def make_model(changes: dict[str, Any], device: str) -> DiffusionGemmaForBlockDiffusion:
    """Random weights, in the shape of the tests' model but for ``changes``."""
    like = random_model().config
    text = DiffusionGemmaTextConfig(**{**like.text_config.to_dict(), **changes})
    config = DiffusionGemmaConfig(text_config=text, vision_config=like.vision_config, canvas_length=CANVAS)
    with torch.device(device):
        model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return model


class Run(NamedTuple):
    seconds: float
    passes: float
    """Over a canvas, the mean."""


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab_size, (24 + 3 * n,), generator=noise).tolist() for n in range(count)]


def by_transformers(hf: Any, asked: list[list[int]], entropy: float) -> Run:
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    longest = max(map(len, asked))
    tokens = torch.tensor([[0] * (longest - len(ids)) + ids for ids in asked], device=hf.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in asked], device=hf.device)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handle = hf.model.decoder.register_forward_hook(count)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = hf.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=CANVASES * CANVAS,
            max_denoising_steps=STEPS,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=2.0),
            t_min=0.4,
            t_max=0.8,
            stability_threshold=0 if entropy else STEPS + 1,
            confidence_threshold=entropy or 1e-9,
        )
    answers.sequences.tolist()  # a GPU has finished
    seconds = time.perf_counter() - started
    handle.remove()
    return Run(seconds, passes / CANVASES)


def by_volley(engine: Engine, asked: list[list[int]], entropy: float) -> tuple[Run, float]:
    """And the passes that commits took, per canvas that had to be committed."""
    own = DiffusionParams(
        max_steps=STEPS,
        entropy_bound=2.0,
        t_min=0.4,
        t_max=0.8,
        stability_threshold=0 if entropy else STEPS + 1,
        confidence_threshold=entropy or 1e-9,
    )
    params = SamplingParams(temperature=1.0, max_tokens=CANVASES * CANVAS, ignore_eos=True, diffusion=own)
    started = time.perf_counter()
    results = list(engine.generate(asked, params))
    seconds = time.perf_counter() - started
    assert all(len(result.token_ids) == CANVASES * CANVAS for result in results)
    canvases = sum(result.stats.canvases for result in results)
    passes = sum(result.stats.denoising_steps for result in results) / canvases
    committed = sum(result.stats.commit_passes for result in results) / (canvases - len(asked))
    return Run(seconds, passes), committed


def compare_generate(shapes: Sequence[str], repeats: int, device: str) -> None:
    print(
        "| model | requests | transformers s | volley s | ratio | passes a canvas, transformers | volley | commits saved |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for shape in shapes:
        hf = make_model(SHAPES[shape], device)
        dtype = torch.bfloat16 if shape == "large" else torch.float32
        hf.to(dtype)
        text = hf.config.text_config
        name = f"{shape} (width {text.hidden_size}, {text.num_hidden_layers} layers, V {text.vocab_size})"
        capacity: dict[str, Any] = {"prefix_caching": False, "max_batch_tokens": 1024}
        with TemporaryDirectory() as folder:  # as users do it, since loading prepares a model for decoding
            hf.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            engine = Engine.from_pretrained(folder, dtype=dtype, device=device, **capacity)
        for count in (1, 8):
            entropy = 0.0 if count == 1 else mean_entropy(engine, prompts(1, text.vocab_size)[0])
            asked = prompts(count, text.vocab_size)
            by_transformers(hf, asked, entropy)
            by_volley(engine, asked, entropy)
            theirs, ours, saved = [], [], 0.0
            for _ in range(repeats):
                theirs.append(by_transformers(hf, asked, entropy))
                run, committed = by_volley(engine, asked, entropy)
                ours.append(run)
                saved = 1 - committed
            ratios = [their.seconds / own.seconds for their, own in zip(theirs, ours, strict=True)]
            columns = [
                spread([run.seconds for run in theirs]),
                spread([run.seconds for run in ours]),
                spread(ratios),
                f"{statistics.mean(run.passes for run in theirs):.1f}",
                f"{statistics.mean(run.passes for run in ours):.1f}",
                f"{saved:.2f}",
            ]
            print(f"| {name} | {count} | " + " | ".join(columns) + " |", flush=True)
        del hf, engine  # their memory, before the next shape's
        give_back(torch.device(device))


def mean_entropy(engine: Engine, prompt: list[int]) -> float:
    """Make a canvas in the middle of its passes: about half of them settle before the last one."""
    found: list[float] = []
    whole = engine.procedures.by_mode["diffusion"]
    denoise = whole.denoise  # type: ignore[attr-defined]

    def note(canvases: Sequence[tuple[Any, Tensor]]) -> None:
        found.extend(float(torch.special.entr((rows / 0.6).softmax(-1)).sum(-1).mean()) for _, rows in canvases)
        denoise(canvases)

    whole.denoise = note  # type: ignore[attr-defined]
    by_volley(engine, [prompt], 0.0)
    whole.denoise = denoise  # type: ignore[attr-defined]
    return statistics.median(found)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The largest sum of what was allocated and not freed since the beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    now = most = 0
    for event in found.profiler.kineto_results.events():  # in the order of time
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def sampler_bytes(length: int, vocab_size: int, **own: Any) -> int:
    """Measure the memory that work on a pass's logits ``[length, vocab_size]`` (fp32) takes beside them. Weights are bf16.

    The larger of a pass that leaves the canvas open, with its feedback, and of the last one.
    """
    engine = Engine(DiffusionGemma(make_model({"vocab_size": vocab_size}, "cpu").to(torch.bfloat16)), num_pages=64)
    denoising, peaks = engine.procedures.by_mode["diffusion"], list[int]()
    verify = denoising.verify
    denoising.verify = lambda *given: peaks.append(peak_bytes(lambda: verify(*given)))  # type: ignore[method-assign]
    canvas = DiffusionParams(canvas_length=length, max_steps=2)
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=length, diffusion=canvas, **own)
    (result,) = engine.generate([[1, 2]], params)
    assert result.stats.denoising_steps == len(peaks) == 2
    return max(peaks)


def canvas_seconds(shape: str, length: int, steps: int, device: str) -> dict[str, float]:
    """Return the median seconds of a denoising step of one canvas of ``length`` slots, and of the sampler's part of it.

    Weights are bf16; the first step is left out.
    """
    engine = Engine(DiffusionGemma(make_model(SHAPES[shape], device).to(torch.bfloat16)), num_pages=64)
    denoising, whole, sampling = engine.procedures.by_mode["diffusion"], list[float](), list[float]()
    verify = denoising.verify

    def timed(*given: Any) -> None:
        synchronise(torch.device(device))
        started = time.perf_counter()
        verify(*given)
        synchronise(torch.device(device))
        sampling.append(time.perf_counter() - started)

    denoising.verify = timed  # type: ignore[method-assign]
    own = DiffusionParams(
        canvas_length=length, max_steps=steps, stability_threshold=steps + 1, confidence_threshold=1e-9
    )
    request = engine.add_request(
        [1, 2], SamplingParams(temperature=1.0, seed=0, max_tokens=length, ignore_eos=True, diffusion=own)
    )
    while request.finish_reason is None:
        started = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - started)
    assert len(sampling) == steps
    return {"step": statistics.median(whole[1:]), "sampler": statistics.median(sampling[1:])}


def measure_canvas(shapes: Sequence[str], steps: int, device: str, record: Path | None) -> None:
    length, found = 256, dict[str, dict[str, float]]()
    for shape in shapes:
        found[shape] = own = canvas_seconds(shape, length, steps, device)
        if device == "cpu":
            vocab_size = SHAPES[shape].get("vocab_size", 99)
            own["sampler_bytes"] = sampler_bytes(length, vocab_size)
        share = own["sampler"] / own["step"]
        print(
            f"{shape}: {1000 * own['step']:.0f} ms a step of {length} slots, {share:.0%} of it the sampler", flush=True
        )
    if record is not None:
        record.write_text(json.dumps({"slots": length, "torch": torch.__version__, "shapes": found}, indent=1) + "\n")


def measure_memory() -> None:
    length, vocab_size = 256, 262_144
    given = 4 * length * vocab_size
    print(f"the logits of a canvas {given / 2**20:.0f} MiB; beside them, and canvases take turns:")
    filtered: dict[str, Any] = {"top_k": 50, "top_p": 0.9}
    ruled: dict[str, Any] = {"presence_penalty": 1.0, "logit_bias": ((3, 1.0),)}
    told: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
    for name, own in (
        ("nothing else", {}),
        ("truncation", filtered),
        ("penalties and biases", ruled),
        ("log-probabilities", told),
        ("all of these", filtered | ruled | told),
    ):
        taken = sampler_bytes(length, vocab_size, **own)
        print(f"{name}: {taken / 2**20:.0f} MiB, {taken / given:.2f} times the logits", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["generate", "memory", "canvas"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="canvas: file for the record")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.what == "generate":
        compare_generate(options.shapes, options.repeats, options.device)
    elif options.what == "canvas":
        measure_canvas(options.shapes, STEPS, options.device, options.json)
    else:
        measure_memory()


if __name__ == "__main__":
    main()
