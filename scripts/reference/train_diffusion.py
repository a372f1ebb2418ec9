"""Adapt the reference target to block diffusion, and keep its causal mode: one joint loss, bounded by the clock.

A row of text goes through the model twice in one pass. The *clean* half is the text itself, read causally, with the next-token
loss. Behind it stand *noisy* blocks, anywhere in the answers: each sees the clean tokens before it and itself both ways, and
predicts its masked slots in place. So K/V of finished text stay causal, canvases begin anywhere, and causal passes can verify.
Half of a loss is against the law that the frozen target has of that token, which varies less than the token does. That law knows
the text before the token alone. A slot with revealed tokens behind it should know more, so it learns the token alone.

The whole state is written every few minutes (atomically). A killed run goes on where it was, and a finished one goes on if it is
given more minutes. What is read is kept as numbers in ``OUT/text.pt``, with which another machine needs no ``--data``. Products
are bf16 where the machine is fast at it. On a GPU: ``--device cuda --rows 64 --learning-rate 2.5e-3 --minutes 7 --compile``.
``--target`` may be what an earlier training made, whose report is put before this one's.
"""

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import DOMAINS, load_chats
from torch import Tensor, nn
from torch.nn import functional as F
from train_target import Resumable, encode
from transformers import AttentionInterface, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from volley.files import replaced, write_atomically
from volley.train.optimizer import Muon, product_dtype

ROW = 256
NOISY_COPIES = 4  # noisy rows per clean row
LENGTHS = {8: 0.6, 16: 0.2, 4: 0.2}  # of blocks, and how often each is drawn
OWN_LENGTH = 8  # what the model says of its canvases
SOFT = 0.5
SLOT_DECAY = 0.95  # weight of a slot's loss against that of the slot before: what is revealed first matters most
WARMUP_STEPS = 40
SHOWN_EVERY = 10
TOKENS_AT_ONCE = 8192  # of a pass over held-out text
DECAY_SHARE = 0.4  # of the budget: the learning rate falls linearly to zero at the end
EPOCH_WEIGHTS = {  # below 1: the share of the file that is read
    "gsm8k_train": 2,
    "mbpp": 4,
    "python_functions": 0.8,
    "python_algorithms": 0.3,
    "tldr_pages": 1,
    "peps": 0.3,
    "rust_book": 1,
    "responses": 2,
}


@dataclass(frozen=True)
class Blocks:
    """Behind each of B clean rows of ``ROW`` tokens A blocks of ``size`` L, at ``starts [B, A]``."""

    starts: Tensor
    size: int

    @property
    def places(self) -> Tensor:
        """Positions ``[B, A, L]`` of the slots."""
        return self.starts[..., None] + torch.arange(self.size, device=self.starts.device)

    def mask(self) -> Tensor:
        """``[B, A, ROW]``, added to scores: a block sees the clean tokens before it."""
        place = torch.arange(ROW, device=self.starts.device)
        seen = place < self.starts[..., None]
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)


def attend(
    module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, **kwargs: object
) -> tuple[Tensor, None]:
    """Attention of a :class:`Pass` as transformers calls it: ``queries [B, heads, T, D]`` and the mask of :class:`Blocks`.

    Clean tokens are causal. A slot's keys are the clean row, masked, and its own block.
    """
    count, kv_heads, total, width = keys.shape
    blocks, noisy = mask.shape[1], total - ROW
    clean = F.scaled_dot_product_attention(
        queries[:, :, :ROW], keys[:, :, :ROW], values[:, :, :ROW], is_causal=True, scale=scaling, enable_gqa=True
    )
    slots = (queries[:, :, ROW:] * scaling).view(count, kv_heads, -1, noisy, width)
    group = slots.shape[2]
    by_head = (count, kv_heads, group * noisy)
    by_block = (count, kv_heads, group, blocks, noisy // blocks)
    far = (slots.reshape(*by_head, width) @ keys[:, :, :ROW].mT).view(*by_block, ROW) + mask[:, None, None, :, None]
    own = keys[:, :, ROW:].view(count, kv_heads, 1, blocks, -1, width)
    near = slots.reshape(*by_block, width) @ own.mT
    share = torch.cat([far, near], dim=-1).softmax(-1)
    of_clean = share[..., :ROW].reshape(*by_head, ROW) @ values[:, :, :ROW]
    of_own = share[..., ROW:] @ values[:, :, ROW:].view(count, kv_heads, 1, blocks, -1, width)
    found = of_clean.view(count, -1, noisy, width) + of_own.reshape(count, -1, noisy, width)
    return torch.cat([clean, found], dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("blocks", attend)


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
        total, grad_hidden = weights.new_zeros(()), torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        for part in torch.arange(len(labels), device=labels.device).split(8192 if hidden.is_cuda else 128):
            chunk, chosen, weight = hidden[part], labels[part, None], weights[part, None]
            log_probs = (chunk @ head.t()).float().log_softmax(-1)
            total -= (log_probs.gather(1, chosen) * weight).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, chosen, soft[part, None] - 1)
            grad.addcmul_(laws[rows[part]], soft[part, None], value=-1)
            grad = grad.mul_(weight).to(head.dtype)
            grad_hidden[part] = grad @ head
            grad_head += grad.t() @ chunk
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None, None, None, None, None


@dataclass(frozen=True)
class Text:
    """Tokens, and whether an answer holds each: one long row ``[N]``, or rows ``[B, ROW]``."""

    tokens: Tensor
    is_answer: Tensor

    def rows(self, start: int, count: int) -> "Text":
        return Text(*(x[start : start + count * ROW].view(count, ROW) for x in (self.tokens, self.is_answer)))


def joined(parts: list[Text], device: torch.device) -> Text:
    return Text(*(torch.cat([getattr(p, name) for p in parts]).to(device) for name in ("tokens", "is_answer")))


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


Documents = tuple[list[str], list[Tensor]]
"""Files' names, and the tokens of each chat."""


def read_documents(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> tuple[Documents, Documents]:
    """Return the training and held-out data of ``text.pt``, which is made of ``--data`` if it is missing."""
    kept = options.out / "text.pt"
    if not kept.exists():
        rng = random.Random(0)
        chats = load_chats(options.data, held_out=False) + read_responses(options.responses)
        sides = (
            [chat for chat in chats if rng.random() < EPOCH_WEIGHTS[chat[0]]],
            load_chats(options.data, held_out=True),
        )
        packed = []
        for side in sides:
            encoded = encode(tokenizer, side)
            tokens = torch.cat(encoded).to(torch.int16 if len(tokenizer) < 2**15 else torch.int32)
            packed.append(([name for name, _, _ in side], tokens, [len(ids) for ids in encoded]))
        with replaced(kept) as temporary:
            torch.save(packed, temporary)
    first, second = torch.load(kept, weights_only=True)
    return tuple((names, list(tokens.split(lengths))) for names, tokens, lengths in (first, second))


def one_epoch(names: list[str], documents: list[Text], epoch: int, device: torch.device) -> Text:
    picks = [index for index, name in enumerate(names) for _ in range(max(1, round(EPOCH_WEIGHTS[name])))]
    random.Random(epoch).shuffle(picks)
    return joined([documents[index] for index in picks], device)


def choose_blocks(rows: Text, size: int, count: int, noise: torch.Generator) -> Blocks:
    """``count`` blocks behind each row, at random places of the answers."""
    allowed = rows.is_answer[:, 1 : ROW - size].float()
    allowed = allowed.masked_fill(~allowed.any(dim=1, keepdim=True), 1.0)
    return Blocks(1 + allowed.multinomial(count, replacement=True, generator=noise), size)


def choose_masks(shape: tuple[int, ...], size: int, noise: torch.Generator) -> Tensor:
    """``[*shape, L]``: a tenth are all masked, a tenth all but the first token. The others have k masks anywhere.

    k is drawn with weight 1 / k, so each number of masks is asked of equally many slots, as in the bound.
    """
    order = torch.rand(*shape, size, generator=noise, device=noise.device).argsort(-1).argsort(-1)
    chances = 1 / torch.arange(1, size + 1, device=noise.device)
    number = 1 + chances.multinomial(math.prod(shape), replacement=True, generator=noise).view(*shape, 1)
    masked = order < number
    kind = torch.rand(*shape, 1, generator=noise, device=noise.device)
    masked |= kind < 0.2
    masked[..., :1] &= ~((kind >= 0.1) & (kind < 0.2))
    return masked


@dataclass(frozen=True)
class Pass:
    """Inputs of one pass over B rows, and which slots are masked ``[B, A, L]``."""

    blocks: Blocks
    tokens: Tensor
    positions: Tensor
    masked: Tensor

    @classmethod
    def of(cls, rows: Text, blocks: Blocks, masked: Tensor, mask_token_id: int) -> "Pass":
        places = blocks.places.flatten(1)
        noisy = rows.tokens.gather(1, places).masked_fill(masked.flatten(1), mask_token_id)
        clean = torch.arange(ROW, device=places.device).expand(len(places), -1)
        return cls(blocks, torch.cat([rows.tokens, noisy], dim=1), torch.cat([clean, places], dim=1), masked)


def computing(products: torch.dtype, device: torch.device) -> torch.autocast:
    """Products in bf16, or all as it is."""
    return torch.autocast(device.type, torch.bfloat16, enabled=products is torch.bfloat16)


def states(model: Qwen3ForCausalLM, work: Pass, products: torch.dtype = torch.float32) -> Tensor:
    """Normed hidden states ``[B, ROW + A · L, H]``."""
    model.set_attn_implementation("blocks")
    with computing(products, work.tokens.device):
        output = model.model(
            input_ids=work.tokens,
            position_ids=work.positions,
            attention_mask={"full_attention": work.blocks.mask()},  # as it is: transformers makes none
            use_cache=False,
        )
    return output.last_hidden_state


class Trainer(Resumable):
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        torch.set_float32_matmul_precision("high" if self.device.type == "cuda" else "highest")
        self.tokenizer = AutoTokenizer.from_pretrained(options.target)
        self.mask = self.tokenizer.convert_tokens_to_ids("<|mask|>")
        self.model = Qwen3ForCausalLM.from_pretrained(options.target, dtype=torch.float32).to(self.device)
        self.products = product_dtype(self.device)
        self.teacher = Qwen3ForCausalLM.from_pretrained(options.target, dtype=self.products).to(self.device).eval()
        if options.compile:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in self.model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
        self.optimizers = [
            Muon(matrices, options.learning_rate, momentum=0.9),
            torch.optim.AdamW(others, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.state = {"step": 0, "seconds": 0.0, "epoch": 0, "position": 0, "tokens": 0, "noisy": 0}
        self.checkpoint = options.out / "checkpoint.pt"

    def read(self) -> None:
        """Training text, and what is held out."""
        (self.names, encoded), self.held_out = read_documents(self.options, self.tokenizer)
        self.documents = [as_text(ids, self.tokenizer) for ids in encoded]
        self.text = one_epoch(self.names, self.documents, self.state["epoch"], self.device)

    def next_rows(self) -> Text:
        taken = self.options.rows * ROW
        if self.state["position"] + taken > len(self.text.tokens):
            self.state["epoch"] += 1
            self.state["position"] = 0
            self.text = one_epoch(self.names, self.documents, self.state["epoch"], self.device)
        self.state["position"] += taken
        return self.text.rows(self.state["position"] - taken, self.options.rows)

    def step(self) -> Tensor:
        """The mean loss of masked slots and of next tokens, after one update, ``[2]``."""
        noise = torch.Generator(self.device).manual_seed(self.state["step"])
        size = random.Random(self.state["step"]).choices(list(LENGTHS), list(LENGTHS.values()))[0]
        losses = self.accumulate(self.next_rows(), size, noise)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def accumulate(self, rows: Text, size: int, noise: torch.Generator) -> Tensor:
        count, blocks_each = len(rows.tokens), NOISY_COPIES * ROW // size
        blocks = choose_blocks(rows, size, blocks_each, noise)
        work = Pass.of(rows, blocks, choose_masks((count, blocks_each), size, noise), self.mask)
        hidden = states(self.model, work, self.products)
        clean, noisy = hidden[:, : ROW - 1].flatten(0, 1), hidden[:, ROW:].view(*work.masked.shape, -1)
        with torch.no_grad():
            laws = self.teacher(input_ids=rows.tokens[:, :-1], use_cache=False).logits.float().softmax(-1).flatten(0, 1)
        law = torch.arange(len(laws), device=self.device)
        even = torch.full_like(law, 1 / len(laws), dtype=torch.float32)
        causal_loss = self.loss(clean, rows.tokens[:, 1:].flatten(), even, laws, law, torch.full_like(even, SOFT))
        places = blocks.places
        asked = work.masked & rows.is_answer.gather(1, places.flatten(1)).view_as(places)
        slot = torch.arange(size, device=self.device)
        weights = (SLOT_DECAY**slot).expand_as(places)[asked]
        last_seen = torch.where(work.masked, -1, slot).amax(-1, keepdim=True)
        row = torch.arange(count, device=self.device)[:, None, None].expand_as(places)[asked]
        masked_loss = self.loss(
            noisy[asked],
            rows.tokens[row, places[asked]],
            weights / weights.sum().clamp(min=1),
            laws,
            row * (ROW - 1) + places[asked] - 1,
            SOFT * (slot > last_seen)[asked],
        )
        (causal_loss * self.options.causal_weight + masked_loss).backward()
        self.state["tokens"] += count * ROW
        self.state["noisy"] += len(row)
        return torch.stack([masked_loss.detach(), causal_loss.detach()])

    def loss(self, hidden: Tensor, labels: Tensor, weights: Tensor, laws: Tensor, rows: Tensor, soft: Tensor) -> Tensor:
        head = self.model.lm_head.weight.to(self.products)
        return JointCrossEntropy.apply(hidden.to(self.products), head, labels, weights, laws, rows, soft)

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
                    group["lr"] = self.options.learning_rate * scale
            for index, loss in enumerate(self.step().tolist()):
                smooth[index] = loss if math.isnan(smooth[index]) else 0.95 * smooth[index] + 0.05 * loss
            self.state["step"] += 1
            seconds = time.monotonic() - started
            self.state["seconds"] += seconds
            if self.state["step"] % SHOWN_EVERY == 0:
                shown = {name: round(value) for name, value in self.state.items()}
                losses = f"masked {smooth[0]:.3f} causal {smooth[1]:.3f}"
                print(f"{shown} {losses} rate {scale:.2f} ({seconds:.2f} s a step)", flush=True)
            if time.monotonic() - saved_at > 120:
                self.save()
                saved_at = time.monotonic()
        self.save()
        self.finish()

    def finish(self) -> None:
        folder = self.options.out / "model"
        if self.options.keep:
            self.go_back(self.options.keep)
        self.model.config.block_diffusion = {"mask_token_id": self.mask, "canvas_length": OWN_LENGTH}
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        own = {**self.state, "keep": self.options.keep}
        own["responses"] = sum(name == "responses" for name in self.names)
        own["machine"] = "a CPU" if self.device.type == "cpu" else f"one {torch.cuda.get_device_name()}"
        before = self.options.target.parent / "report.json"
        is_other = before.exists() and before.resolve() != (self.options.out / "report.json").resolve()
        stages = json.loads(before.read_text(encoding="utf-8")).get("stages", []) if is_other else []
        report = {"stages": [*stages, own]}
        saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # not what was compiled
        fast = product_dtype(torch.device("cpu"))
        report["held_out"] = held_out(saved, self.tokenizer, self.held_out, self.mask, products=fast)
        write_atomically(self.options.out / "report.json", json.dumps(report, indent=2) + "\n")
        print(json.dumps(report))

    @torch.no_grad()
    def go_back(self, share: float) -> None:
        """Move the weights a share of the way back to where they began (Wortsman et al. 2022, arXiv 2109.01903)."""
        begun = dict(Qwen3ForCausalLM.from_pretrained(self.options.target, dtype=torch.float32).named_parameters())
        for name, weight in self.model.named_parameters():
            weight.lerp_(begun[name].to(self.device), share)


@torch.no_grad()
def held_out(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: Documents,
    mask: int,
    most: int = 24,
    *,
    orders: int = 1,
    products: torch.dtype = torch.float32,
) -> dict[str, dict[str, float]]:
    """Nats per token of the first rows of each domain's held-out text: causally, and the bound of blocks of each length.

    *bound L* is the mean over a random order in which each block is revealed. With several ``orders`` there are two more: the
    bound that so many give together for the model's own length, −log of the mean of their likelihoods, which is tighter (arXiv
    1509.00519); and *surest first*, where each pass reveals the slot that it is surest of, as text is written with a high
    threshold. The slot does not depend on its own token, so that is the likelihood of writing so, and no bound.
    """
    noise = torch.Generator().manual_seed(0)
    parts: dict[str, list[Text]] = {}
    for name, ids in zip(*documents, strict=True):
        parts.setdefault(DOMAINS[name], []).append(as_text(ids, tokenizer))
    found: dict[str, dict[str, float]] = {}
    for domain, texts in parts.items():
        text = joined(texts, torch.device("cpu"))
        rows = text.rows(0, min(most, len(text.tokens) // ROW))
        sums = found.setdefault(domain, {})
        for size in sorted(LENGTHS):
            starts = torch.arange(1, ROW - size + 1, size).expand(len(rows.tokens), -1)
            copies = Blocks(starts.repeat(1, orders if size == OWN_LENGTH else 1), size)
            order = torch.rand(copies.places.shape, generator=noise).argsort(-1)
            each = blocks_nats(model, rows, copies, mask, order, products=products)
            sums[f"bound {size}"] = float(each.mean()) / size
            if orders == 1:
                continue
            if size == OWN_LENGTH:
                together = math.log(orders) - (-each.view(len(starts), orders, -1)).logsumexp(1)
                sums[f"bound {size}, {orders} orders"] = float(together.mean()) / size
            surest = blocks_nats(model, rows, Blocks(starts, size), mask, products=products)
            sums[f"surest first {size}"] = float(surest.mean()) / size
        model.set_attn_implementation("sdpa")
        with computing(products, rows.tokens.device):
            clean = model.model(input_ids=rows.tokens[:, :-1], use_cache=False).last_hidden_state
        sums["causal"] = float(nats(model, clean, rows.tokens[:, 1:])[0].mean())
    return {domain: {name: round(value, 4) for name, value in sums.items()} for domain, sums in found.items()}


def blocks_nats(
    model: Qwen3ForCausalLM,
    rows: Text,
    blocks: Blocks,
    mask: int,
    order: Tensor | None = None,
    *,
    products: torch.dtype = torch.float32,
) -> Tensor:
    """−log p ``[B, A]`` of blocks of which each pass reveals one slot: as ``order [B, A, L]`` says, or the surest."""
    tokens = rows.tokens.gather(1, blocks.places.flatten(1)).view(blocks.places.shape)
    masked, found = torch.ones_like(tokens, dtype=torch.bool), list[Tensor]()
    at_once = max(1, TOKENS_AT_ONCE // (ROW + tokens[0].numel()))
    for part in torch.arange(len(tokens)).split(at_once):
        own_rows, own_blocks = Text(rows.tokens[part], rows.is_answer[part]), Blocks(blocks.starts[part], blocks.size)
        own_masked, sums = masked[part], torch.zeros(tokens[part].shape[:2])
        for number in range(blocks.size):
            hidden = states(model, Pass.of(own_rows, own_blocks, own_masked, mask), products)[:, ROW:]
            hidden = hidden.view(*own_masked.shape, -1)
            if order is None:
                losses, least = nats(model, hidden, tokens[part])
                slot = least.masked_fill(~own_masked, math.inf).argmin(-1, keepdim=True)
                sums += losses.gather(-1, slot)[..., 0]
            else:
                slot = order[part, :, number, None]
                chosen = hidden.take_along_dim(slot[..., None], dim=2)
                sums += nats(model, chosen, tokens[part].gather(-1, slot))[0][..., 0]
            own_masked.scatter_(-1, slot, value=False)
        found.append(sums)
    return torch.cat(found)


def nats(model: Qwen3ForCausalLM, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """−log p of ``tokens [B, …]``, and of the likeliest token of each place, row by row of the batch."""
    own, least = list[Tensor](), list[Tensor]()
    for rows, ids in zip(hidden, tokens, strict=True):
        law = model.lm_head(rows).log_softmax(-1)
        own.append(-law.gather(-1, ids[..., None])[..., 0])
        least.append(-law.amax(-1))
    return torch.stack(own), torch.stack(least)


def score(folder: Path, data: Path, orders: int) -> None:
    """Print what :func:`held_out` finds of a saved model, as it is stored; of a causal LM only ``causal`` means anything."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats = load_chats(data, held_out=True)
    documents = [name for name, _, _ in chats], encode(tokenizer, chats)
    found = held_out(
        model,
        tokenizer,
        documents,
        tokenizer.convert_tokens_to_ids("<|mask|>"),
        orders=orders,
        products=product_dtype(torch.device("cpu")),
    )
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=2, help=f"of {ROW} tokens in a step")
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="at its peak")
    parser.add_argument("--causal-weight", type=float, default=0.5, help="of the next-token loss")
    parser.add_argument("--keep", type=float, default=0.0, help="share of --target in the weights that are saved")
    parser.add_argument("--compile", action="store_true", help="compile a layer: a minute, then faster steps")
    parser.add_argument(
        "--score",
        action="store_true",
        help="only measure --target on held-out text, a model of both kinds: some minutes",
    )
    parser.add_argument("--orders", type=int, default=16, help="of blocks, that --score looks at")
    options = parser.parse_args()
    if options.score:
        score(options.target, options.data, options.orders)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        Trainer(options).run()
