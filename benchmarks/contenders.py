"""Contenders of ``llama_cpp.py`` and ``published.py`` in a Python process of their own, and llama.cpp's passes.

:func:`main` calls the address it is given, says that it is ready, and answers orders until it is sent ``None``.
"""

import json
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer
from benchmarks.llama_peer import Passes

Orders = dict[str, Callable[..., Any]]


def volley(settings: dict[str, Any]) -> Orders:
    """``options`` are those of ``Engine.from_pretrained``. Sampled requests have no seed, as most clients send them.

    transformers is imported as the command line does it.
    """
    import torch

    from volley.imports import import_transformers

    import_transformers()
    from volley import Engine, SamplingParams

    torch.set_num_threads(settings["threads"])
    options = dict(settings["options"])
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    engine = Engine.from_pretrained(settings["target"], **options)

    def ask(prompts: list[list[int]], max_tokens: int, temperature: float, seed: int) -> Answer:
        engine.reset_prefix_cache()
        started = time.perf_counter()
        results = list(engine.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=temperature)))
        seconds = time.perf_counter() - started
        stats = [result.stats for result in results]
        return Answer(
            tokens=[result.token_ids for result in results],
            seconds=seconds,
            decode_seconds=max(own.total_seconds - own.time_to_first_token for own in stats),
            gained=sum(sum(own.accepted_lengths) for own in stats),
            passes=sum(len(own.accepted_lengths) for own in stats),
        )

    def target(tokens: int) -> float:
        return engine.core.runner.seconds(tokens, 1)

    def draft(tokens: int) -> float | None:
        proposer = engine.core.proposer
        return None if proposer is None or tokens > engine.block_size else proposer.seconds(tokens, 1)

    return {"ask": ask, "target": target, "draft": draft}


def transformers(settings: dict[str, Any]) -> Orders:
    """Plain ``generate``, one prompt at a time."""
    import torch

    from volley import SamplingParams
    from volley.bench.peers import transformers_runners
    from volley.models.targets.target import load_tokenizer

    torch.set_num_threads(settings["threads"])
    tokenizer = load_tokenizer(settings["target"])
    stops = [tokenizer.eos_token_id]
    runners, _ = transformers_runners(settings["target"], None, tokenizer, stops, torch.bfloat16)
    run = next(runner for case, runner in runners.items() if case.name == "transformers")

    def ask(prompts: list[list[int]], max_tokens: int, temperature: float, seed: int) -> Answer:
        timed = run(prompts, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed))
        (result,) = timed.results
        gained = len(result.token_ids) - 1
        decoding = result.stats.total_seconds - result.stats.time_to_first_token
        return Answer([result.token_ids], timed.seconds, decoding, gained, gained)

    return {"ask": ask}


def vllm(settings: dict[str, Any]) -> Orders:
    """vLLM's CPU build, plain or with its own DFlash. The time to the first token is that of a request for one token."""
    from vllm import LLM, SamplingParams

    own: dict[str, Any] = {}
    if settings["drafter"]:
        own["speculative_config"] = {"method": "dflash", "model": settings["drafter"], "num_speculative_tokens": 7}
    room, batch = settings["room"], settings["batch"]
    memory = {"kv_cache_memory_bytes": 2**30, "enable_prefix_caching": False, "disable_log_stats": False}
    llm = LLM(settings["target"], dtype="bfloat16", max_model_len=room, max_num_seqs=batch, **memory, **own)

    def accepted() -> int:
        counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return int(counted.get("vllm:spec_decode_num_accepted_tokens", 0))

    def ask(prompts: list[list[int]], max_tokens: int, temperature: float, seed: int) -> Answer:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        first = time.perf_counter()
        llm.generate(inputs, SamplingParams(temperature=temperature, max_tokens=1), use_tqdm=False)
        started, before = time.perf_counter(), accepted()
        outputs = llm.generate(inputs, SamplingParams(temperature=temperature, max_tokens=max_tokens), use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        gained = sum(len(answer) - 1 for answer in tokens)
        return Answer(tokens, seconds, seconds - (started - first), gained, gained - (accepted() - before))

    return {"ask": ask}


def openvino(settings: dict[str, Any]) -> Orders:
    """OpenVINO GenAI on a folder of its converter, plain or with prompt lookup, one prompt at a time.

    Its sampler has no noise of a seed that other programs share, so sampled answers are its own.
    """
    import numpy
    import openvino as ov
    import openvino_genai

    own = {"prompt_lookup": True} if settings["lookup"] else {}
    pipe = openvino_genai.LLMPipeline(settings["folder"], "CPU", INFERENCE_NUM_THREADS=settings["threads"], **own)

    def ask(prompts: list[list[int]], max_tokens: int, temperature: float, seed: int) -> Answer:
        (prompt,) = prompts
        config = pipe.get_generation_config()
        config.max_new_tokens, config.do_sample, config.rng_seed = max_tokens, temperature > 0, seed
        if temperature > 0:
            config.temperature, config.top_p, config.top_k = temperature, 1.0, 2**31 - 1
        if settings["lookup"]:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        started = time.perf_counter()
        found = pipe.generate(ov.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
        seconds = time.perf_counter() - started
        tokens = list(found.tokens[0])
        first = found.perf_metrics.get_ttft().mean / 1000
        gained = len(tokens) - 1
        return Answer([tokens], seconds, seconds - first, gained, len(found.perf_metrics.raw_metrics.m_durations) - 1)

    return {"ask": ask}


def passes(settings: dict[str, Any]) -> Orders:
    return {"target": Passes(settings["model"], settings["threads"]).seconds}


KINDS: dict[str, Callable[[dict[str, Any]], Orders]] = {
    "volley": volley,
    "transformers": transformers,
    "vllm": vllm,
    "openvino": openvino,
    "passes": passes,
}


def peak_bytes(pid: int) -> int:
    """The largest resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    """Arguments: address, kind and the settings of that kind in JSON."""
    address, kind, settings = sys.argv[1:]
    with Client(address) as line:
        orders = KINDS[kind](json.loads(settings))
        line.send("ready")
        while (order := line.recv()) is not None:
            name, *arguments = order
            line.send(orders[name](*arguments))
