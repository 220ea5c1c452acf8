"""Keys of which nothing may start, whatever runs: a policy says which, by asking its limits and pauses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.policy import AdaptiveConcurrency, Backlog, Breaker, Concurrency, Policy, Rate, Sequence
from fairlane.policy.limits import Limit
from fairlane.policy.overrides import Kind, Override, Overrides, pause_name, paused_by

NAME = "concurrency:account"
NUMBERS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), min_size=1)


def pause(*scope: tuple[str, str]) -> Override:
    return Override(kind=Kind.PAUSE, scope=scope)


def limit(account: str, number: float) -> Override:
    return Override(kind=Kind.LIMIT, limit=NAME, scope=(("account", account),), value=number)


def stopped(policy: Policy) -> set[tuple[str, tuple[str | None, ...]]]:
    return {(bound.name, key) for bound, key in policy.stopped}


@given(NUMBERS, NUMBERS, st.sets(st.sampled_from("abcd")))
def test_a_named_key_is_stopped_by_the_number_that_holds_for_it_or_by_a_pause(
    declared: dict[str, int], changed: dict[str, int], paused: set[str]
) -> None:
    changed = {account: number for account, number in changed.items() if account in declared}
    overrides = [limit(*each) for each in changed.items()] + [pause(("account", each)) for each in paused]
    policy = Policy("q", limits=(Concurrency(declared, by="account"),)).overridden(Overrides(tuple(overrides)))
    zeros = {(NAME, (account,)) for account, number in {**declared, **changed}.items() if number == 0}
    assert stopped(policy) == zeros | {("pause:account", (account,)) for account in paused}


def test_an_operator_stops_a_key_of_a_limit_that_names_none() -> None:
    policy = Policy("q", limits=(Concurrency(5, by="account"),))
    assert stopped(policy.overridden(Overrides((limit("acme", 0), limit("globex", 1))))) == {(NAME, ("acme",))}


def test_a_suspended_limit_stops_nobody_and_a_pause_does() -> None:
    overrides = Overrides((Override(kind=Kind.SUSPEND), pause(("account", "acme"))))
    policy = Policy("q", limits=(Concurrency({"acme": 0}, by="account"),)).overridden(overrides)
    assert stopped(policy) == {("pause:account", ("acme",))}


def test_a_pause_of_the_whole_queue_is_no_matter_of_keys() -> None:
    assert stopped(Policy("q").overridden(Overrides((pause(),)))) == set()


def test_a_number_that_a_job_brings_stops_its_key() -> None:
    policy = Policy("q", limits=(Concurrency(lambda context: context["slots"], by="account"),))
    (bound,) = policy.bound
    assert [policy.is_stopped(bound, ("acme",), number) for number in (None, 0, 1)] == [False, True, False]
    raised = policy.overridden(Overrides((limit("acme", 2),)))
    assert not raised.is_stopped(bound, ("acme",), 0), "what an operator says goes first"


@pytest.mark.parametrize(
    "admits",
    [
        Concurrency(1, by="account"),
        Rate(1, per="1h", by="account"),
        Rate(1, per="1h", by="account", rolling=True),
        AdaptiveConcurrency(by="account", start=1, min=1, max=5),
        Sequence(by="account"),
        Breaker(by="account"),
        Backlog(1, by="account"),
    ],
    ids=repr,
)
def test_a_limit_that_nothing_has_passed_stops_nobody(admits: Limit) -> None:
    policy = Policy("q", limits=(admits,))
    assert not policy.is_stopped(policy.bound[0], ("acme",))


def test_a_limit_of_nothing_stops_every_key() -> None:
    policy = Policy("q", limits=(Concurrency(0, by="account"),))
    assert policy.is_stopped(policy.bound[0], ("anybody",))


@given(st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), unique=True))
def test_a_pause_is_known_by_the_name_of_its_gates(names: list[str]) -> None:
    assert paused_by(pause_name(tuple(names))) == tuple(names)


@pytest.mark.parametrize("name", [NAME, "rate/60s:pause", "moving:", "", "pause"])
def test_no_limit_is_taken_for_a_pause(name: str) -> None:
    assert paused_by(name) is None
