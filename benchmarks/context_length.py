"""τ, speed, memory and first tokens by the length of the context: the same passages continued from the same point, with more
or less text before it.

    python benchmarks/context_length.py DIR/peps.jsonl --lengths 256,1024,4096 --stretch 4 --draft-windows 0,256

The files are JSONL with a ``text`` in each row, or plain text. Each passage is given as the beginning of the target's answer
and continued for ``--max-tokens``, so that the context ends at the length named; lengths beyond the target's context are left
out. ``--stretch 4`` runs a copy of the target whose rotary embedding reaches four times as far (YaRN), untrained. A draft window
of 0 is the whole context, "own" what the drafter brings. With ``--plain`` every passage is continued without a drafter as well.
``--reader`` names the target that ``--target`` was inflated from: it reads the passages (``benchmarks/reader.py``), and the time
to a first token is worked out from two chunks. Every row is printed, and saved to ``--out``, as soon as it is measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.reader import ReadTarget
from benchmarks.stretch import stretch
from volley import Engine, GenerationResult, SamplingParams, Target
from volley.engine.states import DraftRing
from volley.files import REFERENCE, read_json, write_atomically


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="long prose: JSONL with `text`, or plain text")
    parser.add_argument("--out", type=Path, default=Path("bench/context-length.json"))
    parser.add_argument("--target", type=Path, default=REFERENCE / "target")
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument(
        "--reader", type=Path, help="reads the passages in the place of a target that was inflated from it"
    )
    parser.add_argument("--lengths", default="128,256,512,1024,4096,8192")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--draft-windows", default="own", help="tokens of context the drafter keeps")
    parser.add_argument("--stretch", type=float, default=1, help="how many times further the target reaches")
    parser.add_argument("--plain", action="store_true", help="decode without a drafter as well")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


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


def draft_kib(engine: Engine, length: int) -> float:
    """KiB of the drafter's K/V of one text."""
    assert engine.draft_model is not None
    state, store = engine.sequences.states[1], engine.draft_model.store
    if isinstance(state, DraftRing):
        return store.nbytes / 1024 / state.pool.num_pages * state.num_pages  # one ring; some more keep windows
    return store.nbytes / 1024 / engine.pool.num_pages * engine.pool.pages_for(length)


def decode_seconds(result: GenerationResult) -> float:
    """Of a token after the first."""
    stats = result.stats
    return (stats.total_seconds - stats.time_to_first_token) / (len(result.token_ids) - 1)


class Bench:
    """Engines on one target: one without a drafter if it is asked for, and one for each draft window."""

    def __init__(self, target: Target, arguments: argparse.Namespace, longest: int) -> None:
        sizes = {"max_running": 1, "num_pages": -(-longest // 16) + 1, "prefix_caching": False}
        self.engines: dict[str, Engine] = {}
        if arguments.plain:
            self.engines["plain"] = Engine(target, block_size=1, **sizes)
        for window in arguments.draft_windows.split(","):
            asked = None if window == "own" else int(window)
            self.engines[window] = Engine.from_pretrained(
                target, arguments.drafter, policy="fixed", draft_window=asked, **sizes
            )

    def row(self, prompts: Sequence[list[int]], params: SamplingParams, length: int) -> list[dict[str, object]]:
        """A row of the table for each engine; engines take turns, passage by passage."""
        results: dict[str, list[GenerationResult]] = {name: [] for name in self.engines}
        for index, prompt in enumerate(prompts):
            for name, engine in list(self.engines.items())[:: -1 if index % 2 else 1]:
                results[name] += engine.generate([prompt], params)
        rows: list[dict[str, object]] = []
        for name, found in results.items():
            lengths = [n for result in found for n in result.stats.accepted_lengths]
            row: dict[str, object] = {"context": length, "temperature": params.temperature, "window": name}
            row |= {"cycles": len(lengths), "tau": sum(lengths) / len(lengths)}
            row["speedup"] = (
                median(decode_seconds(a) / decode_seconds(b) for a, b in zip(results["plain"], found, strict=True))
                if "plain" in results
                else None
            )
            target = self.engines[name].target
            row["first_token_seconds"] = (
                target.reading_seconds(length)
                if isinstance(target, ReadTarget)
                else median(result.stats.time_to_first_token for result in found)
            )
            row["draft_kib"] = 0 if name == "plain" else draft_kib(self.engines[name], length)
            rows.append(row)
        return rows


def load(arguments: argparse.Namespace, place: Path) -> Target:
    """The target, stretched in the folder ``place``; with its reader if there is one."""

    def folder(own: Path, name: str) -> Path:
        return own if arguments.stretch == 1 else stretch(own, arguments.stretch, place / name)

    path, dtype = folder(arguments.target, "target"), getattr(torch, arguments.dtype)
    if arguments.reader is None:
        return Target.from_pretrained(path, dtype, arguments.device)
    target = ReadTarget.from_pretrained(path, dtype, "cpu")
    tapped = read_json(Path(arguments.drafter) / "config.json")["dflash_config"]["target_layer_ids"]
    target.read_by(Target.from_pretrained(folder(arguments.reader, "reader"), torch.float32, "cpu"), tuple(tapped))
    return target


def to_line(row: dict[str, object]) -> str:
    cells = (
        f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value) for value in row.values()
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as place:
        target = load(arguments, Path(place))
        lengths = sorted(map(int, arguments.lengths.split(",")))
        lengths = [length for length in lengths if length <= target.context_length]
        bench = Bench(target, arguments, max(lengths, default=1))
        engine = next(iter(bench.engines.values()))
        before = engine.encode([{"role": "user", "content": "Write a long text."}])
        room = arguments.max_tokens + len(before)
        lengths = [length for length in lengths if room < length]
        if not lengths:
            raise SystemExit(f"no length lies between {room} and the target's context of {target.context_length}")
        texts = passages(engine.encode, arguments.files, arguments.num_prompts, lengths[-1] - room)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, object]] = []
        print("| context | T | draft window | cycles | τ | speedup | first token s | drafter KiB |")
        print("|---|---|---|---|---|---|---|---|")
        for length in lengths:
            prompts = [before + text[-(length - room) :] for text in texts]
            for temperature in map(float, arguments.temperatures.split(",")):
                params = SamplingParams(
                    temperature=temperature, max_tokens=arguments.max_tokens, ignore_eos=True, seed=0
                )
                for row in bench.row(prompts, params, length):
                    print(to_line(row), flush=True)
                    rows.append(row)
                write_atomically(arguments.out, json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
