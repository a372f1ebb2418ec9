"""What the benchmark of diffusion models measures without a clock."""

import torch

from benchmarks.diffusion_speed import peak_bytes, sampler_bytes


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    def run() -> None:
        for _ in range(3):
            torch.empty(2**20)

    assert 2**22 <= peak_bytes(run) < 2**23


def test_all_that_becomes_of_logits_is_measured() -> None:
    logits = 4 * 16 * 4096
    assert logits <= sampler_bytes(16, 4096) < sampler_bytes(16, 4096, logit_bias=((3, 1.0),)) < 8 * logits
