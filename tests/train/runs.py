"""Shared parts of the training tests: rows for the tiny pair and a runner for trainings of a second or two."""

import json
import random
import socket
from pathlib import Path
from typing import Any

import torch

from tests.forks import Forked
from volley import Engine, SamplingParams
from volley.engine.step import Step
from volley.tensors import load_tensors
from volley.train.loop import train
from volley.train.options import TrainConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Shape of a tiny target of any family, which the tests train drafters for."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "two",
    "birds",
    "fly",
    "over",
    "it",
    "while",
    "rain",
    "fell",
]


def make_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "messages": [
                {"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))},
                {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randint(2, 9)))},
            ]
        }
        for _ in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_run(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Options of a training of the tiny target that lasts a second; tests change what they are about."""
    options: dict[str, Any] = {
        "target": str(model),
        "data": [str(write_rows(folder / "rows.jsonl", make_rows(24)))],
        "out": str(folder / "run"),
        "eval_share": 0.1,
        "eval_prompts": 0,
        "block_size": 4,
        "taps": [0, 2],
        "num_layers": 1,
        "tokens_per_batch": 400,
        "anchors_per_sequence": 6,
        "max_steps": 6,
        "optimizer": "adamw",
        "learning_rate": 6e-4,
        "loss_decay": "decay",
        "dtype": "float32",
        "log_steps": 2,
        "save_minutes": None,
    }
    return {**options, **changes}


def weights(out: str | Path) -> dict[str, torch.Tensor]:
    """fp32 weights of a run's checkpoint."""
    state = torch.load(Path(out) / "checkpoint.pt", weights_only=True)
    return dict(state["training"]["model"])


def drafter_weights(out: str | Path) -> dict[str, torch.Tensor]:
    return load_tensors(Path(out) / "drafter" / "model.safetensors")


def start(options: dict[str, Any], **variables: str) -> Forked:
    """The training of ``options`` in a process of its own."""
    return Forked(lambda: train(TrainConfig(**options)), **variables)


def start_nodes(*options: dict[str, Any], **variables: str) -> list[Forked]:
    """One training, each of its processes started by itself as torchrun starts them on several nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(len(options)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **variables,
    }
    return [start(own, RANK=str(rank), **shared) for rank, own in enumerate(options)]


def engine_features(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """The features of a prompt that an engine hands to its drafter."""
    seen: list[torch.Tensor] = []
    forward = engine.core.runner.forward

    def spied(step: Step) -> None:
        forward(step)
        assert step.features is not None
        seen.append(step.features.clone())

    engine.core.runner.forward = spied  # type: ignore[method-assign]
    list(engine.generate(token_ids, SamplingParams(max_tokens=1)))
    engine.core.runner.forward = forward  # type: ignore[method-assign]
    return torch.cat(seen)
