"""The code of docs/reference.md decodes like the engine: tokens, drafts and distributions."""

import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_p, joint_counts
from tests.tiny import Pair, answers_and_drafts, greedy, make_pair, random_prompts
from volley import Engine, SamplingParams

PAGE = (Path(__file__).parent.parent / "docs" / "reference.md").read_text(encoding="utf-8")
CODE, EXAMPLE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
VOCAB, DRAWS = 5, 500
PROMPT = [1, 3, 2, 2]


def run(code: str = CODE) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "reference"}
    exec(compile(code, "docs/reference.md", "exec"), names)
    return names


def joined(cycles: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(cycles))


def test_the_code_is_short() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 60


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run(CODE + EXAMPLE)
    assert 5 < capsys.readouterr().out.count("|") < 24, "some drafts of the bundled drafter are accepted"


@pytest.fixture
def pair() -> Pair:
    return make_pair()


def teach(names: dict[str, Any], answer: list[int], prompt: list[int]) -> list[list[int]]:
    """Make the drafts right at four of five tokens; return the list that the random drafter's own drafts are added to."""
    own, drafts = names["draft"], list[list[int]]()

    def draft(target: Any, drafter: Any, features: Tensor, anchor: int) -> Tensor:
        logits: Tensor = own(target, drafter, features, anchor)
        drafts.append(logits.argmax(-1).tolist())
        first = len(features) + 1 - len(prompt)
        for position, token in enumerate(answer[first : first + len(logits)], start=first):
            if position % 5:
                logits[position - first, token] = 100
        return logits

    names["draft"] = draft
    return drafts


@pytest.mark.parametrize("prompt", random_prompts(3))
def test_greedy_tokens_and_drafts_are_the_engines(pair: Pair, prompt: list[int]) -> None:
    names = run()
    drafts = teach(names, [], prompt)
    cycles = list(names["generate"](pair.hf, pair.drafter, prompt, 24))
    engine = Engine(pair.target, pair.drafter, policy="fixed")
    params = SamplingParams(temperature=0, max_tokens=24)
    (result,), (engines,) = answers_and_drafts(engine, [prompt], params)
    assert joined(cycles)[:24] == result.token_ids == greedy(pair.hf, prompt, 24)
    whole = [draft for draft in engines if len(draft) == 5]
    assert len(whole) > 10
    assert drafts[: len(whole)] == whole


@pytest.mark.parametrize("prompt", random_prompts(3, seed=1))
def test_long_accepted_drafts_change_no_token(pair: Pair, prompt: list[int]) -> None:
    names, answer = run(), greedy(pair.hf, prompt, 40)
    teach(names, answer, prompt)
    cycles = list(names["generate"](pair.hf, pair.drafter, prompt, 30))
    assert joined(cycles)[:30] == answer[:30]
    assert max(map(len, cycles)) == 5


# -- distributions -----------------------------------------------------------------------------------------------------


def exact(hf: Any) -> Tensor:
    """Probability of each answer of two tokens to ``PROMPT``."""
    ids = torch.tensor([[*PROMPT, token] for token in range(VOCAB)])
    with torch.inference_mode():
        first, second = hf(ids).logits[:, -2:].double().softmax(-1).unbind(1)
    law: Tensor = (first[0, :, None] * second).flatten()
    return law


def p_value(code: str) -> float:
    drafter = {"vocab_size": VOCAB, "block_size": 3, "mask_token_id": 4, "num_hidden_layers": 1, "num_target_layers": 2}
    small = {"vocab_size": VOCAB, "num_hidden_layers": 2, "initializer_range": 0.2}
    pair = make_pair(2, {**drafter, "target_layer_ids": (0,)}, **small)
    generate = run(code)["generate"]
    answers = [joined(generate(pair.hf, pair.drafter, PROMPT, 2, 1.0))[:2] for _ in range(DRAWS)]
    return chi_square_p(joint_counts(torch.tensor(answers), VOCAB), exact(pair.hf))


def test_answers_have_the_targets_distribution() -> None:
    assert p_value(CODE) > 1e-3


def test_a_draft_that_is_always_accepted_is_seen() -> None:
    assert p_value(CODE.replace("torch.rand(()) < chance", "True")) < 1e-6


P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]])
"""Distributions of three tokens, each independent of those before it."""
Q = torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.4, 0.1, 0.4, 0.1]])


def verified(verify: Callable[..., tuple[int, int]], draws: int = 4000) -> float:
    counts = torch.zeros(4, 4, 4)
    for _ in range(draws):
        drafted = Q.multinomial(1)[:, 0].tolist()
        accepted, token = verify(P, Q, drafted)
        tokens = [*drafted[:accepted], token]
        tokens += [int(row.multinomial(1)) for row in P[len(tokens) :]]
        counts[tuple(tokens)] += 1
    return chi_square_p(counts, P[0][:, None, None] * P[1][:, None] * P[2])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("weights = 0, torch.tensor(1.0), (p[0] - q[0]).clamp(min=0)", "weights = 0, torch.tensor(1.0), p[0]"),
        (".clamp(max=1)", ""),
        ("residual = (level * p[i] - q[i])", "residual = (p[i] - q[i])"),
        ("(residual.sum() + 1 - level)", "1"),
        ("residual, chance = p[i], level", "residual, chance = p[i], 1"),
    ],
)
def test_verification_has_the_targets_distribution_and_planted_biases_are_seen(right: str, wrong: str) -> None:
    assert right in CODE
    found = verified(run(CODE.replace(right, wrong))["verify"])
    assert found > 1e-3 if right == wrong else found < 1e-6
