"""Labelling and training a pilot on a tiny pair."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import TinyPair
from tests.costs import settle
from tests.test_cli import FAST, failure, run
from tests.tiny import VOCAB, Pair, random_drafter, random_prompts, teach
from volley import Engine, SamplingParams
from volley.errors import ConfigError, InputError
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import PilotConfig, load_pilot, net_for, save_pilot
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.train.options import PilotOptions
from volley.train.pilot import (
    Labelled,
    PilotOutcome,
    cycle_seconds,
    fit,
    inputs_of,
    label,
    label_all,
    split,
    train_pilot,
)

PROMPTS = random_prompts(5, longest=20, seed=3)


@pytest.mark.slow
def test_labels_are_what_the_engine_did(pair: Pair) -> None:
    engine = Engine(pair.target, pair.drafter, page_size=4, num_pages=100)
    greedy, hot = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    answers = [next(engine.generate([prompt], greedy)).token_ids for prompt in PROMPTS]
    teach(engine, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)})
    found = label(engine, PROMPTS, [greedy, hot, greedy, greedy, greedy], (2, 4, 6))
    assert found.temperature.tolist() == [0, 1, 0, 0, 0]
    assert found.tokens.tolist() == [[8] * 3] * 5
    for place, size in enumerate((2, 4, 6)):
        engine.block_size = size
        alone = [next(engine.generate([prompt], greedy)).stats for prompt in PROMPTS]
        assert [found.cycles[i, place] for i in (0, 2, 4)] == [len(alone[i].accepted_lengths) for i in (0, 2, 4)]
    assert (found.cycles[0, 0] > found.cycles[0, 2]).item()
    for prompt, logits in zip(PROMPTS, found.logits, strict=True):
        torch.testing.assert_close(logits, engine.next_logits(prompt), atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        states = pair.hf(torch.tensor([PROMPTS[2]]), output_hidden_states=True).hidden_states
    tapped = torch.cat([states[layer + 1][0, -1] for layer in pair.drafter.config.target_layer_ids])
    torch.testing.assert_close(found.hidden[2], tapped, atol=1e-4, rtol=1e-4)


def made_up(count: int) -> tuple[Labelled, Tensor]:
    """Requests that are fastest with blocks of 2 if the target is unsure or samples, else with blocks of 6."""
    generator = torch.Generator().manual_seed(count)
    sure = torch.rand(count, generator=generator) > 0.5
    temperature = (torch.rand(count, generator=generator) > 0.7).float()
    logits = torch.randn(count, VOCAB, generator=generator) * torch.where(sure, 9.0, 0.5)[:, None]
    long = (sure & (temperature == 0))[:, None]
    cycles = torch.where(long, torch.tensor([50, 30, 10]), torch.tensor([50, 49, 48]))
    tokens = torch.full((count, 3), 100)
    prompt, hidden = torch.arange(count), torch.zeros(count, 64)
    found = Labelled(prompt=prompt, temperature=temperature, logits=logits, hidden=hidden, tokens=tokens, cycles=cycles)
    return found, torch.tensor([1.0, 1.2, 1.4])


def test_what_is_held_out_are_prompts_at_all_temperatures() -> None:
    examples, _ = made_up(40)
    twice = replace(examples, prompt=examples.prompt // 2)
    held, kept = split(twice, PilotOptions(prompts=("p",), eval_share=0.2))
    assert (len(held), len(kept)) == (8, 32)
    assert not set(held.prompt.tolist()) & set(kept.prompt.tolist())


def test_a_pilot_learns_what_the_prompt_tells(pair: Pair) -> None:
    config = PilotConfig(
        drafter=drafter_fingerprint(pair.drafter), input="top", block_sizes=(2, 4, 6), width=32, layers=2
    )
    examples, seconds = made_up(300)
    options = PilotOptions(prompts=("p",), epochs=40, learning_rate=3e-3)
    net = fit(config, pair.drafter, examples, examples.rates(seconds), options)
    fresh, _ = made_up(200)
    outcome = PilotOutcome.of(net(inputs_of(config, fresh)).argmax(dim=1), fresh, seconds, config.block_sizes)
    assert outcome.agreement > 0.8
    assert outcome.oracle >= outcome.pilot > 1.1 * max(outcome.fixed.values())
    assert outcome.fixed[2] == pytest.approx(2.0)


@pytest.mark.slow
def test_labelling_goes_on_from_its_file(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pair.target, pair.drafter, num_pages=60)

    def encode(prompt: Any, *, thinking: bool | None = None) -> list[int]:
        return prompt if isinstance(prompt[0], int) else [ord(c) % VOCAB for c in prompt[0]["content"]]

    monkeypatch.setattr(engine, "encode", encode)
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "{"abcdefgh"[i:]}"}}\n' for i in range(7)))
    options: dict[str, Any] = {"prompts": (str(file),), "batch": 3, "max_tokens": 6}
    kept = PilotOptions(**options, labels=tmp_path / "labels.safetensors")
    whole = label_all(engine, PilotOptions(**options), (2, 6), lambda *_: None)

    def stop(done: int, total: int) -> None:
        assert total == 7
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label_all(engine, kept, (2, 6), stop)
    reports: list[int] = []
    for _ in range(2):
        again = label_all(engine, kept, (2, 6), lambda done, total: reports.append(done))
        assert again.cycles.tolist() == whole.cycles.tolist()
        assert torch.equal(again.logits, whole.logits)
    assert reports == [3, 6, 7, 7]
    with pytest.raises(ConfigError, match="labelled for another drafter, or with other prompts or options"):
        label_all(engine, kept, (2, 5), stop)
    with pytest.raises(InputError, match="more than one token"):
        label_all(engine, PilotOptions(**{**options, "max_tokens": 1}), (2, 6), lambda *_: None)
    with pytest.raises(InputError, match="no prompt leaves room for 512 tokens in the target's context of 512"):
        label_all(engine, PilotOptions(**{**options, "max_tokens": 512}), (2, 6), lambda *_: None)


@pytest.mark.parametrize("thinking", [True, False, None])
def test_thinking_is_passed_to_the_template(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thinking: bool | None
) -> None:
    engine, seen = Engine(pair.target, pair.drafter, num_pages=60), list[bool | None]()
    own = random_prompts(8, seed=5)

    def encode(prompt: Any, *, thinking: bool | None = None) -> list[int]:
        if isinstance(prompt[0], int):
            return prompt
        seen.append(thinking)
        return own.pop()

    monkeypatch.setattr(engine, "encode", encode)
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(8)))
    options = PilotOptions(prompts=(str(tmp_path / "p.jsonl"),), max_tokens=6, temperatures=(0.0,), thinking=thinking)
    label_all(engine, options, (2, 6), lambda *_: None)
    assert seen == [thinking] * 8


def test_the_times_of_a_cycle(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    engine = Engine(pair.target, pair.drafter, num_pages=60)
    assert cycle_seconds(engine, (1, 2, 6), 1).tolist() == pytest.approx([1.1, 1.3, 1.7])
    assert cycle_seconds(engine, (2, 6), 4).tolist() == pytest.approx([1.9, 3.5])


@pytest.mark.slow
def test_the_command_leaves_a_pilot_beside_the_drafter(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = tmp_path / "drafter"
    Drafter.from_pretrained(tiny_pair.drafter).save_pretrained(drafter)
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(6)))
    pair = ("--target", tiny_pair.target, "--drafter", drafter, *FAST)
    few = ("--max-tokens", 12, "--epochs", 2, "--radius", 4)
    missing = failure(monkeypatch, capsys, "generate", "Hi", "--policy", "pilot", *pair)
    assert "there is no pilot in" in missing
    assert "train one with `volley pilot`" in missing
    _, errors = run("pilot", "--prompts", file, *few, *pair)
    assert "6/6 prompts labelled" in errors
    assert "On prompts it was not trained on:" in errors
    assert load_pilot(Drafter.from_pretrained(drafter))[0].block_sizes == (2, 3, 4, 5, 6, 7, 8, 9, 10)
    answer, _ = run("generate", "Hi", "--policy", "pilot", "--max-tokens", 8, *pair)
    engine = Engine.from_pretrained(tiny_pair.target, drafter, policy="pilot", dtype=torch.float32)
    assert engine.block_size == 10, "the trained block has 6"
    plain, _ = run("generate", "Hi", "--drafter", "none", "--policy", "plain", "--max-tokens", 8, *pair[:2], *FAST)
    assert answer == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ()}, "no prompts"),
        ({"prompts": ("gsm8k",)}, "gsm8k is kept for evaluation"),
        ({"temperatures": ()}, "give at least one"),
        ({"temperatures": (-1.0,)}, "each 0 or more"),
        ({"radius": 0}, "radius is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"eval_share": 1.0}, "eval_share is 1.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PilotOptions(**{"prompts": ("p",), **options})


def test_the_sizes_to_choose_from() -> None:
    assert PilotOptions(prompts=("p",)).block_sizes(16) == (14, 15, 16, 17, 18)
    assert PilotOptions(prompts=("p",), block_size=8, radius=1).block_sizes(16) == (7, 8, 9)
    assert PilotOptions(prompts=("p",), radius=4).block_sizes(3) == (2, 3, 4, 5, 6, 7)
    with pytest.raises(ConfigError, match="block_size is 1"):
        PilotOptions(prompts=("p",), block_size=1)


@pytest.mark.slow
def test_a_pilot_that_chooses_above_the_trained_block(pair: Pair, tmp_path: Path) -> None:
    """Answers are plain decoding's, and verified blocks have the size that the pilot chose."""
    drafter = random_drafter()
    drafter.folder = tmp_path
    trained = drafter.config.block_size
    sizes = (trained - 1, trained, trained + 3)
    config = PilotConfig(drafter=drafter_fingerprint(drafter), input="top", block_sizes=sizes, width=4, layers=1)
    net = net_for(config, drafter)
    torch.nn.init.zeros_(net[0].weight)
    net[0].bias.data = torch.tensor([0.0, 0.0, 1.0])
    save_pilot(tmp_path, config, net)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (plain,) = Engine(pair.target, policy="plain").generate(PROMPTS[0], params)
    for window in (None, 6):
        engine = Engine(pair.target, drafter, policy="pilot", draft_window=window, page_size=4, num_pages=100)
        (result,) = engine.generate(PROMPTS[0], params)
        assert result.token_ids == plain.token_ids
        assert max(result.stats.block_sizes) == trained + 3


def test_nothing_to_train_for(pair: Pair) -> None:
    options = PilotOptions(prompts=("p",))
    with pytest.raises(ConfigError, match="there is none; name a drafter"):
        train_pilot(Engine(pair.target, num_pages=9), options, lambda *_: None)
    with pytest.raises(ConfigError, match="not loaded from a folder"):
        train_pilot(Engine(pair.target, random_drafter(), num_pages=9), options, lambda *_: None)
