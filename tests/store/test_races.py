"""Two stores that reach for one job at the same instant, over and over: exactly one wins, and the other is told.

Each race leans towards a tie: whoever has won begins a little later next time. So both sides win, and most rounds are
close. `FAIRLANE_RACE_ROUNDS=3000` runs longer. What a driver raises would end a round, and the test.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import cycle
from typing import TypeVar
from uuid import UUID

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.job import BuiltEffects, Claim, NewJob, Outcome, State
from fairlane.policy import Concurrency, Policy
from fairlane.policy.unique import OnConflict, Unique, unique_key
from fairlane.scheduler.settlement import Done, Failed, settle
from fairlane.store import records
from fairlane.store.protocol import Store
from tests.store.harness import LEASE, Database, claim, finish, given_jobs, ids, new_jobs, soon, state_of

pytestmark = pytest.mark.slow

A = TypeVar("A")
B = TypeVar("B")

ROUNDS = int(os.environ.get("FAIRLANE_RACE_ROUNDS", "200"))
POLICY = Policy("races", limits=(Concurrency(5),))


class Race:
    """Lets two sides begin together, and holds back the one that wins too often."""

    def __init__(self) -> None:
        self.won: Counter[str] = Counter()
        self._lead = 0
        """Turns of the event loop that the first side waits; below 0, the second."""
        self._step = 0

    async def run(self, first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]) -> tuple[A, B]:
        return await soon(asyncio.gather(_after(self._lead, first), _after(-self._lead, second)))

    def first_won(self) -> None:
        self.won["first"] += 1
        self._hold_back(1)

    def second_won(self) -> None:
        self.won["second"] += 1
        self._hold_back(-1)

    def _hold_back(self, side: int) -> None:
        # In larger and larger steps for as long as the same side wins.
        self._step = min(2 * self._step, 64 * side, key=abs) if self._step * side > 0 else side
        self._lead += self._step

    def assert_both_have_won(self) -> None:
        assert min(self.won["first"], self.won["second"]) > 0, f"one side always wins: {self.won}"


async def _after(turns: int, begin: Callable[[], Awaitable[A]]) -> A:
    for _ in range(turns):
        await asyncio.sleep(0)
    return await begin()


async def rivals(database: Database, clock: ManualClock) -> tuple[Store, Store]:
    """Two stores with connections of their own, as if each were a process."""
    one, other = await database.open(clock), await database.open(clock)
    await one.declare(POLICY)
    await other.declare(POLICY)
    return one, other


async def assert_nothing_runs(store: Store) -> None:
    """A14"""
    assert await claim(store, "races", 5) == []
    assert (await store.counts("races")).running == 0


def unique_job(key: int, on_conflict: OnConflict) -> NewJob:
    (job,) = new_jobs(POLICY)
    unique = unique_key(Unique(key, on_conflict=on_conflict), job.task, (), {}, job.payload)
    return msgspec.structs.replace(job, unique=unique)


async def outcome_of(store: Store, job: NewJob) -> tuple[Outcome, UUID | None]:
    conflict = (await store.enqueue([job])).get(job.id)
    return (Outcome.ENQUEUED, None) if conflict is None else (conflict.outcome, conflict.holder)


# L02, L16
async def test_of_an_ack_and_a_reaper_exactly_one_wins(shared_database: Database, clock: ManualClock) -> None:
    worker, reaper = await rivals(shared_database, clock)
    plain, with_effects = Race(), Race()
    for turn in range(ROUNDS):
        race = with_effects if turn % 2 else plain
        (job,) = await given_jobs(worker, POLICY)
        (held,) = await claim(worker, "races")
        clock.advance(LEASE)
        (follow_up,) = new_jobs(POLICY)
        effects = BuiltEffects((follow_up,), {f"{turn}": b"1"}) if race is with_effects else None
        ack = settle(held, Done(b"1", effects), 5)
        lost, reaped = await race.run(lambda ack=ack: worker.settle([ack]), reaper.reap)  # type: ignore[misc]
        record = await worker.job(job)
        if lost:
            race.second_won()
            assert lost == [job] == [each.job for each in reaped.settled]
            assert (record.state, record.result) == (State.READY, None)
        else:
            race.first_won()
            assert reaped.settled == []
            assert (record.state, record.result) == (State.DONE, b"1")
        landed = race is with_effects and not lost
        assert (await worker.run(records.get_value(f"{turn}")) is not None) is landed
        again = await claim(worker, "races", 5)
        assert ids(again) == ([job] if lost else [follow_up.id] if landed else [])
        await finish(worker, again)
        assert len(await worker.run(records.attempts(job))) == (2 if lost else 1)
    plain.assert_both_have_won()
    with_effects.assert_both_have_won()
    await assert_nothing_runs(worker)


# L05
async def test_of_a_cancel_and_a_claim_exactly_one_comes_first(shared_database: Database, clock: ManualClock) -> None:
    worker, operator = await rivals(shared_database, clock)
    race = Race()
    for _ in range(ROUNDS):
        (job,) = await given_jobs(worker, POLICY)
        claims, state = await race.run(lambda: claim(worker, "races"), lambda job=job: operator.cancel(job))  # type: ignore[misc]
        record = await worker.job(job)
        assert record.cancel_requested
        if claims:
            race.first_won()
            assert ids(claims) == [job]
            assert state is record.state is State.RUNNING
            # It is not forgotten: the job goes on no more.
            await finish(worker, claims, Failed("no", 0))
            assert await state_of(operator, job) is State.CANCELLED
        else:
            race.second_won()
            assert state is record.state is State.CANCELLED
    race.assert_both_have_won()
    await assert_nothing_runs(worker)


# E05
async def test_of_a_replacement_and_a_start_exactly_one_comes_first(
    shared_database: Database, clock: ManualClock
) -> None:
    worker, producer = await rivals(shared_database, clock)
    race = Race()
    for turn in range(ROUNDS):
        old, new = unique_job(turn, "replace"), unique_job(turn, "replace")
        assert await outcome_of(worker, old) == (Outcome.ENQUEUED, None)
        claims, outcome = await race.run(
            lambda: claim(worker, "races"),
            lambda new=new: outcome_of(producer, new),  # type: ignore[misc]
        )
        state = await state_of(worker, old.id)
        if old.id in ids(claims):
            race.first_won()
            assert (outcome, state) == ((Outcome.ENQUEUED, None), State.RUNNING)
        else:
            race.second_won()
            assert (outcome, state) == ((Outcome.REPLACED, old.id), State.CANCELLED)
        # The new one runs, once, whatever became of the old one.
        claims += await claim(worker, "races", 5)
        assert sorted(ids(claims)) == sorted([new.id] if state is State.CANCELLED else [old.id, new.id])
        await finish(worker, claims)
    race.assert_both_have_won()
    await assert_nothing_runs(worker)


ON_CONFLICT: dict[OnConflict, Outcome] = {
    "return": Outcome.DUPLICATE,
    "reject": Outcome.REFUSED,
    "replace": Outcome.REPLACED,
}


# E05
async def test_of_two_enqueues_of_one_key_exactly_one_comes_first(
    shared_database: Database, clock: ManualClock
) -> None:
    one, other = await rivals(shared_database, clock)
    race = Race()
    for turn, on_conflict in zip(range(ROUNDS), cycle(ON_CONFLICT), strict=False):
        jobs = unique_job(turn, on_conflict), unique_job(turn, on_conflict)
        answers = await race.run(
            lambda job=jobs[0]: outcome_of(one, job),  # type: ignore[misc]
            lambda job=jobs[1]: outcome_of(other, job),  # type: ignore[misc]
        )
        first = 0 if answers[0] == (Outcome.ENQUEUED, None) else 1
        assert answers[first] == (Outcome.ENQUEUED, None)
        assert answers[1 - first] == (ON_CONFLICT[on_conflict], jobs[first].id)
        race.second_won() if first else race.first_won()
        stands = jobs[1 - first] if on_conflict == "replace" else jobs[first]
        claims: list[Claim] = await claim(one, "races", 5)
        assert ids(claims) == [stands.id]
        await finish(one, claims)
    race.assert_both_have_won()
    await assert_nothing_runs(one)
