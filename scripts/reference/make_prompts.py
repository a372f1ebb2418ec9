"""Write the prompts whose answers the drafter is trained on: questions of the training split, domains in balance.

Held-out prompts are those neither model is trained on, in two disjoint files: ``--held-out choose`` for prompts that choose a
setting (scripts/reference/average.py), ``--held-out report`` for prompts that figures are reported on (``volley bench``).
"""

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

from corpus import DOMAINS, load_chats

NUM_CHOOSING = (
    176  # the first held-out prompts, 40 of each domain or more: among them those that chose averaging shares
)


def choose_prompts(data: Path, per_domain: int, *, held_out: bool) -> list[dict]:
    """Up to ``per_domain`` distinct questions of each domain, shuffled together."""
    rng = random.Random(1)
    questions: dict[str, list[str]] = defaultdict(list)
    for name, question, _ in load_chats(data, held_out=held_out):
        if len(question) <= 1200:
            questions[DOMAINS[name]].append(question)
    rows = []
    for domain, found in questions.items():
        distinct = sorted(set(found))
        chosen = rng.sample(distinct, min(per_domain, len(distinct)))
        rows += [{"messages": [{"role": "user", "content": text}], "domain": domain} for text in chosen]
    rng.shuffle(rows)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-domain", type=int, default=7000)
    parser.add_argument("--held-out", choices=("choose", "report"), help="held-out prompts instead, for one purpose")
    options = parser.parse_args()
    rows = choose_prompts(options.data, options.per_domain, held_out=options.held_out is not None)
    if options.held_out is not None:
        rows = rows[:NUM_CHOOSING] if options.held_out == "choose" else rows[NUM_CHOOSING:]
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts in {options.out}")
