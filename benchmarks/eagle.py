"""EAGLE-3 beside block drafters on one target, greedy: τ of chains and trees on held-out prompts.

    python scripts/reference/train_eagle.py --target MODEL.gguf --data responses.jsonl --out runs/eagle --minutes 10
    python -m benchmarks.eagle --target MODEL.gguf --eagle runs/eagle/drafter --drafters runs/dflash/drafter,smollm2-135m \
        --data-dir DIR --json RECORD

The engine grows no trees of an EAGLE-3 drafter. Their τ needs none: greedy answers are plain decoding's, so a cycle of a tree
gains the tokens of the answer that lie on one of its paths, and one more. Trees are dynamic (EAGLE-2): a level continues the
``WIDTH`` likeliest paths by their ``WIDTH`` likeliest tokens, and the likeliest nodes of all levels are verified. A tree of one
path is the engine's chain, which is measured too.
"""

import argparse
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.llama_cpp import circumstances
from volley import Engine, SamplingParams, Target
from volley.files import write_atomically
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.eagle import EagleDrafter
from volley.prompts import load_prompts
from volley.train.documents import Document
from volley.train.features import read_served

DATASETS = ("gsm8k", "humaneval", "mt-bench", "alpaca")
DEPTH, WIDTH = 7, 10
BLOCKS, NODES = (8, 16), (10, 16, 60)


class Node(NamedTuple):
    path: tuple[int, ...]
    chance: float
    """Logarithm of the path's probability."""


class Trees:
    """What an EAGLE-3 drafter drafts after each token of a text that ``target`` has read."""

    def __init__(self, target: Target, drafter: EagleDrafter, text: list[int], width: int = WIDTH) -> None:
        self.target, self.drafter, self.width = target, drafter, width
        ids, taps = torch.tensor(text), drafter.config.target_layer_ids
        tapped = read_served(target, [Document(ids, 0)], taps)[0].to(drafter.fc.weight.dtype)
        self.embeddings = drafter.embed(ids, target.embed)
        self.states = drafter.fused_states(tapped)
        self.keys, self.values = drafter.keys_values(self.embeddings[1:], self.states[:-1], torch.arange(len(ids) - 1))
        self.after = cache(lambda length: list(self._grow(length)))

    def _grow(self, length: int) -> Iterator[Node]:
        """Yield the nodes of all levels of the tree behind the first ``length`` tokens."""
        drafter, first = self.drafter, length - 2
        context = self.keys[:first], self.values[:first]
        embeddings, states = self.embeddings[length - 1][None], self.states[first][None]
        paths, chances, own = [()], torch.zeros(1), list[tuple[Tensor, Tensor]]()
        for depth in range(DEPTH):

            def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                own.append((k, v))
                groups, beams = q.shape[1] // k.shape[1], len(q)
                keys, values = (
                    torch.cat([given.expand(beams, *given.shape), torch.stack(rest, 1)], 1).repeat_interleave(groups, 2)
                    for given, rest in zip(context, zip(*own, strict=True), strict=True)
                )
                weights = (torch.einsum("bhd,bshd->bhs", q, keys).float() * q.shape[-1] ** -0.5).softmax(-1)
                return torch.einsum("bhs,bshd->bhd", weights.to(values.dtype), values)

            moved = drafter.advance(embeddings, states, torch.full((len(paths),), first + depth), attend)
            normed = drafter.norm(moved)
            logs = drafter.logits(normed, self.target.head).float().log_softmax(-1)
            best = logs.topk(self.width)
            every = (chances[:, None] + best.values).flatten()
            yield from (
                Node((*paths[at // self.width], token), chance)
                for at, (token, chance) in enumerate(zip(best.indices.flatten().tolist(), every.tolist(), strict=True))
            )
            chances, kept = every.topk(self.width)
            parents, tokens = kept // self.width, best.indices.flatten()[kept]
            paths = [(*paths[at], token) for at, token in zip(parents.tolist(), tokens.tolist(), strict=True)]
            own[:] = [(k[parents], v[parents]) for k, v in own]
            states = (normed if drafter.switches.norm_output else moved)[parents]
            embeddings = drafter.embed(tokens, self.target.embed)

    def lengths(self, text: list[int], start: int, nodes: int) -> list[int]:
        """Return the tokens gained by each cycle with trees of ``nodes``, anchor included, from ``text[:start]`` to its end."""
        found = list[int]()
        while start < len(text):
            tree = sorted(self.after(start), key=lambda node: -node.chance)[: nodes - 1]
            paths = {node.path for node in tree}
            right = next((n for n in range(DEPTH) if tuple(text[start : start + n + 1]) not in paths), DEPTH)
            found.append(min(right + 1, len(text) - start))
            start += found[-1]
        return found


def row(drafter: str, draft: str, lengths: list[int], nodes: int, passes: int) -> dict[str, Any]:
    """A draft of ``nodes`` tokens, anchor included, takes ``passes`` of the drafter."""
    tau = sum(lengths) / len(lengths)
    share = (tau - 1) / (nodes - 1)
    found = {"drafter": drafter, "draft": draft, "tau": round(tau, 3), "accepted": round(share, 3), "passes": passes}
    print(f"| {drafter} | {draft} | {tau:.2f} | {share:.0%} | {passes} |", flush=True)
    return found


@torch.no_grad()
def measure(
    target: Target, eagle: str, drafters: list[str], prompts: list[list[int]], max_tokens: int
) -> list[dict[str, Any]]:
    """Print and return a row for each drafter and kind of draft."""
    params, rows = SamplingParams(max_tokens=max_tokens), list[dict[str, Any]]()

    def chains(drafter: str, **options: Any) -> list[int]:
        engine = Engine.from_pretrained(target, drafter, dtype=target.dtype, **options)
        return [length for result in engine.generate(prompts, params) for length in result.stats.accepted_lengths]

    plain = Engine(target, block_size=1)
    answers = [result.token_ids for result in plain.generate(prompts, params)]
    rows.append(row("EAGLE-3", "chain of 8", chains(eagle, policy="fixed:8"), 1 + DEPTH, DEPTH))
    model = load_drafter(eagle, target, "auto")
    assert isinstance(model, EagleDrafter)
    texts = [(prompt + answer, len(prompt) + 1) for prompt, answer in zip(prompts, answers, strict=True)]
    trees = [Trees(target, model, text) for text, _ in texts]
    for nodes in NODES:
        found = [n for tree, (text, start) in zip(trees, texts, strict=True) for n in tree.lengths(text, start, nodes)]
        rows.append(row("EAGLE-3", f"tree of {nodes}", found, nodes, DEPTH))
    for folder in drafters:
        name = Path(folder).parent.name or folder
        for size in BLOCKS:
            rows.append(row(name, f"chain of {size}", chains(folder, policy=f"fixed:{size}"), size, 1))
        rows.append(row(name, "tree of 16", chains(folder, policy="fixed", tree_nodes=16), 16, 1))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or GGUF file")
    parser.add_argument("--eagle", required=True, help="folder of the EAGLE-3 drafter")
    parser.add_argument("--drafters", default="", help="block drafters, separated by commas")
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--skip-prompts", type=int, default=40)
    parser.add_argument("--num-prompts", type=int, default=8, help="of each dataset")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="record")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = circumstances(options)
    about["options"] = {name: getattr(options, name) for name in ("skip_prompts", "num_prompts", "max_tokens")}
    target, upto = Target.from_pretrained(options.target), options.skip_prompts + options.num_prompts
    encode = Engine(target, num_pages=8).encode
    chats = [c for name in DATASETS for c in load_prompts(name, options.data_dir, upto)[options.skip_prompts :]]
    prompts = [encode(list(chat.messages)) for chat in chats]
    print("| drafter | draft | τ | accepted | passes of the drafter |\n|---|---|---|---|---|", flush=True)
    drafters = options.drafters.split(",") if options.drafters else []
    rows = measure(target, options.eagle, drafters, prompts, options.max_tokens)
    if options.json is not None:
        write_atomically(options.json, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
