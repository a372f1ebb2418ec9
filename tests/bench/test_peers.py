from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from volley.bench.peers import to_transformers, transformers_runners
from volley.bench.tasks import Case
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.export import export
from volley.params import SamplingParams

from ..conftest import TinyPair, byte_tokenizer


def test_transformers_speculates_with_volleys_drafter_and_changes_no_token(tiny_pair: TinyPair) -> None:
    drafter = Drafter.from_pretrained(tiny_pair.drafter, torch.float32)
    runners, notes = transformers_runners(str(tiny_pair.target), drafter, byte_tokenizer(), [2], torch.float32)
    assert notes == []
    assert [case.name for case in runners] == ["transformers", "transformers-lookup", "transformers-dflash"]
    prompt = list(range(10, 30))
    outcomes = {case.name: run([prompt], SamplingParams(max_tokens=24)) for case, run in runners.items()}
    plain = outcomes["transformers"].results[0]
    assert len(set(plain.token_ids)) > 2
    for outcome in outcomes.values():
        answer = outcome.results[0]
        assert answer.token_ids == plain.token_ids
        assert answer.text == byte_tokenizer().decode(plain.token_ids, skip_special_tokens=True) != ""
        assert 0 < outcome.first_token() < outcome.seconds
        assert sum(answer.stats.accepted_lengths) < len(answer.token_ids)
    sampled = runners[Case("transformers")]([prompt], SamplingParams(temperature=1.0, max_tokens=5, seed=3))
    assert len(sampled.results[0].token_ids) == 5


def test_the_handed_over_drafter_computes_the_same(tiny_pair: TinyPair) -> None:
    drafter = Drafter.from_pretrained(tiny_pair.drafter, torch.float32)
    theirs = to_transformers(drafter).eval()
    torch.manual_seed(1)
    features, block = torch.randn(7, 64), torch.randn(6, 32)
    positions = torch.arange(13)
    context = drafter.context_kv(features, positions[:7])

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys, values = torch.cat([context[layer][0], keys]), torch.cat([context[layer][1], values])
        rows = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        return torch.nn.functional.scaled_dot_product_attention(*rows, enable_gqa=True)[0].transpose(0, 1)

    with torch.inference_mode():
        own = drafter(block, positions[7:], attend)
        other = theirs(
            noise_embeds=block[None], context_hidden_states=features[None], position_ids=positions[None]
        ).last_hidden_state[0]
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_an_exported_drafter_runs_in_transformers(tiny_pair: TinyPair, tmp_path: Path) -> None:
    export(tiny_pair.drafter, tmp_path, "transformers", target=str(tiny_pair.target))
    assistant = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    handed_over = to_transformers(Drafter.from_pretrained(tiny_pair.drafter, torch.float32))
    assert type(assistant) is type(handed_over)
    for one, other in zip(assistant.parameters(), handed_over.parameters(), strict=True):
        assert torch.equal(one, other)
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    ids = torch.arange(10, 30)[None]
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    with torch.inference_mode():
        plain = model.generate(ids, **asked)
        answer = model.generate(ids, **asked, assistant_model=assistant, speculation_type="dflash")
    assert answer.tolist() == plain.tolist()


def test_what_transformers_cannot_run_becomes_a_note(tiny_pair: TinyPair) -> None:
    config = {**vars(Drafter.from_pretrained(tiny_pair.drafter).config), "target_layer_ids": (-1,)}
    runners, notes = transformers_runners(
        str(tiny_pair.target), Drafter(DrafterConfig(**config)), byte_tokenizer(), [2], torch.float32
    )
    assert notes == ["transformers-dflash: decoder layers alone are tapped there, not the embedding (tap -1)"]
    assert Case("transformers") in runners
    _, notes = transformers_runners(str(tiny_pair.target), None, byte_tokenizer(), [2], torch.float32)
    assert notes == ["transformers-dflash: there is no drafter to hand over"]


def test_a_target_that_fails_under_speculation_does_not_stop_the_benchmark(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter.from_pretrained(tiny_pair.drafter)
    broken = to_transformers(drafter)
    monkeypatch.setattr(broken.config, "target_layer_ids", [0, 99])
    monkeypatch.setattr("volley.bench.peers.to_transformers", lambda _: broken)
    runners, notes = transformers_runners(str(tiny_pair.target), drafter, byte_tokenizer(), [2], torch.float32)
    assert len(runners) == 2
    assert notes[0].startswith("transformers-dflash: generate failed on this target: IndexError")
