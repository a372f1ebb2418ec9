"""The drafter's cache while a text grows to 8k tokens, with a draft window and without.

    python benchmarks/draft_window.py --length 8192 --window 256

The bundled pair, whose target is told that its context is longer than it was trained for: what it writes there means nothing,
what it occupies does. Prints a Markdown table.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from volley import Drafter, Engine, SamplingParams, Target
from volley.engine.engine import REFERENCE
from volley.engine.states import DraftRing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = AutoConfig.from_pretrained(REFERENCE / "target", max_position_embeddings=options.length)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE / "target", config=config, dtype=torch.bfloat16)
    target, drafter = Target(model), Drafter.from_pretrained(REFERENCE / "drafter")
    torch.manual_seed(0)
    prompt = torch.randint(target.vocab_size, (options.length - 64,)).tolist()
    print("| draft window | tokens | target's K/V KiB | drafter's K/V KiB |\n|---|---|---|---|")
    for window in (0, options.window):
        engine = Engine(
            target, drafter, policy="fixed", draft_window=window, max_running=1, num_pages=-(-options.length // 16)
        )
        request = engine.add_request(prompt, SamplingParams(max_tokens=64, ignore_eos=True))
        sizes = {}
        shown = 256
        while request.finish_reason is None:
            engine.step()
            pages = (len(request.table.pages), len(request.draft_table.pages))
            if request.finish_reason is None:
                sizes[len(request.token_ids) if request.num_output else request.computed] = pages
        assert engine.draft_model is not None
        _, drafted = engine.sequences.states
        pools = (engine.pool, drafted.pool if isinstance(drafted, DraftRing) else engine.pool)
        stores = (engine.sequences.pages.store, engine.draft_model.store)
        per_page = [store.nbytes / pool.num_pages / 1024 for store, pool in zip(stores, pools, strict=True)]
        for tokens, pages in sizes.items():
            if tokens >= shown or tokens == max(sizes):
                kib = [f"{count * each:.0f}" for count, each in zip(pages, per_page, strict=True)]
                print(f"| {window or 'none'} | {tokens} | {kib[0]} | {kib[1]} |", flush=True)
                shown = 2 * tokens


if __name__ == "__main__":
    main()
