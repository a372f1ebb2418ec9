"""Pools of K/V in the model's dtype, 8 and 4 bits: memory, acceptance, agreement with the unquantised target, speed.

    python benchmarks/kv_cache.py --data-dir DIR --num-prompts 24 --max-tokens 128 --out kv_cache.json

The first table gives the error of each codec on unit Gaussians and on K/V of the target itself, the second the time of a
target pass on each kind of pool. The third decodes all prompts with each combination of pools, speculatively and plainly in
turn. *Same as plain* counts answers whose tokens are those of plain decoding on the same kind of pool; *identical* and
*agreement* compare plain decoding on that pool with plain decoding on the unquantised one: identical answers, and the share
of positions at which both, given the unquantised answer so far, choose the same token. Ctrl-C keeps what was measured;
``--out`` is written after every combination.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import torch
from torch import Tensor

from volley import Engine, GenerationResult, SamplingParams
from volley.bench.run import without_drafter
from volley.config import KVDtype
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.kv_cache import BlockTable
from volley.memory.kv_store import bytes_per_token
from volley.memory.quantise import Codec, Int8Codec, RotatedInt4Codec
from volley.prompts import load_prompts

DATASETS = ("gsm8k", "humaneval", "mt-bench")
KINDS: tuple[KVDtype, ...] = get_args(KVDtype)
HEADER = (
    "| target pool | draft pool | bytes per token | τ | same as plain | identical to unquantised | agreement "
    "| tokens/s | plain tokens/s |"
)
COMBINATIONS = [(kv, draft) for kv in KINDS for draft in KINDS]


@dataclass
class Row:
    kv_dtype: str
    draft_kv_dtype: str
    bytes_per_token: int
    acceptance_length: float
    same_as_plain: int
    answers: int
    identical_answers: int
    agreement: float
    speculative_tokens_per_second: float
    plain_tokens_per_second: float

    def markdown(self) -> str:
        return (
            f"| {self.kv_dtype} | {self.draft_kv_dtype} | {self.bytes_per_token} | {self.acceptance_length:.2f} "
            f"| {self.same_as_plain} of {self.answers} | {self.identical_answers} of {self.answers} "
            f"| {self.agreement:.1%} | {self.speculative_tokens_per_second:.0f} | {self.plain_tokens_per_second:.0f} |"
        )


def relative_mse(codec: Codec, vectors: Tensor) -> float:
    restored = codec.decode(*codec.encode(vectors)).float()
    if codec.rotation is not None:
        restored = restored @ codec.rotation.T
    return float((restored - vectors.float()).square().mean() / vectors.float().square().mean())


@torch.inference_mode()
def codec_errors(engine: Engine, tokens: list[int]) -> list[str]:
    """Markdown rows; K/V are extracted from the engine's own pool after one pass over ``tokens``."""
    table = BlockTable(engine.pool.page_size)
    assert engine.pool.grow(table, len(tokens))
    batch = RaggedBatch([Segment(table, 0, len(tokens))], torch.tensor(tokens))
    engine.target.forward(batch, engine.sequences.pages.store, torch.tensor([0]))
    layers = range(len(engine.target.kv_shapes))
    extracted = [engine.sequences.pages.store.extract(layer, table, 0, len(tokens)) for layer in layers]
    engine.pool.release(table)
    rows = []
    for name, codec_class in (("int8", Int8Codec), ("int4", RotatedInt4Codec)):
        dim = engine.target.kv_shapes[0][1]
        codec = codec_class(dim, torch.float32, torch.device("cpu"))
        gaussian = relative_mse(codec, torch.randn(20000, dim))
        keys, values = (sum(relative_mse(codec, kv[i]) for kv in extracted) / len(layers) for i in range(2))
        rows.append(f"| {name} | {gaussian:.6f} | {keys:.6f} | {values:.6f} |")
    return rows


@torch.inference_mode()
def pass_times(base: Engine, contexts: tuple[int, ...], repeats: int = 15) -> list[str]:
    """Markdown rows: a target pass over 8 tokens after so many others, the kinds of pool taking turns."""
    engines = {kind: Engine(base.target, num_pages=-(-max(contexts) // 16) + 1, kv_dtype=kind) for kind in KINDS}
    rows = []
    for context in contexts:
        seconds: dict[KVDtype, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(repeats):
            for kind, engine in engines.items():
                table = BlockTable(16, range(engine.pool.num_pages))
                batch = RaggedBatch([Segment(table, context - 8, 8)], torch.arange(8))
                started = time.perf_counter()
                engine.target.forward(batch, engine.sequences.pages.store, torch.arange(8))
                seconds[kind].append(time.perf_counter() - started)
        rows.append(f"| {context} | {' | '.join(f'{median(each) * 1e3:.1f}' for each in seconds.values())} |")
    return rows


def decode(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[list[GenerationResult], float]:
    """One prompt at a time; the seconds of the whole."""
    engine.reset_prefix_cache()
    started = time.perf_counter()
    results = [result for prompt in prompts for result in engine.generate([prompt], params)]
    return results, time.perf_counter() - started


@torch.inference_mode()
def forced_choices(engine: Engine, prompt: list[int], answer: list[int]) -> list[int]:
    """The greedy choice at every position of ``answer``, given all before it, in one pass."""
    table = BlockTable(engine.pool.page_size)
    tokens = torch.tensor(prompt + answer[:-1])
    assert engine.pool.grow(table, len(tokens))
    rows = torch.arange(len(prompt) - 1, len(tokens))
    logits = engine.target.forward(
        RaggedBatch([Segment(table, 0, len(tokens))], tokens), engine.sequences.pages.store, rows
    )
    engine.pool.release(table)
    choices: list[int] = logits.argmax(dim=-1).tolist()
    return choices


def measure(
    base: Engine,
    kinds: tuple[KVDtype, KVDtype],
    prompts: list[list[int]],
    params: SamplingParams,
    reference: list[list[int]],
) -> Row:
    """``reference``: the unquantised answers; filled by the first call."""
    kv_dtype, draft_kv_dtype = kinds
    assert base.drafter is not None
    engine = Engine(base.target, base.drafter, policy="fixed", kv_dtype=kv_dtype, draft_kv_dtype=draft_kv_dtype)
    plain = without_drafter(engine)
    for each in (engine, plain):
        decode(each, prompts[:1], params)
    found: dict[Engine, list[GenerationResult]] = {engine: [], plain: []}
    seconds = dict.fromkeys(found, 0.0)
    for index, prompt in enumerate(prompts):
        for each in (engine, plain)[:: -1 if index % 2 else 1]:
            (result,), taken = decode(each, [prompt], params)
            found[each].append(result)
            seconds[each] += taken
    fast, slow = found[engine], found[plain]
    fast_speed, slow_speed = (
        sum(len(own.token_ids) for own in found[each]) / seconds[each] for each in (engine, plain)
    )
    if not reference:
        reference += [result.token_ids for result in slow]
    lengths = [length for result in fast for length in result.stats.accepted_lengths]
    agreed = [
        mine == theirs
        for prompt, answer in zip(prompts, reference, strict=True)
        for mine, theirs in zip(forced_choices(plain, prompt, answer), answer, strict=True)
    ]
    per_token = bytes_per_token(kv_dtype, base.target.kv_shapes, base.target.dtype)
    per_token += bytes_per_token(draft_kv_dtype, base.drafter.kv_shapes, base.target.dtype)
    return Row(
        kv_dtype,
        draft_kv_dtype,
        per_token,
        sum(lengths) / len(lengths),
        sum(a.token_ids == b.token_ids for a, b in zip(fast, slow, strict=True)),
        len(prompts),
        sum(result.token_ids == answer for result, answer in zip(slow, reference, strict=True)),
        sum(agreed) / len(agreed),
        fast_speed,
        slow_speed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    base = Engine.from_pretrained(dtype=getattr(torch, options.dtype))
    share = -(-options.num_prompts // len(DATASETS))
    chats = [chat for name in DATASETS for chat in load_prompts(name, options.data_dir, limit=share)]
    prompts = [base.encode(list(chat.messages)) for chat in chats]
    params = SamplingParams(max_tokens=options.max_tokens)
    print("| codec | MSE of unit Gaussians | of the target's keys, relative | of its values |\n|---|---|---|---|")
    print("\n".join(codec_errors(base, (prompts[0] * 20)[:512])), flush=True)
    print(f"\n| context, ms a pass of 8 tokens | {' | '.join(KINDS)} |\n|---|---|---|---|")
    print("\n".join(pass_times(base, (128, 512, 2000))), flush=True)
    print(f"\n{HEADER}\n{'|---' * HEADER.count(' | ')}|---|", flush=True)
    rows: list[Row] = []
    reference: list[list[int]] = []
    try:
        for kinds in COMBINATIONS:
            row = measure(base, kinds, prompts, params, reference)
            rows.append(row)
            print(row.markdown(), flush=True)
            if options.out:
                options.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    except KeyboardInterrupt:
        print("interrupted; the rows above are complete")


if __name__ == "__main__":
    main()
