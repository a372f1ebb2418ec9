"""A small draft model for the bundled target: the target's first layers, distilled to agree with it. A baseline for the bench.

    python scripts/reference/train_draft_model.py --data DIR --out runs/draft-model --layers 2 --minutes 20

The draft model is an ordinary causal LM with the target's tokenizer. It learns the target's distributions on the training
text (``corpus.py``). A run that finds its checkpoint goes on from it.
"""

import argparse
import copy
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.reference.corpus import load_chats
from scripts.reference.train_target import encode, epoch_stream
from volley.files import REFERENCE

ROW, ROWS = 256, 4
PEAK_LR, WARMUP = 1e-3, 50


def first_layers(target: Qwen3ForCausalLM, layers: int) -> Qwen3ForCausalLM:
    """A copy of ``target`` without its later layers."""
    config = type(target.config).from_dict(target.config.to_dict())
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    student = Qwen3ForCausalLM(config)
    student.load_state_dict(target.state_dict(), strict=False)
    return student


def save(path: Path, state: dict) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


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
    optimizer = torch.optim.AdamW(student.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    checkpoint, state = options.out / "checkpoint.pt", {"step": 0, "seconds": 0.0}
    if checkpoint.exists():
        found = torch.load(checkpoint, weights_only=True)
        student.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        state = found["state"]
    chats = random.Random(0).sample(load_chats(options.data, held_out=False), 12_000)
    stream = epoch_stream([name for name, _, _ in chats], encode(tokenizer, chats), 0)
    rows = stream[: len(stream) // ROW * ROW].view(-1, ROW)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    while state["seconds"] < 60 * options.minutes:
        started, at = time.monotonic(), state["step"] * ROWS % (len(rows) - ROWS)
        ids = rows[order[at : at + ROWS]].long()
        with torch.no_grad():
            goal = target(ids).logits.flatten(0, 1).softmax(-1)
        loss = cross_entropy(student(ids).logits.flatten(0, 1), goal)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        left = 1 - state["seconds"] / (60 * options.minutes)
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1, (state["step"] + 1) / WARMUP) * max(0.05, left)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state["step"] += 1
        state["seconds"] += time.monotonic() - started
        if state["step"] % 50 == 0 or state["seconds"] >= 60 * options.minutes:
            print(f"step {state['step']} {state['seconds']:.0f} s loss {sum(losses) / len(losses):.3f}", flush=True)
            losses.clear()
            save(checkpoint, {"model": student.state_dict(), "optimizer": optimizer.state_dict(), "state": state})
            copy.deepcopy(student).to(torch.bfloat16).save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
