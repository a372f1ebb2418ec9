"""The measurements of diffusion models that need no clock."""

import json
from pathlib import Path

import torch

from benchmarks.diffusion_speed import measure_canvas, peak_bytes, sampler_bytes


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    def run() -> None:
        for _ in range(3):
            torch.empty(2**20)

    assert 2**22 <= peak_bytes(run) < 2**23


def test_all_that_becomes_of_logits_is_measured() -> None:
    logits = 4 * 16 * 4096
    assert logits <= sampler_bytes(16, 4096) < sampler_bytes(16, 4096, logit_bias=((3, 1.0),)) < 8 * logits


def test_a_step_of_256_slots_and_its_sampler_are_recorded(tmp_path: Path) -> None:
    measure_canvas(["tiny"], 4, "cpu", tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    own = record["shapes"]["tiny"]
    assert record["slots"] == 256
    assert 0 < own["sampler"] < own["step"]
    assert own["sampler_bytes"] >= 4 * 256 * 99
