"""Models, configs and tokenizers from wherever they lie: a Hugging Face folder, the hub, or a GGUF file."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from volley.models.gguf.file import GGUFFile, is_gguf
from volley.models.gguf.target import load_model, read_config
from volley.models.gguf.tokenizer import load_gguf_tokenizer


def load_config(path: str | Path) -> PretrainedConfig:
    """The config of a causal LM; no weights are read."""
    config: PretrainedConfig = read_config(GGUFFile(path)) if is_gguf(path) else AutoConfig.from_pretrained(path)
    return config


def load_causal_lm(path: str | Path, dtype: torch.dtype | str, attention: str | None = None) -> PreTrainedModel:
    """A causal LM in ``dtype``, with transformers' ``attention`` or the one it takes by itself."""
    if is_gguf(path):
        kind = torch.float32 if isinstance(dtype, str) else dtype
        return load_model(path, kind, attention or "sdpa")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    return model


def auto_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model."""
    tokenizer: PreTrainedTokenizerBase = (
        load_gguf_tokenizer(path) if is_gguf(path) else AutoTokenizer.from_pretrained(path)
    )
    return tokenizer
