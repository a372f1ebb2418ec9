"""Early stopping by the real τ: when a run ends, and which drafter it leaves, told by scripted evaluations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from volley.files import make_folder
from volley.models.drafters.drafter import Drafter
from volley.train.evaluate import HeldOut
from volley.train.loop import Trainer
from volley.train.options import TrainConfig
from volley.train.parallel import Ranks

from ..conftest import TinyPair
from .runs import drafter_weights, tiny_run


class Killed(BaseException):
    """Stands for kill −9: nothing is saved on the way out."""


class Scripted(HeldOut):
    """Evaluations that say the τ given, and keep what they were asked about."""

    def __init__(self, trainer: Trainer, taus: Iterator[float | None]) -> None:
        super().__init__(trainer.config, trainer.data, trainer.step_function, trainer.source)
        self.taus, self.seen = taus, list[dict[str, torch.Tensor]]()

    def decoded(self, drafter: Drafter) -> dict[str, Any]:
        tau = next(self.taus)
        if tau is None:
            raise Killed
        self.seen.append({name: tensor.clone() for name, tensor in drafter.state_dict().items()})
        return {"decoded": {"tau": tau}}


def scripted(pair: TinyPair, folder: Path, *taus: float | None, **changes: Any) -> tuple[Trainer, Scripted]:
    options = {"keep_best": True, "patience": 3, "eval_steps": 2, "save_steps": 2, "max_steps": 40, "epochs": 99}
    options |= {"eval_prompts": 1, "eval_max_tokens": 2, "learning_rate": 0.01}
    make_folder(folder / "run")
    trainer = Trainer(TrainConfig(**tiny_run(pair.target, folder, **{**options, **changes})), Ranks("cpu"))
    trainer.held_out = evaluations = Scripted(trainer, iter(taus))
    return trainer, evaluations


def assert_kept(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    kept = drafter_weights(folder / "run")
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor.float(), weights[name].to(tensor.dtype).float(), rtol=0, atol=0, msg=name)


def test_three_clearly_worse_evaluations_in_a_row_end_a_run_that_keeps_the_best(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    trainer, evaluations = scripted(tiny_pair, tmp_path, 2.0, 2.5, 2.4, 2.4, 2.4, 2.4)
    trainer.run()
    assert trainer.schedule.position.step == 10, "five evaluations, two steps apart; the sixth is the end's"
    assert trainer.schedule.position.best_tau == 2.5
    assert len(evaluations.seen) == 6
    assert_kept(tmp_path, evaluations.seen[1])


@pytest.mark.parametrize("taus", [[2.5, 2.43, 2.43, 2.43], [2.5, 2.4, 2.4, 2.45, 2.4, 2.4]])
def test_what_is_hardly_worse_or_recovers_does_not_end_it(
    tiny_pair: TinyPair, tmp_path: Path, taus: list[float]
) -> None:
    trainer, evaluations = scripted(tiny_pair, tmp_path, *taus, 2.45, max_steps=2 * len(taus))
    trainer.run()
    assert trainer.schedule.position.step == 2 * len(taus)
    assert_kept(tmp_path, evaluations.seen[0])


def test_without_keep_best_the_last_drafter_is_kept(tiny_pair: TinyPair, tmp_path: Path) -> None:
    trainer, evaluations = scripted(tiny_pair, tmp_path, 2.5, 2.0, 1.5, keep_best=False, patience=None, max_steps=4)
    trainer.run()
    assert_kept(tmp_path, evaluations.seen[-1])


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_killed_run_counts_on_and_still_keeps_the_best(tiny_pair: TinyPair, tmp_path: Path, after: int) -> None:
    """Killed in the evaluation behind the first ``after``: their τ is known to the run that goes on, whenever it is saved."""
    taus = [2.0, 2.5, 2.4, 2.4, 2.4, 2.4]
    trainer, first = scripted(tiny_pair, tmp_path, *taus[:after], None, save_steps=39)
    with pytest.raises(Killed):
        trainer.run()
    leftover = tmp_path / "run" / ".checkpoint.pt.1"
    leftover.touch()
    trainer, second = scripted(tiny_pair, tmp_path, *taus[after:], save_steps=39)
    trainer.resume()
    trainer.run()
    assert trainer.schedule.position.step == 10
    assert trainer.schedule.position.best_tau == 2.5
    assert_kept(tmp_path, [*first.seen, *second.seen][1])
    assert not leftover.exists()
