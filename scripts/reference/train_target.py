"""Train the reference target from scratch: a deep, thin Qwen3 that fits in 28 MB and is bounded by the clock.

Two stages: short rows first, the context's full length for the last part. The whole state is written every few minutes
(atomically), so a killed run goes on where it was. Muon for the matrices inside the layers, AdamW for the rest.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from corpus import DOMAINS, WEIGHTS, load_chats
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from volley.files import replaced

STAGES = [(0.8, 256), (1.0, 1024)]  # (share of the budget at which the stage ends, tokens per row)
TOKENS_PER_FORWARD = 4096
FORWARDS_PER_STEP = 2
PEAK_LR = 3e-3
WARMUP_STEPS = 60
DECAY_FROM = 0.55  # share of the budget after which the learning rate falls linearly to zero


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``hidden [T, H] @ weight.T [V, H]`` without ever holding the ``[T, V]`` logits."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        total, grad_hidden, grad_weight = 0.0, torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for rows in torch.arange(len(labels)).split(256):
            chunk, chosen = hidden[rows], labels[rows]
            logits = (chunk @ weight.t()).float()
            log_sum = logits.logsumexp(-1)
            total = total + (log_sum - logits.gather(1, chosen[:, None])[:, 0]).sum()
            grad = (logits - log_sum[:, None]).exp_()
            grad[torch.arange(len(rows)), chosen] -= 1.0
            grad = (grad / len(labels)).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(labels)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None


def encode(tokenizer: PreTrainedTokenizerFast, chats: list[tuple[str, str, str]]) -> list[Tensor]:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], tokenize=False
        )
        for _, question, answer in chats
    ]
    return [torch.tensor(ids, dtype=torch.int32) for ids in tokenizer(texts)["input_ids"]]


def epoch_stream(names: list[str], documents: list[Tensor], epoch: int) -> Tensor:
    """All documents of one epoch in random order, each as often as its file's weight says, as one long row."""
    rng = random.Random(epoch)
    picks = []
    for index, name in enumerate(names):
        whole, rest = divmod(WEIGHTS[name], 1)
        picks += [index] * (int(whole) + (rng.random() < rest))
    rng.shuffle(picks)
    return torch.cat([documents[index] for index in picks])


@torch.no_grad()
def held_out_losses(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path) -> dict[str, float]:
    """Mean cross-entropy (nats per token) of the held-out rows of each domain, in bf16 as the model is shipped."""
    chats = load_chats(data, held_out=True)
    totals: dict[str, list[float]] = {}
    for (name, _, _), ids in zip(chats, encode(tokenizer, chats), strict=True):
        ids = ids[:1024].long()[None]
        loss = model(input_ids=ids, labels=ids).loss.item()
        total = totals.setdefault(DOMAINS[name], [0.0, 0])
        total[0] += loss * (ids.shape[1] - 1)
        total[1] += ids.shape[1] - 1
    return {domain: round(total / count, 4) for domain, (total, count) in totals.items()}


class Resumable:
    """A training whose ``model``, ``optimizers`` and ``state`` are kept in the file ``checkpoint``."""

    def save(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        with replaced(self.checkpoint) as temporary:
            torch.save({"model": self.model.state_dict(), "optimizers": optimizers, "state": self.state}, temporary)

    def load(self) -> None:
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.state = saved["state"]
            print("resumed", self.state, flush=True)


class Trainer(Resumable):
    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        config = build_config(self.tokenizer)
        config._attn_implementation = "eager"  # compiled, it is twice as fast as the CPU's flash attention backward
        self.model = Qwen3ForCausalLM(config)
        self.body = torch.compile(self.model.model, dynamic=False)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in self.model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.state = {"step": 0, "seconds": 0.0, "epoch": 0, "position": 0, "tokens": 0}
        self.checkpoint = options.out / "checkpoint.pt"

    def set_learning_rate(self, progress: float) -> None:
        scale = min(1.0, (self.state["step"] + 1) / WARMUP_STEPS, (1 - progress) / (1 - DECAY_FROM))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * max(scale, 0.0)

    def next_rows(self, length: int) -> Tensor:
        take = TOKENS_PER_FORWARD + 1
        if self.state["position"] + take > len(self.stream):
            self.state["epoch"] += 1
            self.state["position"] = 0
            self.stream = epoch_stream(self.names, self.documents, self.state["epoch"])
        start = self.state["position"]
        self.state["position"] += TOKENS_PER_FORWARD
        flat = self.stream[start : start + take].long()
        return torch.stack([flat[:-1].view(-1, length), flat[1:].view(-1, length)])

    def step(self, length: int) -> float:
        total = 0.0
        for _ in range(FORWARDS_PER_STEP):
            inputs, labels = self.next_rows(length)
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.body(input_ids=inputs, use_cache=False).last_hidden_state
            weight = self.model.lm_head.weight
            loss = ChunkedCrossEntropy.apply(hidden.flatten(0, 1).bfloat16(), weight.bfloat16(), labels.flatten())
            (loss / FORWARDS_PER_STEP).backward()
            total += loss.item() / FORWARDS_PER_STEP
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total

    def run(self) -> None:
        self.load()
        chats = load_chats(self.options.data, held_out=False)
        self.names = [name for name, _, _ in chats]
        self.documents = encode(self.tokenizer, chats)
        self.stream = epoch_stream(self.names, self.documents, self.state["epoch"])
        budget = self.options.minutes * 60
        saved_at = time.monotonic()
        smooth = math.nan
        while self.state["seconds"] < budget:
            started = time.monotonic()
            progress = self.state["seconds"] / budget
            self.set_learning_rate(progress)
            length = next(length for end, length in STAGES if progress < end)
            loss = self.step(length)
            smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
            self.state["step"] += 1
            self.state["tokens"] += TOKENS_PER_FORWARD * FORWARDS_PER_STEP
            self.state["seconds"] += time.monotonic() - started
            if self.state["step"] % 10 == 0:
                speed = TOKENS_PER_FORWARD * FORWARDS_PER_STEP / (time.monotonic() - started)
                print(f"{self.state} loss {smooth:.3f} ({speed:.0f} tok/s)", flush=True)
            if time.monotonic() - saved_at > 180:
                self.save()
                saved_at = time.monotonic()
        self.save()
        self.finish()

    def finish(self) -> None:
        self.model.config._attn_implementation = "sdpa"
        model = self.model.to(torch.bfloat16)
        report = {**self.state, "held_out_nats_per_token": held_out_losses(model, self.tokenizer, self.options.data)}
        model.save_pretrained(self.options.out / "model")
        self.tokenizer.save_pretrained(self.options.out / "model")
        (self.options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=45.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Trainer(options).run()
