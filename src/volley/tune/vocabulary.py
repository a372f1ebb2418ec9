"""How many tokens to draft: what a smaller head saves on this machine, against what held-out responses say that it loses."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from volley.models.drafters.drafter import Drafter
from volley.models.targets.target import Target
from volley.train.data import TrainingData
from volley.train.features import FrozenTarget
from volley.train.options import TrainConfig, filled
from volley.train.shape import drafter_config
from volley.train.vocabulary import PAYS, Vocabulary, coverage, response_counts
from volley.tune.trials import Trial, cycle_seconds, steady_acceptance

PARTS = (16, 8, 4, 2)
SMALLEST = 1024
"""Below it a head is small beside everything else."""
TIMES = 3
"""So often cycles are timed: a head saves a few percent, and some other work on the machine may look like more."""
LEARNT = 0.85
"""The chance of a draft position of a good drafter. A trial of seconds has half of it, where tokens that are not drafted hardly
matter: its drafts end before them."""


def sizes_for(vocab_size: int) -> list[int]:
    """The numbers of drafted tokens that are tried."""
    return [vocab_size // part for part in PARTS if vocab_size // part >= SMALLEST]


def choose_vocabulary(
    trial: Trial,
    config: TrainConfig,
    frozen: FrozenTarget,
    target: Target,
    sizes: Sequence[int],
    timed: Callable[[Target, Sequence[Drafter]], list[float]] = cycle_seconds,
) -> tuple[int, str]:
    """The number of drafted tokens, 0 for all, that promises most tokens a second, and why.

    ``config`` is the training that ``trial`` speaks for. Tokens are chosen by the responses that are learnt from, and what they
    cover is judged on those held out, as at least :data:`LEARNT` is accepted; ``timed`` gives the seconds of a cycle with each
    drafter.
    """
    ends = frozen.plain_ends
    if not sizes or ends is None:
        return 0, "all tokens are drafted: " + ("the vocabulary is small" if ends else "the head is not a plain matrix")
    data, block = TrainingData(config, frozen), filled(config.block_size)
    counts, others = (response_counts(each, frozen.vocab_size) for each in (data.documents, data.held_out))
    whole = Drafter(drafter_config(config, frozen.model, 0))
    with torch.no_grad():
        drafters = [whole, *(Vocabulary(size, counts, ends).reduce(whole) for size in sizes)]
    rounds = [timed(target, drafters) for _ in range(TIMES)]
    faster = [median(own[0] / own[place] for own in rounds) for place in range(1, len(drafters))]
    chance = max(LEARNT, steady_acceptance(trial.tau, len(trial.accuracy) + 1))

    def tau(covered: float) -> float:
        return sum((chance * covered) ** k for k in range(block))

    kept = [tau(coverage(counts, others, size)) / tau(1.0) for size in sizes]
    gain, size = max((less * own, size) for less, own, size in zip(kept, faster, sizes, strict=True))
    tried = f"{size} of {frozen.vocab_size} promise {gain:.2f} × the speed"
    return (
        (size, f"the most frequent tokens are drafted: {tried}")
        if gain > PAYS
        else (0, f"all tokens are drafted: {tried}")
    )
