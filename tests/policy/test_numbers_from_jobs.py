"""Numbers that jobs bring along: how they are declared, stored and checked."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.errors import InvalidPolicy
from fairlane.policy import Concurrency, Fair, Policy, Rate


def slots(context: Any) -> int:
    return int(context["slots"])


POLICY = Policy(
    "q",
    Fair(by="account", weight=lambda context: context["weight"]),
    (
        Concurrency(slots, by="account"),
        Rate(lambda context: context["rpm"], per="1m", by="account"),
        Rate(lambda context: context["quota"], per="1h", by="account", rolling=True),
        Concurrency(50),
    ),
)
NAMES = ["concurrency:account", "rate/60s:account", "rolling/3600s:account", "weight"]


def test_a_stored_policy_says_only_that_its_numbers_come_from_jobs() -> None:
    again = Policy.decode(POLICY.encoded)
    assert again == POLICY
    assert again.digest == POLICY.digest
    assert (sorted(again.brought), sorted(POLICY.brought)) == (NAMES, NAMES)
    assert [number.source for number in again.brought.values()] == [None] * 4
    assert all(callable(number.source) for number in POLICY.brought.values())


def test_the_function_is_not_part_of_what_a_policy_says() -> None:
    other = Policy("q", limits=(Concurrency(lambda context: 7, by="account"),))
    assert other.digest == Policy("q", limits=(Concurrency(slots, by="account"),)).digest
    assert other.digest != Policy("q", limits=(Concurrency(7, by="account"),)).digest


def test_policies_without_such_numbers_ask_for_none_and_are_stored_as_before() -> None:
    plain = Policy(
        "q", Fair(by="a", weight={"x": 2}), (Concurrency(5, by="a"), Rate(1, per=1), Rate({"x": 1}, per=1, by="a"))
    )
    assert plain.brought == {}
    assert "from" not in plain.encoded


def test_until_a_job_has_brought_a_number_the_least_holds_with_which_its_jobs_run() -> None:
    a, b, c, whole = POLICY.bound
    assert POLICY.limit_at(a, ("acme",), None) == Concurrency(1, by="account")
    assert POLICY.limit_at(b, ("acme",), None) == Rate(1, per="1m", by="account")
    assert POLICY.limit_at(c, ("acme",), None) == Rate(1, per="1h", by="account", rolling=True)
    assert POLICY.limit_at(whole, (), None) == Concurrency(50)
    assert POLICY.weight_of(0, {"account": "acme"}) == 1.0


def test_a_number_that_was_brought_holds_for_its_key() -> None:
    a, b, c, _ = POLICY.bound
    assert POLICY.limit_at(a, ("acme",), 7.0) == Concurrency(7, by="account")
    assert POLICY.limit_at(b, ("acme",), 0.5) == Rate(0.5, per="1m", by="account")
    assert POLICY.limit_at(c, ("acme",), 9.0) == Rate(9, per="1h", by="account", rolling=True)


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        (NAMES[0], -1, "from 0 to"),
        (NAMES[0], 2.5, "whole number"),
        (NAMES[0], True, "not a number"),
        (NAMES[0], "5", "not a number"),
        (NAMES[0], None, "not a number"),
        (NAMES[1], 0, "would never admit"),
        (NAMES[1], float("nan"), "nan is not a number"),
        (NAMES[2], 0.5, "whole jobs"),
        (NAMES[3], 0, "between"),
        (NAMES[3], [1], "not a number"),
    ],
)
def test_a_number_is_refused_as_it_would_be_where_it_is_declared(name: str, number: Any, reason: str) -> None:
    with pytest.raises(InvalidPolicy, match=reason):
        POLICY.check_brought(name, number)


def test_they_print_as_what_they_are() -> None:
    assert repr(POLICY.limits[0]) == "Concurrency(<from the job>, by='account')"
    assert repr(POLICY.limits[1]) == "Rate(<from the job>, per='60s', by='account')"
    assert repr(POLICY.fair) == "Fair(by='account', weight=<from the job>, charge='time')"


def test_a16_what_is_no_number_and_no_function_is_refused() -> None:
    unknown: Any = object()
    with pytest.raises(InvalidPolicy):
        Concurrency(unknown)
    with pytest.raises(InvalidPolicy, match="burst=3 has no meaning"):
        Rate(slots, per="1m", burst=3, rolling=True)
