"""llama.cpp as ``make peers`` builds it: its converter, its server as a contender, and single passes through its C interface."""

import argparse
import contextlib
import importlib
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer

CONTEXT = 128  # tokens before a pass that is timed, as in volley's cost tables

ROOT = Path(__file__).parent.parent
PEERS = Path(os.environ.get("VOLLEY_PEERS", ROOT / ".peers"))
SOURCE, BINARIES = PEERS / "llama-cpp-python", PEERS / "build" / "bin"
CONVERTED = ("f32", "bf16")  # types of a target that the converter writes; all others are quantised from bf16
STARTED_WITHIN = 600.0  # seconds


@dataclass(frozen=True)
class LlamaRow:
    """One way to run llama.cpp: ``bf16``, ``q8_0``, ``bf16+dflash:3``, ``bf16+dspark:7@16384``, ``q4_0+ngram-simple``."""

    weights: str
    method: str | None = None
    depth: int | None = None
    drafted: int | None = None
    """Tokens that the drafter knows, the first of the vocabulary; by default all."""

    @classmethod
    def parse(cls, text: str) -> "LlamaRow":
        weights, _, method = text.partition("+")
        method, _, numbers = method.partition(":")
        depth, _, drafted = numbers.partition("@")
        for number in filter(None, (depth, drafted)):
            if not number.isdecimal():
                raise SystemExit(
                    f"{text!r}: {number!r} is no number; write for example bf16+dflash:3 or bf16+dspark:7@16384"
                )
        return cls(weights, method or None, int(depth) if depth else None, int(drafted) if drafted else None)

    @property
    def drafts(self) -> bool:
        return self.method is not None and not self.method.startswith("ngram")

    def arguments(self, drafter: Path | None) -> list[str]:
        """Options of llama-server."""
        if self.method is None:
            return []
        found = ["--spec-type", f"draft-{self.method}" if self.drafts else self.method]
        if self.drafts:
            found += ["--spec-draft-model", str(drafter)]
        return found + (["--spec-draft-n-max", str(self.depth)] if self.depth else [])


def check_built() -> None:
    if not (BINARIES / "llama-server").exists():
        raise SystemExit(
            f"there is no llama.cpp in {PEERS}; run `make peers`, which needs cmake, ninja and a C++ compiler"
        )


# -- files -------------------------------------------------------------------------------------------------------------
_CONVERT = """
import runpy, sys
sys.path[:0] = [{source!r}, {gguf!r}]
from conversion import base
known, pieces = base.TextModel.get_vocab_base_pre, base.TextModel._create_vocab_sentencepiece
def get_vocab_base_pre(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:  # prompts are sent as token ids, so no pre-tokenizer is asked for
        return "gpt-2"
def create_vocab_sentencepiece(self):
    if not (self.dir_model / "tokenizer.model").is_file():  # asked before the package is imported
        raise FileNotFoundError
    return pieces(self)
base.TextModel.get_vocab_base_pre = get_vocab_base_pre
base.TextModel._create_vocab_sentencepiece = create_vocab_sentencepiece
sys.argv[:] = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def gguf(folder: Path, weights: str, out: Path) -> Path:
    """The target in ``folder`` as a GGUF file of type ``weights`` in ``out``, made if it is not there or older."""
    made = out / f"{folder.name}-{weights}.gguf"
    if is_fresh(made, folder):
        return made
    if weights not in CONVERTED:
        return quantised(gguf(folder, "bf16", out), made, weights)
    partial, llama = made.with_suffix(".partial"), SOURCE / "vendor" / "llama.cpp"
    arguments = [str(llama / "convert_hf_to_gguf.py"), str(folder), "--outtype", weights, "--outfile", str(partial)]
    code = _CONVERT.format(source=str(llama), gguf=str(llama / "gguf-py"), arguments=arguments)
    run([sys.executable, "-c", code], made.with_suffix(".log"))
    return partial.rename(made)


def gguf_drafter(folder: Path, weights: str, out: Path, target: Path, drafted: int | None = None) -> Path:
    """The drafter in ``folder`` as ``volley export`` writes it. ``drafted``: with the first tokens of the vocabulary alone."""
    made = out / f"{folder.name}{'' if drafted is None else f'-{drafted}'}-{weights}.gguf"
    if is_fresh(made, folder):
        return made
    if weights != "bf16":
        return quantised(gguf_drafter(folder, "bf16", out, target, drafted), made, weights)
    from volley.files import read_json
    from volley.models.drafters.export import export

    counts = range(read_json(folder / "config.json")["vocab_size"], 0, -1)
    export(folder, made, "gguf", target=str(target), draft_vocab_size=drafted, counts=counts)
    return made


def is_fresh(made: Path, folder: Path) -> bool:
    return made.exists() and made.stat().st_mtime > (folder / "model.safetensors").stat().st_mtime


def quantised(source: Path, made: Path, weights: str) -> Path:
    partial = made.with_suffix(".partial")
    command = [str(BINARIES / "llama-quantize"), "--allow-requantize", str(source), str(partial), weights.upper()]
    run(command, made.with_suffix(".log"))
    return partial.rename(made)


def run(command: Sequence[str], log: Path) -> None:
    with log.open("w") as output:
        if subprocess.run(command, stdout=output, stderr=output).returncode:
            raise SystemExit(f"{Path(command[0]).name} failed; see {log}")


# -- the server --------------------------------------------------------------------------------------------------------
class Server:
    """A llama-server that answers at ``url``."""

    def __init__(self, url: str, pid: int) -> None:
        import httpx

        self.pid = pid
        self.client = httpx.Client(base_url=url, timeout=3600)

    def ask(self, prompts: Sequence[list[int]], max_tokens: int, temperature: float, seed: int) -> Answer:
        """All prompts at once; greedy at temperature 0."""

        def one(index: int) -> dict[str, Any]:
            body = {
                "prompt": prompts[index],
                "n_predict": max_tokens,
                "temperature": temperature,
                "samplers": ["temperature"],
                "seed": seed + index,
                "cache_prompt": False,
                "return_tokens": True,
            }
            reply = self.client.post("/completion", json=body)
            if reply.status_code != 200:
                raise SystemExit(f"llama-server answered {reply.status_code}: {reply.text[:300]}")
            found: dict[str, Any] = reply.json()
            return found

        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(one, range(len(prompts))))
        return read_replies(replies, time.perf_counter() - started)


def read_replies(replies: Sequence[dict[str, Any]], seconds: float) -> Answer:
    """Convert the answers of ``/completion`` to each prompt of a group that took so many seconds.

    The first token of an answer comes with the prompt; each pass after it gives one token and what it accepted of its draft.
    """
    timings = [reply["timings"] for reply in replies]
    gained = sum(max(timing["predicted_n"] - 1, 0) for timing in timings)
    return Answer(
        tokens=[reply["tokens"] for reply in replies],
        seconds=seconds,
        decode_seconds=max(timing["predicted_ms"] for timing in timings) / 1000,
        gained=gained,
        passes=gained - sum(timing.get("draft_n_accepted", 0) for timing in timings),
    )


@contextmanager
def server(
    row: LlamaRow, model: Path, drafter: Path | None, options: argparse.Namespace, batch: int, log: Path
) -> Iterator[Server]:
    """A server that decodes ``batch`` requests at once, each in a context of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(BINARIES / "llama-server"), "--model", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--threads", str(options.threads), "--threads-batch", str(options.threads), "--parallel", str(batch)]
    command += ["--ctx-size", str(batch * options.room), "--cache-ram", "0", "--no-webui", *row.arguments(drafter)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            found = Server(f"http://127.0.0.1:{port}", process.pid)
            wait_until_healthy(found, process, log)
            yield found
            found.client.close()
        finally:
            process.terminate()
            process.wait()


def wait_until_healthy(found: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    import httpx

    started = time.monotonic()
    while time.monotonic() - started < STARTED_WITHIN:
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with {process.returncode}; see {log}")
        with contextlib.suppress(httpx.TransportError):
            if found.client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"llama-server was not ready within {STARTED_WITHIN:.0f} s; see {log}")


# -- passes through the C interface, in a process of their own ---------------------------------------------------------
def bindings() -> Any:
    """The package's declarations of the C interface, without the rest of the package."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(BINARIES)
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(SOURCE / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


class Passes:
    """Times passes of a GGUF model over n tokens after a short context, with the logits of all of them."""

    def __init__(self, model: str, threads: int) -> None:
        self.api = api = bindings()
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 1024, threads, threads
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot load {model}")
        self.decode(0, CONTEXT)

    def decode(self, first: int, count: int) -> None:
        batch = self.api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for index in range(count):
            batch.token[index], batch.pos[index] = 100 + index, first + index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        self.api.llama_synchronize(self.context)
        self.api.llama_batch_free(batch)

    def seconds(self, count: int, repeats: int = 5) -> float:
        """The fastest of several passes after one that is not counted, as volley's own cost tables time a pass."""
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            self.decode(CONTEXT, count)
            times.append(time.perf_counter() - started)
            self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, CONTEXT, -1)
        return min(times[1:])
