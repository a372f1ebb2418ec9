"""Arguments that make vLLM draft with volley, and checks of the vLLM that volley runs in.

vLLM passes a proposer only its own configuration. volley's options therefore travel in ``additional_config["volley"]``, which
vLLM reserves for extensions.
"""

import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from volley.config import DraftingConfig
from volley.errors import ConfigError, UnsupportedModelError, check_keys
from volley.files import read_json
from volley.models.checkpoints.checkpoint import DrafterConfig
from volley.models.checkpoints.formats import detect, drafter_folder, parse_config, read_raw
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import largest_block
from volley.policies.make import DEFAULT_POLICY, make_policy

TESTED = "0.32"
VARIABLE = "VOLLEY_DRAFTER"
"""Variable that activates the plugin in a plain ``vllm serve`` (``activation.py``)."""
PROPOSER = "volley.vllm.Proposer"
_FORMAT = "transformers' format (volley export it --to zlab)"
LOGGER = logging.getLogger("vllm.volley")  # a child of vLLM's own logger, whose settings apply


NOT_IN_VLLM = {
    "block_size": 'give "policy": "fixed:8" for blocks of 8',
    "tree_nodes": "vLLM verifies chains only; leave it out",
    "verification": "vLLM verifies by a rule of its own; leave it out",
    "kv_dtype": "vLLM keeps the target's K/V; give vLLM --kv-cache-dtype",
    "draft_kv_dtype": "the drafter's K/V are kept in its own data type; leave it out",
    "draft_attention": "the plugin chooses it by the device; leave it out",
    "compile": "the plugin's drafter runs as it is; a plain drafter gets vLLM's compiled method by itself",
    "exact": "vLLM computes with kernels of its own; leave it out",
}
"""Engine settings that the plugin does not support, with what to do instead."""


@dataclass(frozen=True, kw_only=True)
class PluginOptions(DraftingConfig):
    """Options in ``additional_config["volley"]``, with the names and meanings of :class:`volley.Engine`."""

    drafter: str
    """Drafter's folder, in a format that volley loads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_temperature:
            raise ConfigError(
                f"draft_temperature is {self.draft_temperature}, and vLLM tells a proposer no temperatures: drafts there are the "
                "likeliest tokens; leave it out, or give 0"
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
        check_keys("option of volley's vLLM plugin", raw, [field.name for field in fields(cls)])
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


def built_in_args(options: PluginOptions) -> dict[str, Any]:
    """Return arguments by which vLLM's built-in ``dflash`` drafts, compiled with the target.

    Raises UnsupportedModelError if it lacks something that the drafter or an option needs. A window that the drafter was
    measured to need is no obstacle: vLLM's drafter attends to the whole context.
    """
    folder = drafter_folder(Path(options.drafter))
    config, policy = block_drafter(folder), options.policy or "fixed"
    needs = [
        (policy.partition(":")[0] != "fixed", f"policy {policy}"),
        (options.denoising_steps > 1, "several denoising steps"),
        (bool(options.draft_window), "a draft window"),
        (config.head is not None, "a sequential head"),
        (detect(read_json(folder / "config.json")) == "transformers", _FORMAT),
        (is_cpu_build() and len(set(config.layer_types)) > 1, "sliding layers beside full ones on a CPU"),
    ]
    missing = [what for is_needed, what in needs if is_needed]
    if missing:
        raise UnsupportedModelError(f"vLLM's built-in dflash does not have {', '.join(missing)}")
    size = config.block_size if policy == "fixed" else options.fixed_block
    if size < 2:
        raise ConfigError(
            f"policy is {policy!r}; a block to draft has 2 or more tokens, such as fixed:8. Leave the drafter out for plain "
            "decoding"
        )
    return _dflash(folder, size)


def is_cpu_build() -> bool:
    """Return whether the installed vLLM runs on CPUs; this build has another name or its own version."""
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return any("cpu" in f"{name} {importlib.metadata.version(name)}" for name in names)


def engine_args(
    options: PluginOptions, *, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1
) -> dict[str, Any]:
    """Return arguments for ``vllm.LLM`` (and, with dashes, its server) that draft with ``options.drafter``.

    If vLLM does not support a custom proposer, these select its built-in ``dflash`` with the drafter's whole block; the log says
    why.
    """
    folder = drafter_folder(Path(options.drafter))
    config = block_drafter(folder)
    block_size = largest_block(options, config.block_size, folder)
    obstacles = [
        (tensor_parallel_size > 1, "the target's embedding and head are split over processes"),
        (pipeline_parallel_size > 1, "tapped layers live in other processes"),
    ]
    reasons = [reason for applies, reason in obstacles if applies]
    if not reasons:
        make_policy(
            options.policy or DEFAULT_POLICY, Drafter.from_pretrained(folder)
        )  # refuses what the proposer would
        return {
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": block_size - 1,
            },
            "additional_config": {"volley": asdict(options)},
            "enforce_eager": True,
        }
    if config.head is not None:
        raise UnsupportedModelError(
            f"{options.drafter} has a sequential head, which vLLM's built-in dflash does not know, and volley's plugin cannot "
            f"be used here: {'; '.join(reasons)}. Use a drafter without a head, or vLLM eagerly on one device"
        )
    if detect(read_json(folder / "config.json")) == "transformers":
        raise ConfigError(f"vLLM's built-in dflash does not read {folder}, which is in {_FORMAT}")
    LOGGER.warning("volley: vLLM's built-in dflash drafts, in blocks of %d tokens: %s", block_size, "; ".join(reasons))
    return _dflash(folder, block_size)


def _dflash(folder: Path, block_size: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "dflash", "model": str(folder), "num_speculative_tokens": block_size - 1}}


def check_tested(version: str) -> None:
    """Refuse a vLLM of a version that volley was not tested with."""
    if version.split(".")[:2] != TESTED.split("."):
        raise UnsupportedModelError(
            f"this is vLLM {version}; volley's plugin is tested with {TESTED}.x, and vLLM calls its proposer interface "
            f'experimental. Install vllm=={TESTED}.*, or use vLLM\'s own {{"method": "dflash"}}'
        )


def check_engine(config: Any, version: str) -> None:
    """Refuse a vLLM that this proposer was not tested with, or whose configuration hides the target from it."""
    check_tested(version)
    parallel = config.parallel_config
    problems = [
        (
            not config.model_config.enforce_eager,
            "volley taps the target's layers with forward hooks, which compiled passes and CUDA graphs do not call; "
            "pass --enforce-eager (enforce_eager=True)",
        ),
        (
            parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1,
            "volley's proposer needs the whole target in one process; with tensor or pipeline parallelism use vLLM's own "
            '{"method": "dflash"}',
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise UnsupportedModelError(message)


def repair_sampler() -> None:
    """Replace two functions by which vLLM's CPU build samples with speculation. Call this before vLLM registers its kernels.

    The function of vLLM 0.32 that spreads each request's temperature, top-k and top-p over its draft tokens writes integers to
    another address, so that verification reads uninitialised memory. Its top-k raises an error in passes without a draft. Other
    builds use neither.
    """
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    cpu_triton_utils._expand_kernel_impl = spread_over_drafts
    top_k = topk_topp_sampler.apply_top_k_only
    topk_topp_sampler.apply_top_k_only = lambda logits, k: top_k(logits, k) if len(logits) else logits


def spread_over_drafts(
    output: Tensor, values: Tensor, ends: Tensor, old: float, new: float, MAX_NUM_TOKENS: int | None = None
) -> None:
    """Write ``values [R]``, with ``new`` in place of ``old``, to ``output [T]``; request r's tokens end before ``ends[r]``."""
    spread = values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)), output_size=len(output))
    output.copy_(torch.where(spread == old, new, spread))


def check_sampler(device: Any) -> None:
    """Refuse a vLLM that verifies drafts at temperatures other than the requests', because volley's plugin is not loaded."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    temperatures = torch.tensor([0.5, 2.0], device=device)
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    if expand_batch_to_tokens(temperatures, ends, 3).tolist() != [0.5, 2.0, 2.0]:
        raise UnsupportedModelError(
            "this build of vLLM verifies drafts at wrong temperatures with every drafting method (0.32 does so on CPUs), and "
            "volley's plugin, which repairs that, is not loaded: install volley in vLLM's environment, and name volley in "
            "VLLM_PLUGINS or unset it"
        )
