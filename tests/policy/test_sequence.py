"""What a sequence may be declared with, and what is refused with the reason (A16)."""

from __future__ import annotations

import pytest

from fairlane.errors import InvalidPolicy
from fairlane.policy import Concurrency, Fair, Limit, Policy, Rate, Sequence


def test_the_lane_is_the_sequence_s_key() -> None:
    policy = Policy("documents", limits=(Sequence(by=("document", "account")), Concurrency(2, by="account")))
    assert policy.lane_keys == ("account", "document")
    assert Policy.decode(policy.encoded) == policy
    with_more = Policy("documents", limits=(Sequence(by="document"),), keys=("document", "region"))
    assert with_more.lane_keys == ("document",)
    assert with_more.keys_of_job == ("document", "region")


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ((), "name the key whose jobs follow one another"),
        ("priority", "the order of enqueue decides, not priority"),
        (("a", "a"), "names a key twice"),
    ],
)
def test_a_sequence_needs_a_key(by: str | tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidPolicy, match=said):
        Sequence(by=by)


@pytest.mark.parametrize(
    ("fair", "limits", "said"),
    [
        (None, [Sequence(by="a"), Sequence(by="b")], "a queue has one sequence"),
        (None, [Sequence(by="a"), Rate(1, per="1s", by="b")], r"put it into the sequence: Sequence\(by=\('a', 'b'\)\)"),
        (None, [Concurrency(1, by="task"), Sequence(by="a")], r"Sequence\(by=\('a', 'task'\)\)"),
        (None, [Concurrency(1, by="priority"), Sequence(by="a")], "looks at the priority, which has no part in"),
        (Fair(by="b"), [Sequence(by="a")], r"Fair\(by='b', charge='time'\) looks at 'b'"),
    ],
)
def test_what_looks_at_other_keys_than_the_sequence_is_refused(
    fair: Fair | None, limits: list[Limit], said: str
) -> None:
    with pytest.raises(InvalidPolicy, match=said):
        Policy("documents", fair=fair, limits=tuple(limits))


def test_a_sequence_by_task_may_have_limits_by_task() -> None:
    limits = (Sequence(by=("a", "task")), Concurrency(1, by="task"))
    assert Policy("documents", limits=limits).lane_keys == ("a", "task")
