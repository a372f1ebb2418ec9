"""Answers of the bundled target, as ``volley collect`` writes them."""

import json
from pathlib import Path

import torch

from volley import Engine, SamplingParams
from volley.files import REFERENCE

TARGET = str(REFERENCE / "target")
QUESTIONS = (
    "How do I use `tar`?",
    "Write a function that adds two numbers.",
    "What is 12 times 4?",
    "How do I list files?",
)


def write_answers(path: Path, temperature: float = 0.0, times: int = 1) -> Path:
    """One answer of 40 tokens to each question, or so many."""
    engine = Engine.from_pretrained(dtype=torch.float32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS * times]
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=seed) for seed in range(len(chats))]
    with path.open("w") as file:
        for chat, result in zip(chats, engine.generate(chats, params), strict=True):
            row = {
                "messages": [*chat, {"role": "assistant", "content": result.text}],
                "prompt_token_ids": engine.encode(chat),
                "response_token_ids": result.token_ids,
                "temperature": temperature,
                "thinking": None,
            }
            file.write(json.dumps(row) + "\n")
    return path
