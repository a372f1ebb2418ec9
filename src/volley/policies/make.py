"""Make policies by name."""

from collections.abc import Callable
from functools import partial

from volley.errors import ConfigError, unknown_key
from volley.models.drafters.drafter import Drafter
from volley.models.drafters.pilot import load_pilot
from volley.policies.base import Policy
from volley.policies.fixed import Feedback, Fixed
from volley.policies.goodput import Goodput
from volley.policies.pilot import Pilot

DEFAULT_POLICY = "goodput"
POLICIES: dict[str, Callable[[], Policy]] = {
    "feedback": Feedback,
    "fixed": Fixed,
    "goodput": Goodput,
    "goodput:drafts": partial(Goodput, uses_lookup=False),
    "plain": partial(Fixed, 1),
}


def make_policy(spec: str | Policy, drafter: Drafter | None) -> Policy:
    """Make the policy of a name: ``goodput``, ``goodput:drafts`` (without prompt lookup), ``plain`` (without drafts),
    ``feedback``, ``fixed`` (the drafter's block), ``fixed:8``, ``pilot`` (written by ``volley pilot`` beside the drafter), or
    ``pilot:FOLDER``."""
    if isinstance(spec, Policy):
        return spec
    if spec in POLICIES:
        return POLICIES[spec]()
    name, _, argument = spec.partition(":")
    if name == "fixed":
        if not argument.isdecimal() or int(argument) < 1:
            raise ConfigError(f"policy {spec!r} has no usable block size; give one such as fixed:8")
        return Fixed(int(argument))
    if name == "pilot":
        if drafter is None:
            raise ConfigError("policy 'pilot' decides how much a drafter drafts, and there is none; name a drafter")
        return Pilot(*load_pilot(drafter, argument or None))
    raise unknown_key("policy", spec, [*POLICIES, "fixed:8", "pilot"])
