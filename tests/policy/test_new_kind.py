"""A new kind of limit is two files: its class, and `policy/__init__.py`, which imports it. This one is only a class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest

from fairlane.clock import SECOND, Instant
from fairlane.policy import Fair, Policy, Reason
from fairlane.policy.gates import GateState, Release, Why
from fairlane.policy.keys import By, normalize_by, repr_by
from fairlane.policy.limits import KINDS, Limit, duration_above_zero, time_words
from fairlane.policy.policy import parse_policy, policy_words, written_policy
from fairlane.simulation.memory import MemoryQueue
from fairlane.stats.gates import board_now, gauges


@dataclass(frozen=True, slots=True, init=False)
class Rest(Limit):
    """One job of a key at a time, and the next one no sooner than so much after its end."""

    after: int
    by: By

    kind = "rest"
    times = frozenset({"after"})

    def __init__(self, after: timedelta | str | float, *, by: str | tuple[str, ...] | None = None) -> None:
        self._set(after=duration_above_zero("Rest", "after", after), by=normalize_by("Rest", by))

    def __repr__(self) -> str:
        return f"Rest('{self.after / SECOND:g}s'{repr_by(self.by)})"

    def room_at(self, gate: GateState, now: Instant) -> int:
        return 0 if gate.in_flight or gate.tat > now else 1

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        gate.tat = now + self.after
        return Limit.free(self, gate, ending, now, held, task)

    def opens_again_at(self, gate: GateState) -> Instant | None:
        return None if gate.in_flight else gate.tat

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.CONCURRENCY, gate.in_flight, 1)

    def describe(self, where: str) -> str:
        return f"A rest of a {time_words(self.after)} after each job {where}"

    def with_bound(self, bound: float) -> Rest:
        return Rest(bound / SECOND, by=self.by)


_REST = KINDS.pop("rest")


@pytest.fixture(scope="module", autouse=True)
def only_here() -> Iterator[None]:
    """Other tests do not meet it."""
    KINDS["rest"] = _REST
    yield
    del KINDS["rest"]


def with_rest() -> Policy:
    return Policy("q", fair=Fair(by="account"), limits=(Rest("1m", by="account"),))


def test_a_new_kind_is_stored_written_and_described_by_its_class_alone() -> None:
    policy = with_rest()
    assert Policy.decode(policy.encoded) == policy
    assert written_policy(policy)["limits"] == [{"kind": "rest", "after": "1m", "by": "account"}]
    assert parse_policy({"queue": "q", **written_policy(policy)}, "here") == policy
    assert policy_words(policy)[1] == "A rest of a minute after each job for each account."


def test_a_new_kind_is_kept_by_claims_and_told_to_people() -> None:
    queue, now = MemoryQueue(with_rest()), 1_000 * SECOND
    queue.enqueue(now, {"account": "a", "task": "t"}, 3)
    queue.enqueue(now, {"account": "b", "task": "t"})
    first = queue.claim(now, 10)
    assert len(first.starts) == 2
    for start in first.starts:
        queue.settle(start, SECOND)
    assert queue.claim(now + SECOND, 10).starts == []
    assert queue.next_alarm() == now + 61 * SECOND
    (bound,) = queue.policy.bound
    board = board_now(queue.policy, now + SECOND, queue.gates.values(), [(bound, ("a",))])
    (gauge,) = gauges(board, [(bound, ("a",))])
    assert (gauge.room, gauge.opens_at) == (0, now + 61 * SECOND)
    assert len(queue.claim(now + 61 * SECOND, 10).starts) == 1


def test_a_kind_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(Exception, match="of kind 'nap' is not known to this version, which knows adaptive, backlog"):
        Policy.from_document({"queue": "q", "limits": [{"kind": "nap"}]})
