"""Policies, sharing and width change while claims come and go: at every rest, every gate equals the running jobs.

A14, A21, A23 to A25, J01. Claims end in every way (done, retried, snoozed, given back, dead, cancelled, abandoned and
reaped, adopted by another worker), in transactions of callers that stay open over a change too, and `Sequence` is among
the policies. On PostgreSQL actions also meet: see `changes.py`.

`FAIRLANE_CHANGES_STEPS=5000 pytest tests/model/test_changes.py` lives for longer; `-s` prints how much was looked at.
A life that fails is printed as calls: write it into `changes_kept.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from fairlane.clock import ManualClock
from fairlane.store import boards as checkpoints
from fairlane.testing.postgres import ThrowawayPostgres
from tests.model import changes_kept
from tests.model.changes import QUEUES, TABLES, Action, Changes
from tests.model.home import Home
from tests.model.steps import Ending
from tests.store.harness import Database, Kind

STEPS = int(os.environ.get("FAIRLANE_CHANGES_STEPS", "250"))
STEPS_A_LIFE = 60

some = st.integers(0, 30)
queues = st.sampled_from(QUEUES)
processes = st.integers(0, 2)
wants = st.sampled_from([1, 2, 4])
endings = st.lists(st.tuples(some, st.sampled_from(get_args(Ending))), min_size=1, max_size=4)
keys = st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from("1234")), min_size=1, max_size=5)
overrides = st.tuples(queues, st.sampled_from(["pause", "suspend", "limit"]), st.none() | st.integers(0, 3))

given = {
    "enqueue": st.tuples(queues, keys),
    "claim": st.tuples(queues, wants, some),
    "settle": st.tuples(endings),
    "adopt": st.tuples(some),
    "reap": st.tuples(),
    "collect": st.tuples(queues),
    "apply": st.tuples(queues, some, some, st.booleans()),
    "divide": st.tuples(queues, st.integers(1, 3)),
    "override": overrides,
    "cancel": st.tuples(some),
    "force": st.tuples(some),
}


def named(*names: str) -> st.SearchStrategy[Action]:
    return st.one_of(*(st.tuples(st.just(name), given[name]) for name in names))


changes = named("apply", "apply", "apply", "divide", "override")
# The newest claims: those that were made for the meeting.
newest = st.lists(st.tuples(st.integers(-3, -1), st.sampled_from(get_args(Ending))), min_size=1, max_size=3)
settling = st.tuples(st.just("settle"), st.tuples(newest))
others = settling | settling | named("claim", "adopt", "reap", "collect", "cancel", "force")
# One change at most divides a queue: of two at once, the second is refused.
meetings = st.one_of(
    st.tuples(changes, settling),
    st.tuples(changes, others),
    st.tuples(changes, others, others),
    st.tuples(others, changes, others),
    st.tuples(named("apply"), named("apply"), settling),
)


def weighted(weight: int, name: str, strategy: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Action]]:
    return [st.tuples(st.just(name), strategy)] * weight


steps = st.one_of(
    *weighted(6, "enqueue", given["enqueue"]),
    *weighted(1, "enqueue", st.tuples(queues, keys, st.just(2_000_000))),
    *weighted(8, "claim", st.tuples(queues, wants, some, processes)),
    *weighted(5, "settle", st.tuples(endings, processes)),
    *weighted(2, "settle_in_transaction", st.tuples(some, st.booleans())),
    *weighted(1, "end_transactions", st.tuples(st.booleans())),
    *weighted(1, "adopt", given["adopt"]),
    *weighted(2, "abandon", st.tuples(some)),
    *weighted(2, "pass_time", st.tuples(st.sampled_from([0.1, 1, 3, 31]))),
    *weighted(2, "reap", st.tuples(processes)),
    *weighted(1, "collect", given["collect"]),
    *weighted(1, "crash", st.tuples()),
    *weighted(4, "apply", given["apply"]),
    *weighted(2, "divide", given["divide"]),
    *weighted(1, "override", overrides),
    *weighted(1, "cancel", given["cancel"]),
    *weighted(1, "force", given["force"]),
    *weighted(14, "meet", st.tuples(st.sampled_from(TABLES), meetings)),
)


@dataclass
class Town:
    """Where lives are lived: a new database for each of them, on one event loop."""

    kind: Kind
    postgres: ThrowawayPostgres
    template: str
    folder: Path
    loop: asyncio.Runner
    numbers: Iterator[int] = field(default_factory=itertools.count)
    steps: int = 0
    rests: int = 0
    gates: int = 0
    boards: int = 0
    met: Counter[str] = field(default_factory=Counter)

    def begin(self) -> Changes:
        return self.loop.run(self._begin())

    async def _begin(self) -> Changes:
        name, clock = f"changes_{next(self.numbers)}", ManualClock()
        url = str(self.folder / f"{name}.db")
        if self.kind == "postgres":
            url = await self.postgres.create_database(name, template=self.template)
        life = Changes(Home(Database(self.kind, url), clock), clock)
        await life.begin()
        return life

    def take(self, life: Changes, name: str, *args: Any) -> None:
        try:
            self.loop.run(getattr(life, name)(*args))
        except BaseException as error:
            error.add_note(f"{self.kind}:\n" + "\n".join(life.told))
            raise

    def end(self, life: Changes) -> None:
        self.steps += life.steps
        self.rests += life.rests
        self.gates += life.gates_seen
        self.boards += life.boards_seen
        self.met += life.met
        self.loop.run(life.end())
        if self.kind == "postgres":
            self.loop.run(self.postgres.drop_database(life.home.database.url.rpartition("/")[2].partition("?")[0]))


@pytest.fixture(params=["sqlite-file", "postgres"])
def town(
    request: pytest.FixtureRequest,
    postgres: ThrowawayPostgres,
    postgres_template: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Town]:
    # Checkpoints are steps: who looks at a board and then at the tables looks at one moment.
    monkeypatch.setattr(checkpoints, "EVERY", 3_600.0)
    with asyncio.Runner() as loop:
        yield Town(request.param, postgres, postgres_template, tmp_path, loop)


class Lives(RuleBasedStateMachine):
    """Chooses the steps; `Changes` takes them."""

    town: ClassVar[Town]

    @initialize()
    def begin(self) -> None:
        self.life = self.town.begin()
        self.is_well = True

    @rule(step=steps)
    def take(self, step: Action) -> None:
        self.is_well = False
        self.town.take(self.life, step[0], *step[1])
        self.is_well = True

    def teardown(self) -> None:
        if not hasattr(self, "life"):
            return
        try:
            if self.is_well:
                self.town.take(self.life, "come_to_rest")
        finally:
            self.town.end(self.life)


def test_whatever_changes_every_gate_counts_the_jobs_that_run(town: Town) -> None:
    machine = type("Lives", (Lives,), {"town": town})
    # Not shrunk: a life takes a second, and is told step by step.
    once = settings(
        stateful_step_count=STEPS_A_LIFE,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    while (left := STEPS - town.steps) > 0:  # some lives are short
        run_state_machine_as_test(machine, settings=settings(once, max_examples=-(-left // STEPS_A_LIFE)))
    looked_at = f"{town.gates:,} gates and {town.boards:,} boards looked at"
    seen = f"{town.steps:,} steps, {town.rests:,} rests, {looked_at}, met at {dict(town.met)}"
    print(f"\n{town.kind}: {seen}")


@pytest.mark.parametrize("kept", changes_kept.LIVES, ids=lambda life: life.__name__)
def test_changes_that_showed_a_fault_once_are_lived_well(town: Town, kept: changes_kept.Kept) -> None:
    life = town.begin()
    try:
        town.loop.run(kept(life))
        town.take(life, "come_to_rest")
    finally:
        town.end(life)


def test_the_look_itself_sees_a_slot_that_nobody_holds(town: Town) -> None:
    # A test that cannot fail is a defect.
    life = town.begin()
    try:
        town.take(life, "apply", "a", 5)
        town.take(life, "enqueue", "a", [("x", "1")])
        town.take(life, "claim", "a", 1)
        schema = "fairlane." if town.kind == "postgres" else ""
        mine = f"update {schema}shared_gates set in_flight = in_flight + 1"

        async def spoil() -> None:
            async with life.home.database.transaction() as somebody:
                if town.kind == "postgres":
                    await somebody.tx.execute(mine)
                else:
                    somebody.tx.execute(mine)
                await somebody.commit()

        town.loop.run(spoil())
        with pytest.raises(AssertionError, match="2 in flight, 1 run"):
            town.take(life, "collect", "a")
    finally:
        town.end(life)
