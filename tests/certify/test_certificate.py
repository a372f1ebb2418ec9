"""Certificates: a lossless pair passes, every planted fault is named, and a certificate that was changed is refused."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.certify.faults import FAULTS
from tests.procedures.test_in_place import Eager
from tests.tiny import Pair, random_prompts
from volley import Engine
from volley.certify.certificate import certify_pair, read_certificate
from volley.certify.checks import Check, Questions, check_penalties, greedy_params
from volley.certify.options import CertifyConfig
from volley.certify.sampled import Way, check_way
from volley.certify.subject import EngineSubject
from volley.errors import CheckpointError
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.families import JOINT, SDAR
from volley.models.targets.target import Target
from volley.procedures.self_speculative import SelfSpeculative

QUICK = CertifyConfig(bias=0.3, max_tokens=16, prompts_used=6)
BIASES = {
    "temperature": (0.05, "sampled at T = 0.6"),
    "bonus tokens": (0.06, "sampled"),
    "trees": (0.04, "sampled trees"),
}
"""Checks that find these faults with a margin of four standard deviations; the others need no statistics."""
PROMPTS = random_prompts(6, longest=12)


def said(_: str) -> None:
    """Nobody reads along."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(pair: Pair, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, word = FAULTS[fault]
    bias, where = BIASES.get(word, (QUICK.bias, ""))

    def check(engine: Engine, prompts: Any, way: Way, config: CertifyConfig, tests: int) -> list[Check]:
        """The sample that finds it where it is, and a small one elsewhere."""
        return check_way(engine, prompts, way, replace(config, bias=bias) if way.name == where else config, tests)

    monkeypatch.setattr("volley.certify.certificate.check_way", check)
    certificate = certify_pair(make(pair), PROMPTS, QUICK, said)
    assert certificate.verdict == "not lossless"
    assert certificate.finding is not None
    assert certificate.finding.startswith(word)


@pytest.mark.slow
def test_a_lossless_pair_passes_and_its_certificate_tells_of_every_check(pair: Pair, tmp_path: Path) -> None:
    certificate = certify_pair(Engine(pair.target, pair.drafter, page_size=4), PROMPTS, QUICK, said)
    assert [check.name for check in certificate.failed] == []
    path = tmp_path / "certificate.json"
    certificate.write(path)
    found = read_certificate(path)
    assert (found["verdict"], found["finding"]) == ("lossless", None)
    assert {"greedy", "prefix cache", "concurrency 32", "penalties", "sampled trees"} <= {
        c["name"] for c in found["checks"]
    }
    assert len(found["subject"]["target"]) == 32
    (cache,) = (check for check in found["checks"] if check["name"] == "prefix cache")
    assert cache["facts"]["cached_tokens"] > 6 * 300
    path.write_text(json.dumps({**found, "verdict": "perfect"}))
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        read_certificate(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [JOINT, SDAR])
def test_a_diffusion_language_model_is_certified_against_its_autoregressive_mode(
    pair: Pair, family: BlockDiffusion
) -> None:
    target = Target(deepcopy(pair.hf), None, replace(family, mask_token_id=3))  # others compare with the model as it is
    engine = Engine(target, page_size=4)
    drafted: list[int] = []
    engine.on_verified.append(lambda _, proposal, __: drafted.append(len(proposal.token_ids)))
    certificate = certify_pair(engine, PROMPTS, replace(QUICK, bias=0.4), said)
    assert [check.name for check in certificate.failed] == []
    assert certificate.subject["mode"] == "self"
    assert sum(drafted) > 50
    assert engine.procedures.default_mode == "diffusion", "as it was"


@pytest.mark.slow
def test_a_mask_is_not_expected_where_it_would_be_likely(pair: Pair) -> None:
    """The mask is never chosen, though its log-probability is returned."""
    hf = deepcopy(pair.hf)
    with torch.no_grad():
        hf.lm_head.weight[3] = 1.2 * hf.lm_head.weight[5]  # which some answers hold
    engine = Engine(Target(hf, None, replace(SDAR, mask_token_id=3)), page_size=4)
    engine.procedures.default_mode = "autoregressive"
    questions = Questions(
        EngineSubject(engine), None, PROMPTS, PROMPTS, lambda asked, _: list(asked), greedy_params(16)
    )
    (result,) = engine.generate(PROMPTS[:1], questions.greedy)
    assert any(3 in dict(row) for row in result.top_logprobs or ()), "or nothing is left out"
    assert check_penalties(questions).outcome == "passed"


@pytest.mark.slow
def test_a_biased_verifier_of_a_model_in_place_is_found(pair: Pair) -> None:
    target = Target(deepcopy(pair.hf), None, replace(SDAR, mask_token_id=3))
    engine = Engine(target, page_size=4)
    assert target.diffusion is not None
    engine.procedures.by_mode["self"] = SelfSpeculative(target, target.diffusion, Eager(engine.config, 3))
    certificate = certify_pair(engine, PROMPTS, replace(QUICK, bias=0.4), said)
    assert "greedy" in {check.name for check in certificate.failed}
