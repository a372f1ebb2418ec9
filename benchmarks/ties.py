"""By how much the gap of the target's two largest bf16 logits changes from one way to compute it to another.

    python benchmarks/ties.py --data-dir DIR --num-prompts 24 --max-tokens 96

Each greedy answer of plain decoding (passes of one row) is computed again: with chains, in one pass over the whole text (which is
how ties are judged), and by transformers. Gaps are compared in units in the last place of the largest logit, until an answer
parts from plain decoding's. Prints the table of docs/benchmarks/identity.md and the gap at each place where an answer parts.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from volley import Engine, SamplingParams
from volley.bench.ties import first_difference, unit_in_last_place
from volley.engine.engine import REFERENCE
from volley.prompts import load_prompts
from volley.types import GenerationResult

DATASETS = ("gsm8k", "humaneval", "mt-bench")
WAYS = ("chains of 8", "whole text in one pass", "transformers")
Scores = list[dict[int, float]]  # by position: the largest logits, up to a constant


def recorded(result: GenerationResult) -> Scores:
    assert result.top_logprobs is not None
    return [dict(row) for row in result.top_logprobs]


def of_transformers(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> tuple[list[int], Scores]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    scores = [dict(enumerate(row[0].float().tolist())) for row in output.logits]
    return output.sequences[0, len(prompt) :].tolist(), scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the datasets' files; without it the hub")
    parser.add_argument("--num-prompts", type=int, default=24, help="of each dataset")
    parser.add_argument("--skip-prompts", type=int, default=40, help="of each dataset: they chose settings")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    drafting = Engine.from_pretrained(policy="fixed", prefix_caching=False)
    plain = Engine(drafting.target, prefix_caching=False, block_size=1)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.bfloat16).eval()
    params = SamplingParams(max_tokens=options.max_tokens, logprobs=True, top_logprobs=8)
    limit = options.skip_prompts + options.num_prompts
    changes: dict[str, Counter[int]] = {way: Counter() for way in WAYS}
    for name in DATASETS:
        for chat in load_prompts(name, options.data_dir, limit)[options.skip_prompts :]:
            prompt = drafting.encode(list(chat.messages))
            (answer,), (drafted,) = plain.generate([prompt], params), drafting.generate([prompt], params)
            tokens = answer.token_ids
            whole = [plain.next_logits([*prompt, *tokens[:at]]) for at in range(len(tokens))]
            theirs, their_scores = of_transformers(model, prompt, options.max_tokens)
            others = {
                WAYS[0]: (drafted.token_ids, recorded(drafted)),
                WAYS[1]: (tokens, [dict(enumerate(row.tolist())) for row in whole]),
                WAYS[2]: (theirs, their_scores),
            }
            for way, (other, scores) in others.items():
                parts = first_difference(other, tokens)
                shared = len(tokens) if parts is None else parts + 1
                for at, (mine, rescored) in enumerate(zip(recorded(answer)[:shared], scores, strict=False)):
                    first, second = sorted(mine, key=mine.__getitem__, reverse=True)[:2]
                    unit = unit_in_last_place(whole[at].max().item(), torch.bfloat16)
                    if first in rescored and second in rescored:
                        change = mine[first] - mine[second] - rescored[first] + rescored[second]
                        changes[way][round(abs(change) / unit)] += 1
                if parts is not None and parts < min(len(other), len(tokens)):
                    gap = whole[parts].max() - whole[parts][[other[parts], tokens[parts]]].min()
                    unit = unit_in_last_place(whole[parts].max().item(), torch.bfloat16)
                    print(f"{way}: {chat.id} parts at token {parts}, {gap.item() / unit:g} units apart", flush=True)
    print(f"\n| change of the gap, units | {' | '.join(WAYS)} |\n|---|---|---|---|")
    for units in range(1 + max(max(counted, default=0) for counted in changes.values())):
        print(f"| {units} | {' | '.join(str(changes[way][units]) for way in WAYS)} |")


if __name__ == "__main__":
    main()
