"""Definition of a benchmark: the workload (datasets, temperatures, lengths) and the cases that run on it in turn."""

import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from volley.config import DecodingConfig
from volley.errors import ConfigError, InputError, check_fields, unknown_key
from volley.params import SamplingParams
from volley.prompts import Conversation, load_prompts

_PLAINLY = DecodingConfig(block_size=1)


@dataclass(frozen=True)
class Case:
    """Decoding configuration to measure. ``name`` is ``plain``, ``volley`` or a peer."""

    name: str
    decoding: DecodingConfig = _PLAINLY
    """Decoding settings; the policy is given by name."""
    largest: int = 1
    """Largest block of a policy."""

    @property
    def label(self) -> str:
        if self.name != "volley":
            return self.name
        decoding = self.decoding
        steps = f" S={decoding.denoising_steps}" if decoding.denoising_steps > 1 else ""
        size = decoding.policy or f"B={decoding.block_size}"
        return f"{size}{steps}" + (f" N={decoding.tree_nodes}" if decoding.tree_nodes else "")

    def to_json(self) -> dict[str, Any]:
        """Return the case as reports show it. ``tree_nodes`` 0 is a chain; with a policy, ``block_size`` is the maximum."""
        decoding = self.decoding
        return {
            "name": self.name,
            "block_size": decoding.block_size or self.largest,
            "denoising_steps": decoding.denoising_steps,
            "tree_nodes": decoding.tree_nodes or 0,
            "policy": decoding.policy or "",
        }


PLAIN = Case("plain")
SELF = Case("self")
"""Case of a diffusion language model that drafts canvases and verifies them itself."""


def name_of(draft_model: str) -> str:
    """Return the name in tables of one of ``draft_models``."""
    return Path(draft_model).name


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options of a benchmark. Every case runs on every prompt at every temperature ``repeats`` times, in turns."""

    datasets: tuple[str, ...] = ("gsm8k", "humaneval", "mt-bench")
    """Names of datasets, or JSONL files of prompts or turns."""
    data_dir: Path | None = None
    """Folder with the datasets' files (gsm8k_test.jsonl and so on); by default they come from the hub."""
    num_prompts: int = 8
    """Conversations taken from each dataset."""
    skip_prompts: int = 0
    """Conversations to skip at the start of each dataset, such as those a setting was chosen on."""
    temperatures: tuple[float, ...] = (0.0,)
    """Sampling temperatures; 0 is greedy."""
    block_sizes: tuple[int, ...] = ()
    """Block sizes to try; empty: the drafter's own."""
    policies: tuple[str, ...] = ()
    """Policies to try beside the fixed sizes: goodput, feedback, pilot. The default, goodput, is
    tried where neither policies nor sizes are given."""
    denoising_steps: tuple[int, ...] = (1,)
    """Denoising steps to try with each block size."""
    tree_nodes: tuple[int, ...] = (0,)
    """Sizes of draft trees to try with each block size, anchor included; 0 is a chain."""
    concurrency: int = 1
    """Prompts decoded at once."""
    max_tokens: int = 128
    """Maximum tokens of an answer."""
    ignore_eos: bool = False
    """Decode beyond the end of an answer, so that every answer has max_tokens: for lengths that few answers reach."""
    repeats: int = 3
    """Repeats of every measurement."""
    seed: int = 0
    """Seed of sampled answers, increased by one per repeat."""
    unseeded: bool = False
    """Sample without seeds, as most requests do: chains then use speculative sampling, and answers differ."""
    against: tuple[str, ...] = ()
    """Peers to compare with: ``transformers`` is its own generate, plain and with each speculation it offers."""
    draft_models: tuple[str, ...] = ()
    """Drafters to compare with, named in the table by their folders: folders or hub names of smaller causal LMs with the
    target's tokenizer, of EAGLE-3 drafters, or of block drafters."""
    draft_tokens: int = 4
    """Tokens that each of draft_models drafts; a block drafter drafts its own block."""
    raw: bool = False
    """Send prompts without the chat template."""
    thinking: bool | None = None
    """Value of ``enable_thinking`` for the chat template; by default the template decides."""
    score: bool = False
    """Score the answers to mathematics and GPQA by exact match."""

    def __post_init__(self) -> None:
        counts = ("num_prompts", "concurrency", "max_tokens", "repeats", "draft_tokens")
        check_fields(
            self,
            *((name, getattr(self, name) >= 1, "at least 1") for name in counts),
            ("skip_prompts", self.skip_prompts >= 0, "0 or more"),
        )
        for name in ("datasets", "temperatures", "denoising_steps", "tree_nodes"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; give at least one")
        if any(size < 2 for size in self.block_sizes):
            raise ConfigError(
                f"block sizes are {self.block_sizes}; a block needs 2 or more, and plain is always measured"
            )
        if any(steps < 1 for steps in self.denoising_steps):
            raise ConfigError(f"denoising steps are {self.denoising_steps}; each must be at least 1")
        if any(nodes < 0 or nodes == 1 for nodes in self.tree_nodes):
            raise ConfigError(f"tree nodes are {self.tree_nodes}; each is 0 (a chain) or at least 2, anchor included")
        if any(self.tree_nodes) and max(self.denoising_steps) > 1:
            raise ConfigError("a tree grows from one denoising step; measure trees and several steps apart")
        names = [name_of(path) for path in self.draft_models]
        if len({*names, "", PLAIN.name, SELF.name, "volley", "transformers"}) < len(names) + 5:
            raise ConfigError(
                f"draft models are called {', '.join(names)}; each needs a name of its own, and none that the table has"
            )
        for peer in self.against:
            if peer != "transformers":
                raise unknown_key("peer", peer, ("transformers",))
        if self.against and self.concurrency > 1:
            raise ConfigError("transformers speculates for one prompt at a time; measure against it with concurrency 1")
        if self.ignore_eos and self.score:
            raise ConfigError("what stands behind the end of an answer cannot be judged; give score or ignore_eos")
        if self.raw and self.thinking is not None:
            raise ConfigError(
                "raw prompts go without the chat template, which thinking is a setting of; give one of them"
            )
        if not all(0 <= temperature < math.inf for temperature in self.temperatures):
            raise ConfigError(f"temperatures are {self.temperatures}; each must be a finite number, 0 or more")

    def load(self) -> dict[str, list[Conversation]]:
        """Load ``num_prompts`` conversations of every dataset, from ``skip_prompts`` on, keyed by its short name."""
        workload = {}
        for name in self.datasets:
            conversations = load_prompts(name, self.data_dir, self.skip_prompts + self.num_prompts)
            if len(conversations) <= self.skip_prompts:
                raise InputError(
                    f"{name} has {len(conversations)} prompts and skip_prompts is {self.skip_prompts}; skip fewer"
                )
            short = Path(name).stem if name.endswith(".jsonl") else name
            workload[name if short in workload else short] = conversations[self.skip_prompts :]
        return workload

    def params(self, temperature: float, repeat: int) -> SamplingParams:
        seed = None if self.unseeded else self.seed + repeat
        return SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, seed=seed
        )

    def cases(self, drafter_block_size: int | None, decoding: DecodingConfig | None = None) -> list[Case]:
        """Return plain decoding, every policy, and every block size with every step count or tree. Without a drafter only
        prompt lookup drafts. Other settings are as in ``decoding``."""
        base = replace(decoding or DecodingConfig(), policy=None, block_size=None, denoising_steps=1, tree_nodes=None)
        decided = [Case("volley", replace(base, policy=policy), drafter_block_size or 1) for policy in self.policies]
        if drafter_block_size is None:
            varied = self.block_sizes or any(self.tree_nodes) or {*self.denoising_steps} - {1}
            if varied or set(self.policies) - {"goodput"}:
                raise ConfigError(
                    "block sizes, denoising steps, tree nodes or policies were given but there is no drafter; name one, or leave "
                    "out all but policy goodput, which drafts by prompt lookup"
                )
            return [PLAIN, *decided]
        sizes = self.block_sizes or (drafter_block_size,)
        fixed = [
            Case("volley", replace(base, block_size=size, denoising_steps=steps, tree_nodes=nodes or None))
            for size, steps, nodes in product(sizes, self.denoising_steps, self.tree_nodes)
        ]
        return [PLAIN, *decided, *fixed]
