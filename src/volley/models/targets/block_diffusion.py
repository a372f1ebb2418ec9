"""Properties of a block-diffusion language model that the engine needs; ``models/targets/families.py`` lists the families."""

from dataclasses import dataclass, field

from volley.params import DiffusionParams


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion:
    """Properties of a family, or of one of its models."""

    mask_token_id: int | None
    """Token that stands for noise; ``None``: noise is uniform random tokens."""
    is_aligned: bool = False
    """True if canvases begin at multiples of their length, prompt included. The first canvas may begin with prompt tokens."""
    is_shifted: bool = False
    """True if row i of the logits predicts token i + 1, as in an autoregressive model."""
    has_causal_context: bool = False
    """True if the K/V of committed tokens are computed causally; otherwise attention within a block is bidirectional."""
    writes_causally: bool = False
    """True if row i of a causal pass predicts token i + 1, so that the model can also decode autoregressively."""
    symmetric_window: bool = False
    """True if a canvas token sees ``W`` positions before it and ``W`` after it, as in vLLM's description of DiffusionGemma.
    Otherwise it sees the canvas and the window of the canvas's first token, as in transformers."""
    defaults: DiffusionParams
    """Settings of the family, with the block length that the checkpoint names."""
    own: DiffusionParams = field(default_factory=DiffusionParams)
    """Settings of ``block_diffusion`` in the config, which override ``defaults``."""

    @property
    def settings(self) -> DiffusionParams:
        """Return ``defaults`` overridden by ``own``; ``procedures/make.py`` interprets them for each mode."""
        return self.own.over(self.defaults)
