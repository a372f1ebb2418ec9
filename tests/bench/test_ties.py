"""Which differences of greedy answers the bench excuses, and which it must not."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from volley import Engine
from volley.bench.ties import TIE_UNITS, first_difference, is_tie, tied_logits, unit_in_last_place
from volley.engine.engine import REFERENCE

BF16 = torch.bfloat16


class Judge:
    """Logits that do not depend on the text; it notes which text it was asked about."""

    def __init__(self, *logits: float) -> None:
        self.logits = torch.tensor(logits)
        self.asked: list[list[int]] = []

    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        self.asked.append(list(token_ids))
        return self.logits


def test_answers_part_at_the_first_other_token_or_at_the_end_of_the_shorter_one() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [0.75, 1.0, 7.9, 8.0, 12.3, -17.0, 255.0])
def test_the_unit_in_the_last_place_is_the_distance_to_the_next_number(dtype: torch.dtype, value: float) -> None:
    here = torch.tensor(abs(value), dtype=dtype)
    following = torch.nextafter(here, torch.tensor(torch.inf, dtype=dtype))
    assert unit_in_last_place(value, dtype) == (following - here).item()
    assert unit_in_last_place(0.0, dtype) > 0


@pytest.mark.parametrize("largest", [9.0, 15.9375, 16.0, 30.0])
def test_a_tie_is_so_many_units_of_the_largest_logit(largest: float) -> None:
    unit = unit_in_last_place(largest, BF16)
    near, far = largest - TIE_UNITS * unit, largest - (TIE_UNITS + 1) * unit
    assert tied_logits(Judge(0.0, near, largest), [5], BF16) == (largest, near)
    assert tied_logits(Judge(0.0, far, largest), [5], BF16) is None, "a gap of one unit more is no tie"
    assert tied_logits(Judge(0.0, near, largest), [5], torch.float32) is None, "fp32 tells them apart"


def test_the_tokens_that_were_chosen_must_tie_not_just_the_two_best() -> None:
    judge = Judge(12.0, 12.0, 11.5, 3.0)
    assert is_tie(judge, [7, 7], [4, 0, 2], [4, 1], BF16)
    assert judge.asked == [[7, 7, 4]], "asked where the answers part"
    assert not is_tie(judge, [7], [0], [2], BF16), "planted: a third token, while the two best do tie"
    assert not is_tie(judge, [7], [3], [0], BF16)


def test_an_answer_that_ends_where_the_other_goes_on_is_no_tie() -> None:
    judge = Judge(12.0, 12.0)
    assert not is_tie(judge, [7], [1], [1, 0], BF16)
    assert not is_tie(judge, [7], [1, 0], [1], BF16)


def test_a_planted_wrong_token_of_the_bundled_pair_is_not_excused() -> None:
    """In bf16: the second choice of a target that is sure is a bug; its own choice twice is a tie with itself."""
    engine = Engine.from_pretrained(REFERENCE / "target", dtype=BF16)
    prompt = engine.encode(
        [{"role": "user", "content": "Tom has 5 boxes with 8 pencils each. How many pencils are there?"}]
    )
    logits = engine.next_logits(prompt)
    (best, second), (first, next_best) = logits.topk(2).indices.tolist(), logits.topk(2).values.tolist()
    assert first - next_best > TIE_UNITS * unit_in_last_place(first, BF16), "the target is sure here"
    assert tied_logits(engine, prompt, BF16, (best, best)) == (first, first)
    assert not is_tie(engine, prompt, [second, 1], [best, 1], BF16)
