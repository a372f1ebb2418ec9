"""Perplexity and memory of a target by the kind of its weights, and of GGUF files; where llama.cpp is built, its own figures too.

Texts are joined and cut into chunks as llama-perplexity cuts them: each chunk is read alone, and its second half is scored. If
the tokenizer adds a BOS token, it replaces a chunk's first token. Two things differ: llama.cpp cuts text into tokens by the
tokenizer of the file, and keeps K and V in fp16. Every row is a process of its own. Peaks: that of volley is of loading and one
token, that of llama.cpp includes the logits of its batches.

python -m benchmarks.perplexity DIR/gsm8k_test.jsonl
python -m benchmarks.perplexity DIR/gsm8k_test.jsonl --target runs/llama-cpp/pair-0.6b/target --llama bf16,q8_0,q4_0
python -m benchmarks.perplexity DIR/gsm8k_test.jsonl --weights "" --gguf MODEL.gguf --chunks 40 --json RECORD
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.llama_cpp import circumstances
from benchmarks.llama_peer import BINARIES, check_built, gguf
from volley.files import REFERENCE, write_atomically
from volley.prompts import read_jsonl

if TYPE_CHECKING:
    from volley import Engine

SCORED_AT_ONCE = 32  # rows of logits in fp32
_ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+)")


class Figures(NamedTuple):
    perplexity: float
    tokens: int | None
    """Tokens that were scored; llama.cpp does not say."""
    peak: int
    """Bytes."""


def perplexity(engine: "Engine", token_ids: Sequence[int], chunk: int) -> tuple[float, int]:
    """Return the perplexity of the second halves of all whole chunks, and the number of their tokens.

    A BOS token replaces each chunk's first token if the tokenizer adds one.
    """
    import torch

    from volley.memory.batch import RaggedBatch, Segment
    from volley.memory.kv_cache import BlockTable

    loss, count = 0.0, 0
    added = engine.tokenizer.encode("")[:1]
    begins = added if added == [engine.tokenizer.bos_token_id] else []
    rows = torch.arange(chunk // 2, chunk - 1)
    for first in range(0, len(token_ids) - chunk + 1, chunk):
        own = [*begins, *token_ids[first + len(begins) : first + chunk]]
        tokens, table = torch.tensor(own), BlockTable(engine.core.pool.page_size)
        assert engine.core.pool.grow(table, chunk), "nothing else uses the pool"
        with torch.inference_mode():
            logits = engine.target.forward(
                RaggedBatch([Segment(table, 0, chunk)], tokens), engine.core.runner.store, rows
            )
            for part in torch.split(torch.arange(len(rows)), SCORED_AT_ONCE):
                wanted = tokens[rows[part] + 1]
                loss += torch.nn.functional.cross_entropy(logits[part].float(), wanted, reduction="sum").item()
        engine.core.pool.release(table)
        count += len(rows)
    if not count:
        raise SystemExit(f"the texts have {len(token_ids)} tokens, fewer than one chunk of {chunk}; give more text")
    return float(torch.tensor(loss / count).exp()), count


def measure(options: argparse.Namespace) -> Figures:
    """In the process that is asked for one row."""
    import torch

    from benchmarks.contenders import peak_bytes
    from volley import Engine

    torch.set_num_threads(options.threads)
    pages = -(-options.chunk // 16) + 8
    own = {"dtype": torch.float32} if options.one == "fp32" else {"weights": options.one}
    engine = Engine.from_pretrained(options.target, drafter=None, num_pages=pages, **own)
    token_ids = engine.tokenizer.encode(options.texts[0].read_text(encoding="utf-8"), add_special_tokens=False)
    engine.next_logits(token_ids[:1])
    peak = peak_bytes(os.getpid())
    return Figures(*perplexity(engine, token_ids[: options.chunks * options.chunk], options.chunk), peak)


def row_in_a_process(target: str | Path, weights: str, text: Path, options: argparse.Namespace) -> Figures:
    command = [sys.executable, __file__, str(text), "--target", str(target), "--one", weights]
    command += [f"--{name}={getattr(options, name)}" for name in ("chunk", "chunks", "threads")]
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    return Figures(*json.loads(found.stdout.splitlines()[-1]))


def llama_row(model: Path, text: Path, options: argparse.Namespace) -> Figures:
    command = [str(BINARIES / "llama-perplexity"), "--model", str(model), "--file", str(text)]
    command += ["--ctx-size", str(options.chunk), "--chunks", str(options.chunks), "--threads", str(options.threads)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Figures(read_estimate(output.read()), None, usage.ru_maxrss * 1024)


def read_estimate(output: str) -> float:
    """The perplexity that llama-perplexity prints."""
    found = _ESTIMATE.search(output)
    if found is None:
        raise SystemExit(f"llama-perplexity gave no estimate: {output[-500:]}")
    return float(found[1])


def joined(files: Sequence[Path], skip: int) -> str:
    """The texts of all rows of JSONL files but the first of each file: every field that is text."""
    rows: list[dict[str, Any]] = [row for file in files for _, row in list(read_jsonl(file))[skip:]]
    return "\n\n".join("\n".join(value for value in row.values() if isinstance(value, str)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, nargs="+", help="JSONL")
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--weights", default="bf16,int8,int4")
    parser.add_argument("--gguf", nargs="*", default=[], help="GGUF files, read in their codes and decoded to fp32")
    parser.add_argument(
        "--llama", default="", help="types for llama.cpp and, as GGUF files, for volley, such as bf16,q8_0,q4_0"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/perplexity"))
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=20, help="at most")
    parser.add_argument("--skip", type=int, default=40, help="rows of each file that may have chosen a setting")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="record")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    text = options.work / "text.txt"
    text.write_text(joined(options.texts, options.skip), encoding="utf-8")
    about, rows = circumstances(options), []
    about["options"] = {
        "texts": [file.name for file in options.texts],
        "chunk": options.chunk,
        "chunks": options.chunks,
    }
    print("| | weights | perplexity | tokens scored | peak, MiB |\n|---|---|---|---|---|")

    def show(what: str, weights: str, found: Figures) -> None:
        rows.append({"row": what, "weights": weights, **found._asdict()})
        print(
            f"| {what} | {weights} | {found.perplexity:.3f} | {found.tokens or ''} | {found.peak / 2**20:.0f} |",
            flush=True,
        )

    for weights in filter(None, options.weights.split(",")):
        show("volley", weights, row_in_a_process(options.target, weights, text, options))
    files = [Path(file) for file in options.gguf]
    if options.llama:
        check_built()
        files += [gguf(Path(options.target), kind, options.work) for kind in options.llama.split(",")]
    for file in files:
        for weights in ("auto", "fp32"):
            show(f"volley, {file.name}", weights, row_in_a_process(file, weights, text, options))
        if (BINARIES / "llama-perplexity").exists():
            show(f"llama.cpp, {file.name}", "", llama_row(file, text, options))
    if options.json:
        write_atomically(options.json, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
