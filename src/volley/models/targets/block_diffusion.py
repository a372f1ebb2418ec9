"""What the engine has to know of a block-diffusion language model; its families are in ``models/targets/diffusion.py``."""

from dataclasses import dataclass, field

from volley.types import DiffusionParams


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion:
    """A family, or one model of it."""

    mask_token_id: int | None
    """The noise; ``None``: uniform random tokens."""
    is_aligned: bool = False
    """Canvases begin at multiples of their length, prompt included; what the prompt has of the first one is given."""
    is_shifted: bool = False
    """Row i of the logits predicts token i + 1, as in an autoregressive model."""
    has_causal_context: bool = False
    """K/V of what is committed are made causally; otherwise each block sees itself both ways."""
    writes_causally: bool = False
    """Row i of a causal pass predicts token i + 1, so that the same weights also write one token after the other."""
    symmetric_window: bool = False
    """A canvas's token sees a window's ``W`` positions before it and ``W`` after it, ``2 W + 1`` in all, as in vLLM's account of
    DiffusionGemma. Otherwise it sees what transformers shows it: the canvas, and the window of the canvas's first token."""
    defaults: DiffusionParams
    """Of the family, with the block length that the checkpoint names."""
    own: DiffusionParams = field(default_factory=DiffusionParams)
    """What ``block_diffusion`` in the config says instead."""

    @property
    def settings(self) -> DiffusionParams:
        """``own`` over ``defaults``; what each mode makes of them is in ``procedures/make.py``."""
        return self.own.over(self.defaults)
