"""Arguments that make vLLM draft with volley, and checks of the vLLM that volley runs in.

vLLM passes a proposer only its own configuration. volley's options therefore travel in ``additional_config["volley"]``, which
vLLM reserves for extensions.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from volley.config import DraftingConfig
from volley.errors import ConfigError, UnsupportedModelError, check_keys
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.checkpoints.formats import drafter_folder, parse_config, read_raw

TESTED = "0.32"
PROPOSER = "volley.vllm.Proposer"
T = TypeVar("T")
LOGGER = logging.getLogger("vllm.volley")  # a child of vLLM's own logger, whose settings apply


NOT_IN_VLLM = {
    "block_size": 'give "policy": "fixed:8" for blocks of 8',
    "tree_nodes": "vLLM verifies chains only; leave it out",
    "verification": "vLLM verifies by a rule of its own; leave it out",
    "kv_dtype": "vLLM keeps the target's K/V; give vLLM --kv-cache-dtype",
    "draft_kv_dtype": "the drafter's K/V are kept in its own data type; leave it out",
    "exact": "vLLM computes with kernels of its own; leave it out",
}
"""Engine settings that the plugin does not support, with what to do instead."""


@dataclass(frozen=True, kw_only=True)
class PluginOptions(DraftingConfig):
    """Options in ``additional_config["volley"]``, with the names and meanings of :class:`volley.Engine`."""

    drafter: str
    """Drafter's folder, in a format that volley loads."""
    greedy_only: bool = False
    """Every request will have temperature 0: needed if vLLM's own verification is wrong for others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_temperature is not None:
            raise ConfigError(
                f"draft_temperature is {self.draft_temperature}, and vLLM tells a proposer no temperatures: drafts there are the "
                "likeliest tokens; leave it out"
            )
        if not isinstance(self.policy, str | None):
            raise ConfigError(f"policy is {self.policy!r}; it goes through vLLM's configuration, so give its name")

    @classmethod
    def from_config(cls, additional_config: object) -> "PluginOptions":
        """Parse vLLM's ``additional_config``; unknown and missing keys are errors that name them."""
        raw = additional_config.get("volley") if isinstance(additional_config, Mapping) else None
        if not isinstance(raw, Mapping) or "drafter" not in raw:
            raise ConfigError(
                "volley's proposer was not told its drafter; give vLLM "
                """--additional-config '{"volley": {"drafter": "FOLDER"}}'"""
            )
        for name, remedy in NOT_IN_VLLM.items():
            if name in raw:
                raise ConfigError(f"{name} is a setting of volley's own engine: {remedy}")
        return parse_options(cls, raw, "option of volley's vLLM plugin")


def parse_options(cls: type[T], raw: Mapping[Any, Any], what: str) -> T:
    """Return an options dataclass from a mapping; unknown keys are errors."""
    check_keys(what, raw, [field.name for field in fields(cls)])  # type: ignore[arg-type]
    return cls(**raw)


def block_drafter(folder: Path) -> DrafterConfig:
    """Return the config of the drafter in ``folder``. Raises an error unless it is a block drafter."""
    config = parse_config(read_raw(folder))
    if config.eagle is not None:
        raise UnsupportedModelError(
            f"{folder} is an EAGLE-3 drafter, and volley gives vLLM block drafters; leave the drafter out and name vLLM's own "
            f'way: --speculative-config \'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": '
            f"{config.block_size - 1}}}'"
        )
    return config


def engine_args(
    options: PluginOptions, *, eager: bool = True, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1
) -> dict[str, Any]:
    """Return arguments for ``vllm.LLM`` (and, with dashes, its server) that draft with ``options.drafter``.

    If vLLM does not support a custom proposer, these select its built-in ``dflash`` with the drafter's whole block; the log says
    why.
    """
    config = block_drafter(drafter_folder(Path(options.drafter)))
    slots = config.block_size - 1
    obstacles = [
        (not eager, "compiled passes do not call the hooks that tap the target"),
        (tensor_parallel_size > 1, "the target's embedding and head are split over processes"),
        (pipeline_parallel_size > 1, "tapped layers live in other processes"),
    ]
    reasons = [reason for applies, reason in obstacles if applies]
    if not reasons:
        return {
            "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": slots},
            "additional_config": {"volley": asdict(options)},
            "enforce_eager": True,
        }
    if config.head is not None:
        raise UnsupportedModelError(
            f"{options.drafter} has a sequential head, which vLLM's built-in dflash does not know, and volley's plugin cannot "
            f"be used here: {'; '.join(reasons)}. Use a drafter without a head, or vLLM eagerly on one device"
        )
    LOGGER.warning("volley: vLLM's built-in dflash drafts, in blocks of %d tokens: %s", slots + 1, "; ".join(reasons))
    return {"speculative_config": {"method": "dflash", "model": options.drafter, "num_speculative_tokens": slots}}


def check_engine(config: Any, version: str, split: bool = False) -> None:
    """Refuse a vLLM that this proposer was not tested with, or whose configuration hides the target from it.

    ``split``: the proposer supports a target whose weights are split over processes.
    """
    if not _is_tested(version):
        raise UnsupportedModelError(
            f"this is vLLM {version}; volley's plugin is tested with {TESTED}.x, and vLLM calls its proposer interface "
            f'experimental. Install vllm=={TESTED}.*, or use vLLM\'s own {{"method": "dflash"}}'
        )
    parallel = config.parallel_config
    problems = [
        (
            not config.model_config.enforce_eager,
            "volley taps the target's layers with forward hooks, which compiled passes and CUDA graphs do not call; "
            "pass --enforce-eager (enforce_eager=True)",
        ),
        (
            not split and (parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1),
            "volley's proposer needs the whole target in one process; with tensor or pipeline parallelism use vLLM's own "
            '{"method": "dflash"}',
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise UnsupportedModelError(message)


def check_sampler(device: Any) -> None:
    """Refuse a vLLM that verifies drafts at temperatures other than the requests'.

    vLLM 0.32's CPU build spreads each request's temperature, top-k and top-p over its draft tokens with a kernel that writes
    integers to another address. Verification then reads uninitialised memory with every drafting method.
    """
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    temperatures = torch.tensor([0.5, 2.0], device=device)
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    if expand_batch_to_tokens(temperatures, ends, 3).tolist() != [0.5, 2.0, 2.0]:
        raise wrong_sampler()


def wrong_sampler() -> UnsupportedModelError:
    """Return the error for a vLLM that verifies drafts wrongly."""
    return UnsupportedModelError(
        "this build of vLLM verifies drafts at wrong temperatures with every drafting method (0.32 does so on CPUs): "
        "sampled answers would not have the target's distribution. If all requests have temperature 0, say so with "
        "`volley serve --engine vllm --greedy-only`, in vLLM's words "
        """--additional-config '{"volley": {"greedy_only": true, …}}'; else serve without speculation or on a GPU"""
    )


def register() -> None:
    """Log at the start of each vLLM process whether this vLLM was tested with the proposer (vLLM's general plug-in)."""
    import vllm

    if _is_tested(vllm.__version__):
        LOGGER.debug("volley drafts in this vLLM with the proposer %s", PROPOSER)
    else:
        LOGGER.warning("volley's proposer is tested with vLLM %s.x and will refuse %s", TESTED, vllm.__version__)


def _is_tested(version: str) -> bool:
    return version.split(".")[:2] == TESTED.split(".")
