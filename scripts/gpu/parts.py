"""Measurements and checks on a GPU: one function a part. ``run.py`` runs them, each in a process of its own.

Weights are random in Qwen3-8B's shape, or the bundled pair's. A part that checks something says so with ``passed``.
"""

import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = ":".join(part for part in (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")) if part)
"""Folders in which processes look for modules."""
SECONDS = 9 * 60
"""Maximum seconds of a part."""
COMMAND_SECONDS = 500
"""Maximum seconds of a command within a part; its output so far is kept."""
LOAD_SECONDS = 400
"""After which a part starts no further level of load."""
LEVELS = (1, 2, 4, 8, 16, 32, 64)
BLOCK = 16
WANTED = 0.85
"""Least share of a copy's bandwidth in plain decoding."""


class Bench:
    """The device and the sizes of a run; models are made once a process."""

    def __init__(self, dry: bool, levels: Sequence[int] = LEVELS) -> None:
        """``levels``: numbers of requests at once."""
        import torch

        self.torch, self.dry = torch, dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.levels = (1, 2) if dry else tuple(levels)
        self.layers = 8 if dry else 36
        self.shape = {
            "hidden_size": 64 if dry else 4096,
            "intermediate_size": 96 if dry else 12288,
            "num_attention_heads": 4 if dry else 32,
            "num_key_value_heads": 2 if dry else 8,
            "head_dim": 16 if dry else 128,
            "vocab_size": 64 if dry else 151936,
        }

    def seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Median of some runs, each waited for."""
        times = []
        for turn in range(2 if self.dry else repeats + 3):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            if turn >= (1 if self.dry else 3):
                times.append(time.perf_counter() - started)
        return median(times)

    def pass_times(self, engine: Any, level: int) -> tuple[float, float, float]:
        """Milliseconds of a pass of plain decoding, of one of verification and of one of drafting, for ``level`` requests."""
        plain, verify = (engine.core.runner.seconds(size * level, level) for size in (1, BLOCK))
        return 1e3 * plain, 1e3 * verify, 1e3 * engine.core.proposer.seconds(BLOCK * level, level)

    def wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def warn_of_waits(self, on: bool) -> None:
        """Let PyTorch warn whenever the host waits for the device, or no more."""
        if self.device.type == "cuda":
            self.torch.cuda.set_sync_debug_mode("warn" if on else "default")

    def pair(self) -> Any:
        """A target and a drafter with random weights in Qwen3-8B's shape and DFlash's."""
        from transformers import AutoModelForCausalLM, Qwen3Config

        from volley.models.layers.accelerate import accelerate
        from volley.models.targets.target import Target

        config = Qwen3Config(
            **self.shape, num_hidden_layers=self.layers, max_position_embeddings=40960, eos_token_id=None
        )
        self.torch.manual_seed(0)
        with self.torch.device(self.device):
            dtype = self.torch.bfloat16
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        accelerate(model)
        target = Target(model)
        return target, self.drafter()

    def drafter(self) -> Any:
        """Make a random drafter in bf16."""
        from volley.models.checkpoints.checkpoint import DrafterConfig
        from volley.models.drafters.drafter import Drafter

        own = DrafterConfig(
            **self.shape,
            num_hidden_layers=2 if self.dry else 5,
            num_target_layers=self.layers,
            block_size=BLOCK,
            mask_token_id=3,
            target_layer_ids=tuple(range(1, self.layers, 8))[:5],
        )
        with self.torch.device(self.device):
            drafter = Drafter(own).to(self.device, self.torch.bfloat16).eval().requires_grad_(False)
        drafter.fuse()
        return drafter


def searching() -> dict[str, str]:
    """The environment of a process that runs a command of the checkout."""
    return {**os.environ, "PYTHONPATH": SEARCHED, "PYTHONUNBUFFERED": "1"}


def run_command(*command: str) -> tuple[bool, str]:
    """Return whether a command of the checkout ended well, and the end of its output; also if it was stopped for the time."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=searching(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=COMMAND_SECONDS)
        return process.returncode == 0, said[-6000:]
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        return False, f"{said[-6000:]}\nstopped after {COMMAND_SECONDS} s"


def commanded(bench: Bench, *command: str) -> dict[str, Any]:
    """Run a command of the checkout as a part; a dry run leaves it out."""
    if bench.dry:
        return {"passed": True, "table": "not run"}
    passed, said = run_command(*command)
    return {"passed": passed, "table": said}


def without(*names: str) -> dict[str, Any] | None:
    """Return the finding of a part that needs packages of these ``names``, if one is not there."""
    if missing := [name for name in names if find_spec(name) is None]:
        return {"passed": False, "table": f"{' and '.join(missing)} missing here; install it, or bring its wheels"}
    return None


def tests(bench: Bench) -> dict[str, Any]:
    """The kernels' tests, compiled on the device; the reference is PyTorch's."""
    ahead_of_time = "--ignore=tests/memory/kernels/test_resources.py"  # it needs no GPU, and minutes
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/memory/kernels", ahead_of_time)
    found = without("pytest", "hypothesis") or commanded(bench, *command)
    return {"passed": found["passed"], "tail": found["table"]}


def copy(bench: Bench) -> dict[str, Any]:
    """Bandwidth of a copy, bytes read and written."""
    size = 2**20 if bench.dry else 2**31
    source = bench.torch.ones(size, dtype=bench.torch.uint8, device=bench.device)
    target = bench.torch.empty_like(source)
    return {"GB_s": 2 * size / bench.seconds(lambda: target.copy_(source)) / 1e9}


def kernels(bench: Bench) -> dict[str, Any]:
    """Kernels against the copy: ``benchmarks/gpu_kernels.py``."""
    return commanded(bench, "benchmarks/gpu_kernels.py", "--device", "cuda")


def rows(bench: Bench) -> dict[str, Any]:
    """Return whether a row has the same bits in a block of sixteen as alone, and as alone in a pass filled up to sixteen rows."""
    from volley.memory.batch import RaggedBatch, Segment
    from volley.memory.kv_cache import BlockTable
    from volley.memory.kv_store import make_store

    torch, (target, _) = bench.torch, bench.pair()
    tokens = torch.arange(BLOCK, device=bench.device) % target.vocab_size
    store = make_store("auto", target.kv_shapes, 128, target.dtype, bench.device)
    more, zeros = Segment(BlockTable(64, [1]), 0, BLOCK - 1), tokens[: BLOCK - 1] * 0
    with torch.inference_mode():
        table = BlockTable(64, [0])
        together = target.forward(
            RaggedBatch([Segment(table, 0, BLOCK)], tokens), store, torch.arange(BLOCK).to(tokens)
        )
        alone = [
            target.forward(RaggedBatch([Segment(table, i, 1)], tokens[i : i + 1]), store, tokens[:1])[0]
            for i in range(BLOCK)
        ]
        filled = [
            target.forward(
                RaggedBatch([Segment(table, i, 1), more], torch.cat([tokens[i : i + 1], zeros])), store, tokens[:1]
            )[0]
            for i in range(BLOCK)
        ]
    change = (torch.stack(alone).float() - together.float()).abs().amax(dim=-1)
    equal, equal_filled = (
        sum(torch.equal(one, other) for one, other in zip(own, together, strict=True)) for own in (alone, filled)
    )
    found = {"equal_rows": equal, "equal_rows_filled_up": equal_filled, "rows": BLOCK}
    return {"passed": equal_filled == BLOCK, **found, "largest_difference": float(change.max())}


def passes(bench: Bench) -> dict[str, Any]:
    """T_plain, T_verify and T_draft by requests, in milliseconds, and what a plain pass reaches of a copy's bandwidth."""
    from volley import Engine

    target, drafter = bench.pair()
    small = {"policy": "fixed", "num_pages": 64}  # passes are timed on pools of their own
    engine, table = Engine(target, drafter, **small), []
    for level in bench.levels:
        plain, verify, draft = bench.pass_times(engine, level)
        times = {"T_plain": plain, "T_verify": verify, "T_draft": draft}
        table.append({"requests": level, **times, "ratio": (verify + draft) / plain})
    embedding = target.kept_head[: target.vocab_size].nbytes
    read = sum(w.nbytes for w in target.model.parameters()) - embedding
    return {"table": table, **compared(read / table[0]["T_plain"] / 1e6, copy(bench)["GB_s"])}


def compared(plain: float, copied: float) -> dict[str, Any]:
    """Return the bandwidth of plain decoding and of a copy, both in GB/s, and the verdict."""
    share = plain / copied
    verdict = f"{'reached' if share >= WANTED else 'MISSED'}: {share:.0%} of a copy's bandwidth, {WANTED:.0%} wanted"
    return {"plain_GB_s": plain, "copy_GB_s": copied, "verdict": verdict}


def graphs(bench: Bench) -> dict[str, Any]:
    """T_plain, T_verify and T_draft in milliseconds with and without CUDA graphs, and whether the tokens are the same."""
    from volley import Engine, SamplingParams

    pair = bench.pair()
    params = SamplingParams(max_tokens=8 if bench.dry else 64, ignore_eos=True)
    prompts = [[10 + i] * 32 + list(range(40, 60)) for i in range(max(bench.levels))]
    table: list[dict[str, Any]] = [{"requests": level} for level in bench.levels]
    answers, held = [], 0
    for name, with_graphs in (("eager", False), ("graphs", True)):
        engine = Engine(*pair, policy=f"fixed:{BLOCK}", num_pages=64 * max(bench.levels), cuda_graphs=with_graphs)
        for row in table:
            plain, verify, draft = bench.pass_times(engine, row["requests"])
            row |= {f"plain {name}": plain, f"verify {name}": verify, f"draft {name}": draft}
        answers.append([own.token_ids for level in bench.levels for own in engine.generate(prompts[:level], params)])
        held = sum(own.passes.nbytes for own in (engine.core.runner, engine.core.proposer) if own.passes is not None)
    same = share_equal(*answers)
    return {"equal_answers": same, "graphs_MiB": held / 2**20, "table": table}


def share_equal(here: Sequence[Any], there: Sequence[Any]) -> float:
    """The share of answers that are equal in two runs."""
    return sum(one == other for one, other in zip(here, there, strict=True)) / len(here)


def families(bench: Bench) -> dict[str, Any]:
    """Milliseconds of passes in other families, in bf16, by operation and as graphs, and the share of answers that are equal."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, Qwen3MoeConfig

    from volley import Engine, SamplingParams, Target
    from volley.memory.device import give_back
    from volley.models.layers.accelerate import accelerate

    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "sliding_window": 32}
    size = {"num_hidden_layers": 2 if bench.dry else 12, "vocab_size": bench.shape["vocab_size"], **ends}
    wide = {
        name: bench.shape[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    inner, experts = (32, 4) if bench.dry else (768, 64)
    routed = {"num_experts_per_tok": 2 if bench.dry else 8, "intermediate_size": inner}
    configs: dict[str, Any] = {
        "Qwen3-MoE": Qwen3MoeConfig(**size, **wide, **routed, num_experts=experts, moe_intermediate_size=inner),
        "gpt-oss": GptOssConfig(**size, **wide, **routed, num_local_experts=experts),
        "Gemma 3": Gemma3TextConfig(
            **size, **wide, intermediate_size=8 * inner, query_pre_attn_scalar=wide["head_dim"]
        ),
    }
    prompts = [[10 + i] * 32 + list(range(40, 60)) for i in range(4)]
    params, table = SamplingParams(max_tokens=8 if bench.dry else 32, ignore_eos=True), []
    for name, config in configs.items():
        row: dict[str, Any] = {"family": name}
        for dtype in (bench.torch.bfloat16, bench.torch.float32):
            bench.torch.manual_seed(0)
            with bench.torch.device(bench.device):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
            accelerate(model)
            target, answers = Target(model), list[Any]()
            for kind, with_graphs in (("by operation", False), ("graph", True)):
                engine = Engine(target, num_pages=64, cuda_graphs=with_graphs)
                answers.append([own.token_ids for own in engine.generate(prompts, params)])
                if dtype is bench.torch.bfloat16:
                    for tokens, requests in ((1, 1), (BLOCK, 1), (8, 8)):
                        row[f"{tokens} of {requests}, {kind}"] = 1e3 * engine.core.runner.seconds(tokens, requests)
            graphs = 0 if engine.core.runner.passes is None else engine.core.runner.passes.num_graphs
            row[f"graphs, {dtype}"] = graphs
            row[f"equal, {dtype}"] = share_equal(*answers)
            del model, target, engine
            give_back(bench.device)
        table.append(row)
    return {"passed": all(row["equal, torch.float32"] == 1 for row in table), "table": table}


def canvases(bench: Bench) -> dict[str, Any]:
    """DiffusionGemma in bf16: seconds of some answers alone, by operation and as graphs, and the share that are equal."""
    if found := without("pytest", "hypothesis"):
        return found
    from benchmarks.diffusion_speed import SHAPES, make_model, prompts
    from volley import DiffusionParams, Engine, SamplingParams
    from volley.models.layers.accelerate import accelerate
    from volley.models.targets.diffusion_gemma import DiffusionGemma

    shape = "tiny" if bench.dry else "small"
    model = make_model(SHAPES[shape], bench.device.type).to(bench.torch.bfloat16)
    accelerate(model)
    target, answers, found = DiffusionGemma(model), list[Any](), {"shape": shape}
    params = SamplingParams(
        max_tokens=192, ignore_eos=True, temperature=1.0, seed=3, diffusion=DiffusionParams(max_steps=8)
    )
    for kind, with_graphs in (("by operation", False), ("graph", True)):
        engine = Engine(target, num_pages=64, prefix_caching=False, cuda_graphs=with_graphs)
        list(engine.generate(prompts(1, 90), params))
        started = time.perf_counter()
        answers.append([next(iter(engine.generate([prompt], params))).token_ids for prompt in prompts(4, 90)])
        found[kind] = time.perf_counter() - started
    found["graphs"] = 0 if engine.core.runner.passes is None else engine.core.runner.passes.num_graphs
    found["equal"] = share_equal(*answers)
    return found


def ahead(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a step, launched behind the read of the last or ahead of it, and of its passes: plain and chains.

    Sampled chains are verified by speculative sampling. With a seed they are the same both ways, but for the drafter's rounding:
    its K/V are made of whole blocks, or of accepted tokens alone.
    """
    from volley import Engine, SamplingParams

    target, drafter = bench.pair()
    pages = 128 * max(bench.levels)
    engine, table = Engine(target, drafter, num_pages=pages, policy="fixed:1", verification="rejection"), []
    steps = 4 if bench.dry else 100
    same = True
    for level, size, temperature in product(bench.levels, (1, BLOCK), (0.0, 1.0)):
        params = SamplingParams(max_tokens=(steps + 8) * BLOCK, ignore_eos=True, temperature=temperature, seed=3)
        plain, verify, draft = bench.pass_times(engine, level)
        alone = plain if size == 1 else verify + draft
        engine.policy = f"fixed:{size}"
        row, answers = {"requests": level, "block": size, "T": temperature, "passes": alone}, []
        for name, is_ahead in (("behind", False), ("ahead", True)):
            engine.core.async_launch.is_used = is_ahead
            engine.reset_prefix_cache()
            requests = [engine.add_request([10 + i % 50] * 32, params) for i in range(level)]
            while any(request.num_output < 8 for request in requests):
                engine.step()
            bench.wait()
            started = time.perf_counter()
            for _ in range(steps):
                engine.step()
            step = 1e3 * (time.perf_counter() - started) / steps
            row |= {f"step {name}": step, f"gap {name}": step - alone}
            answers.append([request.token_ids[: 32 + steps] for request in requests])
            for request in requests:
                engine.abort(request)
        row["equal"] = share_equal(*answers)
        same &= row["equal"] == 1 or (size > 1 and temperature > 0)
        table.append(row)
    return {"passed": same, "table": table}


def profile(bench: Bench) -> dict[str, Any]:
    """Microseconds of a step, of what the device is busy in it, and of its largest kernels: plain, and chains of 16."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    from volley import Engine, SamplingParams

    target, drafter = bench.pair()
    engine = Engine(target, drafter, policy="fixed:1", num_pages=256 * max(bench.levels))
    params, steps, table = SamplingParams(max_tokens=4000, ignore_eos=True), 2 if bench.dry else 60, []
    kind = ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA
    for level, size in product((1, max(bench.levels)), (1, BLOCK)):
        engine.policy = f"fixed:{size}"
        engine.reset_prefix_cache()
        requests = [engine.add_request([10 + i % 50] * 32, params) for i in range(level)]
        while any(request.num_output < 2 * BLOCK for request in requests):
            engine.step()
        taken = bench.seconds(lambda: [engine.step() for _ in range(steps)], 1) / steps
        with recorded(activities=[kind]) as seen:
            for _ in range(steps):
                engine.step()
            bench.wait()
        for request in requests:
            engine.abort(request)
        of = {
            own.key: (own.self_cpu_time_total if bench.dry else own.self_device_time_total)
            for own in seen.key_averages()
        }
        largest = sorted(of.items(), key=lambda pair: -pair[1])[:10]
        shown = ", ".join(f"{name[:40]} {time / steps:.0f}" for name, time in largest)
        row = {"requests": level, "block": size, "step": 1e6 * taken, "busy": sum(of.values()) / steps}
        table.append({**row, "largest": shown.replace("|", "/")})
    return {"table": table}


def engine(bench: Bench) -> dict[str, Any]:
    """Tokens of the bundled pair in fp32, on the CPU and on the device: the share of answers that are equal."""
    from volley import Engine, SamplingParams

    size = 8 if bench.dry else 64
    greedy, seeded = SamplingParams(max_tokens=size), SamplingParams(max_tokens=size, temperature=1.0, seed=3)
    kinds: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
        "greedy chains": (greedy, {"policy": "fixed"}),
        "greedy trees": (greedy, {"tree_nodes": BLOCK}),
        "sampled with a seed": (seeded, {"policy": "fixed"}),
        "goodput": (greedy, {"policy": "goodput"}),
    }
    prompts = [[10 + i] * 8 + list(range(40, 60)) for i in range(2 if bench.dry else 8)]
    here, there = (
        Engine.from_pretrained(dtype=bench.torch.float32, device=device, num_pages=1024, max_running=8)
        for device in ("cpu", bench.device)
    )
    table = []
    for name, (params, options) in kinds.items():
        for level in (1, len(prompts)):
            answers = []
            for own in (here, there):
                own.reconfigure(type(own.config)(**options))
                own.reset_prefix_cache()
                answers.append([result.token_ids for result in own.generate(prompts[:level], params)])
            equal = share_equal(*answers)
            table.append({"kind": name, "requests": level, "equal": equal})
    return {"passed": all(row["equal"] == 1 for row in table), "table": table}


def kinds(bench: Bench) -> dict[str, Any]:
    """Tiny random models of many kinds in fp32: whether their tokens are the CPU's. The kinds are those of ``tests/gpu``."""
    if found := without("pytest", "hypothesis", "jsonschema", "llguidance"):
        return found
    from tests.gpu import test_engine, test_kinds

    made: dict[str, Callable[[], Any]] = {name: make for name, (make, _) in test_kinds.KINDS.items()}
    for case in test_engine.CASES:
        _, params, options = case.values
        if "drafter" not in options:
            made[str(case.id)] = partial(test_kinds.plain, params, options)
    table = []
    for name, make in list(made.items())[: 2 if bench.dry else None]:
        try:
            kind = make()
            here, there = (
                [own.token_ids for own in own_engine.generate(kind.prompts(), kind.params)]
                for own_engine in (
                    kind.run(deepcopy(kind.hf), deepcopy(kind.drafter)),
                    kind.run(deepcopy(kind.hf).to(bench.device), kind.drafter and kind.drafter.to(bench.device)),
                )
            )
            said = "equal" if here == there else f"{here} here, {there} there"
        except Exception as error:  # the other kinds are still to be tried
            said = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        table.append({"kind": name, "tokens": said})
    return {"passed": all(row["tokens"] == "equal" for row in table), "table": table}


def tune(bench: Bench) -> dict[str, Any]:
    """Two minutes of ``volley tune`` on the bundled target: whether every stage runs, and how it ended."""
    with TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        each = product(("cat", "river", "clock", "letter", "garden"), ("lost", "old", "blue", "quiet"), range(2, 22))
        lines = [{"prompt": f"Write {count} sentences about the {how} {what}."} for what, how, count in each]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        out = Path(folder) / "tuned"
        command = ["tune", "--target", str(ROOT / "src/volley/reference/target"), "--prompts", str(prompts)]
        command += ["--out", str(out), "--max-minutes", "2", "--device", "cuda", "--max-tokens", "96", "--seed", "0"]
        return commanded(bench, "-m", "volley.cli", *command)


def demo(bench: Bench) -> dict[str, Any]:
    """The first thing that a new user runs."""
    return commanded(bench, "-m", "volley.cli", "demo")


def asked_over_http(url: str, prompts: Sequence[str], most: int) -> tuple[str, list[str]]:
    """A server's greedy answer to the first of ``prompts``, streamed, and to all of them at once, of ``most`` tokens."""
    from concurrent.futures import ThreadPoolExecutor

    import httpx

    body = {"max_tokens": most, "temperature": 0}
    with httpx.Client(base_url=url, timeout=100) as client:

        def ask(prompt: str) -> str:
            return client.post("/v1/completions", json={**body, "prompt": prompt}).json()["choices"][0]["text"]

        with client.stream("POST", "/v1/completions", json={**body, "prompt": prompts[0], "stream": True}) as lines:
            events = [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]
        streamed = "".join(choice["text"] for event in events for choice in event["choices"])
        with ThreadPoolExecutor(len(prompts)) as pool:
            return streamed, list(pool.map(ask, prompts))


def serving(bench: Bench) -> dict[str, Any]:
    """``volley serve`` in fp32: whether answers to eight clients at once, and a streamed one, are the CPU's."""
    if found := without("fastapi", "uvicorn"):
        return found
    from volley import Engine, SamplingParams

    prompts = [f"Write {count} sentences about a river." for count in range(2, 10)]
    params = SamplingParams(max_tokens=8 if bench.dry else 64)
    here = Engine.from_pretrained(dtype=bench.torch.float32, device="cpu", num_pages=1024)
    wanted = [result.text for result in here.generate(prompts, params)]
    command = [sys.executable, "-m", "volley.cli", "serve", "--port", "0", "--dtype", "float32", "--device"]
    server = subprocess.Popen([*command, bench.device.type], stderr=subprocess.PIPE, text=True, env=searching())
    assert server.stderr is not None
    try:
        told = next((json.loads(line) for line in server.stderr if '"listening"' in line), None)
        if told is None:
            return {"passed": False, "table": f"the server ended with status {server.wait()}"}
        log = Thread(target=server.stderr.read, daemon=True)  # else it would fill the pipe
        log.start()
        streamed, answers = asked_over_http(told["url"], prompts, params.max_tokens)
        server.terminate()
        status = server.wait(60)
        log.join()
    finally:
        server.kill()
        server.stderr.close()
    equal = sum(one == other for one, other in zip(answers, wanted, strict=True))
    return {
        "passed": equal == len(prompts) and streamed == wanted[0] and status == 0,
        "equal": f"{equal} of {len(prompts)} at once; the streamed one: {streamed == wanted[0]}",
        "ended_with_status": status,
        "listening": {key: value for key, value in told.items() if key.endswith(("_mib", "_graphs", "_seconds"))},
    }


def load(bench: Bench) -> dict[str, Any]:
    """Tokens a second of so many requests at once, plain and with the bundled drafter, and whether their tokens are equal."""
    from volley import Engine

    engine = Engine.from_pretrained(device=bench.device, num_pages=256 * max(bench.levels))
    return loaded(bench, engine, ("fixed:1", "goodput"), 8 if bench.dry else 128)


def load_large(bench: Bench) -> dict[str, Any]:
    """Measure cycles in Qwen3-8B's shape with random weights, of whose drafts next to nothing is accepted."""
    from volley import Engine

    engine = Engine(*bench.pair(), num_pages=64 * max(bench.levels))
    return loaded(bench, engine, ("fixed:1", f"fixed:{BLOCK}", "goodput"), 8 if bench.dry else 96)


def loaded(bench: Bench, engine: Any, policies: tuple[str, ...], size: int) -> dict[str, Any]:
    """Tokens a second by requests and policy, for as many levels as there is time for, and what capturing graphs took before."""
    from volley import SamplingParams
    from volley.engine.start import warm_up

    graphs, seconds = warm_up(engine)
    params, started = SamplingParams(max_tokens=size, ignore_eos=True), time.perf_counter()
    prompts = [[10 + i % 50] * 32 + list(range(40, 60)) for i in range(max(bench.levels))]
    table: list[dict[str, Any]] = []
    for level in bench.levels:
        if time.perf_counter() - started > LOAD_SECONDS:
            break
        row, answers = {"requests": level}, []
        for policy in policies:
            engine.policy = policy
            warm_up(engine)
            engine.reset_prefix_cache()
            begun = time.perf_counter()
            results = list(engine.generate(prompts[:level], params))
            row[policy] = sum(len(own.token_ids) for own in results) / (time.perf_counter() - begun)
            answers.append([own.token_ids for own in results])
        row["equal"] = sum(all(one == first for one in others) for first, *others in zip(*answers, strict=True)) / level
        table.append(row)
    return {"cuda_graphs": graphs, "cuda_graphs_seconds": seconds, "table": table}


def waits(bench: Bench) -> dict[str, Any]:
    """Find where a decoding step of one request waits for the device: the read of its results is the only place allowed."""
    from volley import Engine, SamplingParams

    kinds = {"greedy": {}, "T = 1": {"temperature": 1.0}, "T = 1, seed": {"temperature": 1.0, "seed": 3}}
    pair, table, places = bench.pair(), [], {}
    for policy in (f"fixed:{BLOCK}", "fixed:1"):
        engine = Engine(*pair, policy=policy, num_pages=256)
        for kind, own in kinds.items():
            request = engine.add_request(list(range(40)), SamplingParams(max_tokens=200, ignore_eos=True, **own))
            for _ in range(4):
                engine.step()
            found = [waits_of(bench.warn_of_waits, engine.step) for _ in range(3)]
            engine.abort(request)
            table.append({"policy": policy, "kind": kind, "most_waits": max(step.total() for step in found)})
            places[f"{policy}, {kind}"] = dict(max(found, key=Counter.total))
    return {"passed": all(row["most_waits"] <= 1 for row in table), "places": places, "table": table}


def waits_of(warn: Callable[[bool], None], run: Callable[[], object]) -> Counter[str]:
    """Places in volley where ``run`` waits for the device, by PyTorch's warnings, which ``warn`` switches."""
    import volley
    from volley.memory.kernels.launching import SYNCHRONISED

    package, found = Path(volley.__file__).parent, Counter[str]()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if SYNCHRONISED in str(message):
            frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(package)]
            place = f"{Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno}" if frames else "elsewhere"
            found[place] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        warn(True)
        try:
            run()
        finally:
            warn(False)
    return found


PARTS = {
    part.__name__: part
    for part in (
        tests,
        copy,
        kernels,
        rows,
        engine,
        kinds,
        demo,
        tune,
        serving,
        passes,
        graphs,
        profile,
        families,
        canvases,
        ahead,
        load,
        load_large,
        waits,
    )
}
