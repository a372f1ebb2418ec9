"""τ by the length of the context: the same passages continued from the same point, with more or less text before it.

    python benchmarks/context_length.py DIR/peps.jsonl DIR/rust_book.jsonl --lengths 128,256,512,1024,4096,8192 --num-prompts 32

The files are JSONL with a ``text`` in each row, or plain text. Each passage is given as the beginning of the target's answer
and continued for ``--max-tokens``, so that the context ends at the length named; lengths beyond the target's context are left
out. Every row is printed, and saved to ``--out``, as soon as it is measured.
"""

import argparse
import json
from pathlib import Path

import torch

from volley import Engine, SamplingParams
from volley.engine.engine import REFERENCE


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="long prose: JSONL with `text`, or plain text")
    parser.add_argument("--out", type=Path, default=Path("bench/context-length.json"))
    parser.add_argument("--target", default=str(REFERENCE / "target"))
    parser.add_argument("--drafter", default=str(REFERENCE / "drafter"))
    parser.add_argument("--lengths", default="128,256,512,1024,4096,8192")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--draft-window", type=int, default=None, help="tokens of context the drafter keeps")
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


def passages(engine: Engine, files: list[Path], count: int, length: int) -> list[list[int]]:
    """``count`` passages of ``length`` tokens, as many from each file."""
    found: list[list[int]] = []
    for index, path in enumerate(files):
        wanted = count // len(files) + (index < count % len(files))
        tokens = engine.encode(read_text(path, 8 * wanted * length))
        found += [tokens[start : start + length] for start in range(0, wanted * length, length)]
    short = [passage for passage in found if len(passage) < length]
    if short:
        raise SystemExit(f"the files hold {len(found) - len(short)} passages of {length} tokens; give more text")
    return found


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    window = arguments.draft_window
    engine = Engine.from_pretrained(
        arguments.target, arguments.drafter, dtype=dtype, device=arguments.device, draft_window=window
    )
    assert engine.drafter is not None
    engine.block_size = engine.drafter.config.block_size
    before = engine.encode([{"role": "user", "content": "Write a long text."}])
    room = arguments.max_tokens + len(before)
    lengths = sorted(length for length in map(int, arguments.lengths.split(",")) if room < length)
    lengths = [length for length in lengths if length <= engine.target.context_length]
    if not lengths:
        raise SystemExit(f"no length lies between {room} and the target's context of {engine.target.context_length}")
    texts = passages(engine, arguments.files, arguments.num_prompts, lengths[-1] - room)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    print("| context | T | prompts | cycles | τ |\n|---|---|---|---|---|")
    for length in lengths:
        prompts = [before + text[-(length - room) :] for text in texts]
        for temperature in map(float, arguments.temperatures.split(",")):
            params = SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens, ignore_eos=True, seed=0)
            accepted = [n for result in engine.generate(prompts, params) for n in result.stats.accepted_lengths]
            tau = sum(accepted) / len(accepted)
            print(f"| {length} | {temperature:g} | {len(prompts)} | {len(accepted)} | {tau:.3f} |", flush=True)
            rows.append({"context": length, "temperature": temperature, "cycles": len(accepted), "tau": tau})
            arguments.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
