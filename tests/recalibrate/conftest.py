"""A reservoir filled with the tiny pair's own answers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyPair
from tests.tiny import random_prompts
from volley import Engine, SamplingParams
from volley.files import write_atomically
from volley.models.drafters.drafter import Drafter
from volley.models.layers.fingerprint import drafter_fingerprint
from volley.models.targets.target import Target
from volley.recalibrate.options import RecalibrateConfig
from volley.recalibrate.reservoir import Reservoir
from volley.recalibrate.rounds import Event, Recalibration
from volley.recalibrate.state import BASE, Learnt
from volley.train.features import FrozenTarget

QUICK: dict[str, Any] = {"recalibrate_tokens": 500, "recalibrate_steps": 6, "recalibrate_learning_rate": 2e-2}


@dataclass
class Kept:
    """A folder as a server leaves it, and what works in it."""

    folder: Path
    target: FrozenTarget
    path: str
    engine: Engine
    reservoir: Reservoir
    events: list[Event] = field(default_factory=list)

    def recalibration(self, **changes: Any) -> Recalibration:
        config = RecalibrateConfig(**{**QUICK, "recalibrate": self.folder, **changes})
        return Recalibration(self.folder, self.target, self.path, config, self.events.append)

    def serve(self, count: int, *, client: str = "a", seed: int = 0, temperature: float = 0.0) -> None:
        prompts = random_prompts(count, seed=seed, longest=12, vocab=250)
        params = SamplingParams(max_tokens=32, temperature=temperature, ignore_eos=True)
        for prompt, result in zip(prompts, self.engine.generate(prompts, params), strict=True):
            self.reservoir.add(client, prompt, result.token_ids, temperature)

    @property
    def learnt(self) -> Learnt:
        found = Learnt.load(self.folder)
        assert found is not None
        return found


@pytest.fixture(scope="session")
def frozen(tiny_pair: TinyPair) -> FrozenTarget:
    return FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def plain(tiny_pair: TinyPair) -> Engine:
    return Engine(Target.from_pretrained(tiny_pair.target, dtype=torch.float32), num_pages=256)


@pytest.fixture
def kept(tiny_pair: TinyPair, frozen: FrozenTarget, plain: Engine, tmp_path: Path) -> Iterator[Kept]:
    folder = tmp_path / "kept"
    facts = {
        "target": frozen.fingerprint,
        "key": "00",
    }  # which says what is held out: too little of 60 answers by some keys
    write_atomically(folder / "reservoir.json", json.dumps(facts))
    reservoir = Reservoir(folder)
    reservoir.open(frozen.fingerprint)
    base = Drafter.from_pretrained(tiny_pair.drafter)
    base.save_pretrained(folder / BASE)
    Learnt(drafter_fingerprint(base)).save(folder)
    yield Kept(folder, frozen, str(tiny_pair.target), plain, reservoir)
    reservoir.close()
