"""τ of the bundled pair, greedy, by domain, on prompts that neither model was trained on.

python scripts/reference/make_prompts.py --data DIR --out held-out.jsonl --held-out report
python benchmarks/held_out.py held-out.jsonl [DRAFTER]
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from volley import Engine, SamplingParams
from volley.files import REFERENCE

PROMPTS_PER_DOMAIN = 40


def main() -> None:
    chats: dict[str, list[Any]] = defaultdict(list)
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chats[row["domain"]].append(row["messages"])
    drafter = sys.argv[2] if len(sys.argv) > 2 else "reference"
    engine = Engine.from_pretrained(REFERENCE / "target", drafter=drafter, policy="fixed")
    every: list[int] = []
    print("| domain | prompts | cycles | τ |\n|---|---|---|---|")
    for domain, found in chats.items():
        chosen = found[:PROMPTS_PER_DOMAIN]
        results = engine.generate(chosen, SamplingParams(max_tokens=128))
        lengths = [length for result in results for length in result.stats.accepted_lengths]
        every += lengths
        print(f"| {domain} | {len(chosen)} | {len(lengths)} | {sum(lengths) / len(lengths):.2f} |")
    print(f"| all | | {len(every)} | {sum(every) / len(every):.2f} |")


if __name__ == "__main__":
    main()
