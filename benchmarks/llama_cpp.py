"""volley against llama.cpp (and transformers, vLLM) on the same weights, prompts and threads.

    make peers
    python -m benchmarks.llama_cpp --shape 0.6b --prompts gsm8k --data-dir DATA --threads 2 --json runs/0.6b.json

The bundled pair is inflated to ``--shape`` (``inflate.py``); ``--pair FOLDER`` takes another, a folder that holds ``target``,
``drafter``, ``drafter-dflash`` and ``drafter-markov``. Every row has a process of its own. All rows are alive together and take
turns on each group of prompts; which of them goes first rotates. The first group is run once before, uncounted. Prompts are sent
as token ids.

Rows of llama.cpp are written ``WEIGHTS[+METHOD[:DEPTH[@TOKENS]]]``: ``bf16``, ``bf16+dflash:3``, ``q4_0+ngram-simple``;
``q8_0+dspark:5@16384`` drafts the first 16,384 tokens of the vocabulary alone. Rows of volley are a name and options of
``Engine.from_pretrained``: ``--volley chains policy=fixed:8``. Speeds count the tokens and the time after the first token where
one prompt is answered at a time; where several are, all tokens and all of the group's time, prompts included. Ctrl-C ends the run
early and prints what there is.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer, connected
from benchmarks.contenders import peak_bytes
from benchmarks.llama_peer import ROOT, LlamaRow, check_built, gguf, gguf_drafter, server
from volley.engine.capacity import PAGE_SIZE

SIZES = (1, 2, 4, 8, 16, 32)
SPARE_PAGES = 4  # of each request, for drafts beyond its room
VOLLEY = {
    "plain": {"drafter": None, "block_size": 1},
    "default": {},
    "drafts": {"policy": "goodput:drafts"},
}
DRAFTERS = {"dflash": "drafter-dflash", "dspark": "drafter-markov"}
"""The pair's folders by llama.cpp's methods: its Markov head is the only sequential head that llama.cpp knows."""
LLAMA = (
    "bf16",
    "bf16+dflash:3",
    "bf16+dspark:5@16384",
    "bf16+ngram-simple",
    "q8_0",
    "q8_0+dflash:3",
    "q8_0+dspark:5@16384",
    "q4_0",
    "q4_0+dspark:3@16384",
)


@dataclass
class Contender:
    """A row that is alive: what it answers, and how much memory it took."""

    ask: Callable[[Sequence[list[int]], int, float, int], Answer]
    pid: int


@dataclass(frozen=True)
class Setting:
    """Facts that a group of figures shares."""

    context: int
    """Tokens of each prompt; 0: as they come."""
    temperature: float
    batch: int


@dataclass
class Run:
    """One answer of one row to one group of prompts."""

    row: str
    setting: Setting
    group: int
    repeat: int
    answer: Answer

    @property
    def speed(self) -> float:
        """Tokens a second."""
        if self.setting.batch == 1:
            return self.answer.gained / max(self.answer.decode_seconds, 1e-9)
        return sum(map(len, self.answer.tokens)) / self.answer.seconds


@dataclass
class Measured:
    runs: list[Run] = field(default_factory=list)
    memory: dict[tuple[str, int], int] = field(default_factory=dict)
    """Peak bytes by row and number of prompts at once."""
    passes: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """Seconds of a pass by what makes it and its number of tokens."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Measured":
        """Return what :meth:`to_json` wrote."""
        runs = [
            Run(one["row"], Setting(**one["setting"]), one["group"], one["repeat"], Answer(**one["answer"]))
            for one in record["runs"]
        ]
        memory = {(one["row"], one["batch"]): one["peak_bytes"] for one in record["memory"]}
        return cls(runs, memory, record["passes"])

    def to_json(self) -> dict[str, Any]:
        runs = [asdict(run) | {"speed": run.speed} for run in self.runs]
        memory = [{"row": row, "batch": batch, "peak_bytes": size} for (row, batch), size in self.memory.items()]
        return {"runs": runs, "memory": memory, "passes": self.passes}


def read_text(path: Path, enough: int) -> str:
    """The first ``enough`` characters or a little more."""
    if path.suffix != ".jsonl":
        return path.read_text(encoding="utf-8")[:enough]
    text = ""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text += json.loads(line)["text"] + "\n\n"
            if len(text) >= enough:
                break
    return text


def passages(encode: Callable[[str], Sequence[int]], files: Sequence[Path], count: int, length: int) -> list[list[int]]:
    """``count`` passages of ``length`` tokens, as many from each file; the program ends if one of these is too short."""
    found: list[list[int]] = []
    for index, path in enumerate(files):
        wanted = count // len(files) + (index < count % len(files))
        tokens = encode(read_text(path, 8 * wanted * length)) if wanted else []
        own = [list(tokens[start : start + length]) for start in range(0, wanted * length, length)]
        if any(len(passage) < length for passage in own):
            raise SystemExit(f"{path} holds no {wanted} passages of {length} tokens; give more text")
        found += own
    return found


# -- who takes part ----------------------------------------------------------------------------------------------------


def parse_volley(groups: Sequence[Sequence[str]] | None) -> dict[str, dict[str, Any]]:
    """Rows from ``NAME KEY=VALUE …``; a value is JSON if it can be read as such."""
    rows = {}
    for name, *pairs in groups or ():
        options = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise SystemExit(f"--volley {name}: {pair!r} is no KEY=VALUE")
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                options[key] = value
        rows[name] = options
    return rows or VOLLEY


def num_pages(options: argparse.Namespace, batch: int) -> int:
    """Return the pages of ``batch`` requests, each with the room that llama.cpp gives it and some for drafts beyond it."""
    return batch * (options.room // PAGE_SIZE + SPARE_PAGES)


def volley_settings(options: argparse.Namespace, own: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """``drafter`` names a folder of the pair, or is ``None``. K/V get the room that llama.cpp's do, or ``num_pages``."""
    drafter = own.get("drafter", "drafter")
    found = {"num_pages": num_pages(options, batch), **own, "drafter": drafter and str(options.pair / drafter)}
    return {"target": str(options.pair / "target"), "threads": options.threads, "options": found}


@contextmanager
def process(
    options: argparse.Namespace, name: str, kind: str, settings: Mapping[str, Any]
) -> Iterator[tuple[Connection, int]]:
    """A line to a contender in a Python process of its own."""
    python = str({"vllm": "vllm_python", "openvino": "openvino_python"}.get(kind, ""))
    python = str(getattr(options, python)) if python else sys.executable
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": str(options.threads)}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}"}
    print(f"starting {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "line")
        code = "from benchmarks.contenders import main; main()"  # run as a module, its classes could not be sent
        command = [python, "-c", code, address, kind, json.dumps(settings)]
        with connected(command, environment, address, options.work / f"{name}.log") as found:
            yield found


def asker(name: str, line: Connection) -> Callable[..., Any]:
    def ask(*order: Any) -> Any:
        line.send(order)
        try:
            return line.recv()
        except EOFError:
            raise SystemExit(f"{name} ended; see its log in --work") from None

    return ask


@contextmanager
def contenders(options: argparse.Namespace, batch: int) -> Iterator[dict[str, Contender]]:
    """All rows, each in its process."""
    with ExitStack() as stack:
        found: dict[str, Contender] = {}

        def start(name: str, kind: str, settings: Mapping[str, Any]) -> None:
            line, pid = stack.enter_context(process(options, name.replace(" ", "-"), kind, settings))
            order = asker(name, line)
            found[name] = Contender(lambda *group: order("ask", *group), pid)

        for text in options.llama:
            print(f"starting llama.cpp {text}", file=sys.stderr, flush=True)
            row = LlamaRow.parse(text)
            model = gguf(options.pair / "target", row.weights, options.work)
            drafter = drafter_of(options, row) if row.drafts else None
            log = options.work / f"llama-{text.replace(':', '-')}-{batch}.log"
            alive = stack.enter_context(server(row, model, drafter, options, batch, log))
            found[f"llama.cpp {text}"] = Contender(alive.ask, alive.pid)
        for name, own in options.volley.items():
            start(f"volley {name}", "volley", volley_settings(options, own, batch))
        target = str(options.pair / "target")
        if options.transformers and batch == 1:
            start("transformers", "transformers", {"target": target, "threads": options.threads})
        if options.vllm_python:
            common = {"target": target, "room": options.room, "batch": batch}
            start("vllm", "vllm", {**common, "drafter": None})
            start("vllm dflash", "vllm", {**common, "drafter": str(options.pair / "drafter-dflash")})
        yield found


def drafter_of(options: argparse.Namespace, row: LlamaRow) -> Path:
    """In 8 bits, as volley drafts by default, and in fp32 for a target in fp32."""
    if row.method not in DRAFTERS:
        raise SystemExit(f"the pair has no drafter for {row.method!r}; there are {', '.join(DRAFTERS)}")
    weights = row.weights if row.weights == "f32" else "q8_0"
    return gguf_drafter(
        options.pair / DRAFTERS[row.method], weights, options.work, options.pair / "target", row.drafted
    )


# -- measuring ---------------------------------------------------------------------------------------------------------
def measure_answers(
    found: Mapping[str, Contender],
    setting: Setting,
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
    measured: Measured,
    save: Callable[[], None],
) -> None:
    """Every row on every group of prompts, in turn."""
    groups = [prompts[i : i + setting.batch] for i in range(0, len(prompts), setting.batch)]
    names = list(found)
    for name in names:
        found[name].ask(groups[0], options.max_tokens, setting.temperature, 0)
    for repeat in range(options.repeats):
        for index, group in enumerate(groups):
            turn = (index + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                answer = found[name].ask(group, options.max_tokens, setting.temperature, 1 + repeat)
                measured.runs.append(Run(name, setting, index, repeat, answer))
                measured.memory[name, setting.batch] = peak_bytes(found[name].pid)
            save()


def measure_passes(options: argparse.Namespace, measured: Measured) -> None:
    """Passes of n tokens by every type of llama.cpp's weights and every row of volley, in turn."""
    orders: dict[str, Callable[..., Any]] = {}
    with ExitStack() as stack:
        for weights in dict.fromkeys(LlamaRow.parse(text).weights for text in options.llama):
            settings = {"model": str(gguf(options.pair / "target", weights, options.work)), "threads": options.threads}
            line, _ = stack.enter_context(process(options, f"passes-{weights}", "passes", settings))
            orders[f"llama.cpp {weights}"] = asker(f"passes-{weights}", line)
        for name, own in options.volley.items():
            settings = volley_settings(options, own, 1)
            line, _ = stack.enter_context(process(options, f"passes-volley-{name}", "volley", settings))
            orders[f"volley {name}"] = asker(f"passes-volley-{name}", line)
        for turn in range(options.pass_rounds):
            names = list(orders)[turn % len(orders) :] + list(orders)[: turn % len(orders)]
            for size in SIZES:
                for name in names:
                    add_pass(measured, name, size, orders[name]("target", size))
                    if name.startswith("volley") and size > 1:
                        add_pass(measured, f"{name}, draft", size, orders[name]("draft", size))


def add_pass(measured: Measured, name: str, size: int, seconds: float | None) -> None:
    if seconds is not None:
        measured.passes.setdefault(name, {}).setdefault(size, []).append(seconds)


# -- prompts -----------------------------------------------------------------------------------------------------------
def load(options: argparse.Namespace) -> dict[int, list[list[int]]]:
    """Token ids of the prompts by the length of the context; ``options.room`` becomes the tokens that a request may need."""
    from volley.chat import encode_prompt
    from volley.files import read_json
    from volley.models.targets.target import load_tokenizer
    from volley.prompts import load_prompts

    tokenizer = load_tokenizer(options.pair / "target")
    limit = read_json(options.pair / "target" / "config.json")["max_position_embeddings"]
    found: dict[int, list[list[int]]] = {}
    for context in options.contexts if options.num_prompts else ():
        if context == 0:
            chosen = load_prompts(options.prompts, options.data_dir, options.skip_prompts + options.num_prompts)
            chats = [list(conversation.messages) for conversation in chosen[options.skip_prompts :]]
            found[0] = [encode_prompt(tokenizer, chat) for chat in chats]
        else:
            length = min(context, limit - options.max_tokens)
            before = encode_prompt(tokenizer, [{"role": "user", "content": "Write a long text."}])
            if not options.texts:
                raise SystemExit("--contexts needs --texts: files to take passages from")
            found[context] = [
                before + text
                for text in passages(
                    lambda text: tokenizer(text)["input_ids"], options.texts, options.num_prompts, length - len(before)
                )
            ]
    longest = max((len(prompt) for prompts in found.values() for prompt in prompts), default=0)
    options.room = min(-(-(longest + options.max_tokens) // 256) * 256, limit)  # llama.cpp rounds to 256
    return found


# -- what it came to ---------------------------------------------------------------------------------------------------
def spread(speeds: Sequence[float]) -> str:
    if len(speeds) < 2:
        return " ".join(f"{speed:.1f}" for speed in speeds)
    low, middle, high = statistics.quantiles(speeds, n=4, method="inclusive")
    return f"{middle:.1f} ({low:.1f}–{high:.1f})"


def best_rows(speeds: Mapping[str, Mapping[Any, float]]) -> dict[str, str]:
    """llama.cpp's fastest row of each type of weights, by the median over groups."""
    medians = {name: statistics.median(own.values()) for name, own in speeds.items() if name.startswith("llama.cpp ")}
    best: dict[str, str] = {}
    for name, median in medians.items():
        weights = LlamaRow.parse(name.removeprefix("llama.cpp ")).weights
        if weights not in best or median > medians[best[weights]]:
            best[weights] = name
    return best


def ratio(own: Mapping[Any, float], other: Mapping[Any, float]) -> str:
    """The median of the ratios on the same group in the same turn; empty if there is none."""
    ratios = [own[key] / other[key] for key in own if key in other]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def same_answers(own: Sequence[Run], plain: Sequence[Run]) -> str:
    """How many greedy answers are those of plain decoding."""
    expected = {(run.group, run.repeat): run.answer.tokens for run in plain}
    both = [(run.answer.tokens, expected[run.group, run.repeat]) for run in own if (run.group, run.repeat) in expected]
    equal = [one == other for answers in both for one, other in zip(*answers, strict=True)]
    return f"{sum(equal)}/{len(equal)}" if equal and own[0].setting.temperature == 0 else ""


def answers_table(measured: Measured, setting: Setting) -> str:
    """One line a row: speed, ratios to llama.cpp's best of each type of weights, τ, equal answers, memory."""
    runs = [run for run in measured.runs if run.setting == setting]
    speeds: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    of_row: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        speeds[run.row][run.group, run.repeat] = run.speed
        of_row[run.row].append(run)
    best = best_rows(speeds)
    heads = ["row", "tokens/s (quartiles)", *(f"× {name}" for name in best.values()), "τ", "same answers", "peak MiB"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, own in of_row.items():
        ratios = [ratio(speeds[name], speeds[other]) for other in best.values()]
        tau = sum(run.answer.gained for run in own) / max(sum(run.answer.passes for run in own), 1)
        same, memory = same_answers(own, of_row.get("volley plain", ())), measured.memory[name, setting.batch] / 2**20
        cells = [name, spread(list(speeds[name].values())), *ratios, f"{tau:.2f}", same, f"{memory:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    context = f"prompts of {setting.context} tokens" if setting.context else "prompts as they are"
    return f"{context}, T = {setting.temperature:g}, {setting.batch} at once\n\n" + "\n".join(lines)


def passes_table(measured: Measured) -> str:
    """Milliseconds of a pass: the median over rounds."""
    lines = ["ms of a pass of n tokens | " + " | ".join(map(str, SIZES)), "---|" * (len(SIZES) + 1)]
    for name, own in measured.passes.items():
        cells = [f"{statistics.median(own[size]) * 1000:.1f}" if size in own else "" for size in SIZES]
        lines.append(" | ".join([name, *cells]))
    return "\n".join(f"| {line} |" if not line.startswith("---") else f"|{line}" for line in lines)


VECTORS = {"amx_tile": "AMX", "avx512_vnni": "AVX512", "avx2": "AVX2 alone"}
"""The widest instructions of a CPU, by their flag in /proc/cpuinfo."""


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """The machine, the commit and the options."""

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return found.stdout.strip()

    about_cpu = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.partition(":")[2].strip() for line in about_cpu if "model name" in line]
    flags = next((line.split() for line in about_cpu if line.startswith("flags")), [])
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else ""),
        "cpu": cpu[0] if cpu else platform.processor(),
        "vectors": next((name for flag, name in VECTORS.items() if flag in flags), "no AVX2"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "options": {key: str(value) for key, value in vars(options).items()},
    }


def report(measured: Measured, about: Mapping[str, Any]) -> str:
    settings = dict.fromkeys(run.setting for run in measured.runs)
    parts = [answers_table(measured, setting) for setting in settings]
    if measured.passes:
        parts.append(passes_table(measured))
    head = "{cpu}, {cores} cores, load {load:.1f} at the start; commit {commit}, {date}".format(**about)
    return "\n\n".join([head, *parts])


# -- the command -------------------------------------------------------------------------------------------------------
def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--shape", default="0.6b", help="shape to inflate the bundled pair to; none: as it is")
    own.add_argument("--pair", type=Path, help="folder with target and drafters instead")
    own.add_argument("--llama", nargs="*", default=LLAMA, metavar="ROW", help=f"by default {' '.join(LLAMA)}")
    own.add_argument(
        "--volley", action="append", nargs="+", metavar=("NAME", "KEY=VALUE"), help=f"by default {', '.join(VOLLEY)}"
    )
    own.add_argument("--transformers", action="store_true", help="transformers' plain generate, too")
    own.add_argument("--vllm-python", type=Path, help="python that has vLLM's CPU build; adds its rows")
    own.add_argument("--prompts", default="gsm8k", help="name of a dataset or JSONL file of prompts")
    own.add_argument("--data-dir", type=Path, help="folder with the datasets' files")
    own.add_argument("--num-prompts", type=int, default=16, help="0 measures passes only")
    own.add_argument("--skip-prompts", type=int, default=0)
    own.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[0],
        help="0: prompts as they are; N: passages of N tokens of --texts",
    )
    own.add_argument("--texts", type=Path, nargs="*", default=[], help="long texts for --contexts")
    own.add_argument("--max-tokens", type=int, default=96)
    own.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    own.add_argument("--batches", type=int, nargs="+", default=[1])
    own.add_argument("--repeats", type=int, default=1)
    own.add_argument("--pass-rounds", type=int, default=5, help="0 leaves single passes out")
    own.add_argument("--threads", type=int, default=os.cpu_count(), help="of every row")
    own.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "llama-cpp", help="folder for converted models and logs"
    )
    own.add_argument("--json", type=Path, help="where to save every run, after each group")
    options = own.parse_args(arguments)
    options.volley = parse_volley(options.volley)
    return options


def prepare(options: argparse.Namespace) -> None:
    """The pair, inflated if it is not there yet."""
    if options.pair is None and options.shape == "none":
        options.pair = ROOT / "src" / "volley" / "reference"
    elif options.pair is None:
        options.pair = options.work / f"pair-{options.shape}"
        if not (options.pair / DRAFTERS["dspark"] / "model.safetensors").exists():  # the last that is written
            command = [sys.executable, str(ROOT / "benchmarks" / "inflate.py"), str(options.pair)]
            command += ["--shape", options.shape]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    options.work = options.work / options.pair.name
    options.work.mkdir(parents=True, exist_ok=True)


def main() -> None:
    options = parse_arguments()
    if options.llama:
        check_built()
    prepare(options)
    measured, about = Measured(), circumstances(options)

    def save() -> None:
        if options.json:
            from volley.files import write_atomically

            write_atomically(options.json, json.dumps({"about": about, **measured.to_json()}, indent=1) + "\n")

    try:
        prompts = load(options)
        if options.pass_rounds:
            measure_passes(options, measured)
            save()
        for batch in options.batches if prompts else ():
            with contenders(options, batch) as found:
                for context, own in prompts.items():
                    for temperature in options.temperatures:
                        measure_answers(found, Setting(context, temperature, batch), own, options, measured, save)
    except KeyboardInterrupt:
        print("interrupted; what was measured:", file=sys.stderr)
    print(report(measured, about))


if __name__ == "__main__":
    main()
