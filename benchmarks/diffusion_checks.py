"""What the tests of canvases check, on longer runs: that nothing leaks, and that self-speculation draws what the model draws.

    python -m benchmarks.diffusion_checks leaks --turns 2000 --only DiffusionGemma
    python -m benchmarks.diffusion_checks draws --draws 20000

``leaks``: requests of all modes that a model has come, are aborted and preempted at random; in each turn every page is recounted,
requests that ended are asked for canvases, and the memory of the process is reported now and then. ``draws``: tiny random models.
The chi-square test of five tokens, for drafts of 1, 2, 4 passes and of a number chosen at random, and of fewer draws with a
planted bias, which must be seen; then the acceptance lengths of canvases drawn with the verifier's noise and with noise of their
own.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor

from tests.diffusion_gemma import random_model
from tests.engine.test_diffusion import BLOCKS, CANVAS, mixed
from tests.procedures.test_denoising import MASK, masked_model
from tests.procedures.test_self_speculative import Independent, Unmatched, V, Whim, drawn, draws, exact, p_of, target
from tests.tiny import finish
from volley import DiffusionParams, Engine, SamplingParams, Target
from volley.models.targets.diffusion_gemma import DiffusionGemma
from volley.models.targets.families import FAST_DLLM, SDAR
from volley.procedures.request import Request
from volley.procedures.self_speculative import SelfSpeculative

AT_ONCE = 500
REPORTED = 200
"""Turns between two reports of memory. In the first, caches of the allocator and of PyTorch fill up."""


def arrive_and_leave(target: Target, turns: int, canvas: DiffusionParams = CANVAS) -> Iterator[int]:
    """Requests of all its modes come, are aborted and preempted, and the books are recounted in each turn; how many came."""
    chance, came = random.Random(0), 0
    engine = Engine(target, num_pages=24, max_running=6, max_batch_tokens=40, **BLOCKS)
    alive: list[Request] = []
    for turn in range(turns):
        if len(alive) < 8 and chance.random() < 0.5:
            prompt = [chance.randrange(MASK) for _ in range(chance.choice([2, 8, 30]))]
            own = replace(mixed(turn, canvas), max_tokens=chance.choice([3, 16, 21]))
            alive.append(engine.add_request(prompt, own))
            came += 1
        if alive and chance.random() < 0.1:
            engine.abort(chance.choice(alive))
        if engine.scheduler.running and chance.random() < 0.1:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
        engine.step()
        engine.check_integrity()
        ended = [request for request in alive if request.finish_reason is not None]
        assert not any(request.canvas for request in ended)
        alive = [request for request in alive if request.finish_reason is None]
        yield came
    finish(engine, alive)
    assert not any(request.canvas for request in alive)
    assert engine.pool.num_used == 0


def check_leaks(turns: int, only: str | None) -> None:
    canvases = DiffusionParams(max_steps=6, entropy_bound=2.0)
    targets: dict[str, tuple[Target, list[DiffusionParams]]] = {
        "SDAR": (masked_model(SDAR).target, []),
        "Fast-dLLM v2": (masked_model(FAST_DLLM).target, []),
        "DiffusionGemma": (DiffusionGemma(random_model()), [canvases]),
    }
    process = psutil.Process()
    for name, (own, settings) in targets.items():
        if only not in (None, name):
            continue
        first, started = 0, time.process_time()
        for turn, came in enumerate(arrive_and_leave(own, turns, *settings), start=1):
            if turn % REPORTED == 0 or turn == turns:
                gc.collect()
                held = process.memory_info().rss
                first = first or held
                said = f"{came} requests, {(held - first) / 2**20:+.1f} MiB since turn {REPORTED}"
                print(f"{name}: {turn} turns, {said}, {time.process_time() - started:.0f} s", flush=True)
        print(f"{name}: {turns} turns, {came} requests, nothing leaked", flush=True)


def many_draws(engine: Engine, procedure: Any, count: int, params: SamplingParams) -> tuple[Tensor, float]:
    """Tokens of ``count`` answers, and their mean acceptance length."""
    parts = [draws(engine, procedure, AT_ONCE, params, first) for first in range(0, count, AT_ONCE)]
    return torch.cat([tokens for tokens, _ in parts]), sum(length for _, length in parts) / len(parts)


def engine_of(own: Any) -> Engine:
    return Engine(own, max_running=AT_ONCE, max_batch_tokens=4000, prefix_caching=False, num_pages=1000)


def check_draws(count: int) -> None:
    own = target(vocab_size=V)
    engine, distribution = engine_of(own), exact(own)
    assert own.diffusion is not None
    for steps in (1, 2, 4, None):
        for kind in (SelfSpeculative, Unmatched):
            procedure = kind(own, own.diffusion, engine.procedure, Whim())
            tokens, _ = many_draws(engine, procedure, AT_ONCE if kind is Unmatched else count, drawn(steps))
            p = p_of(tokens, distribution)
            said = "planted bias" if kind is Unmatched else "drafts"
            print(f"{said}, passes {steps or 'at random'}: p = {p:.2g} over {len(tokens)} draws", flush=True)
    flat = target()
    with torch.no_grad():
        flat.model.get_output_embeddings().weight.mul_(0.3)  # flat distributions: what is drawn is the noise's choice
    engine = engine_of(flat)
    assert flat.diffusion is not None
    for steps in (1, 2, 4):
        diffusion = DiffusionParams(mode="self", canvas_length=4, max_steps=steps)
        asked = SamplingParams(temperature=1.0, max_tokens=9, diffusion=diffusion)
        shared, apart = (
            many_draws(engine, kind(flat, flat.diffusion, engine.procedure), AT_ONCE, asked)[1]
            for kind in (SelfSpeculative, Independent)
        )
        print(f"acceptance length, passes {steps}: coupled {shared:.2f}, independent {apart:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["leaks", "draws"])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--only", metavar="NAME", help="one of the models of leaks: SDAR, Fast-dLLM v2, DiffusionGemma")
    parser.add_argument("--draws", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "leaks":
        check_leaks(options.turns, options.only)
    else:
        check_draws(options.draws)


if __name__ == "__main__":
    main()
