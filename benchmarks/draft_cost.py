"""Figure 3 of DFlash: seconds of a draft by 1, 3, 5 and 8 layers in one pass, beside an EAGLE-3 chain of one layer.

    python -m benchmarks.draft_cost --json benchmarks/results/draft-cost.json

Weights are random and bf16; a draft's cost does not depend on them. Target and drafters have one width, and all drafters draft
the same vocabulary with the target's head. A draft includes its tokens' choice, and the K/V of one accepted token. Times are the
shortest of rounds in which all take turns, in seconds of the CPU, so that other processes on it count little; ``ratio`` is by
the EAGLE-3 chain of 7 tokens (the paper compares with 8).
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from volley import Engine, Target
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.targets import rehearsal

LAYERS = (1, 3, 5, 8)
TOKENS = (3, 7, 15)
"""Drafted tokens: blocks of 4, 8 and 16."""
TAPS = (0, 1, 2)
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
}


def make_target(shape: dict[str, int]) -> Target:
    config = Qwen3Config(**shape, num_hidden_layers=4, max_position_embeddings=2048, tie_word_embeddings=True)
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config).to(torch.bfloat16))


def write_block_drafter(folder: Path, shape: dict[str, int], layers: int) -> Path:
    own = {"num_target_layers": 4, "block_size": 16, "mask_token_id": 1, "target_layer_ids": TAPS}
    Drafter(DrafterConfig(**shape, num_hidden_layers=layers, **own)).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def write_eagle(folder: Path, shape: dict[str, int]) -> Path:
    """An EAGLE-3 checkpoint by its published names."""
    width, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    heads, shared = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * width),
        "midlayer.self_attn.k_proj.weight": (shared, 2 * width),
        "midlayer.self_attn.v_proj.weight": (shared, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, heads),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "lm_head.weight": (vocab, width),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights = {name: 0.02 * torch.randn(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    weights |= {f"{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in norms}
    said: dict[str, Any] = {
        **shape,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    save_file(weights, folder / "model.safetensors")
    return folder


def measure(shape: dict[str, int], rounds: int) -> dict[str, dict[int, float]]:
    """Return the seconds of a draft by its drafter and its number of tokens."""
    target, engines = make_target(shape), dict[str, Engine]()
    with TemporaryDirectory() as place:
        folders = {f"DFlash, {n} layers": write_block_drafter(Path(place) / str(n), shape, n) for n in LAYERS}
        folders["EAGLE-3, 1 layer"] = write_eagle(Path(place) / "eagle", shape)
        for name, folder in folders.items():
            drafter = load_drafter(folder, target, "bf16")
            engines[name] = Engine(target, drafter, policy="fixed:16", num_pages=64)
        found = {name: dict.fromkeys(TOKENS, float("inf")) for name in engines}
        clock = mock.patch.object(rehearsal.time, "perf_counter", time.process_time)
        for _ in range(rounds):
            for name, engine in engines.items():
                assert engine.core.proposer is not None
                for size in TOKENS:
                    own = engine.core.proposer
                    if hasattr(own, "_seconds"):
                        own._seconds = {}  # an EAGLE-3 drafter remembers what a step took
                    with clock:
                        found[name][size] = min(found[name][size], own.seconds(1 + size, 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(SHAPE, options.rounds)
    chain = found["EAGLE-3, 1 layer"][7]
    ratios = {name: {str(size): round(own[size] / chain, 3) for size in TOKENS} for name, own in found.items()}
    print("| drafter | 3 tokens | 7 tokens | 15 tokens |\n|---|---|---|---|")
    for name, own in ratios.items():
        print(f"| {name} | " + " | ".join(f"{own[str(size)]:.2f}" for size in TOKENS) + " |")
    if options.json is not None:
        record = {"shape": SHAPE, "threads": options.threads, "torch": torch.__version__, "ratio": ratios}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
