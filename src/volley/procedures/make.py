"""Which procedure answers a request: the ways that its model can be decoded."""

from dataclasses import dataclass, replace

from volley.errors import ConfigError
from volley.models.target import Target
from volley.policies.cost import PassCost
from volley.policies.draft_steps import DraftSteps
from volley.procedures.denoising import Denoising
from volley.procedures.request import Procedure
from volley.procedures.self_speculative import SelfSpeculative
from volley.procedures.speculative import Speculative
from volley.types import DiffusionMode, DiffusionParams, SamplingParams

_SELF = DiffusionParams(mode="self", strategy="low_confidence_static")
"""Drafts as long as the checkpoint's canvases. How many passes they get is measured, unless the request says it."""


@dataclass(slots=True)
class Procedures:
    """One target's; by mode if it is a diffusion language model."""

    target: Target
    speculative: Speculative
    by_mode: dict[DiffusionMode, Procedure]

    def choose(self, params: SamplingParams) -> tuple[Procedure, SamplingParams]:
        """The procedure of a request, and its parameters with every diffusion setting filled in but what is measured."""
        family = self.target.diffusion
        if family is None:
            if params.diffusion is not None:
                raise ConfigError(
                    f"{type(self.target.model).__name__} is no diffusion language model; leave SamplingParams.diffusion out, "
                    "or load one (docs/diffusion.md)",
                    field="diffusion",
                )
            return self.speculative, params
        own = params.diffusion or DiffusionParams()
        mode = own.mode or "diffusion"
        renoises = family.mask_token_id is None
        if own.strategy is not None and (own.strategy == "entropy_renoise") != renoises:
            why = "canvases of random tokens have one rule" if renoises else "its canvases begin with mask tokens"
            told = f"strategy {own.strategy!r} is not for this model: {why}; leave it out, or give another"
            raise ConfigError(told, field="diffusion.strategy")
        defaults = family.defaults
        if mode == "self":
            defaults = replace(_SELF, strategy=defaults.strategy if renoises else _SELF.strategy).over(defaults)
        filled = replace(own, mode=mode).over(defaults)
        if mode == "self":
            filled = replace(filled, max_steps=own.max_steps)
        return self.by_mode[mode], replace(params, diffusion=filled)

    def use_costs(self, costs: PassCost) -> None:
        """What the target's passes cost from now on; what was learnt by another table is forgotten."""
        drafting = self.by_mode.get("self")
        if isinstance(drafting, SelfSpeculative):
            drafting.steps = DraftSteps(costs)


def make_procedures(target: Target, speculative: Speculative) -> Procedures:
    by_mode: dict[DiffusionMode, Procedure] = {}
    if target.diffusion is not None:
        by_mode = {
            "diffusion": Denoising(target, target.diffusion),
            "autoregressive": speculative,
            "self": SelfSpeculative(target, target.diffusion, speculative),
        }
    return Procedures(target, speculative, by_mode)
