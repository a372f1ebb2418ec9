"""Tiny random checkpoints of transformers' families of causal LMs: which ones volley runs as ``generate`` does, which it refuses.

    python benchmarks/families.py [--families smollm3,llama4_text] [--tokens 200] [--out families.jsonl]

Each family's config gets small sizes where it has such fields; the model is saved with a byte tokenizer and loaded as a user
would, in fp32. Three prompts, one of them a repetition, are answered plainly, with copies (``policy="goodput"``), in blocks of a
script that drafts one wrong token of seven, and by two requests at once in chunks of 13 on pages of 4 tokens. A row says whether
all answers are those of ``generate``, else where each parts first, or why the model was refused.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import byte_tokenizer
from volley import Engine, SamplingParams
from volley.decode.work import Work
from volley.errors import VolleyError
from volley.models.targets.loading import auto_class
from volley.models.targets.target import Target
from volley.proposers.scripted import ScriptedProposer

VOCAB, BLOCK = 260, 8
SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings original_max_position_embeddings n_positions",
    48: "intermediate_size n_inner ffn_hidden_size ffn_dim",
    32: "hidden_size n_embd d_model word_embed_proj_dim attention_hidden_size dim_model_base",
    16: "moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank "
    "mamba_chunk_size",
    8: "head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim sliding_window query_pre_attn_scalar "
    "hidden_size_per_layer_input mamba_n_heads mamba_d_head mamba_d_state",
    4: "num_hidden_layers num_attention_heads n_head n_layer num_layers num_heads rotary_dim num_experts num_local_experts "
    "n_routed_experts moe_num_experts decoder_layers decoder_attention_heads",
    2: "num_key_value_heads num_global_key_value_heads num_experts_per_tok moe_topk moe_k mamba_n_groups n_mamba_heads",
    1: "n_group topk_group first_k_dense_replace num_dense_layers n_shared_experts scale_emb",
    0: "num_kv_shared_layers",
}
_EVERY_HEAD = {"num_key_value_heads": 4}
CHANGES: dict[str, dict[str, Any]] = {  # what a family needs beside small sizes
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), _EVERY_HEAD),
    "mamba2": {"num_heads": 8},
    "zamba2": {"layer_types": ["linear_attention", "linear_attention", "hybrid", "linear_attention"]},
}
NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def small_config(name: str) -> PretrainedConfig:
    kind = type(AutoConfig.for_model(name))
    aliases: dict[str, str] = getattr(kind, "attribute_map", {})
    known = {field for part in kind.__mro__ for field in getattr(part, "__annotations__", {})} | set(aliases)
    sizes = {field: size for size, fields in SIZES.items() for field in fields.split() if field in known}
    sizes = {field: size for field, size in sizes.items() if aliases.get(field, "") not in sizes}
    more = {"initializer_range": 0.3} if "initializer_range" in known else {}
    return kind(**{**sizes, **more, **NO_ENDS, **CHANGES.get(name, {})})


def make_folder(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    config = small_config(name)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim > 1 and weight.std() < 0.1:  # or logits would be flat
            torch.nn.init.normal_(weight, 0.0, 0.3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    one, two, three = (torch.randint(4, VOCAB, (size,), generator=generator).tolist() for size in (24, 9, 37))
    return [one, two * 3, three]


def generated(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, len(prompt) :
        ].tolist()
    return found


def script_of(answers: dict[tuple[int, ...], list[int]]) -> ScriptedProposer:
    def draft(work: Work[Any]) -> list[int]:
        request = work.request
        known = answers[tuple(request.token_ids[: request.num_prompt])][request.num_output :][: BLOCK - 1]
        return [token if (request.num_output + i) % 7 else (token + 1) % VOCAB for i, token in enumerate(known)]

    return ScriptedProposer(draft, BLOCK)


def compare(name: str, tokens: int, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"family": name}
    make_folder(name, folder)
    try:
        target = Target.from_pretrained(folder, torch.float32)
    except VolleyError as error:
        return row | {"refused": str(error)}
    kind: Any = auto_class(small_config(name))
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = make_prompts()
    expected = [generated(model, prompt, tokens) for prompt in prompts]
    row["different words"] = len({token for answer in expected for token in answer})
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    settings: dict[str, Callable[[], Engine]] = {
        "plain": lambda: Engine(target, block_size=1),
        "copies": lambda: Engine(target),
        "blocks": lambda: Engine(target, proposer=script_of(answers), policy=f"fixed:{BLOCK}"),
        "two at once, chunks": lambda: Engine(
            target,
            proposer=script_of(answers),
            policy=f"fixed:{BLOCK}",
            max_running=2,
            max_batch_tokens=13,
            page_size=4,
        ),
    }
    for setting, make in settings.items():
        results = make().generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        parts = [first_difference(a, result.token_ids) for a, result in zip(expected, results, strict=True)]
        row[setting] = "equal" if parts == [None] * len(parts) else parts
    return row


def first_difference(one: list[int], other: list[int]) -> int | None:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(len(one), len(other)) if at is None and len(one) != len(other) else at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a file that rows are added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    for name in options.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = compare(name, options.tokens, Path(folder))
            except Exception as error:  # of transformers, in a model of odd sizes
                row = {"family": name, "fails": f"{type(error).__name__}: {error}"}
        text = json.dumps(row)
        print(text, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
