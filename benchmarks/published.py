"""volley on published models beside llama.cpp, OpenVINO GenAI and transformers: one file, one set of prompts, one table.

    make peers openvino
    python -m benchmarks.published --data-dir DATA --models DIR --json benchmarks/results/published.json

``--models`` is a folder with the GGUF files of ``MODELS``, as they are downloaded. Each row is a process of its own. The rows of
a model are alive together and take turns on each group of prompts; which of them goes first rotates. The first group is run once
before, uncounted. Prompts are sent as token ids.

A row is written ``PROGRAM WEIGHTS[+METHOD]``. Weights are ``file`` (as downloaded), or a type that ``llama-quantize`` makes of
it: ``volley file``, ``volley q4_0+plain``, ``llama.cpp file+ngram-simple``, ``llama.cpp q4_0+dspark:4``,
``openvino int4+lookup``, ``transformers bf16``. ``volley`` without a method is the default, with the model's drafter if there is
one; ``+copies`` drafts by prompt lookup alone, ``+plain`` drafts nothing, and ``+drafter:POLICY`` sets the policy.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.llama_cpp import (
    Contender,
    Measured,
    Run,
    Setting,
    asker,
    circumstances,
    measure_answers,
    num_pages,
    process,
    same_answers,
    spread,
)
from benchmarks.llama_peer import ROOT, LlamaRow, check_built, gguf_drafter, quantised, server


@dataclass(frozen=True)
class Model:
    """A GGUF file, and the name of the drafter that volley has for it."""

    file: str
    drafter: str | None = None


MODELS = {
    "smollm2-135m": Model("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m"),
    "qwen2.5-coder-0.5b": Model("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "qwen2.5-coder-0.5b"),
    "gemma-3-270m": Model("gemma-3-270m.Q4_K_M.gguf"),
}
TEXTS = {"code": ("humaneval", "mbpp"), "arithmetic": ("gsm8k",), "chat": ("mt-bench", "alpaca")}
ROWS = (
    "volley file+plain",
    "volley file+copies",
    "volley file",
    "volley q4_0+plain",
    "volley q4_0",
    "llama.cpp file",
    "llama.cpp file+ngram-simple",
    "llama.cpp q4_0",
    "llama.cpp q4_0+ngram-simple",
)
RECORDED = (
    "rows",
    "texts",
    "num_prompts",
    "skip_prompts",
    "contexts",
    "max_tokens",
    "temperatures",
    "batches",
    "repeats",
    "threads",
)
"""Options that a record keeps: folders are of one machine."""
OPENVINO = ("openvino int8", "openvino int8+lookup", "openvino int4", "openvino int4+lookup")


@dataclass(frozen=True)
class Row:
    """A program, its weights and how it drafts."""

    program: str
    weights: str
    method: str

    @classmethod
    def parse(cls, text: str) -> "Row":
        program, _, rest = text.partition(" ")
        weights, _, method = rest.partition("+")
        if program not in ("volley", "llama.cpp", "openvino", "transformers") or not weights:
            raise SystemExit(f"{text!r} is no row; write for example 'volley file' or 'llama.cpp q4_0+ngram-simple'")
        return cls(program, weights, method)

    def __str__(self) -> str:
        return f"{self.program} {self.weights}{self.method and '+'}{self.method}"


# -- files -------------------------------------------------------------------------------------------------------------
def weights_file(model: Path, weights: str, work: Path) -> Path:
    """Return the GGUF file of ``model`` in ``weights``, requantised by llama.cpp unless it is the file itself."""
    if weights == "file":
        return model
    made = work / f"{model.stem}-{weights}.gguf"
    return made if made.exists() else quantised(model, made, weights)


def dequantised(model: Path, work: Path) -> Path:
    """Return a Hugging Face folder with the file's numbers in bf16, for programs that read no GGUF."""
    folder = work / f"{model.stem}-bf16"
    if not (folder / "config.json").exists():
        import torch

        from volley.models.targets.loading import load_causal_lm
        from volley.models.targets.target import load_tokenizer

        target = load_causal_lm(str(model), torch.bfloat16, "sdpa")
        target.save_pretrained(folder)
        load_tokenizer(model).save_pretrained(folder)
    return folder


def openvino_folder(model: Path, weights: str, options: argparse.Namespace) -> Path:
    """Return the folder that OpenVINO's own converter makes of the dequantised model."""
    folder = Path(options.work) / f"{model.stem}-openvino-{weights}"
    if not (folder / "openvino_model.xml").exists():
        command = [str(options.openvino_python.parent / "optimum-cli"), "export", "openvino", "--model"]
        command += [str(dequantised(model, options.work)), "--task", "text-generation-with-past"]
        command += ["--weight-format", weights, *(["--group-size", "64"] if weights == "int4" else []), str(folder)]
        with folder.with_suffix(".log").open("w") as log:
            if subprocess.run(command, stdout=log, stderr=log).returncode:
                raise SystemExit(f"OpenVINO's converter failed; see {log.name}")
    return folder


# -- who takes part ----------------------------------------------------------------------------------------------------
def start(stack: ExitStack, row: Row, model: Model, batch: int, options: argparse.Namespace) -> Contender | None:
    """Start a row's process; ``None`` where the program has no such row."""
    file, label = options.models / model.file, str(row).replace(" ", "-").replace(":", "-")
    if row.program == "llama.cpp":
        own = LlamaRow.parse(f"{row.weights}+{row.method}" if row.method else row.weights)
        drafter = None
        if own.drafts:
            folder = named_drafter(model)
            if folder is None:
                return None
            drafter = gguf_drafter(folder, "q8_0", options.work, file, own.drafted)
        path = weights_file(file, row.weights, options.work)
        found = stack.enter_context(server(own, path, drafter, options, batch, options.work / f"{label}-{batch}.log"))
        return Contender(found.ask, found.pid)
    if row.program == "volley":
        settings = volley_settings(row, model, batch, options)
        if settings is None:
            return None
        line, pid = stack.enter_context(process(options, label, "volley", settings))
    elif batch > 1:
        return None  # one prompt at a time is what these programs' own loops serve
    elif row.program == "openvino":
        folder = openvino_folder(file, row.weights, options)
        settings = {"folder": str(folder), "threads": options.threads, "lookup": row.method == "lookup"}
        line, pid = stack.enter_context(process(options, label, "openvino", settings))
    else:
        settings = {"target": str(dequantised(file, options.work)), "threads": options.threads}
        line, pid = stack.enter_context(process(options, label, "transformers", settings))
    order = asker(label, line)
    return Contender(lambda *group: order("ask", *group), pid)


def volley_settings(row: Row, model: Model, batch: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the options of ``Engine.from_pretrained``, with as many pages as llama.cpp has room for."""
    own: dict[str, Any] = {"num_pages": num_pages(options, batch)}
    if row.method == "plain":
        own |= {"drafter": None, "block_size": 1}
    elif row.method == "copies":
        if named_drafter(model) is None:
            return None  # this is the default
        own["drafter"] = None
    elif row.method.startswith("drafter"):
        if named_drafter(model) is None:
            return None
        own["drafter"] = model.drafter
        _, _, policy = row.method.partition(":")
        own |= {"policy": policy} if policy else {}
    target = weights_file(options.models / model.file, row.weights, options.work)
    return {"target": str(target), "threads": options.threads, "options": own}


def named_drafter(model: Model) -> Path | None:
    from volley.files import REFERENCE

    folder = REFERENCE / (model.drafter or "")
    return folder if model.drafter and (folder / "config.json").exists() else None


# -- prompts -----------------------------------------------------------------------------------------------------------
def load(model: Model, options: argparse.Namespace) -> dict[tuple[str, int], list[list[int]]]:
    """Return token ids of the prompts by kind of text and context; ``options.room`` becomes the tokens that a request needs."""
    from volley.chat import encode_prompt
    from volley.models.targets.target import load_tokenizer
    from volley.prompts import load_prompts

    tokenizer = load_tokenizer(options.models / model.file)
    found = {}
    for kind in options.texts:
        sets = [load_prompts(name, options.data_dir) for name in TEXTS[kind]]
        chosen = [own[options.skip_prompts + index] for index in range(options.num_prompts) for own in sets]
        chats = [conversation.messages for conversation in chosen[: options.num_prompts]]
        if not tokenizer.chat_template:
            chats = [chat[0]["content"] for chat in chats]
        own = [encode_prompt(tokenizer, chat) for chat in chats]
        others = [encode_prompt(tokenizer, chat) for chat in chats[::-1]]
        for context in options.contexts:
            found[kind, context] = [lengthened(prompt, others, context) for prompt in own]
    longest = max(len(prompt) for prompts in found.values() for prompt in prompts)
    options.room = -(-(longest + options.max_tokens) // 256) * 256  # llama.cpp rounds to 256
    return found


def lengthened(prompt: list[int], others: Sequence[list[int]], context: int) -> list[int]:
    """Put other prompts of the kind before ``prompt`` until it has ``context`` tokens; 0 leaves it as it is."""
    before: list[int] = []
    while len(before) + len(prompt) < context:
        before += [token for other in others if other != prompt for token in other] or prompt
    return before[: max(context - len(prompt), 0)] + prompt


# -- what it came to ---------------------------------------------------------------------------------------------------
def table(measured: Measured, kind: str, setting: Setting, loads: Mapping[str, float]) -> str:
    """Return a line a row: speed, ratios to the fastest peer prompt by prompt, first token, τ, equal answers, load, memory."""
    rows: dict[str, list[Run]] = {}
    for run in measured.runs:
        if run.setting == setting:
            rows.setdefault(run.row, []).append(run)
    speeds = {name: {(run.group, run.repeat): run.speed for run in own} for name, own in rows.items()}
    peers = [name for name in rows if not name.startswith("volley")]
    best = {}
    for weights in ("file", "any"):
        own = [name for name in peers if weights == "any" or Row.parse(name).weights == "file"]
        if own:
            best[weights] = max(own, key=lambda name: statistics.median(speeds[name].values()))
    heads = ["row", "tokens/s (quartiles)", *(f"× {name}" for name in dict.fromkeys(best.values()))]
    heads += ["first token, ms", "τ", "as plain", "load, s", "peak, MiB"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, own in rows.items():
        ratios = []
        for other in dict.fromkeys(best.values()):  # an answer of one token has no speed
            both = [(speed, speeds[other][key]) for key, speed in speeds[name].items()]
            ratios.append(f"{statistics.median(a / b for a, b in both if b > 0):.2f}")
        tau = sum(run.answer.gained for run in own) / max(sum(run.answer.passes for run in own), 1)
        first = statistics.median(run.answer.seconds - run.answer.decode_seconds for run in own) * 1000
        plain = rows.get(f"volley {Row.parse(name).weights}+plain", [])
        same = same_answers(own, plain) if name.startswith("volley") else ""
        cells = [name, spread(list(speeds[name].values())), *ratios, f"{first:.0f}", f"{tau:.2f}", same]
        cells += [f"{loads[name]:.1f}", f"{measured.memory[name, setting.batch] / 2**20:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    context = f"prompts of {setting.context} tokens" if setting.context else "prompts as they are"
    return f"{kind}, {context}, T = {setting.temperature:g}, {setting.batch} at once\n\n" + "\n".join(lines)


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a page of docs/benchmarks: of each record its circumstances, and a table of each model and setting."""
    parts, machine = [_HEAD], ""
    for record in records:
        about, model = record["about"], None
        if (own := _MACHINE.format(**about)) != machine:
            machine = own
            parts.append(machine)
        parts.append(_RUN.format(**about, **about["options"]))
        for entry in record["measured"]:
            if entry["model"] != model:
                model = entry["model"]
                parts.append(f"### {model}")
            measured = Measured.from_json(entry)
            parts.append(table(measured, entry["texts"], measured.runs[0].setting, entry["load_seconds"]))
    return "\n\n".join(parts) + "\n"


_HEAD = """# Published models beside llama.cpp

- **What**: volley and llama.cpp on the same GGUF files, prompts and threads, prompt by prompt in turn. `file` is the file as it
  is downloaded, `q4_0` what llama.cpp's own quantiser makes of it. Ratios are medians over prompts: against the fastest row of
  other programs on the file, and against their fastest row of all.
- *as plain*: greedy answers that equal volley's plain decoding of the same weights.
- `python -m benchmarks.published` measures, and `--page RECORD …` prints this page. So few prompts tell a tenth."""

_MACHINE = "## {cpu} with {vectors}, {cores} cores"

_RUN = """`--num-prompts {num_prompts} --skip-prompts {skip_prompts} --max-tokens {max_tokens}` with the rows below, load
{load:.1f} at the start, commit {commit}, {date}."""


def measure(name: str, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Run all settings of one model; tables are printed and records saved as they come."""
    from volley.files import write_atomically

    model = MODELS[name]
    prompts = load(model, options)
    for batch in options.batches:
        with ExitStack() as stack:
            found: dict[str, Contender] = {}
            loads: dict[str, float] = {}
            for row in map(Row.parse, options.rows):
                started = time.perf_counter()
                contender = start(stack, row, model, batch, options)
                if contender is not None:
                    found[str(row)], loads[str(row)] = contender, time.perf_counter() - started
            for (kind, context), own in prompts.items():
                for temperature in options.temperatures:
                    setting, measured = Setting(context, temperature, batch), Measured()
                    measure_answers(found, setting, own, options, measured, lambda: None)
                    print(f"\n{name}: {table(measured, kind, setting, loads)}", flush=True)
                    entry = {"model": name, "texts": kind, "load_seconds": loads, **measured.to_json()}
                    record["measured"].append(entry)
                    if options.json:
                        options.json.parent.mkdir(parents=True, exist_ok=True)
                        write_atomically(options.json, json.dumps(record, indent=1) + "\n")


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--models", type=Path, default=ROOT / "runs" / "models", help="folder with the GGUF files")
    own.add_argument(
        "--page", type=Path, nargs="+", metavar="RECORD", help="print the page of these records, and measure nothing"
    )
    own.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    own.add_argument("--rows", nargs="+", help=f"by default {', '.join(ROWS)}, and OpenVINO's where it is installed")
    own.add_argument("--openvino-python", type=Path, default=ROOT / ".venv-openvino" / "bin" / "python")
    own.add_argument("--data-dir", type=Path, help="folder with the datasets' files")
    own.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    own.add_argument("--num-prompts", type=int, default=8, help="of each kind of text")
    own.add_argument("--skip-prompts", type=int, default=0, help="of each data set")
    own.add_argument("--contexts", type=int, nargs="+", default=[0], help="0: prompts as they are")
    own.add_argument("--max-tokens", type=int, default=128)
    own.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    own.add_argument("--batches", type=int, nargs="+", default=[1])
    own.add_argument("--repeats", type=int, default=1)
    own.add_argument("--threads", type=int, default=os.cpu_count(), help="of every row")
    own.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "published", help="folder for converted models and logs"
    )
    own.add_argument("--json", type=Path, help="where to save the record")
    options = own.parse_args()
    if options.page:
        print(page([json.loads(record.read_text(encoding="utf-8")) for record in options.page]), end="")
        return
    options.rows = options.rows or [*ROWS, *(OPENVINO if options.openvino_python.exists() else ())]
    options.work.mkdir(parents=True, exist_ok=True)
    check_built()
    about = circumstances(options)
    about["options"] = {name: about["options"][name] for name in RECORDED}
    record: dict[str, Any] = {"about": about, "measured": []}
    for name in options.model:
        measure(name, options, record)


if __name__ == "__main__":
    main()
