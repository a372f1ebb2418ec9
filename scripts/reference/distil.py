"""Parts that all trainings of draft models for the bundled target share: rows of its responses, and a loop bounded by the clock.

The clock is the process's CPU time: on a busy machine a training gets as much as on a quiet one.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from volley.files import replaced
from volley.train.data import encode_rows, read_rows
from volley.train.fused import keep_freed_memory

ROW = 256
PEAK_LR = 1e-3
WARMUP = 0.05  # of the minutes


def training_rows(responses: Path, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Token ids ``[N, ROW]`` of the prompts and responses of ``volley collect``, in random order, end to end."""
    documents = encode_rows(tokenizer, read_rows([responses]), sys.maxsize, {tokenizer.eos_token_id})
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
    stream = torch.cat([documents[index].token_ids for index in order]).long()
    return stream[: len(stream) // ROW * ROW].view(-1, ROW)


def train(
    model: nn.Module,
    rows: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    publish: Callable[[], object],
    out: Path,
    minutes: float,
    at_once: int = 4,
    every: int = 20,
) -> None:
    """Lower ``loss_of`` token ids ``[at_once, ROW]`` for so many minutes of CPU time.

    Every few steps the state is kept, and published. A run that finds its checkpoint in ``out`` goes on from it.
    """
    keep_freed_memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    checkpoint, state, seconds = out / "checkpoint.pt", {"step": 0, "seconds": 0.0}, 60 * minutes
    if checkpoint.exists():
        found = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        state = found["state"]
    losses: list[float] = []
    while state["seconds"] < seconds:
        started, at = time.process_time(), state["step"] * at_once % max(1, len(rows) - at_once)
        loss = loss_of(rows[at : at + at_once])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        spent = state["seconds"] / seconds
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1, max(spent, 0.002) / WARMUP) * max(0.05, 1 - spent)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state["step"] += 1
        state["seconds"] += time.process_time() - started
        if state["step"] % every == 0 or state["seconds"] >= seconds:
            print(f"step {state['step']} {state['seconds']:.0f} s loss {sum(losses) / len(losses):.3f}", flush=True)
            losses.clear()
            with replaced(checkpoint) as temporary:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}, temporary
                )
            publish()
