"""A small draft model for the bundled target: the target's first layers, distilled to agree with it. A baseline for the bench.

    python scripts/reference/train_draft_model.py --data responses.jsonl --out runs/draft-model --layers 2 --minutes 20

The draft model is an ordinary causal LM with the target's tokenizer. It learns the target's distributions on the target's
responses (``volley collect``). A run that finds its checkpoint goes on from it. ``--minutes`` are of CPU time.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.reference import distil
from volley.files import REFERENCE


def first_layers(target: Qwen3ForCausalLM, layers: int) -> Qwen3ForCausalLM:
    """A copy of ``target`` without its later layers."""
    config = type(target.config).from_dict(target.config.to_dict())
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    student = Qwen3ForCausalLM(config)
    student.load_state_dict(target.state_dict(), strict=False)
    return student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    target = Qwen3ForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    student = first_layers(target, options.layers)
    tokenizer.save_pretrained(options.out / "model")

    def loss_of(ids: Tensor) -> Tensor:
        with torch.no_grad():
            goal = target(ids).logits.flatten(0, 1).softmax(-1)
        return cross_entropy(student(ids).logits.flatten(0, 1), goal)

    def publish() -> None:
        copy.deepcopy(student).to(torch.bfloat16).save_pretrained(options.out / "model")

    rows = distil.training_rows(options.data, tokenizer)
    distil.train(student, rows, loss_of, publish, options.out, options.minutes)


if __name__ == "__main__":
    main()
