"""Options are checked when given; the drafter's shape follows the target."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from volley.errors import ConfigError
from volley.models.drafters.tap_layers import choose_taps, parse_taps, spread_taps
from volley.train.documents import Document
from volley.train.options import TrainConfig
from volley.train.shape import choose_mask_token

from ..conftest import byte_tokenizer

NEEDED: dict[str, Any] = {"target": "t", "data": ("d",), "out": "o"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"data": ()}, "at least one JSONL file"),
        ({"soft_targets": 2.0}, r"in \[0, 1\]"),
        ({"reveal": 1.5}, r"reveal is 1.5; it must be in \[0, 1\]"),
        ({"reveal": 0.5, "loss_decay": "pace"}, "use loss_decay='decay'"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"head": "residuel"}, "did you mean 'residual'"),
        ({"taps": "1,x"}, "give a count"),
        ({"taps": 0}, "tap at least one layer"),
        ({"learning_rat": 1.0}, "did you mean 'learning_rate'"),
    ],
)
def test_unusable_options_name_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{**NEEDED, **options})


def test_one_data_file_may_be_given_by_itself() -> None:
    assert TrainConfig(**{**NEEDED, "data": "rows.jsonl"}).data == ("rows.jsonl",)


def test_taps_are_the_papers() -> None:
    assert spread_taps(5, 36) == (1, 9, 17, 25, 33)
    assert spread_taps(5, 20) == (1, 5, 9, 13, 17)
    assert choose_taps(None, 20) == (1, 5, 9, 13, 17)
    assert choose_taps(None, 2) == (1,)
    assert choose_taps(parse_taps("1,3"), 4) == (1, 3)


def plain_tokenizer(*specials: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    return tokenizer


def test_the_mask_token_is_one_that_no_text_uses() -> None:
    text = [Document(torch.tensor([10, 11, 260], dtype=torch.int32), 1)]
    tokenizer = byte_tokenizer()
    assert choose_mask_token(tokenizer, torch.ones(264, 2), text, None) == 3
    assert choose_mask_token(tokenizer, torch.ones(264, 2), text, 7) == 7
    masked = [Document(torch.tensor([3], dtype=torch.int32), 0)]
    assert choose_mask_token(tokenizer, torch.ones(264, 2), masked, None) == 260
    assert choose_mask_token(tokenizer, torch.ones(264, 2), masked + text, None) == 261
    reserved = plain_tokenizer("<|reserved_1|>")
    assert choose_mask_token(reserved, torch.ones(261, 2), masked, None) == 260


def test_where_all_tokens_are_text_the_mask_is_the_rarest_with_an_embedding() -> None:
    tokenizer = byte_tokenizer()
    everything = [Document(torch.tensor([*range(260), *range(4, 260)], dtype=torch.int32), 1)]
    assert choose_mask_token(tokenizer, torch.ones(260, 2), everything, None) == 1
    embedding = torch.ones(260, 2)
    embedding[[1, 3]] = 0
    assert choose_mask_token(tokenizer, embedding, everything, None) == 4
    with pytest.raises(ConfigError, match="--mask-token-id"):
        choose_mask_token(tokenizer, torch.full((260, 2), torch.nan), everything, None)
