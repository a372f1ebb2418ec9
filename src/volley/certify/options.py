"""Options of ``volley certify``."""

from dataclasses import dataclass
from math import ceil
from statistics import NormalDist

from volley.errors import ConfigError, check_fields

POWER = 0.9


@dataclass(frozen=True, kw_only=True)
class CertifyConfig:
    """Sample sizes and significance of a certification."""

    prompts_used: int = 12
    """Prompts on which greedy answers are compared."""
    max_tokens: int = 48
    """Maximum tokens of an answer."""
    bias: float = 0.03
    """Smallest bias to detect in sampled output: the change of the likeliest token's frequency. A bias of 0.01 takes nine
    times the tokens of 0.03."""
    alpha: float = 1e-4
    """Probability that a lossless pair fails, over all checks together."""
    seed: int = 0
    """Seed of the requests that have seeds; other randomness is new in each run."""

    def __post_init__(self) -> None:
        if self.prompts_used < 1 or self.max_tokens < 8:
            raise ConfigError("certify needs at least one prompt and answers of 8 tokens")
        check_fields(
            self,
            ("bias", 0 < self.bias < 0.5, "between 0 and 0.5, such as 0.03"),
            ("alpha", 0 < self.alpha < 0.1, "between 0 and 0.1"),
        )

    def sample_size(self, tests: int) -> int:
        """Return the number of tokens with which each of ``tests`` two-sided tests finds ``bias`` with probability 0.9, for
        any distribution."""
        return ceil(0.25 * (self.errors_found(tests) / self.bias) ** 2)

    def errors_found(self, tests: int) -> float:
        """Return the shift, in standard errors, that each of ``tests`` two-sided tests finds with probability 0.9."""
        normal = NormalDist()
        return normal.inv_cdf(1 - self.alpha / tests / 2) + normal.inv_cdf(POWER)
