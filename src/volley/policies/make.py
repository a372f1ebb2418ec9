"""Policies by name."""

from collections.abc import Callable

from volley.errors import ConfigError, unknown_key
from volley.models.drafter import Drafter
from volley.models.pilot import load_pilot
from volley.policies.base import Policy
from volley.policies.fixed import Feedback, Fixed
from volley.policies.goodput import Goodput
from volley.policies.pilot import Pilot

DEFAULT_POLICY = "goodput"
POLICIES: dict[str, Callable[[], Policy]] = {"feedback": Feedback, "fixed": Fixed, "goodput": Goodput}


def make_policy(spec: str | Policy, drafter: Drafter | None) -> Policy:
    """A policy from its name: ``goodput``, ``feedback``, ``fixed`` (the drafter's block), ``fixed:8``, or ``pilot``, which
    ``volley pilot`` left beside the drafter; ``pilot:FOLDER`` is one kept elsewhere. ``goodput:drafts`` copies nothing from the
    text.
    """
    if isinstance(spec, Policy):
        return spec
    name, colon, argument = spec.partition(":")
    if name == "fixed" and colon:
        if not argument.isdecimal() or int(argument) < 1:
            raise ConfigError(f"policy {spec!r} has no usable block size; give one such as fixed:8")
        return Fixed(int(argument))
    if name == "pilot":
        if drafter is None:
            raise ConfigError("policy 'pilot' decides how much a drafter drafts, and there is none; name a drafter")
        return Pilot(*load_pilot(drafter, argument or None))
    if spec == "goodput:drafts":
        return Goodput(uses_lookup=False)
    if name not in POLICIES:
        raise unknown_key("policy", name, [*POLICIES, "pilot"])
    if colon:
        known = " but 'drafts'" if name == "goodput" else ""
        raise ConfigError(f"policy {name!r} takes nothing after a colon{known}; {argument!r} was given")
    return POLICIES[name]()
