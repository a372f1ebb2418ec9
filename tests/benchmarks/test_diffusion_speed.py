"""What the benchmark of diffusion models measures without a clock."""

import torch

from benchmarks.diffusion_speed import peak_bytes


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    def run() -> None:
        for _ in range(3):
            torch.empty(2**20)

    assert 2**22 <= peak_bytes(run) < 2**23
