"""Is a drafter for a hybrid target as good as one for an all-attention target? Two tiny targets of one size, on one text.

    python benchmarks/hybrid_drafter.py --data DIR --out runs/hybrid-drafter

A tokenizer of 1,024 pieces and two targets are trained on GSM8K's training questions, for as many steps of the same rows: one
has attention in every layer, the other gated delta nets in three of four. Each target answers the same questions greedily, and
a drafter is trained on these answers for as many steps. τ is measured on questions of the test set from the 41st on. Every
stage is kept in ``--out``: a run that was stopped goes on. DIR has gsm8k_train.jsonl and gsm8k_test.jsonl.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
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

from volley import Engine, SamplingParams
from volley.files import write_atomically
from volley.prompts import read_jsonl
from volley.train.loop import train
from volley.train.options import TrainConfig

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, ROW, LAYERS, SKIPPED = 1024, 256, 8, 40
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
    parser.add_argument("--target-steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=8, help=f"of {ROW} tokens, in a step of a target's training")
    parser.add_argument("--answers", type=int, default=500, help="questions that each target answers")
    parser.add_argument("--drafter-steps", type=int, default=500)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
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


def train_target(name: str, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> tuple[int, float]:
    """Train a target, unless it is there; its number of weights and its loss on the test set's text."""
    folder, facts = options.out / name / "target", options.out / name / "target.json"
    if not facts.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        rows = token_rows(tokenizer, options.data / "gsm8k_train.jsonl")
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, options.target_steps, pct_start=0.1)
        for step in range(options.target_steps):
            at = step * options.rows % (len(rows) - options.rows)
            loss = loss_of(model, rows[at : at + options.rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 25 == 24:
                print(f"{name}: step {step + 1}, loss {loss.item():.3f}", flush=True)
        model.eval()
        with torch.inference_mode():
            held_out = float(loss_of(model, token_rows(tokenizer, options.data / "gsm8k_test.jsonl")[:64]))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_atomically(facts, json.dumps([sum(p.numel() for p in model.parameters()), held_out]))
    size, held_out = json.loads(facts.read_text(encoding="utf-8"))
    return size, held_out


def answer(name: str, options: argparse.Namespace) -> Path:
    """The target's own answers to training questions, as rows for ``volley train``."""
    path: Path = options.out / name / "answers.jsonl"
    if not path.exists():
        engine = Engine.from_pretrained(options.out / name / "target", dtype=torch.float32, max_running=32)
        chats = questions(options.data / "gsm8k_train.jsonl", 0, options.answers)
        params = SamplingParams(max_tokens=options.max_tokens)
        found = engine.generate(chats, params)
        rows = [
            {"messages": [*chat, {"role": "assistant", "content": result.text}]}
            for chat, result in zip(chats, found, strict=True)
        ]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_drafter(name: str, data: Path, options: argparse.Namespace) -> Path:
    return train(
        TrainConfig(
            target=str(options.out / name / "target"),
            data=(str(data),),
            out=str(options.out / name / "run"),
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
        )
    )


def acceptance(name: str, drafter: Path, temperature: float, options: argparse.Namespace) -> tuple[float, int]:
    """Mean τ over all cycles of all answers, and how many cycles."""
    engine = Engine.from_pretrained(
        options.out / name / "target", drafter=drafter, dtype=torch.float32, policy="fixed", max_running=16
    )
    chats = questions(options.data / "gsm8k_test.jsonl", SKIPPED, options.num_prompts)
    params = [
        SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=seed) for seed in range(len(chats))
    ]
    lengths = [n for result in engine.generate(chats, params) for n in result.stats.accepted_lengths]
    return sum(lengths) / len(lengths), len(lengths)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(None if arguments is None else list(arguments))
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(options.data, options.out / "tokenizer")
    lines, found = [], dict[str, list[float]]()
    for name in CONFIGS:
        size, loss = train_target(name, tokenizer, options)
        drafter = train_drafter(name, answer(name, options), options)
        measured = [acceptance(name, drafter, temperature, options) for temperature in (0.0, 1.0)]
        found[name] = [tau for tau, _ in measured]
        cells = (f"{tau:.2f} ({cycles})" for tau, cycles in measured)
        lines.append(f"| {name} | {size:,} | {loss:.3f} | {' | '.join(cells)} |")
    print("| target | weights | loss on the test set | τ, T = 0 (cycles) | τ, T = 1 |\n|---|---|---|---|---|")
    print("\n".join(lines))
    ratios = (b / a for a, b in zip(found["attention"], found["hybrid"], strict=True))
    print("hybrid ÷ attention: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
