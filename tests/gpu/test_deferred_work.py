"""While the pretended device works, the host makes texts and tells of them: it is never idle for that."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.conftest import byte_tokenizer
from tests.gpu.pretended import Counts, move, pretended_cuda
from tests.tiny import eager_model, random_drafter, target_config
from volley import Engine, SamplingParams
from volley.decode.detokenize import Detokenizer
from volley.engine.deferred_work import DeferredWork
from volley.models.targets.target import Target

SMALL = {"num_hidden_layers": 2, "num_key_value_heads": 1}
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


def idle_and_busy(
    monkeypatch: pytest.MonkeyPatch, policy: str, params: SamplingParams, *, overlaps: bool = True
) -> dict[str, list[bool]]:
    """Return for each text and each call of a listener in some steps of decoding whether launches were unfinished."""
    busy: dict[str, list[bool]] = {"text": [], "told": []}
    push = Detokenizer.push

    with pretended_cuda() as counts:
        target = Target(move(eager_model(target_config(vocab_size=260, **SMALL))), byte_tokenizer())
        drafter = None
        if policy != "fixed:1":
            drafter = move(random_drafter(vocab_size=260, num_target_layers=2, target_layer_ids=(0, 1)))
        engine = Engine(target, drafter, policy=policy, num_pages=64)
        if not overlaps:
            engine.deferred_work, engine.core.async_launch.is_used = DeferredWork(torch.device("cpu")), False
        for prompt in ([40, 50, 60], [77, 78], [100, 101, 9]):
            engine.add_request(prompt, params)
        engine.step()
        engine.step()

        def note(kind: str, counts: Counts = counts) -> None:
            busy[kind].append(counts.unfinished > 0)

        def noted(self: Detokenizer, token_id: int, **options: Any) -> str:
            note("text")
            return push(self, token_id, **options)

        monkeypatch.setattr(Detokenizer, "push", noted)
        engine.deferred_work.listeners.append(lambda: note("told"))
        for _ in range(4):
            engine.step()
    return busy


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", ["fixed:1", "fixed", "goodput"])
def test_the_device_is_at_work_whenever_a_text_is_made(
    policy: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = idle_and_busy(monkeypatch, policy, params)
    assert len(busy["text"]) >= 12
    assert all(busy["text"])
    assert busy["told"] == [True] * 4


def test_texts_that_are_made_at_once_find_the_device_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = idle_and_busy(monkeypatch, "fixed:1", GREEDY, overlaps=False)
    assert len(busy["text"]) >= 12
    assert not any(busy["text"])


def test_texts_are_the_cpus() -> None:
    hf = eager_model(target_config(vocab_size=260, **SMALL))
    prompts, params = [[40, 50, 60], [77, 78]], SamplingParams(max_tokens=6, ignore_eos=True)
    expected = [own.text for own in Engine(Target(copy.deepcopy(hf), byte_tokenizer())).generate(prompts, params)]
    with pretended_cuda(runs_kernels=True):
        engine = Engine(Target(move(hf), byte_tokenizer()), num_pages=64)
        assert [own.text for own in engine.generate(prompts, params)] == expected
