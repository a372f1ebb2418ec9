"""Average two drafters of one shape, one trained on from the other, and measure the result on prompts nothing was trained on.

What a training gains in one respect costs some of what was there before; between the weights both are kept (docs/LOG.md).
The prompts given here choose the share, so they must not report figures: give the file of ``make_prompts.py --held-out choose``,
and report on that of ``--held-out report``.
"""

import argparse
import json
from pathlib import Path

import torch

from volley import Drafter, Target
from volley.chat import encode_chat
from volley.prompts import load_prompts
from volley.train.evaluate import evaluate_tau


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--first", type=Path, required=True, help="folder of a training")
    parser.add_argument("--second", type=Path, required=True, help="folder of the training that went on from it")
    parser.add_argument("--share", type=float, default=0.5, help="of the second")
    parser.add_argument("--prompts", type=Path, required=True, help="held-out prompts that choose, and report nothing")
    parser.add_argument("--num-prompts", type=int, default=120)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    drafter, other = (
        Drafter.from_pretrained(path / "drafter", torch.float32) for path in (options.first, options.second)
    )
    with torch.no_grad():
        for weight, theirs in zip(drafter.parameters(), other.parameters(), strict=True):
            weight.lerp_(theirs, options.share)
    drafter.save_pretrained(options.out / "drafter")
    tokenizer = Target.from_pretrained(options.target).tokenizer
    chats = load_prompts(options.prompts, limit=options.num_prompts)
    prompts = [encode_chat(tokenizer, chat.messages) for chat in chats]
    report = json.loads((options.second / "training_report.json").read_text())
    report["held_out"]["decoded"] = evaluate_tau(
        drafter, options.target, prompts, max_tokens=128, dtype=torch.bfloat16, device="cpu"
    ) | {"prompts": "that neither model was trained on and that chose the averaging share"}
    (options.out / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
