"""Choose the decoding method of a request, among those that its model allows."""

from dataclasses import replace

from volley.errors import ConfigError, UnsupportedModelError
from volley.models.targets.block_diffusion import BlockDiffusion
from volley.models.targets.diffusion import SELF_STRATEGY, refuse_unread
from volley.models.targets.target import Target
from volley.params import DiffusionMode, DiffusionParams, SamplingParams
from volley.policies.cost import PassCost
from volley.policies.draft_steps import DraftSteps
from volley.procedures.denoising import Denoising
from volley.procedures.in_place import InPlace
from volley.procedures.request import Procedure
from volley.procedures.self_speculative import SelfSpeculative
from volley.procedures.speculative import Speculative

_MASK_DEFAULTS = DiffusionParams(threshold=0.9, entropy_bound=0.35)
"""Values that the strategies of masked models read if a family gives none. A family gives those of its own strategy."""


class Procedures:
    """Decoding methods of one target: one, or one for each mode of a diffusion language model."""

    def __init__(self, target: Target, speculative: Speculative, max_batch_tokens: int | None = None) -> None:
        """Make the methods. ``max_batch_tokens`` limits a pass, and so a canvas; ``None``: no limit."""
        self.target, self.speculative, self.max_batch_tokens = target, speculative, max_batch_tokens
        self.by_mode: dict[DiffusionMode, Procedure] = {}
        self.plain = speculative
        """Method that writes token by token; the engine's own if the model cannot."""
        self.default_mode: DiffusionMode = "diffusion"
        """Mode of requests that name none."""
        if target.diffusion is not None:
            if target.recurrent:
                raise UnsupportedModelError(
                    "recurrent layers read from left to right, and a canvas is read both ways; leave block_diffusion out of the "
                    "model's config, or use a model whose layers are all attention"
                )
            self._check_fits(target.diffusion.settings.canvas_length, "raise it", None)
            self.default_mode = target.diffusion.settings.mode or "diffusion"
            self.by_mode["diffusion"] = Denoising(target, target.diffusion)
            verifier = self._verifier(target.diffusion)
            if verifier is not None:
                self.by_mode["autoregressive"] = self.plain = verifier
                self.by_mode["self"] = SelfSpeculative(target, target.diffusion, verifier)

    def _verifier(self, family: BlockDiffusion) -> Speculative | None:
        """Return the method that writes token by token with a model of this family; ``None`` if none can."""
        if family.writes_causally:
            return self.speculative
        return None if family.mask_token_id is None else InPlace(self.speculative.config, family.mask_token_id)

    def mode(self, params: SamplingParams) -> DiffusionMode:
        """Return the mode of a request with these parameters."""
        if self.target.diffusion is None:
            return "autoregressive"
        return (params.diffusion and params.diffusion.mode) or self.default_mode

    def write_causally(self) -> None:
        """Use token-by-token decoding for requests that name no mode, if the model supports it, because drafters need it."""
        if self.target.diffusion is not None and self.target.diffusion.writes_causally:
            self.default_mode = "autoregressive"

    def choose(self, params: SamplingParams) -> tuple[Procedure, SamplingParams]:
        """Return the decoding method of a request, and its parameters with all diffusion settings filled in except measured
        ones."""
        family = self.target.diffusion
        if family is None:
            if params.diffusion is not None:
                raise ConfigError(
                    f"{type(self.target.model).__name__} is no diffusion language model; leave SamplingParams.diffusion out "
                    "(--diffusion on the command line), or load one (docs/diffusion.md)",
                    field="diffusion",
                )
            return self.speculative, params
        own = params.diffusion or DiffusionParams()
        mode = self.mode(params)
        if mode not in self.by_mode:
            raise ConfigError(
                f"mode {mode!r} is not for this model: a row of its logits predicts its own token, and there is no mask to "
                "ask for the next one; use mode='diffusion'",
                field="diffusion.mode",
            )
        refuse_unread(own, family)
        if mode != "autoregressive":
            self._check_fits(own.canvas_length, "use a smaller canvas_length", "diffusion.canvas_length")
        return self.by_mode[mode], replace(params, diffusion=replace(own, mode=mode).over(_usual(family, mode)))

    def _check_fits(self, length: int | None, remedy: str, field: str | None) -> None:
        most = self.max_batch_tokens
        if most is not None and length is not None and length > most:
            told = f"a canvas of {length} tokens does not fit in a pass: max_batch_tokens is {most}; {remedy}"
            raise ConfigError(told, field=field)

    def use_costs(self, costs: PassCost) -> None:
        """Use ``costs`` as the cost table of target passes; what was learnt with an earlier one is dropped."""
        drafting = self.by_mode.get("self")
        if isinstance(drafting, SelfSpeculative):
            drafting.steps = DraftSteps(costs, plain=1 + drafting.verifier.num_beside(0))


def _usual(family: BlockDiffusion, mode: DiffusionMode) -> DiffusionParams:
    """Return the default settings of a mode.

    A config's strategy and steps apply to drafts if its mode is self, else to texts.
    """
    said, defaults = family.own, family.defaults
    if family.mask_token_id is not None:
        defaults = defaults.over(_MASK_DEFAULTS)
    if mode == "self":
        strategy = defaults.strategy if family.mask_token_id is None else SELF_STRATEGY
        defaults = replace(defaults, strategy=strategy, max_steps=None, sub_block=None)
    config_mode = family.settings.mode or "diffusion"
    if mode != config_mode and "self" in (mode, config_mode):
        said = replace(said, strategy=None, max_steps=None, sub_block=None)
    return said.over(defaults)
