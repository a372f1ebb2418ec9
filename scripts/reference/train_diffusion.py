"""Adapt the reference target to block diffusion, and keep its causal mode: one joint loss, bounded by the clock.

A row of text goes through the model twice in one pass. The *clean* half is the text itself, read causally, with the next-token
loss. Behind it stand *noisy* blocks, anywhere in the answers: each sees the clean tokens before it and itself both ways, and
predicts its masked slots in place. So K/V of finished text stay causal, canvases begin anywhere, and causal passes can verify.
Half of each loss is against the law that the frozen target has of that token, which varies less than the token does.

The whole state is written every few minutes (atomically). A killed run goes on where it was, and a finished one goes on if it is
given more minutes. All is fp32: on a CPU without bf16 instructions products of bf16 ran at 0.2 and those of fp32 at 50 GFLOP/s.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import DOMAINS, load_chats
from torch import Tensor, nn
from train_target import Resumable, encode
from transformers import AttentionInterface, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from volley.files import replaced, write_atomically
from volley.train.optimizer import Muon

ROW = 256
NOISY_COPIES = 2  # noisy rows per clean row
LENGTHS = {8: 0.7, 4: 0.15, 16: 0.15}  # of blocks, and how often each is drawn; the first is the model's own
SOFT = 0.5
SLOT_DECAY = 0.95  # weight of a slot's loss against that of the slot before: what is revealed first matters most
ROWS_PER_STEP = 2
PEAK_LR = 8e-4
WARMUP_STEPS = 10
DECAY_SHARE = 0.4  # of the budget: the learning rate falls linearly to zero at the end
EPOCH_WEIGHTS = {  # below 1: the share of the file that is read
    "gsm8k_train": 1,
    "mbpp": 3,
    "python_functions": 0.5,
    "python_algorithms": 0.05,
    "tldr_pages": 0.7,
    "peps": 0.05,
    "rust_book": 0.3,
    "responses": 12,
}


@dataclass(frozen=True)
class Blocks:
    """``A`` blocks of ``size`` L behind a clean row of ``ROW`` tokens, at ``starts [A]``: the rule of attention."""

    starts: Tensor
    size: int

    @property
    def places(self) -> Tensor:
        """Positions ``[A, L]`` of the slots."""
        return self.starts[:, None] + torch.arange(self.size)

    @property
    def hidden(self) -> Tensor:
        """Added to scores against the clean row, ``[A, 1, ROW]``: a block sees what lies before it."""
        after = torch.arange(ROW) >= self.starts[:, None]
        return torch.zeros(after.shape).masked_fill(after, -math.inf)[:, None]


def _mix(query: Tensor, key: Tensor, value: Tensor, causal: Tensor, hidden: Tensor, size: int) -> Tensor:
    """``query [H, T, d]``, scaled; ``key`` and ``value [KV, T, d]``; T is the clean row and the blocks behind it."""
    heads, kv_heads, dim = query.shape[0], key.shape[0], key.shape[-1]
    group = heads // kv_heads
    query = query.view(kv_heads, group, -1, dim)
    clean_keys, clean_values = key[:, :ROW], value[:, :ROW]
    scores = query[:, :, :ROW].reshape(kv_heads, group * ROW, dim) @ clean_keys.mT
    probs = (scores.view(kv_heads, group, ROW, ROW) + causal).softmax(-1)
    clean = probs.view(kv_heads, -1, ROW) @ clean_values
    rows = query[:, :, ROW:].reshape(kv_heads, group, -1, size, dim)
    own_keys, own_values = (x[:, ROW:].reshape(kv_heads, 1, -1, size, dim) for x in (key, value))
    to_context = (rows.reshape(kv_heads, -1, dim) @ clean_keys.mT).view(*rows.shape[:-1], ROW) + hidden
    probs = torch.cat([to_context, rows @ own_keys.mT], dim=-1).softmax(-1)
    noisy = probs[..., :ROW].reshape(kv_heads, -1, ROW) @ clean_values
    noisy = noisy.view(rows.shape) + probs[..., ROW:] @ own_values
    parts = (clean.view(heads, ROW, dim), noisy.reshape(heads, -1, dim))
    return torch.cat(parts, dim=1)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, *, blocks: Any, **_: Any
) -> tuple[Tensor, None]:
    mixed = _mix(query[0] * scaling, key[0], value[0], *blocks)
    return mixed.transpose(0, 1)[None], None


AttentionInterface.register("clean_and_noisy", attend)  # and no mask function: transformers then build no masks


class JointCrossEntropy(torch.autograd.Function):
    """Σ weight · cross-entropy of ``hidden [R, H] @ head.T [H, V]``, without ever holding the logits of all rows.

    The target of row i is ``labels[i]``, and for a share ``soft[i]`` of it the law ``laws[rows[i]]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        laws: Tensor,
        rows: Tensor,
        soft: Tensor,
    ) -> Tensor:
        total, grad_hidden, grad_head = 0.0, torch.empty_like(hidden), torch.zeros_like(head)
        for part in torch.arange(len(labels)).split(128):
            chunk, chosen, weight = hidden[part], labels[part, None], weights[part, None]
            log_probs = (chunk @ head.t()).log_softmax(-1)
            total = total - float((log_probs.gather(1, chosen) * weight).sum())
            grad = log_probs.exp_()
            grad.scatter_add_(1, chosen, soft[part, None] - 1)
            if bool(soft[part].any()):
                grad.addcmul_(laws[rows[part]], soft[part, None], value=-1)
            grad.mul_(weight)
            grad_hidden[part] = grad @ head
            grad_head.addmm_(grad.t(), chunk)
        ctx.save_for_backward(grad_hidden, grad_head)
        return torch.tensor(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None, None, None, None, None


@dataclass(frozen=True)
class Text:
    """One long row: tokens, and whether an answer holds each."""

    tokens: Tensor
    is_answer: Tensor

    def row(self, start: int) -> "Text":
        return Text(*(x[start : start + ROW] for x in (self.tokens, self.is_answer)))


def joined(parts: list[Text]) -> Text:
    return Text(*(torch.cat([getattr(p, name) for p in parts]) for name in ("tokens", "is_answer")))


def as_text(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Text:
    """A chat; its answer is what follows the last opening of a turn."""
    opening = int((ids == tokenizer.convert_tokens_to_ids("<|im_start|>")).nonzero()[-1])
    head = len(tokenizer("assistant\n")["input_ids"])
    place = torch.arange(len(ids))
    return Text(ids.long(), place > opening + head)


def read_responses(path: Path | None) -> list[tuple[str, str, str]]:
    if path is None:
        return []
    chats = []
    for line in path.read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"][-2:]
        chats.append(("responses", question["content"], answer["content"]))
    return chats


def one_epoch(names: list[str], documents: list[Text], epoch: int) -> Text:
    picks = [index for index, name in enumerate(names) for _ in range(max(1, round(EPOCH_WEIGHTS[name])))]
    random.Random(epoch).shuffle(picks)
    return joined([documents[index] for index in picks])


def choose_blocks(row: Text, size: int, count: int, noise: torch.Generator) -> Blocks:
    """Blocks at random places of the answers."""
    places = row.is_answer[: ROW - size].nonzero()[:, 0]
    places = places[places > 0] if bool((places > 0).any()) else torch.arange(1, ROW - size)
    return Blocks(places[torch.randint(len(places), (count,), generator=noise)], size)


def choose_masks(count: int, size: int, noise: torch.Generator) -> Tensor:
    """``[count, L]``: four tenths all masked, three with the first token given, the others at random, later slots more often."""
    level = 0.3 + 0.7 * torch.rand(count, 1, generator=noise)
    tilt = torch.linspace(-0.2, 0.2, size)
    masked = torch.rand(count, size, generator=noise) < level + tilt
    kind = torch.rand(count, 1, generator=noise)
    masked |= kind < 0.7
    masked[:, :1] &= ~((kind >= 0.4) & (kind < 0.7))
    masked[:, -1] |= ~masked.any(dim=1)
    return masked


@dataclass(frozen=True)
class Pass:
    """Inputs of one pass, and where its losses are."""

    blocks: Blocks
    tokens: Tensor
    positions: Tensor
    masked: Tensor

    @classmethod
    def of(cls, row: Text, blocks: Blocks, masked: Tensor, mask_token_id: int) -> "Pass":
        noisy = row.tokens[blocks.places].masked_fill(masked, mask_token_id)
        positions = torch.cat([torch.arange(ROW), blocks.places.flatten()])
        return cls(blocks, torch.cat([row.tokens, noisy.flatten()]), positions, masked)


CAUSAL = torch.full((ROW, ROW), -math.inf).triu(1)


def states(model: Qwen3ForCausalLM, work: Pass) -> Tensor:
    """Normed hidden states ``[ROW + A · L, H]``."""
    blocks = (CAUSAL, work.blocks.hidden, work.blocks.size)
    output = model.model(input_ids=work.tokens[None], position_ids=work.positions[None], use_cache=False, blocks=blocks)
    return output.last_hidden_state[0]


class Trainer(Resumable):
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.target)
        self.mask = self.tokenizer.convert_tokens_to_ids("<|mask|>")
        self.model = Qwen3ForCausalLM.from_pretrained(options.target, dtype=torch.float32)
        self.model.set_attn_implementation("clean_and_noisy")
        self.teacher = Qwen3ForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
        if options.compile:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in self.model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
        self.optimizers = [
            Muon(matrices, PEAK_LR, momentum=0.9),
            torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.state = {"step": 0, "seconds": 0.0, "epoch": 0, "position": 0, "tokens": 0, "noisy": 0}
        self.checkpoint = options.out / "checkpoint.pt"

    def read(self) -> None:
        """Training text; tokens are kept beside the checkpoint."""
        kept = self.options.out / "documents.pt"
        if kept.exists():
            self.names, encoded = torch.load(kept, weights_only=True)
        else:
            rng = random.Random(0)
            chats = load_chats(self.options.data, held_out=False) + read_responses(self.options.responses)
            chats = [chat for chat in chats if rng.random() < EPOCH_WEIGHTS[chat[0]]]
            self.names, encoded = [name for name, _, _ in chats], encode(self.tokenizer, chats)
            with replaced(kept) as temporary:
                torch.save((self.names, encoded), temporary)
        self.documents = [as_text(ids, self.tokenizer) for ids in encoded]
        self.text = one_epoch(self.names, self.documents, self.state["epoch"])

    def next_row(self) -> Text:
        if self.state["position"] + ROW > len(self.text.tokens):
            self.state["epoch"] += 1
            self.state["position"] = 0
            self.text = one_epoch(self.names, self.documents, self.state["epoch"])
        self.state["position"] += ROW
        return self.text.row(self.state["position"] - ROW)

    def step(self) -> tuple[float, float]:
        """The mean loss of masked slots and of next tokens, after one update."""
        noise = torch.Generator().manual_seed(self.state["step"])
        chooser = random.Random(self.state["step"])
        sums = torch.zeros(2)
        for _ in range(ROWS_PER_STEP):
            size = chooser.choices(list(LENGTHS), list(LENGTHS.values()))[0]
            sums += self.accumulate(self.next_row(), size, noise) / ROWS_PER_STEP
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(sums[0]), float(sums[1])

    def accumulate(self, row: Text, size: int, noise: torch.Generator) -> Tensor:
        count = NOISY_COPIES * ROW // size
        blocks = choose_blocks(row, size, count, noise)
        work = Pass.of(row, blocks, choose_masks(count, size, noise), self.mask)
        hidden = states(self.model, work)
        clean, noisy = hidden[: ROW - 1], hidden[ROW:].view(count, size, -1)
        with torch.no_grad():
            laws = self.teacher(input_ids=row.tokens[None, :-1], use_cache=False).logits[0].softmax(-1)
        places = blocks.places
        asked = work.masked & row.is_answer[places]
        slots = SLOT_DECAY ** torch.arange(size).expand(count, size)
        noisy_weights = slots[asked] / slots[asked].sum().clamp(min=1)
        following, where = torch.arange(1, ROW), places[asked]
        causal_loss = self.loss(
            clean, row.tokens[following], torch.full((ROW - 1,), 1 / (ROW - 1)), laws, following - 1
        )
        masked_loss = self.loss(noisy[asked], row.tokens[where], noisy_weights, laws, where - 1)
        ((causal_loss * self.options.causal_weight + masked_loss) / ROWS_PER_STEP).backward()
        self.state["tokens"] += ROW
        self.state["noisy"] += int(asked.sum())
        return torch.stack([masked_loss.detach(), causal_loss.detach()])

    def loss(self, hidden: Tensor, labels: Tensor, weights: Tensor, laws: Tensor, rows: Tensor) -> Tensor:
        soft = torch.full((len(labels),), SOFT)
        return JointCrossEntropy.apply(hidden, self.model.lm_head.weight, labels, weights, laws, rows, soft)

    def run(self) -> None:
        self.load()
        self.read()
        budget, saved_at = self.options.minutes * 60, time.monotonic()
        smooth = [math.nan, math.nan]
        while self.state["seconds"] < budget:
            started = time.monotonic()
            progress = self.state["seconds"] / budget
            scale = min(1.0, (self.state["step"] + 1) / WARMUP_STEPS, (1 - progress) / DECAY_SHARE)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = PEAK_LR * scale
            for index, loss in enumerate(self.step()):
                smooth[index] = loss if math.isnan(smooth[index]) else 0.95 * smooth[index] + 0.05 * loss
            self.state["step"] += 1
            seconds = time.monotonic() - started
            self.state["seconds"] += seconds
            if self.state["step"] % 5 == 0:
                shown = {name: round(value) for name, value in self.state.items()}
                losses = f"masked {smooth[0]:.3f} causal {smooth[1]:.3f}"
                print(f"{shown} {losses} rate {scale:.2f} ({seconds:.1f} s a step)", flush=True)
            if time.monotonic() - saved_at > 120:
                self.save()
                saved_at = time.monotonic()
        self.save()
        self.finish()

    def finish(self) -> None:
        report = {**self.state, "responses": sum(name == "responses" for name in self.names)}
        report["held_out"] = held_out(self.model, self.tokenizer, self.options.data, self.mask)
        self.model.set_attn_implementation("sdpa")
        config = self.model.config
        config.block_diffusion = {"mask_token_id": self.mask, "canvas_length": next(iter(LENGTHS))}
        self.model.to(torch.bfloat16).save_pretrained(self.options.out / "model")
        self.tokenizer.save_pretrained(self.options.out / "model")
        write_atomically(self.options.out / "report.json", json.dumps(report, indent=2) + "\n")
        print(json.dumps(report))


def held_out_rows(tokenizer: PreTrainedTokenizerFast, data: Path, most: int) -> Iterator[tuple[str, Text]]:
    """The first rows of each domain's held-out text."""
    chats = load_chats(data, held_out=True)
    parts: dict[str, list[Text]] = {}
    for (name, _, _), ids in zip(chats, encode(tokenizer, chats), strict=True):
        parts.setdefault(DOMAINS[name], []).append(as_text(ids, tokenizer))
    for domain, texts in parts.items():
        text = joined(texts)
        for start in range(0, min(most * ROW, len(text.tokens) - ROW), ROW):
            yield domain, text.row(start)


@torch.no_grad()
def held_out(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path, mask: int, most: int = 24
) -> dict[str, dict[str, float]]:
    """Nats per token of held-out text by domain: causally, and the bound of blocks of each length.

    The bound is that of revealing in random order: of k slots masked, k uniform, each has the weight L / k.
    """
    noise = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, list[float]]] = {}
    for domain, row in held_out_rows(tokenizer, data, most):
        sums = found.setdefault(domain, {})
        for size in sorted(LENGTHS):
            starts = torch.arange(1, ROW - size + 1, size)
            order = torch.rand(len(starts), size, generator=noise).argsort(-1).argsort(-1)
            number = torch.randint(1, size + 1, (len(starts), 1), generator=noise)
            blocks = Blocks(starts, size)
            work = Pass.of(row, blocks, order < number, mask)
            hidden = states(model, work)
            places = blocks.places
            logs = model.lm_head(hidden[ROW:]).log_softmax(-1).gather(1, row.tokens[places].view(-1, 1))
            logs = (-logs.view(places.shape) * work.masked / number).sum()
            sums.setdefault(f"bound {size}", []).append(float(logs) / len(starts))
        causal = model.lm_head(hidden[: ROW - 1]).log_softmax(-1).gather(1, row.tokens[1:, None])
        sums.setdefault("causal", []).append(float(-causal.mean()))
    return {domain: {k: round(sum(v) / len(v), 4) for k, v in sums.items()} for domain, sums in found.items()}


def score(folder: Path, data: Path) -> None:
    """Print what :func:`held_out` finds of a saved model, as it is stored; of a causal LM only ``causal`` means anything."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_attn_implementation("clean_and_noisy")
    found = held_out(model, tokenizer, data, tokenizer.convert_tokens_to_ids("<|mask|>"))
    names = list(next(iter(found.values())))
    print(f"| domain | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for domain, losses in found.items():
        print(f"| {domain} | " + " | ".join(f"{losses[name]:.3f}" for name in names) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target to begin with")
    parser.add_argument("--responses", type=Path, help="what volley collect took from the target")
    parser.add_argument("--out", type=Path, default=Path("diffusion"))
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--causal-weight", type=float, default=0.5, help="of the next-token loss")
    parser.add_argument("--compile", action="store_true", help="compile a layer: a minute, then faster steps")
    parser.add_argument(
        "--score", action="store_true", help="only measure --target on held-out text, a model of both kinds"
    )
    options = parser.parse_args()
    if options.score:
        score(options.target, options.data)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        Trainer(options).run()
