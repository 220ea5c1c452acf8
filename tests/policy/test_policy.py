"""A queue's policy as a whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.errors import InvalidPolicy
from fairlane.policy import Concurrency, Fair, Level, Policy, Rate
from tests.scheduler.strategies import policies


@settings(deadline=None, max_examples=200)
@given(policies(max_limits=6))
def test_a_policy_read_back_is_the_policy_that_was_stored(policy: Policy) -> None:
    again = Policy.decode(policy.encoded)
    assert again == policy
    assert again.encoded == policy.encoded
    assert again.digest == policy.digest
    assert again.bound == policy.bound


@settings(deadline=None, max_examples=200)
@given(
    st.floats(1e-2, 1e6) | st.integers(1, 10**6),
    st.integers(10**6, 10**13),
    st.integers(1, 10**3),
)
def test_a_rate_read_back_has_the_same_interval_to_the_microsecond(limit: float, per: int, burst: int) -> None:
    policy = Policy("q", limits=(Rate(limit, per=per / 1_000_000, burst=burst),))
    assert Policy.decode(policy.encoded) == policy


def test_lists_say_the_same_as_tuples() -> None:
    loose: Any = {"limits": [Concurrency(1, by="a")], "keys": ["a", "b"]}
    assert Policy("q", **loose) == Policy("q", limits=(Concurrency(1, by="a"),), keys=("a", "b"))
    named: Any = "account"
    assert Policy("q", keys=named).keys_of_job == ("account",)


def test_two_declarations_that_say_the_same_have_the_same_digest() -> None:
    assert Policy("q", limits=(Rate(60, per="1m"),)).digest == Policy("q", limits=(Rate(60, per=60),)).digest
    assert Policy("q", limits=(Rate(60, per="1m"),)).digest != Policy("q", limits=(Rate(61, per="1m"),)).digest


def test_twins_are_numbered_and_have_gates_of_their_own() -> None:
    policy = Policy("q", limits=(Concurrency(5, by="a"), Concurrency(3, by="a"), Rate(1, per=1), Rate(9, per=1)))
    assert [bound.name for bound in policy.bound] == ["concurrency:a", "concurrency:a#2", "rate/1s:", "rate/1s:#2"]
    assert len({gate for gate, _ in (*policy.gates_of(0, {"a": "x"}), *policy.queue_gates)}) == 4


@settings(deadline=None, max_examples=200)
@given(policies(max_limits=6))
def test_no_two_limits_of_a_policy_share_a_gate(policy: Policy) -> None:
    keys = dict.fromkeys(policy.lane_keys, "x")
    gates = [gate for gate, _ in (*policy.gates_of(0, keys), *policy.queue_gates)]
    assert len(gates) == len(set(gates)) == len(policy.limits)


@pytest.mark.parametrize(
    ("fair", "by", "level"),
    [
        (None, None, Level.QUEUE),
        (None, "account", Level.LANE),
        (Fair(by="account"), None, Level.QUEUE),
        (Fair(by="account"), "account", Level.FLOW),
        (Fair(by="account"), "endpoint", Level.LANE),
        (Fair(by="account"), ("account", "endpoint"), Level.LANE),
        (Fair(by=("account", "region")), "region", Level.FLOW),
        (Fair(by="account"), "priority", Level.LANE),
    ],
)
def test_a_limit_stops_the_queue_a_flow_or_a_lane_by_its_scope(
    fair: Fair | None, by: str | tuple[str, ...] | None, level: Level
) -> None:
    assert Policy("q", fair=fair, limits=(Concurrency(1, by=by),)).bound[0].level is level


def test_changing_a_bound_keeps_the_gates_and_changing_a_scope_does_not() -> None:
    def gate(limit: Concurrency) -> bytes:
        return Policy("q", limits=(limit,)).gates_of(0, {"a": "x", "b": "x"})[0][0]

    assert gate(Concurrency(1, by="a")) == gate(Concurrency(9, by="a"))
    assert gate(Concurrency(1, by="a")) != gate(Concurrency(1, by="b"))


def test_lanes_are_told_apart_by_all_keys_that_the_policy_looks_at_and_no_others() -> None:
    policy = Policy("q", fair=Fair(by="account"), limits=(Rate(1, per=1, by=("endpoint", "priority")), Concurrency(9)))
    assert policy.lane_keys == ("account", "endpoint", "task")


def test_lanes_of_a_queue_without_fair_belong_to_one_flow() -> None:
    policy = Policy("q", limits=(Concurrency(1, by="account"),))
    assert policy.flow_of(0, {"account": "x"}) == policy.flow_of(5, {"account": None})


def test_a_priority_step_is_a_head_start_in_time() -> None:
    policy = Policy("q", priority_step=60_000_000)
    assert policy.rank(1_000_000_000, 2) == policy.rank(1_000_000_000 - 120_000_000, 0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"queue": ""}, "''"),
        ({"queue": "a/b"}, "a/b"),
        ({"queue": "x" * 121}, "120"),
        ({"queue": 7}, "queue 7"),
        ({"queue": "q", "limits": (5,)}, "5 is not a limit"),
        ({"queue": "q", "fair": "account"}, "not a fair share"),
        ({"queue": "q", "keys": ("region",), "fair": Fair(by="account")}, "looks at account"),
        ({"queue": "q", "keys": ("a", "a")}, "twice"),
        ({"queue": "q", "keys": ("priority",)}, "every job has a priority"),
        ({"queue": "q", "priority_step": -1}, "priority step"),
    ],
)
def test_a16_a_policy_that_contradicts_itself_is_refused_and_the_queue_is_named(
    arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidPolicy, match=named) as error:
        Policy(**arguments)
    assert "queue " in str(error.value)


def test_a_stored_limit_of_an_unknown_kind_is_named() -> None:
    document = Policy("q").to_document() | {"limits": [{"kind": "lottery", "by": []}]}
    with pytest.raises(InvalidPolicy, match="'lottery'"):
        Policy.from_document(document)
