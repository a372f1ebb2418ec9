"""Policies by name: what is asked for is what one gets, and what cannot be had is named."""

import pytest

from tests.made_up import costs
from tests.tiny import random_drafter
from volley.errors import ConfigError
from volley.policies.base import Policy
from volley.policies.fixed import Feedback, Fixed
from volley.policies.goodput import Goodput
from volley.policies.make import POLICIES, make_policy


@pytest.mark.parametrize(("spec", "kind"), [("fixed", Fixed), ("feedback", Feedback), ("goodput", Goodput)])
def test_a_name_makes_a_fresh_policy(spec: str, kind: type[Policy]) -> None:
    one, other = make_policy(spec, None), make_policy(spec, None)
    assert type(one) is type(other) is kind
    assert one is not other
    assert spec in POLICIES


def test_arguments_follow_a_colon() -> None:
    assert make_policy("fixed:3", None).block_size == 3
    assert make_policy("plain", None).block_size == 1
    assert make_policy("goodput", None).uses_lookup
    assert not make_policy("goodput:drafts", None).uses_lookup


def test_a_policy_of_ones_own_is_taken_as_it_is() -> None:
    own = Fixed(2)
    assert make_policy(own, None) is own


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("godput", "unknown policy 'godput'; did you mean 'goodput'"),
        ("pilto", "did you mean 'pilot'"),
        ("fixed:", "such as fixed:8"),
        ("fixed:x", "such as fixed:8"),
        ("fixed:0", "such as fixed:8"),
        ("feedback:3", "unknown policy 'feedback:3'; did you mean 'feedback'"),
        ("goodput:draft", "did you mean 'goodput:drafts'"),
        ("pilot", "no pilot beside this drafter; train one with `volley pilot`"),
        ("pilot:nowhere", "no pilot in nowhere; train one with `volley pilot`"),
    ],
)
def test_bad_names_are_refused_with_a_remedy(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(spec, random_drafter())


def test_a_pilot_needs_a_drafter() -> None:
    with pytest.raises(ConfigError, match="there is none; name a drafter"):
        make_policy("pilot", None)


def test_a_block_beyond_the_drafters_is_refused_when_the_policy_is_attached() -> None:
    with pytest.raises(ConfigError, match="beyond the 6"):
        make_policy("fixed:9", None).attach(6, costs())
