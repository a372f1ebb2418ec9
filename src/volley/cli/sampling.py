"""Options for sampling, shared by the commands that answer prompts."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from volley.params import SamplingParams

if TYPE_CHECKING:
    from volley.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for sampling. Omitted ones take the model's own values, or greedy decoding."""

    temperature: float | None = None
    """Sampling temperature; 0 is greedy, and the default if the model's generation config sets none."""
    top_p: float | None = None
    """Keep the likeliest tokens with this total probability."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float | None = None
    """Keep tokens with at least this share of the likeliest token's probability."""
    seed: int | None = None
    """Seed with which the same answer is drawn again."""
    max_tokens: int | None = None
    """Maximum tokens of an answer."""
    generation_config: Literal["auto", "none"] = "auto"
    """Defaults of sampling options: auto takes those of the model's generation config."""

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        return {name: own for name, own in asdict(self).items() if own is not None and name != "generation_config"}

    def params(self, **fixed: Any) -> SamplingParams:
        """Return the parameters of requests; options that were given win over ``fixed``."""
        return SamplingParams(**{**fixed, **self.given()})

    def with_defaults(self, params: SamplingParams, engine: "Engine") -> SamplingParams:
        """Return ``params`` with the model's own values of what was left out, and say which these are."""
        from volley.cli import console
        from volley.models.targets.sampling_defaults import sampling_defaults

        found = sampling_defaults(engine.target.model.generation_config) if self.generation_config == "auto" else {}
        own = {name: value for name, value in found.items() if name not in self.given()}
        if own:
            told = ", ".join(f"{name} {value:g}" for name, value in own.items())
            console.stderr().print(f"The model's own sampling: {told} (--generation-config none goes without)")
        return replace(params, **own)
