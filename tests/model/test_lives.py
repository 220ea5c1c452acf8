"""Long lives of a queue, on every store side by side, held against a model after every step.

Whatever happens in whatever order: every store tells of every job what the model tells; no limit is exceeded (A01, A02,
A05, A06, A09, A17, A25); nothing that could start is left behind (F09, F14, A24, A26); a claim says when to come back
(C10); a lost claim settles nothing (L01); nothing is lost or started twice (L18); unique keys and ids are given once
(E05); and in the end nothing is counted as running (A14).

`FAIRLANE_MODEL_STEPS=10000` lives for longer. A life that fails is printed as calls: write it into `lives_kept.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from fairlane.clock import ManualClock
from fairlane.testing.postgres import ThrowawayPostgres
from tests.model import lives_kept
from tests.model.home import Home
from tests.model.life import Life
from tests.model.steps import POLICIES, Call, End, Ending, Key, Tx
from tests.store.harness import SECOND, Database, Kind

Step = Callable[[Life], Coroutine[Any, Any, None]]

STEPS = int(os.environ.get("FAIRLANE_MODEL_STEPS", "1000"))
STEPS_A_LIFE = 100

# Odd, so that nothing falls together by chance; and a few whole seconds, at which things do.
times = st.sampled_from([1, 700_001, SECOND, 2 * SECOND, 2 * SECOND + 3, 5 * SECOND, 11 * SECOND + 1])
delays = st.none() | times
some = st.integers(0, 30)
few = st.lists(some, min_size=1, max_size=3)
unique_keys = st.builds(
    Key,
    st.integers(0, 2),
    until=st.sampled_from(["started", "done", "window"]),
    on_conflict=st.sampled_from(["return", "reject", "replace"]),
    same_payload=st.booleans(),
)
calls = st.builds(
    Call,
    account=st.sampled_from("abcd"),
    endpoint=st.sampled_from("xyz"),
    delay=delays,
    priority=st.sampled_from([0, 0, 5]),
    payload=st.integers(0, 1),
    unique=st.none() | unique_keys,
    known=st.integers(0, 150).map(lambda n: n if n <= 30 else None),
)
plain_calls = st.builds(Call, account=st.sampled_from("abcd"), endpoint=st.sampled_from("xyz"))
ends = st.builds(
    End,
    which=some,
    how=st.sampled_from(get_args(Ending)),
    wait=times,
    ran=st.sampled_from([0, 1_000, 3 * SECOND]),
    follow_ups=st.just(()) | st.lists(calls, min_size=1, max_size=2).map(tuple),
    put=st.none() | st.integers(0, 2),
    delete=st.none() | st.integers(0, 2),
)


@dataclass(frozen=True)
class Act:
    """A step of a life: one of its methods, and what that is given."""

    name: str
    given: tuple[Any, ...]

    def __call__(self, life: Life) -> Coroutine[Any, Any, None]:
        step: Coroutine[Any, Any, None] = getattr(life, self.name)(*self.given)
        return step


def acts(weight: int, name: str, *given: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Act]]:
    """A step to choose, so many times as often as another."""
    return [st.builds(Act, st.just(name), st.tuples(*given)) for _ in range(weight)]


# One rule with weights, not a rule for each step: a life in which nothing is ever settled is no life.
steps = st.one_of(
    *acts(3, "enqueue", st.lists(calls, min_size=1, max_size=4), st.sampled_from(get_args(Tx))),
    *acts(4, "enqueue", st.lists(plain_calls, min_size=1, max_size=6)),
    *acts(8, "claim", st.sampled_from([1, 2, 5, 20]), st.sampled_from([3, 30]), st.integers(0, 2)),
    *acts(8, "settle", st.lists(ends, min_size=1, max_size=4)),
    *acts(5, "pass_time", times),
    *acts(3, "reap"),
    *acts(2, "renew", some),
    *acts(2, "cancel", some),
    *acts(3, "replay", few, delays, st.sampled_from(["reject", "replace"])),
    *acts(2, "retry_now", few),
    *acts(1, "foresee", st.lists(calls, min_size=1, max_size=2)),
    *acts(1, "purge", few),
    *acts(1, "prune", times, times),
    *acts(1, "collect", st.sampled_from([2, 1_000])),
    *acts(1, "apply", st.integers(0, 2)),
    *acts(1, "crash"),
)


@dataclass
class Town:
    """Where lives are lived: a new database of every kind for each of them, on one event loop."""

    postgres: ThrowawayPostgres
    template: str
    folder: Path
    loop: asyncio.Runner
    numbers: Iterator[int] = field(default_factory=itertools.count)
    steps: int = 0

    def begin(self, family: str, kinds: Sequence[Kind] = get_args(Kind)) -> list[Life]:
        return self.loop.run(self._begin(family, kinds))

    async def _begin(self, family: str, kinds: Sequence[Kind]) -> list[Life]:
        lives = []
        for kind in kinds:
            clock = ManualClock()
            lives.append(Life(Home(Database(kind, await self._place(kind)), clock), clock, family))
            await lives[-1].begin()
        return lives

    async def _place(self, kind: Kind) -> str:
        name = f"life_{next(self.numbers)}"
        if kind == "postgres":
            return await self.postgres.create_database(name, template=self.template)
        return str(self.folder / f"{name}.db")

    def take(self, lives: Sequence[Life], step: Step) -> None:
        """The same step in every life."""
        for life in lives:
            try:
                self.loop.run(step(life))
            except BaseException as error:
                error.add_note(f"{life.home.database.kind}, {life.family}:\n" + "\n".join(life.told))
                raise

    def end(self, lives: Sequence[Life]) -> None:
        for life in lives:
            self.loop.run(life.end())
            if life.home.database.kind == "postgres":
                name = life.home.database.url.rpartition("/")[2].partition("?")[0]
                self.loop.run(self.postgres.drop_database(name))


@pytest.fixture
def town(postgres: ThrowawayPostgres, postgres_template: str, tmp_path: Path) -> Iterator[Town]:
    with asyncio.Runner() as loop:
        yield Town(postgres, postgres_template, tmp_path, loop)


class Lives(RuleBasedStateMachine):
    """Chooses the steps; `Life` takes them."""

    town: ClassVar[Town]

    @initialize(family=st.sampled_from(sorted(POLICIES)))
    def begin(self, family: str) -> None:
        self.lives = self.town.begin(family)
        self.is_well = True

    @rule(step=steps)
    def take(self, step: Step) -> None:
        self.is_well = False
        self.town.take(self.lives, step)
        self.is_well = True

    def teardown(self) -> None:
        if not hasattr(self, "lives"):
            return
        self.town.steps += self.lives[0].steps
        try:
            if self.is_well:
                self.town.take(self.lives, Life.come_to_rest)
        finally:
            self.town.end(self.lives)


def test_whatever_happens_every_store_lives_as_the_model_does(town: Town) -> None:
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
        lives = -(-left // STEPS_A_LIFE)
        run_state_machine_as_test(machine, settings=settings(once, max_examples=lives))


@pytest.mark.parametrize("kept", lives_kept.LIVES, ids=str)
def test_a_life_that_showed_a_fault_once_is_lived_well(town: Town, kept: lives_kept.Kept) -> None:
    lives = town.begin(kept.family)
    try:
        town.take(lives, kept.live)
        town.take(lives, Life.come_to_rest)
    finally:
        town.end(lives)


def test_the_model_itself_sees_a_limit_exceeded(town: Town) -> None:
    # A test that cannot fail is a defect: the same claims, held against a stricter policy.
    (life,) = town.begin("flows", ["sqlite-memory"])
    town.loop.run(life.enqueue([Call()] * 3))
    life.model.policy = POLICIES["flows"][1]
    with pytest.raises(AssertionError, match="was exceeded"):
        town.loop.run(life.claim(want=3))
    town.end([life])


def test_the_model_itself_sees_a_job_that_the_store_tells_otherwise(town: Town) -> None:
    (life,) = town.begin("plain", ["sqlite-memory"])
    town.loop.run(life.enqueue([Call()]))
    (job,) = life.model.jobs
    town.loop.run(life.store.cancel(job))
    with pytest.raises(AssertionError):
        town.loop.run(life.compare())
    town.end([life])
