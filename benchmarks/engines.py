"""The reference pair in volley, vLLM (eager and compiled) and transformers, plain and speculative, side by side.

    python benchmarks/engines.py --vllm-python .venv-vllm/bin/python --prompts gsm8k --data-dir DATA --out runs/engines

Every way of decoding has a process of its own, all are alive together, and they take turns on each group of prompts, so that a
machine that drifts is the same for all; which of them goes first rotates. Greedy, no prefix cache, prompts included in the time.
The first round warms up and is not counted. Prints a Markdown table and saves ``measured.json`` after every group; Ctrl-C ends it
early and prints what there is. ``--rows`` picks rows; vLLM's take about 1.5 GB each. τ is over the cycles that drafted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src"
REFERENCE = SOURCE / "volley" / "reference"
TARGET, DFLASH, BEST = (str(REFERENCE / name) for name in ("target", "drafter-dflash", "drafter"))
Answer = Callable[[list[list[int]], int], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    engine: str
    name: str
    drafter: str | None = None
    policy: str = "fixed"
    compiled: bool = False
    builtin: bool = False


ROWS = {
    "volley": Row("volley", "plain"),
    "volley-dflash": Row("volley", "DFlash, B = 8", DFLASH),
    "volley-best": Row("volley", "residual head, goodput", BEST, "goodput"),
    "vllm": Row("vllm", "plain, eager"),
    "vllm-dflash": Row("vllm", "built-in dflash, eager", DFLASH, builtin=True),
    "vllm-plugin": Row("vllm", "plugin, DFlash, B = 8, eager", DFLASH),
    "vllm-plugin-best": Row("vllm", "plugin, residual head, goodput, eager", BEST, "goodput"),
    "vllm-compiled": Row("vllm", "plain, compiled", compiled=True),
    "vllm-compiled-dflash": Row("vllm", "built-in dflash, compiled", DFLASH, compiled=True, builtin=True),
    "transformers": Row("transformers", "plain"),
    "transformers-dflash": Row("transformers", "DFlash, B = 8", DFLASH),
}


# -- in each row's process ---------------------------------------------------------------------------------------------
def volley_answer(row: Row, options: argparse.Namespace) -> Answer:
    import torch

    from volley import Engine, SamplingParams

    torch.set_num_threads(options.threads)
    engine = Engine.from_pretrained(
        TARGET, row.drafter, dtype=getattr(torch, options.dtype), prefix_caching=False, policy=row.policy
    )

    def answer(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        results = list(engine.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
        stats = [result.stats for result in results]
        cycles = [pair for s in stats for pair in zip(s.accepted_lengths, s.block_sizes, strict=True)]
        lengths = [length for length, size in cycles if size > 1]
        return {"tokens": [r.token_ids for r in results], "cycles": len(lengths), "gained": sum(lengths)}

    return answer


def transformers_answer(row: Row, options: argparse.Namespace) -> Answer:
    import torch

    from volley import Drafter, SamplingParams
    from volley.bench.peers import transformers_runners
    from volley.models.targets.target import load_tokenizer

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    drafter = Drafter.from_pretrained(row.drafter, dtype=dtype) if row.drafter else None
    runners, notes = transformers_runners(TARGET, drafter, load_tokenizer(TARGET), [], dtype)
    wanted = "transformers-dflash" if row.drafter else "transformers"
    runner = next((runner for case, runner in runners.items() if case.name == wanted), None)
    if runner is None:
        raise SystemExit(f"{wanted}: {'; '.join(notes)}")

    def answer(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        (result,) = runner(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True)).results
        lengths = result.stats.accepted_lengths
        return {"tokens": [result.token_ids], "cycles": len(lengths), "gained": sum(lengths)}

    return answer


def vllm_answer(row: Row, options: argparse.Namespace) -> Answer:
    from vllm import LLM, SamplingParams

    from volley.vllm import PluginOptions, engine_args

    speculation: dict[str, Any] = {}
    if row.builtin:
        speculation["speculative_config"] = {"method": "dflash", "model": row.drafter, "num_speculative_tokens": 7}
    elif row.drafter is not None:
        speculation = engine_args(PluginOptions(drafter=row.drafter, policy=row.policy))
    llm = LLM(
        TARGET,
        dtype=options.dtype,
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
        disable_log_stats=False,
        kv_cache_memory_bytes=2**28,
        **{**speculation, "enforce_eager": not row.compiled},
    )

    def counters() -> tuple[int, int]:
        counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return counted.get(names[0], 0), counted.get(names[1], 0)

    def answer(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        before = counters()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        drafts, accepted = (now - then for now, then in zip(counters(), before, strict=True))
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"tokens": tokens, "cycles": drafts, "gained": drafts + accepted}

    return answer


MAKERS = {"volley": volley_answer, "transformers": transformers_answer, "vllm": vllm_answer}


def work(key: str, options: argparse.Namespace) -> None:
    with Client(options.address) as line:
        answer = MAKERS[ROWS[key].engine](ROWS[key], options)
        line.send(key)
        while (order := line.recv()) is not None:
            started = time.perf_counter()
            found = answer(*order)
            line.send({"seconds": time.perf_counter() - started, **found})


# -- in the process that measures --------------------------------------------------------------------------------------
@contextmanager
def worker(key: str, options: argparse.Namespace, folder: str) -> Iterator[Connection]:
    """The line to a process that runs one row; its output goes to a file in ``--out``."""
    address = os.path.join(folder, key)
    python = options.vllm_python if ROWS[key].engine == "vllm" else sys.executable
    cores = f"0-{options.threads - 1}" if options.threads > 1 else "0"
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
    command = [str(python), __file__, "--worker", key, "--address", address]
    command += ["--dtype", options.dtype, "--threads", str(options.threads)]
    with connected(command, environment, address, options.out / f"{key}.log") as (line, _):
        yield line


@contextmanager
def connected(
    command: Sequence[str], environment: Mapping[str, str], address: str, log: Path
) -> Iterator[tuple[Connection, int]]:
    """A line to ``address``, from which a new process calls and sends something once it is ready, and that process's id.

    ``None`` on the line tells it to end.
    """
    with Listener(address) as listener, log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
        try:
            with accepted(listener, process, log) as line:
                while not line.poll(1):
                    check_alive(process, log)
                line.recv()
                yield line, process.pid
                line.send(None)
        finally:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.terminate()


def accepted(listener: Listener, process: subprocess.Popen[bytes], log: Path) -> Connection:
    while True:
        try:
            return listener.accept()
        except TimeoutError:
            check_alive(process, log)


def check_alive(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise SystemExit(f"{process.args[0]} ended with {process.returncode}; see {log}")  # type: ignore[index]


@dataclass
class Measured:
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Tokens a second of each group, by the number of prompts at once."""
    cycles: int = 0
    gained: int = 0
    same: int = 0
    answers: int = 0


def measure(options: argparse.Namespace, prompts: list[list[int]], measured: dict[str, Measured]) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        lines: dict[str, Connection] = {}
        for key in measured:
            print(f"starting {key}", file=sys.stderr, flush=True)
            lines[key] = stack.enter_context(worker(key, options, folder))
        for repeat in range(options.repeats + 1):
            for batch in options.batches:
                for start in range(0, len(prompts), batch):
                    group = prompts[start : start + batch]
                    keys = [key for key in lines if batch == 1 or ROWS[key].engine != "transformers"]
                    turn = (start // batch + repeat) % len(keys)
                    found = {key: ask(lines[key], group, options.max_tokens) for key in keys[turn:] + keys[:turn]}
                    if repeat:
                        record(measured, found, batch)
                        save(options, measured)


def ask(line: Connection, group: list[list[int]], max_tokens: int) -> dict[str, Any]:
    line.send((group, max_tokens))
    answer: dict[str, Any] = line.recv()
    return answer


def record(measured: dict[str, Measured], found: dict[str, dict[str, Any]], batch: int) -> None:
    reference = found[next(key for key in measured if key in found)]["tokens"]
    for key, answer in found.items():
        row = measured[key]
        row.rates.setdefault(batch, []).append(sum(map(len, answer["tokens"])) / answer["seconds"])
        row.cycles, row.gained = row.cycles + answer["cycles"], row.gained + answer["gained"]
        row.same += sum(a == b for a, b in zip(answer["tokens"], reference, strict=True))
        row.answers += len(reference)


def save(options: argparse.Namespace, measured: dict[str, Measured]) -> None:
    whole = {
        "options": {k: str(v) for k, v in vars(options).items()},
        "rows": {k: vars(m) for k, m in measured.items()},
    }
    (options.out / "measured.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def table(options: argparse.Namespace, measured: dict[str, Measured]) -> str:
    first = next(iter(measured.values()))
    heads = [f"batch {batch}, tokens/s (quartiles)" for batch in options.batches]
    heads += [f"× the first row, batch {batch}" for batch in options.batches]
    lines = ["| engine | decoding | " + " | ".join(heads) + " | τ | same answers |"]
    lines.append("|" + "---|" * (len(heads) + 4))
    for key, row in measured.items():
        speeds = [spread(row.rates.get(batch, [])) for batch in options.batches]
        ratios = [ratio(row.rates.get(batch), first.rates.get(batch)) for batch in options.batches]
        tau = f"{row.gained / row.cycles:.2f}" if row.cycles and ROWS[key].drafter else ""
        cells = [ROWS[key].engine, ROWS[key].name, *speeds, *ratios, tau, f"{row.same}/{row.answers}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(rates: list[float]) -> str:
    if len(rates) < 2:
        return " ".join(f"{rate:.0f}" for rate in rates)
    low, middle, high = statistics.quantiles(rates, n=4)
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


def ratio(rates: list[float] | None, of: list[float] | None) -> str:
    """Median of the ratios of the same group in the same turn."""
    if not rates or not of:
        return ""
    return f"{statistics.median(a / b for a, b in zip(rates, of, strict=False)):.2f}"


def load(options: argparse.Namespace) -> list[list[int]]:
    from volley import Engine
    from volley.prompts import load_prompts

    engine = Engine.from_pretrained(TARGET)
    found = load_prompts(options.prompts, options.data_dir, options.num_prompts)
    return [engine.encode(list(conversation.messages)) for conversation in found]


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), help="python that has vLLM")
    own.add_argument("--prompts", default="gsm8k", help="name of a dataset or JSONL file of prompts")
    own.add_argument("--data-dir", type=Path, help="folder with the datasets' files")
    own.add_argument("--num-prompts", type=int, default=16)
    own.add_argument("--max-tokens", type=int, default=128)
    own.add_argument("--repeats", type=int, default=3)
    own.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    own.add_argument("--threads", type=int, default=1, help="threads of each engine")
    own.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    own.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated, of {', '.join(ROWS)}")
    own.add_argument("--out", type=Path, default=Path("runs/engines"))
    own.add_argument("--worker", help=argparse.SUPPRESS)
    own.add_argument("--address", help=argparse.SUPPRESS)
    options = own.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    measured = {key: Measured() for key in options.rows.split(",")}
    prompts = load(options)
    try:
        measure(options, prompts, measured)
    except KeyboardInterrupt:
        print("interrupted; what was measured:", file=sys.stderr)
    print(table(options, measured))


if __name__ == "__main__":
    main()
