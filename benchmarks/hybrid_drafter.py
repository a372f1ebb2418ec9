"""Is a drafter for a hybrid target as good as one for an all-attention target? Two tiny targets of one size, on one text.

    python benchmarks/hybrid_drafter.py --data DIR --out runs/hybrid-drafter

A tokenizer of 1,024 pieces and two targets are trained on GSM8K's training questions, for as many steps of the same rows: one
has attention in every layer, the other gated delta nets in three of four. Each target answers the same questions at T = 0.7, and
a drafter is trained on these answers for as many steps. τ is measured on questions of the test set from the 41st on. A seed
draws both targets, the order of their rows, the answers and the drafters. Ratios come with the 95 % interval of a bootstrap over
the questions; what another seed would change is not in it.

Such small models repeat themselves when they are greedy. A drafter learns a loop at once, and τ then tells how soon a target
falls into one. So greedy answers count only as far as no run of eight tokens has come a second time. Every stage is kept in
``--out``: a run that was stopped goes on. DIR has gsm8k_train.jsonl and gsm8k_test.jsonl.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from volley import Engine, GenerationResult, SamplingParams
from volley.files import write_atomically
from volley.prompts import read_jsonl
from volley.train.loop import train
from volley.train.optimizer import MuonWithAdamW
from volley.train.options import TrainConfig

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, ROW, LAYERS, SKIPPED = 1024, 256, 8, 40
RATE, WARMUP = 4e-3, 0.1  # of targets: the highest learning rate, and the share of the steps until it is reached
RUN, RESAMPLES = 8, 2000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
}
CONFIGS = {  # widths of the MLPs make both targets as large
    "attention": lambda: Qwen3Config(**SHAPE, intermediate_size=336),
    "hybrid": lambda: Qwen3_5TextConfig(**SHAPE, **LINEAR, intermediate_size=256),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--target-steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4, help=f"of {ROW} tokens, in a step of a target's training")
    parser.add_argument("--answers", type=int, default=250, help="questions that each target answers")
    parser.add_argument("--drafter-steps", type=int, default=250)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def questions(file: Path, first: int, count: int | None = None) -> list[list[dict[str, str]]]:
    rows = [row for _, row in read_jsonl(file)][first:]
    return [[{"role": "user", "content": row["question"]}] for row in rows[:count]]


def texts(file: Path) -> list[str]:
    return [f"{row['question']}\n{row['answer']}" for _, row in read_jsonl(file)]


def make_tokenizer(data: Path, folder: Path) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIALS, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(texts(data / "gsm8k_train.jsonl"), trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
        fast.chat_template = TEMPLATE
        fast.save_pretrained(folder)
    made: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    return made


def token_rows(tokenizer: PreTrainedTokenizerFast, file: Path) -> Tensor:
    """Conversations one after another, cut into rows ``[N, ROW]``."""
    chats = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        for _, row in read_jsonl(file)
    ]
    stream = tokenizer("".join(tokenizer.apply_chat_template(chats, tokenize=False)))["input_ids"]
    return torch.tensor(stream[: len(stream) // ROW * ROW]).view(-1, ROW)


def loss_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train_target(name: str, seed: int, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> list[float]:
    """Train a target, unless it is there; its number of weights and its loss on the test set's text."""
    folder = options.out / f"{name}-{seed}"
    facts = folder / "target.json"
    if not facts.exists():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        rows = token_rows(tokenizer, options.data / "gsm8k_train.jsonl")
        rows = rows[torch.randperm(len(rows))]
        matrices, others = list[Tensor](), list[Tensor]()
        for place, weight in model.named_parameters():
            (matrices if weight.ndim == 2 and "layers" in place else others).append(weight)
        optimizer = MuonWithAdamW(matrices, others, RATE, weight_decay=0.01)
        for step in range(options.target_steps):
            done = step / options.target_steps
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (done + 1 / options.target_steps) / WARMUP) * (1 - done)
            at = step * options.rows % (len(rows) - options.rows)
            loss = loss_of(model, rows[at : at + options.rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 25 == 24:
                print(f"{name}: step {step + 1}, loss {loss.item():.3f}", flush=True)
        model.eval()
        with torch.inference_mode():
            held_out = float(loss_of(model, token_rows(tokenizer, options.data / "gsm8k_test.jsonl")[:64]))
        model.save_pretrained(folder / "target")
        tokenizer.save_pretrained(folder / "target")
        write_atomically(facts, json.dumps([sum(p.numel() for p in model.parameters()), held_out]))
    found: list[float] = json.loads(facts.read_text(encoding="utf-8"))
    return found


def answer(folder: Path, seed: int, options: argparse.Namespace) -> Path:
    """The target's own answers to training questions, as rows for ``volley train``."""
    path = folder / "answers.jsonl"
    if not path.exists():
        engine = Engine.from_pretrained(folder / "target", dtype=torch.float32, max_running=32)
        chats = questions(options.data / "gsm8k_train.jsonl", 0, options.answers)
        params = [
            SamplingParams(max_tokens=options.max_tokens, temperature=0.7, seed=1000 * seed + i)
            for i in range(len(chats))
        ]
        rows = [
            {"messages": [*chat, {"role": "assistant", "content": result.text}]}
            for chat, result in zip(chats, engine.generate(chats, params), strict=True)
        ]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_drafter(folder: Path, data: Path, seed: int, options: argparse.Namespace) -> Path:
    return train(
        TrainConfig(
            target=str(folder / "target"),
            data=(str(data),),
            out=str(folder / "run"),
            num_layers=1,
            block_size=8,
            taps=(1, 3, 5),
            intermediate_size=256,
            draft_vocab_size=0,
            head="residual",
            head_rank=64,
            optimizer="muon",
            learning_rate=2e-3,
            soft_targets=0.5,
            tokens_per_batch=1024,
            epochs=1000,
            max_steps=options.drafter_steps,
            eval_prompts=0,
            dtype="float32",
            threads=options.threads,
            seed=seed,
        )
    )


def repeats_from(tokens: Sequence[int]) -> int:
    """Where the first run of ``RUN`` tokens ends that stood in ``tokens`` before, or their number."""
    seen = set[tuple[int, ...]]()
    for end in range(RUN, len(tokens) + 1):
        run = tuple(tokens[end - RUN : end])
        if run in seen:
            return end
        seen.add(run)
    return len(tokens)


def new_cycles(result: GenerationResult) -> list[int]:
    """Tokens of each cycle that ended before the answer began to repeat itself; the prompt's pass made the first token."""
    lengths, end = result.stats.accepted_lengths, repeats_from(result.token_ids)
    return [n for n, last in zip(lengths, accumulate(lengths, initial=1), strict=False) if last + n <= end]


def acceptance(folder: Path, drafter: Path, options: argparse.Namespace) -> NDArray[np.int64]:
    """Tokens and cycles of each answer before it repeats itself, at each temperature: ``[2, temperatures, questions]``."""
    engine = Engine.from_pretrained(
        folder / "target", drafter=drafter, dtype=torch.float32, policy="fixed", max_running=16
    )
    chats = questions(options.data / "gsm8k_test.jsonl", SKIPPED, options.num_prompts)
    found = []
    for temperature in options.temperatures:
        params = [
            SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=i) for i in range(len(chats))
        ]
        lengths = [new_cycles(result) for result in engine.generate(chats, params)]
        found.append([(sum(own), len(own)) for own in lengths])
    return np.array(found).transpose(2, 0, 1)


def tau(counted: NDArray[np.int64]) -> NDArray[np.float64]:
    """Tokens of a cycle, from ``[…, 2, temperatures, questions]``."""
    tokens, cycles = np.moveaxis(counted.sum(axis=-1), -2, 0)
    return np.asarray(tokens / cycles)


def ratios(counted: NDArray[np.int64]) -> list[str]:
    """Hybrid to attention at each temperature, the mean over seeds, from ``[seeds, targets, 2, temperatures, questions]``."""

    def of(counted: NDArray[np.int64]) -> NDArray[np.float64]:
        taus = tau(counted)
        return np.asarray((taus[:, 1] / taus[:, 0]).mean(axis=0))

    generator, size = np.random.default_rng(0), counted.shape[-1]
    drawn = [of(counted[..., generator.integers(size, size=size)]) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return [f"{r:.3f} ({a:.3f} to {b:.3f})" for r, a, b in zip(of(counted), low, high, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(None if arguments is None else list(arguments))
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(options.data, options.out / "tokenizer")
    columns = [f"τ, T = {t:g} (cycles)" for t in options.temperatures]
    print(f"| seed | target | weights | loss on the test set | {' | '.join(columns)} |\n{'|---' * (4 + len(columns))}|")
    counted = list[list[NDArray[np.int64]]]()
    for seed in options.seeds:
        counted.append([])
        for name in CONFIGS:
            size, loss = train_target(name, seed, tokenizer, options)
            folder = options.out / f"{name}-{seed}"
            drafter = train_drafter(folder, answer(folder, seed, options), seed, options)
            own = acceptance(folder, drafter, options)
            counted[-1].append(own)
            cycles = own[1].sum(axis=-1)
            cells = " | ".join(f"{t:.2f} ({count:,})" for t, count in zip(tau(own), cycles, strict=True))
            print(f"| {seed} | {name} | {size:,} | {loss:.3f} | {cells} |", flush=True)
        print(f"| {seed} | hybrid ÷ attention | | | {' | '.join(ratios(np.array(counted[-1:])))} |", flush=True)
    print(f"| all | hybrid ÷ attention | | | {' | '.join(ratios(np.array(counted)))} |")


if __name__ == "__main__":
    main()
