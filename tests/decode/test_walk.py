"""Walks over a lattice: each token from its law given the one before, and no other."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.chi_square import chi_square_p
from volley.decode.sampling import PositionNoise, Purpose, race, token_probs
from volley.decode.walk import conditional_laws, walk_coupled, walk_greedy, walk_sampled
from volley.types import Lattice, SamplingParams

VOCAB = 9
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, draft_temperature=1.2)


def random_lattice(slots: int, count: int, seed: int) -> Lattice:
    generator = np.random.default_rng(seed)
    tokens = np.stack([generator.permutation(VOCAB)[:count] for _ in range(slots)])
    scores = generator.normal(size=(slots, count, count)).astype(np.float32)
    scores[0] = scores[0, :1]
    return Lattice(tokens, scores)


@given(slots=st.integers(1, 7), count=st.integers(1, VOCAB), seed=st.integers(0, 99))
def test_walks_equal_choosing_slot_by_slot(slots: int, count: int, seed: int) -> None:
    """The reference scatters each slot's law over the vocabulary and looks up only the row of the token before."""
    lattice, noise, first = random_lattice(slots, count, seed), PositionNoise(seed), 5
    for params in (replace(PARAMS, draft_temperature=0.0), PARAMS):
        coupled, last = [], 0
        for slot in range(slots):
            law = token_probs(torch.from_numpy(lattice.scores[slot, last])[None], params, params.draft_temperature)
            whole = torch.zeros(1, VOCAB).scatter_(1, torch.from_numpy(lattice.tokens[slot])[None], law)
            coupled.append(int(race(whole, noise.exponentials(Purpose.TARGET, [first + slot], VOCAB))))
            last = lattice.tokens[slot].tolist().index(coupled[-1])
        found = walk_coupled(lattice, params, noise, first, VOCAB)
        assert found.token_ids == coupled
        assert found.draft_probs is None
        if params.draft_temperature == 0:
            assert walk_greedy(lattice).token_ids == coupled
            assert walk_sampled(lattice, params, noise, first, VOCAB).token_ids == coupled


def test_the_law_of_a_sampled_walk_is_the_one_it_carries() -> None:
    lattice = random_lattice(3, 4, 1)
    laws = conditional_laws(lattice, PARAMS)
    joint = laws[0, 0][:, None, None] * laws[1][:, :, None] * laws[2][None]
    counts = torch.zeros(4, 4, 4)
    for seed in range(4000):
        proposal = walk_sampled(lattice, PARAMS, PositionNoise(seed), 10, VOCAB)
        assert proposal.draft_probs is not None
        path = tuple(lattice.tokens[i].tolist().index(token) for i, token in enumerate(proposal.token_ids))
        counts[path] += 1
        for slot, law in enumerate((laws[0, 0], laws[1, path[0]], laws[2, path[1]])):
            carried = proposal.draft_probs[slot].numpy()
            assert np.array_equal(carried[lattice.tokens[slot]], law)
            assert np.count_nonzero(carried) == np.count_nonzero(law), "nothing outside the candidates"
    assert chi_square_p(counts, torch.from_numpy(joint)) > 1e-3


def test_sampled_walks_do_not_use_the_targets_noise() -> None:
    lattice = Lattice(np.arange(1000)[None], np.zeros((1, 1000, 1000), dtype=np.float32))
    hot = SamplingParams(temperature=1.0)
    same = [
        walk_sampled(lattice, hot, PositionNoise(seed), 4, 1000).token_ids
        == walk_coupled(lattice, hot, PositionNoise(seed), 4, 1000).token_ids
        for seed in range(10)
    ]
    assert sum(same) < 2
