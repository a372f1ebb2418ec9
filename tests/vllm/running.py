"""vLLM's OpenAI server in processes of its own, for the tests that ask it."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[str]:
    """The server's URL, once it is healthy; ``command`` lacks host and port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            wait_for(lambda: is_healthy(process, port, log), 600)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # it does not hear while it loads
                process.kill()


def is_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


def wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def metric(server: str, name: str) -> float:
    lines = httpx.get(f"{server}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")))
