"""Make the smallest kind of target that people try first: a Llama of 260 thousand parameters, without a chat template.

Five layers of width 64, a vocabulary of 512 tokens, all of them used: no mask token, no spare row. It is trained for a few
minutes on JSONL files of text and written to ``--out`` with ``prompts.jsonl`` (openings to learn from) and ``held-out.jsonl``
(openings that nothing is learnt from).

    python benchmarks/small_llama.py --text gsm8k_train.jsonl --out small-llama --minutes 5
    volley tune --target small-llama --prompts small-llama/prompts.jsonl --out tuned --max-minutes 4
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2000)
    options = parser.parse_args()
    texts = [text for path in options.text for text in read(path)]
    random.Random(0).shuffle(texts)
    tokenizer = make_tokenizer(texts)
    model = train(tokenizer, texts[100:], options.width, minutes=options.minutes)
    write(options.out, model, tokenizer, texts, options.prompts)


def read(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield "\n".join(row[key] for key in ("question", "answer", "text", "source") if row.get(key))


def write_openings(path: Path, texts: list[str]) -> None:
    openings = [" ".join(text.split(" ")[: 4 + index % 12]) for index, text in enumerate(texts)]
    path.write_text("".join(json.dumps({"prompt": opening}) + "\n" for opening in openings), encoding="utf-8")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write(
    out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], prompts: int
) -> None:
    """A folder of the target and its openings; it has learnt nothing of the first hundred texts."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_openings(out / "prompts.jsonl", texts[100 : 100 + prompts])
    write_openings(out / "held-out.jsonl", texts[:100])


def train(
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    width: int,
    *,
    minutes: float = float("inf"),
    steps: float = float("inf"),
) -> LlamaForCausalLM:
    """Until the ``minutes`` or the ``steps`` are over; the learning rate falls to zero."""
    torch.manual_seed(0)
    rate = 4e-3 * (64 / width) ** 0.5
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=43 * width // 16,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    tokens = [token for ids in tokenizer(texts)["input_ids"] for token in [*ids, 2]]
    stream = torch.tensor(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    started, step = time.monotonic(), 0
    while (done := max((time.monotonic() - started) / (60 * minutes), step / steps)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (1 - done)
        starts = torch.randint(len(stream) - LENGTH, (16,))
        batch = torch.stack([stream[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            print(f"step {step} {done:.0%} loss {loss.item():.3f} ({model.num_parameters()} parameters)", flush=True)
        step += 1
    return model.eval()


if __name__ == "__main__":
    main()
