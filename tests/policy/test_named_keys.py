"""Limits for named keys: what holds for whom, and that the others have no gate."""

from __future__ import annotations

import pytest

from fairlane.errors import InvalidOverride, InvalidPolicy
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.overrides import Kind, Override, Overrides, check_override
from tests.scheduler.simulation import Bench

SLOTS = Concurrency({"acme": 2, 42: 1, "none": 0}, by="account")
POLICY = Policy("q", limits=(SLOTS, Rate({"acme": 3, "42": 0.5}, per="1m", by="account"), Concurrency(9)))


def names_at(account: str | None) -> list[str]:
    return [bound.name for _, bound in POLICY.gates_of(0, {"account": account, "task": "t"})]


@pytest.mark.parametrize(
    ("account", "names"),
    [
        ("acme", ["concurrency:account", "rate/60s:account"]),
        ("42", ["concurrency:account", "rate/60s:account"]),
        ("none", ["concurrency:account"]),
        ("other", []),
        ("", []),
        (None, []),
    ],
)
def test_only_named_keys_have_gates(account: str | None, names: list[str]) -> None:
    assert names_at(account) == names


def test_each_named_key_has_the_number_that_was_given_for_it() -> None:
    slots, rate, whole = POLICY.bound
    assert POLICY.limit_at(slots, ("acme",), None) == Concurrency(2, by="account")
    assert POLICY.limit_at(slots, ("42",), None) == Concurrency(1, by="account")
    assert POLICY.limit_at(slots, ("other",), None) is None
    assert POLICY.limit_at(slots, (None,), None) is None
    assert POLICY.limit_at(rate, ("42",), None) == Rate(0.5, per="1m", by="account")
    assert POLICY.limit_at(whole, (), None) is whole.limit


def test_an_operator_changes_the_number_of_a_named_key_and_of_no_other() -> None:
    name = "concurrency:account"
    acme, other = (Override(kind=Kind.LIMIT, limit=name, scope=(("account", each),), value=7) for each in ("acme", "x"))
    slots = POLICY.bound[0]
    changed = POLICY.overridden(Overrides((acme, other)))
    assert changed.limit_at(slots, ("acme",)) == Concurrency(7, by="account")
    assert changed.limit_at(slots, ("42",)) == Concurrency(1, by="account")
    assert changed.limit_at(slots, ("x",)) is None
    with pytest.raises(InvalidOverride, match="holds only for 42, acme, none"):
        check_override(POLICY, other)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (Rate(10, per="1s"), Rate(20, per="1s")),
        (Rate(10, per="1s", burst=3), Rate(20, per="1s", burst=3)),
        (Rate(10, per="1s", rolling=True), Rate(20, per="1s", rolling=True)),
    ],
)
def test_a_burst_follows_the_number_unless_it_was_given(declared: Rate, expected: Rate) -> None:
    assert declared.with_bound(20.0) == expected


@pytest.mark.parametrize("burst", [None, 1, 5])
def test_one_burst_holds_for_all_named_keys(burst: int | None) -> None:
    named = Rate({"acme": 10}, per="1s", burst=burst, by="account")
    assert named.at(("acme",), None) == Rate(10, per="1s", burst=burst, by="account")


@pytest.mark.parametrize(
    "limit",
    [
        SLOTS,
        Rate({"acme": 10, "b": 0.5}, per="1s", by="account"),
        Rate({"acme": 10}, per="1s", burst=2, by="account"),
        Rate({"acme": 10}, per="1s", rolling=True, by="account"),
    ],
    ids=repr,
)
def test_a_limit_for_named_keys_is_read_back_as_it_was_stored(limit: Concurrency | Rate) -> None:
    policy = Policy("q", limits=(limit,))
    again = Policy.decode(policy.encoded)
    assert again == policy
    assert again.digest == policy.digest
    assert hash(limit) == hash(again.limits[0])


def test_naming_keys_keeps_what_the_gates_hold() -> None:
    assert SLOTS.identity == Concurrency(5, by="account").identity


def test_keys_that_are_not_named_record_nothing_and_are_not_held_back() -> None:
    bench = Bench(Policy("q", Fair(by="account", charge="count"), (SLOTS,)))
    for account in ("acme", "none", "other", None):
        bench.enqueue({"account": account}, count=5)
    bench.claim(50)
    assert (
        sorted(dict(run.lane[1])["account"] or "-" for run in bench.ledger.runs)
        == ["-"] * 5 + ["acme"] * 2 + ["other"] * 5
    )
    assert {tuple(gate.key) for gate in bench.queue.gates.values()} == {("acme",), ("none",)}


@pytest.mark.parametrize(
    ("declare", "named"),
    [
        (lambda: Concurrency({"a": 1}), "single key"),
        (lambda: Concurrency({"a": 1}, by=("x", "y")), "single key"),
        (lambda: Concurrency({}, by="x"), "names no key"),
        (lambda: Concurrency({None: 1}, by="x"), "None cannot be named"),
        (lambda: Concurrency({1.5: 1}, by="x"), "float"),
        (lambda: Concurrency({42: 1, "42": 2}, by="x"), "'42' is given twice"),
        (lambda: Concurrency({"a": 1.5}, by="x"), "whole number"),  # type: ignore[dict-item]
        (lambda: Concurrency({"a": -1}, by="x"), "from 0 to"),
        (lambda: Rate({"a": 0}, per="1s", by="x"), "would never admit"),
        (lambda: Rate({"a": 0.5}, per="1s", by="x", rolling=True), "whole jobs"),
        (lambda: Rate({"a": 5}, per="1s"), "single key"),
        (lambda: Rate({"a": 5}, per="1s", by="x", burst=0), "burst=0"),
    ],
)
def test_a16_nonsense_is_refused_where_it_is_declared_and_named(declare: object, named: str) -> None:
    assert callable(declare)
    with pytest.raises(InvalidPolicy, match=named):
        declare()
