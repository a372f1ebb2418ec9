"""Everything that can only be known on a GPU, in parts of at most nine minutes each, resumable.

    scripts/gpu/run OUT                  all parts that OUT does not have yet, one process each
    scripts/gpu/run OUT --part copy      one part, again
    scripts/gpu/run OUT --dry-run        the parts on a CPU, with tiny shapes: whether the script itself works

Each part writes ``OUT/PART.json`` when it is done, and ``OUT/tables.md`` is made of all that are there. Nothing is fetched:
weights are random in Qwen3-8B's shape, and the bundled pair. Ends with status 1 if a part failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from volley.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 9 * 60
PROMPT, BLOCK = 512, 16


class Bench:
    """The device and the sizes of a run; models are made once a process."""

    def __init__(self, dry: bool) -> None:
        import torch

        self.torch, self.dry = torch, dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.levels = (1, 2) if dry else (1, 2, 4, 8, 16, 32, 64)
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
        plain, verify = (engine.runner.seconds(size * level, level) for size in (1, BLOCK))
        return 1e3 * plain, 1e3 * verify, 1e3 * engine.proposer.seconds(BLOCK * level, level)

    def wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def pair(self) -> Any:
        """A target and a drafter with random weights in Qwen3-8B's shape and DFlash's."""
        from transformers import AutoModelForCausalLM, Qwen3Config

        from volley.models.accelerate import accelerate
        from volley.models.target import Target

        config = Qwen3Config(
            **self.shape, num_hidden_layers=self.layers, max_position_embeddings=40960, eos_token_id=None
        )
        self.torch.manual_seed(0)
        with self.torch.device(self.device):
            dtype = self.torch.bfloat16
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        accelerate(model)
        target = Target(model)
        return target, self.drafter(target, "bf16")

    def drafter(self, target: Any, weights: Any) -> Any:
        """A drafter for ``target`` with such weights."""
        from volley.models.checkpoint import DrafterConfig
        from volley.models.drafter import Drafter

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
        drafter.fuse(weights, None if weights == "bf16" else target.head_weight)
        return drafter


def tests(bench: Bench) -> dict[str, Any]:
    """The kernels' tests, compiled on the device; the reference is PyTorch's."""
    if bench.dry:
        return {"passed": True, "tail": "not run"}
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/memory/kernels"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)
    return {"passed": done.returncode == 0, "tail": done.stdout[-3000:]}


def copy(bench: Bench) -> dict[str, Any]:
    """Bandwidth of a copy, bytes read and written."""
    size = 2**20 if bench.dry else 2**31
    source = bench.torch.ones(size, dtype=bench.torch.uint8, device=bench.device)
    target = bench.torch.empty_like(source)
    return {"GB_s": 2 * size / bench.seconds(lambda: target.copy_(source)) / 1e9}


def kernels(bench: Bench) -> dict[str, Any]:
    """Kernels against the copy: ``benchmarks/gpu_kernels.py``."""
    if bench.dry:
        return {"passed": True, "table": "not run"}
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "benchmarks/gpu_kernels.py", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)
    return {"passed": done.returncode == 0, "table": (done.stdout + done.stderr)[-6000:]}


def rows(bench: Bench) -> dict[str, Any]:
    """Whether one row of a pass and the same row among sixteen have equal logits, bit for bit."""
    from volley.memory.batch import RaggedBatch, Segment
    from volley.memory.kv_cache import BlockTable
    from volley.memory.kv_store import make_store

    torch, (target, _) = bench.torch, bench.pair()
    tokens = torch.arange(BLOCK, device=bench.device) % target.vocab_size
    store = make_store("auto", target.kv_shapes, 64, target.dtype, bench.device)
    with torch.inference_mode():
        table = BlockTable(64, [0])
        together = target.forward(
            RaggedBatch([Segment(table, 0, BLOCK)], tokens), store, torch.arange(BLOCK).to(tokens)
        )
        alone = [
            target.forward(RaggedBatch([Segment(table, i, 1)], tokens[i : i + 1]), store, tokens[:1])[0]
            for i in range(BLOCK)
        ]
    change = (torch.stack(alone).float() - together.float()).abs().amax(dim=-1)
    same = [torch.equal(one, other) for one, other in zip(alone, together, strict=True)]
    return {"equal_rows": sum(same), "rows": BLOCK, "largest_difference": float(change.max())}


def passes(bench: Bench) -> dict[str, Any]:
    """T_plain, T_verify and T_draft by requests, in milliseconds, and what they are of the copy's bandwidth."""
    from volley import Engine

    target, drafter = bench.pair()
    small = {"policy": "fixed", "num_pages": 64}  # passes are timed on pools of their own
    engine, table = Engine(target, drafter, **small), []
    for level in bench.levels:
        plain, verify, draft = bench.pass_times(engine, level)
        times = {"T_plain": plain, "T_verify": verify, "T_draft": draft}
        table.append({"requests": level, **times, "ratio": (verify + draft) / plain})
    coded = Engine(target, bench.drafter(target, "fp8"), **small).proposer
    for row in table:
        row["T_draft_fp8"] = 1e3 * coded.seconds(BLOCK * row["requests"], row["requests"])
        row["ratio_fp8"] = (row["T_verify"] + row["T_draft_fp8"]) / row["T_plain"]
    weights = sum(w.nbytes for w in target.model.parameters()) - target.head_weight.nbytes
    return {"table": table, "plain_GB_s": weights / table[0]["T_plain"] / 1e6}


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
        held = sum(own.passes.nbytes for own in (engine.runner, engine.proposer) if own.passes is not None)
    same = sum(one == other for one, other in zip(*answers, strict=True)) / len(answers[0])
    return {"equal_answers": same, "graphs_MiB": held / 2**20, "table": table}


def load(bench: Bench) -> dict[str, Any]:
    """Tokens a second of so many requests at once, plain and with the bundled drafter, and whether their tokens are equal."""
    from volley import Engine, SamplingParams

    params = SamplingParams(max_tokens=8 if bench.dry else 128, ignore_eos=True)
    engine = Engine.from_pretrained(device=bench.device, num_pages=256 * max(bench.levels))
    prompts = [[10 + i] * 32 + list(range(40, 60)) for i in range(max(bench.levels))]
    table = []
    for level in bench.levels:
        row: dict[str, Any] = {"requests": level}
        answers = []
        for name, options in (("plain", {"block_size": 1}), ("goodput", {"policy": "goodput", "block_size": None})):
            engine.reconfigure(type(engine.config)(**options))
            engine.reset_prefix_cache()
            started = time.perf_counter()
            results = list(engine.generate(prompts[:level], params))
            row[name] = sum(len(own.token_ids) for own in results) / (time.perf_counter() - started)
            answers.append([own.token_ids for own in results])
        row["equal"] = sum(one == other for one, other in zip(*answers, strict=True)) / level
        table.append(row)
    return {"table": table}


def waits(bench: Bench) -> dict[str, Any]:
    """The first place where a step of decoding waits for the device; none is the aim."""
    from volley import Engine, SamplingParams

    engine = Engine(*bench.pair(), policy=f"fixed:{BLOCK}")
    engine.add_request(list(range(40)), SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(4):
        engine.step()
    if bench.dry:
        return {"error": None}
    bench.torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step()
    except RuntimeError as error:
        import traceback

        frames = [
            f"{f.filename.rpartition('/volley/')[2]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)
        ]
        return {"error": str(error)[:200], "at": frames[-6:]}
    finally:
        bench.torch.cuda.set_sync_debug_mode("default")
    return {"error": None}


PARTS = {part.__name__: part for part in (tests, copy, kernels, rows, passes, graphs, load, waits)}


def tables(out: Path) -> str:
    """What the parts found, as Markdown."""
    lines = ["# On a GPU", ""]
    for name, part in PARTS.items():
        file = out / f"{name}.json"
        if not file.exists():
            lines += [f"## {name}", "", "not run", ""]
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"## {name}", "", str(part.__doc__).split("\n")[0], ""]
        table = found.pop("table", None)
        lines += [f"- {key}: {value}" for key, value in found.items()] + [""]
        if isinstance(table, list):
            lines += ["| " + " | ".join(table[0]) + " |", "|---" * len(table[0]) + "|"]
            lines += ["| " + " | ".join(_shown(value) for value in row.values()) + " |" for row in table] + [""]
        elif table:
            lines += ["```", table, "```", ""]
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:.4g}"


def run_part(name: str, out: Path, *, dry: bool) -> None:
    """One part, in this process."""
    bench = Bench(dry)
    started = time.time()
    found = PARTS[name](bench)
    facts = {"device": str(bench.device), "torch": bench.torch.__version__}
    if not dry:
        facts["device"] = bench.torch.cuda.get_device_name()
    report = {**found, **facts, "seconds": round(time.time() - started, 1)}
    write_atomically(out / f"{name}.json", json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--part", choices=PARTS, help="only this one, in this process")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny shapes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        run_part(options.part, options.out, dry=options.dry_run)
        return 0
    failed = []
    for name in PARTS:
        if (options.out / f"{name}.json").exists():
            continue
        command = [sys.executable, __file__, str(options.out), "--part", name, *["--dry-run"] * options.dry_run]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        try:
            status = subprocess.run(command, env=env, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 124
        print(f"{name}: {'done' if status == 0 else f'failed with status {status}'}", flush=True)
        failed += [name] * (status != 0)
        write_atomically(options.out / "tables.md", tables(options.out))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
