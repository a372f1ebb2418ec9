"""llama-server as ``make peers`` builds it, answering one request at a time with numbers kept in fp32."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PEERS = Path(os.environ.get("VOLLEY_PEERS", Path(__file__).parents[2] / ".peers"))
SERVER = PEERS / "build" / "bin" / "llama-server"
SOURCE = PEERS / "llama-cpp-python" / "vendor" / "llama.cpp"
EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
STARTED_WITHIN, STOPPED_WITHIN = 120.0, 20.0  # seconds


@dataclass(frozen=True)
class LlamaAnswer:
    token_ids: list[int]
    drafted: int
    accepted: int


@contextmanager
def llama_server(log: Path, *arguments: str) -> Iterator[httpx.Client]:
    """A server with these arguments; what it prints is in ``log``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(SERVER), "--host", "127.0.0.1", "--port", port, "--threads", "1", "--parallel", "1", "-c", "1024"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--no-webui", *arguments], stdout=output, stderr=output)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                _wait_until_ready(client, process, log)
                yield client
        finally:
            process.terminate()
            try:
                process.wait(STOPPED_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    started = time.monotonic()
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        with suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        assert time.monotonic() - started < STARTED_WITHIN, f"not ready in time: {log.read_text()[-2000:]}"
        time.sleep(0.1)


def ask(client: httpx.Client, prompt: Sequence[int], max_tokens: int) -> LlamaAnswer:
    """The greedy answer to token ids, and what became of the drafts."""
    body = {
        "prompt": list(prompt),
        "n_predict": max_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "return_tokens": True,
    }
    reply = client.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    timings = found["timings"]
    return LlamaAnswer(found["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


_CONVERT = """
import runpy, sys
sys.path[:0] = [{source!r}, {package!r}]
from conversion import base, gemma, phi
def no_sentencepiece(self):
    raise FileNotFoundError  # asked first, and its package is not needed for anything else
base.TextModel._create_vocab_sentencepiece = no_sentencepiece
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # it knows published tokenizers only
for model in (gemma.GemmaModel, gemma.Gemma2Model, phi.Phi3MiniModel):
    model.set_vocab = base.TextModel._set_vocab_gpt2
for arguments in {calls!r}:
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")
"""


def convert(folder: Path, out: Path) -> Path:
    """A target's folder as llama.cpp's converter writes it, in bf16."""
    convert_all({folder: out}, "bf16")
    return out


def convert_all(files: Mapping[Path, Path], kind: str) -> None:
    """Convert folders to files of ``kind``, in one process; layers that predict further tokens are left out."""
    script, ending = str(SOURCE / "convert_hf_to_gguf.py"), ["--no-mtp", "--outtype", kind, "--outfile"]
    calls = []
    for folder, out in files.items():
        predicts = (
            "Qwen3Next" in (folder / "config.json").read_text() or "Qwen3_5" in (folder / "config.json").read_text()
        )
        calls.append([script, str(folder), *ending[not predicts :], str(out)])
    code = _CONVERT.format(source=str(SOURCE), package=str(SOURCE / "gguf-py"), calls=calls)
    _run(sys.executable, "-c", code)


def quantise(source: Path, out: Path, kind: str) -> Path:
    _run(str(SERVER.with_name("llama-quantize")), "--allow-requantize", str(source), str(out), kind)
    return out


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
