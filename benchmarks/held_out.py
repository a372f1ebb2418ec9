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


def decode(path: Path, drafter: str | Path = "reference", per_domain: int = PROMPTS_PER_DOMAIN) -> dict[str, list[int]]:
    """What each cycle gained on the prompts of ``path``, greedy with chains of the drafter's own block, by domain."""
    chats: dict[str, list[Any]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chats[row["domain"]].append(row["messages"])
    engine = Engine.from_pretrained(REFERENCE / "target", drafter=drafter, policy="fixed")
    lengths = {}
    for domain, found in chats.items():
        results = engine.generate(found[:per_domain], SamplingParams(max_tokens=128))
        lengths[domain] = [length for result in results for length in result.stats.accepted_lengths]
    return lengths


def main() -> None:
    found = decode(Path(sys.argv[1]), *sys.argv[2:3])
    print("| domain | cycles | τ |\n|---|---|---|")
    for domain, lengths in {**found, "all": [length for each in found.values() for length in each]}.items():
        print(f"| {domain} | {len(lengths)} | {sum(lengths) / len(lengths):.2f} |")


if __name__ == "__main__":
    main()
