"""How operators name what they mean, and how differences between policies are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairlane.clock import SECOND
from fairlane.errors import ConfigurationError, InvalidOverride
from fairlane.operations import Intent, find_limit, scope_of
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.differences import differences

POLICY = Policy(
    "webhooks",
    fair=Fair(by="account"),
    limits=(Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)),
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: Intent(actor=" "), "set FAIRLANE_ACTOR"),
        (lambda: Intent(actor="ada", expires_in=1, expires_at=2), "not both"),
        (lambda: Intent(actor="ada", reason="x" * 2_000), "at most 1,000"),
    ],
)
def test_an_intent_that_makes_no_sense_is_refused(given: Callable[[], Intent], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        given()


@pytest.mark.parametrize(
    ("text", "keys", "name"),
    [
        ("concurrency:account", {}, "concurrency:account"),
        ("Concurrency:account", {}, "concurrency:account"),
        ("account", {}, "concurrency:account"),
        ("concurrency", {"account": "acme"}, "concurrency:account"),
        ("concurrency", {}, "concurrency:"),
        ("rate", {}, "rate/60s:endpoint"),
        ("rate/1m", {}, "rate/60s:endpoint"),
        ("rate:endpoint", {}, "rate/60s:endpoint"),
        ("rate/1m:endpoint", {}, "rate/60s:endpoint"),
    ],
)
def test_a_limit_is_found_by_its_name_its_kind_or_its_keys(text: str, keys: dict[str, str], name: str) -> None:
    assert find_limit(POLICY, text, scope_of(keys)).name == name


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        ("concurrency", {"region": "eu"}, "may be any of concurrency:account, concurrency:;"),
        ("breaker", {}, "its limits: concurrency:account, rate/60s:endpoint, concurrency:"),
        ("rate/soon", {}, "has no limit 'rate/soon'"),
    ],
)
def test_a_limit_that_is_not_clear_is_refused_with_the_names_there_are(
    text: str, keys: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidOverride, match=said):
        find_limit(POLICY, text, scope_of(keys))


def test_twins_are_told_apart_by_their_numbers() -> None:
    twins = Policy("q", limits=(Concurrency(5, by="account"), Concurrency(7, by="account")))
    assert find_limit(twins, "concurrency:account#2", ()).limit == Concurrency(7, by="account")


def test_two_policies_that_differ_only_in_order_say_so() -> None:
    one = Policy("q", limits=(Concurrency(5), Concurrency(2, by="a")), keys=("a", "b"))
    assert differences(one, one) == ()
    (found,) = differences(one, Policy("q", limits=(Concurrency(2, by="a"), Concurrency(5)), keys=("a", "b")))
    assert found.part == "the order of limits"
    slower = Policy("q", limits=one.limits, keys=("a",), priority_step=SECOND, fair=Fair(by="a"))
    assert [each.part for each in differences(one, slower)] == ["keys", "priority_step", "fair"]


def test_the_task_is_a_key_that_can_be_given_by_its_own_name() -> None:
    assert scope_of({"account": 42}, "shop.deliver") == (("account", "42"), ("task", "shop.deliver"))
    with pytest.raises(ConfigurationError, match="given twice"):
        scope_of({"task": "shop.refund"}, "shop.deliver")
