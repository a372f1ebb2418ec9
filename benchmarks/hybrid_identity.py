"""Long greedy answers of targets with recurrent layers, token for token against transformers' own ``generate``.

    python benchmarks/hybrid_identity.py --tokens 1000 --out hybrid_identity.json [--families qwen3_5_text,nemotron_h]
        [--settings "plain;trees"] [--rounds 1]

One tiny random model of each family in fp32 answers eight prompts. A script drafts what transformers wrote, one token of seven
made wrong, so that drafts are cut everywhere. Every setting decodes all prompts; the settings cover block sizes, trees, copies,
batches, chunks of prompts, forced preemption, few states, and prefixes (each engine answers everything twice). Where tokens
differ, the distance of the two logits in one pass over the whole text is given, as is what transformers' own two ways of
computing the text, in one pass and token by token, differ by.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.hybrid import CONFIGS
from tests.tiny import VOCAB, eager_model
from volley import Engine, SamplingParams
from volley.decode.work import Shape, Work
from volley.files import write_atomically
from volley.models.targets.target import Target
from volley.proposers.scripted import ScriptedProposer
from volley.types import Proposal

PROMPTS, LENGTH = 8, 24
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"policy": "fixed:1"},
    "blocks of 2": {"policy": "fixed:2"},
    "blocks of 8": {"policy": "fixed:8"},
    "blocks of 16, one at a time": {"policy": "fixed:16", "max_running": 1},
    "trees": {"policy": "fixed:8", "tree_nodes": 15},
    "chunks of 5, three at once": {"policy": "fixed:8", "max_batch_tokens": 5, "max_running": 3},
    "preemption, few states": {"policy": "fixed:8", "num_states": 6, "scarce": True},
    "trees, chunks, preemption": {"policy": "fixed:8", "tree_nodes": 15, "max_batch_tokens": 64, "scarce": True},
    "goodput, copies": {"policy": "goodput"},
}


class Script(ScriptedProposer):
    """Proposes the known answers, one token of seven wrong; as a tree, each wrong token beside a right one."""

    can_grow_trees = True

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(self.draft, 16)
        self.answers = answers

    def draft(self, work: Work[Any]) -> list[int]:
        request = work.request
        known = self.answers[tuple(request.token_ids[: request.num_prompt])][request.num_output :][:16]
        return [token if (request.num_output + i) % 7 else (token + 1) % VOCAB for i, token in enumerate(known)]

    def propose(self, works: Sequence[Work[Any]], *, with_confidence: bool) -> float:
        super().propose(works, with_confidence=with_confidence)
        for work in works:
            if work.ask.shape is not Shape.TREE:
                continue
            nodes, parents, last = list[int](), list[int](), 0
            for token in work.proposal.token_ids:  # a wrong sibling before each token of the chain
                nodes += [(token + 7) % VOCAB, token]
                parents += [last, last]
                last = len(nodes)
            size = work.ask.size
            work.proposal = Proposal(nodes[:size], parents=tuple(parents[:size]), confidence=[0.5] * size)
        return 0.0


def reference(model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return output[:, LENGTH:].tolist()


def gap(model: PreTrainedModel, text: list[int], one: int, other: int) -> float:
    """Distance of two tokens' logits after ``text``."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
    return float((logits[one] - logits[other]).abs())


def own_noise(model: PreTrainedModel, text: list[int]) -> float:
    """How far apart transformers' logits are, computed in one pass and token by token."""
    ids, cache, stepped = torch.tensor([text]), None, []
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits[0]
        for index in range(len(text)):
            output = model(input_ids=ids[:, index : index + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            stepped.append(output.logits[0, -1])
    return float((torch.stack(stepped) - whole).abs().max())


def compare(name: str, tokens: int, settings: Sequence[str], rounds: int) -> dict[str, Any]:
    config = CONFIGS[name]()
    config.max_position_embeddings = 4096
    model = eager_model(config)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCAB, (PROMPTS, LENGTH), generator=generator).tolist()
    for prompt in prompts[PROMPTS // 2 :]:  # half of them begin alike, and part inside a page
        prompt[:19] = prompts[0][:19]
    expected = reference(model, prompts, tokens)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    target = Target(eager_model(config))
    row: dict[str, Any] = {"family": name, "different words": len({t for a in expected for t in a}), "settings": {}}
    row["noise of transformers itself"] = own_noise(model, [*prompts[0], *expected[0]][:400])
    for setting in settings:
        options = dict(SETTINGS[setting])
        pages = (LENGTH + tokens) // 16 + 2
        options["num_pages"] = pages * 3 if options.pop("scarce", False) else pages * PROMPTS * 2
        engine = Engine(target, proposer=Script(answers), **options)
        found = row["settings"][setting] = {"compared": 0, "preemptions": 0, "cached": 0, "first differences": []}
        cycles = 0
        for _ in range(rounds):
            results = list(engine.generate(prompts, SamplingParams(max_tokens=tokens)))
            engine.check_integrity()
            for prompt, answer, result in zip(prompts, expected, results, strict=True):
                found["preemptions"] += result.stats.preemptions
                found["cached"] += result.stats.cached_tokens
                cycles += len(result.stats.accepted_lengths)
                pairs = list(zip(answer, result.token_ids, strict=True))
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                found["compared"] += len(pairs) if at is None else at + 1
                if at is not None:
                    distance = gap(model, [*prompt, *answer[:at]], *pairs[at])
                    found["first differences"].append({"after": at, "distance of the logits": distance})
        found["tau"] = round(rounds * PROMPTS * (tokens - 1) / cycles, 2)
        print(name, setting, found, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--families", default=",".join(CONFIGS))
    parser.add_argument("--settings", default=";".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.families.split(","):
        rows.append(compare(name, args.tokens, args.settings.split(";"), args.rounds))
        write_atomically(args.out, json.dumps(rows, indent=2))
    total = sum(found["compared"] for row in rows for found in row["settings"].values())
    differences = sum(len(found["first differences"]) for row in rows for found in row["settings"].values())
    print(f"{total} tokens compared; {differences} answers differ somewhere")


if __name__ == "__main__":
    main()
