"""Shared fixtures: a tiny random pair on disk."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests import tiny
from volley.models.drafters.drafter import Drafter
from volley.models.layers import host_memory

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

torch.set_num_threads(1)  # the models are too small for more
SLOW_ON_PURPOSE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "volley",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=20,  # `make test-fresh` explores
    suppress_health_check=SLOW_ON_PURPOSE,
)
settings.register_profile(  # other examples in every run; `make test-fresh` prints the seed that repeats them
    "fresh",
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    max_examples=60,
    suppress_health_check=SLOW_ON_PURPOSE,
)
settings.load_profile("volley")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip tests that would begin after ``TESTS_END`` (seconds since 1970): a slow machine's run ends in time."""
    if time.time() > float(os.environ.get("TESTS_END", "inf")):
        pytest.skip("no time is left in this run")


@pytest.fixture(scope="session", autouse=True)
def _libraries_stay() -> Iterator[None]:
    """Every test that loads a model would read them again; ``test_host_memory`` looks at processes of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "forget_libraries", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _chance_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed all unseeded draws, so that a statistical test passes always or never."""
    torch.manual_seed(0)
    drawn = Random(0)
    monkeypatch.setattr("secrets.randbits", drawn.getrandbits)
    monkeypatch.setattr("secrets.token_bytes", lambda size=32: drawn.randbytes(size or 32))


class TinyPair(NamedTuple):
    """Folders of a random Qwen3 target with a byte-level tokenizer and of a random drafter for it."""

    target: Path
    drafter: Path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the chat's markers."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_tiny_pair(TinyPair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")))


def write_tiny_pair(pair: TinyPair) -> TinyPair:
    """Random weights large enough that greedy answers wander; nothing is learnt, so τ is close to 1."""
    torch.manual_seed(0)
    config = tiny.target_config(
        vocab_size=260, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0
    )
    Qwen3ForCausalLM(config).eval().save_pretrained(pair.target)
    byte_tokenizer().save_pretrained(pair.target)
    Drafter(tiny.drafter_config(vocab_size=260, num_hidden_layers=1)).save_pretrained(pair.drafter)
    return pair


@pytest.fixture(scope="session")
def pair() -> tiny.Pair:
    """A random Qwen3 target of 50 tokens, a drafter for it, and the target's twin under transformers' own attention."""
    return tiny.make_pair()
