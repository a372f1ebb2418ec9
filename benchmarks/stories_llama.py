"""Make a target of the smallest public Llama: "stories260K" of llama2.c, without a chat template or a reserved token.

It has 260 thousand parameters. ``--bin`` is its checkpoint in llama2.c's first format. Copies exist whose matrices were
transposed in place, some of them for the wrong shape and several times; the number of times under which the model expects its
own opening ("Once upon a time") is undone. The tokenizer is a stand-in of one symbol a token, so texts cannot be read, but the
model and its ids are the public ones. Openings of ``prompts.jsonl`` and ``held-out.jsonl`` are the first 4 to 15 tokens of the
model's own samples at T = 1.

    python benchmarks/stories_llama.py --bin stories260K.bin --out stories
    volley tune --target stories --prompts stories/prompts.jsonl --out tuned --max-minutes 4
"""

import argparse
import json
import struct
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OPENING = [1, 403, 407, 261, 378]
"""<s>Once upon a time"""
EXPECTED = 0.5
"""Nats a token of the opening, at most; a wrong order gives more than 2."""
MOST_TRANSPOSED = 12
FIRST_SYMBOL = 0x4E00


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=2000)
    options = parser.parse_args()
    config, weights = read(options.bin)
    model, times = restored(config, weights)
    print(f"{options.bin}: {model.num_parameters()} parameters, matrices transposed in place {times} times")
    tokenizer = make_tokenizer(config.vocab_size)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    openings = sample_openings(model, options.prompts + 100)
    write(options.out / "prompts.jsonl", tokenizer, openings[100:])
    write(options.out / "held-out.jsonl", tokenizer, openings[:100])


def read(path: Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """The legacy format: seven integers, then fp32 matrices, each kind for all layers."""
    data = path.read_bytes()
    width, inner, depth, heads, kv_heads, vocab, length = struct.unpack("7i", data[:28])
    if vocab < 0:
        raise SystemExit(f"{path}: output weights of their own are not expected of this model")
    kv_width, values, at = width // heads * kv_heads, torch.frombuffer(bytearray(data[28:]), dtype=torch.float32), 0
    weights = {}
    for name, shape in (
        ("embed_tokens", (vocab, width)),
        ("input_layernorm", (depth, width)),
        ("self_attn.q_proj", (depth, width, width)),
        ("self_attn.k_proj", (depth, kv_width, width)),
        ("self_attn.v_proj", (depth, kv_width, width)),
        ("self_attn.o_proj", (depth, width, width)),
        ("post_attention_layernorm", (depth, width)),
        ("mlp.gate_proj", (depth, inner, width)),
        ("mlp.down_proj", (depth, width, inner)),
        ("mlp.up_proj", (depth, inner, width)),
        ("norm", (width,)),
    ):
        size = torch.Size(shape).numel()
        weights[name] = values[at : at + size].view(shape)
        at += size
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    )
    return config, weights


def restored(config: LlamaConfig, weights: dict[str, Tensor]) -> tuple[LlamaForCausalLM, int]:
    opening = torch.tensor([OPENING])
    for times in range(MOST_TRANSPOSED + 1):
        model = build(config, {name: untransposed(value, times) for name, value in weights.items()})
        with torch.inference_mode():
            if model(input_ids=opening, labels=opening).loss.item() < EXPECTED:
                return model, times
    raise SystemExit('no order of the matrices makes "Once upon a time" likely; is this stories260K.bin?')


def untransposed(value: Tensor, times: int) -> Tensor:
    """``value`` as it was ``times`` transpositions in place ago; of matrices by layer only, ``[L, rows, columns]``."""
    if value.dim() == 3:
        for _ in range(times):
            value = value.transpose(1, 2).reshape(value.shape)
    return value


def build(config: LlamaConfig, weights: dict[str, Tensor]) -> LlamaForCausalLM:
    state = {"lm_head.weight": weights["embed_tokens"]}
    for name, value in weights.items():
        if name in ("embed_tokens", "norm"):
            state[f"model.{name}.weight"] = value
            continue
        for layer in range(config.num_hidden_layers):
            matrix = value[layer]
            if name.endswith(("q_proj", "k_proj")):
                matrix = halves(matrix, config.head_dim)
            state[f"model.layers.{layer}.{name}.weight"] = matrix
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def halves(matrix: Tensor, head: int) -> Tensor:
    """Rotary pairs next to each other, as llama2.c has them, to pairs half a head apart, as transformers does."""
    return matrix.view(-1, head // 2, 2, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    specials = ["<unk>", "<s>", "</s>"]
    names = specials + [chr(FIRST_SYMBOL + token) for token in range(len(specials), size)]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def sample_openings(model: LlamaForCausalLM, number: int) -> list[list[int]]:
    """Different ones, without ``<s>``."""
    torch.manual_seed(0)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < number:
        starts = torch.full((256, 1), 1)
        rows = model.generate(
            starts, attention_mask=torch.ones_like(starts), max_new_tokens=15, do_sample=True, top_k=0, pad_token_id=2
        )
        for row in rows[:, 1:].tolist():
            found.setdefault(tuple(row[: 4 + len(found) % 12]))
    return [list(opening) for opening in found if 2 not in opening][:number]


def write(path: Path, tokenizer: PreTrainedTokenizerFast, openings: list[list[int]]) -> None:
    lines = [json.dumps({"prompt": tokenizer.decode(opening)}, ensure_ascii=False) + "\n" for opening in openings]
    path.write_text("".join(lines), encoding="utf-8")
    assert all(
        tokenizer(json.loads(line)["prompt"])["input_ids"][1:] == ids for line, ids in zip(lines, openings, strict=True)
    )


if __name__ == "__main__":
    main()
