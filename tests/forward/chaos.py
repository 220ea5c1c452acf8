"""Chaos for a forwarder: an engine's workers, the dispatcher and the broker are killed while jobs run through them.

What to kill next is decided by how many jobs have ended, never by a clock. `FAIRLANE_FORWARD_JOBS=5000` runs it at full
size: ten kills of a worker's process group, ten of a dispatcher, a restart and a crash of the broker.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from fairlane.job import State
from tests.forward.brokers import ThrowawayBroker
from tests.forward.ledger import PIPE, WHOLE_QUEUE, Kept, Ledger, judge, note, told
from tests.forward.members import ROOT, Member, dispatcher_of, environment_with, is_alive, stop

IS_FULL_SIZE = "FAIRLANE_FORWARD_JOBS" in os.environ
WATCHDOG = 900.0
"""Seconds without the expected end after which the test fails. Never the measure of anything."""
QUEUE = "chaos"
LIMIT, LIMIT_OF_TENANT = 6, 2
TENANTS = ["acme", "bolt", "cove", "dune"]
"""Their limits add up to more than the queue's: both bind."""
LIMITS = {WHOLE_QUEUE: LIMIT, **dict.fromkeys(TENANTS, LIMIT_OF_TENANT)}
LEASE = "5s"
REPUBLISH_AFTER = "2s"
SLOTS = 6
"""Of each worker: as many as the whole queue may have in flight, so that its limits bind and not the slots."""


def busy_for() -> float:
    """Seconds that a run takes."""
    return random.uniform(0.01, 0.05)


@dataclass(frozen=True)
class Size:
    jobs: int
    kills: int
    """Of a worker, and as many of a dispatcher."""
    restarts: int
    """Of the broker: every second one is a crash."""

    @classmethod
    def of_this_run(cls) -> Size:
        jobs = int(os.environ.get("FAIRLANE_FORWARD_JOBS", "200"))
        return cls(jobs, kills=max(2, jobs // 500), restarts=max(1, jobs // 2_500))

    def schedule(self, rng: random.Random) -> list[tuple[int, str]]:
        """What is to happen once so many jobs have ended: evenly over the run, in any order."""
        events = ["kill a worker", "kill a dispatcher"] * self.kills
        events += ["restart the broker" if each % 2 else "crash the broker" for each in range(self.restarts)]
        rng.shuffle(events)
        return [(self.jobs * (place + 1) // (len(events) + 2), event) for place, event in enumerate(events)]


@dataclass(frozen=True)
class Engine:
    """What is started for an engine. `module` has the forwarder, the Fairlane task `work` and its app."""

    module: str
    worker: Sequence[str]
    workers: int = 2


@dataclass
class Chaos:
    """One run."""

    engine: Engine
    broker: ThrowawayBroker
    url: str
    folder: Path
    size: Size = field(default_factory=Size.of_this_run)
    seed: int = 7
    ledger: Ledger = field(default_factory=Ledger)
    happened: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run it, judge it, and tell what was seen."""
        began = time.monotonic()
        pipe = self.folder / "ledger"
        os.mkfifo(pipe)
        self._reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # open for writing too: it never ends
        self._pending = b""
        self._began = began
        self._last_of_broker: str | None = None
        self.broker.meanwhile = lambda: self._listen(0)
        self._environment = environment_with(
            **{PIPE: str(pipe)},
            FAIRLANE_URL=self.url,
            CHAOS_BROKER=self.broker.url,
            dramatiq_restart_delay="300",  # milliseconds
        )
        jobs = self._produce()
        self._start_members()
        try:
            self._go_through(jobs)
        finally:
            self.broker.meanwhile = lambda: None
            stop([*self._workers, *self._dispatchers], lambda: self._take_what_is_there(0))
            self._take_what_is_there(0)
            os.close(self._reader)
        faults = judge(self.ledger, jobs, asyncio.run(self._kept()), LIMITS, kills=self.size.kills)
        note("\n".join(self.happened))
        note(
            f"{self.engine.module}: {len(jobs)} jobs in {time.monotonic() - began:.0f} s; {len(self.happened)} events, "
            f"{len(self.ledger.duplicates())} runs were repeated, at most {dict(self.ledger.most)} at once"
        )
        assert not faults, told([*faults, *self.happened])

    def _produce(self) -> dict[int, str]:
        """Enqueue the jobs, and return the id of each number."""
        command = [sys.executable, "-m", "tests.forward.chaos_producer", self.engine.module, str(self.size.jobs)]
        made = subprocess.run(command, env=self._environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert made.returncode == 0, made.stderr
        return dict(enumerate(made.stdout.split()))

    def _start_members(self) -> None:
        dispatcher = dispatcher_of(f"{self.engine.module}:forwarder", "--lease", LEASE)
        self._dispatchers = [Member("dispatcher", dispatcher, self._environment, self.folder)]
        self._workers = [
            Member(f"worker-{number}", self.engine.worker, self._environment, self.folder)
            for number in range(self.engine.workers)
        ]

    def _go_through(self, jobs: dict[int, str]) -> None:
        rng = random.Random(self.seed)
        schedule = self.size.schedule(rng)
        deadline = time.monotonic() + WATCHDOG
        while schedule or len(self.ledger.ended) < len(jobs) or not asyncio.run(self._are_all_done()):
            assert time.monotonic() < deadline, self._where_it_hangs(jobs)
            self._listen(0.1)
            if schedule and len(self.ledger.ended) >= schedule[0][0]:
                self._happen(schedule.pop(0)[1], rng)

    def _happen(self, event: str, rng: random.Random) -> None:
        self._note(event)
        match event:
            case "kill a worker":
                # One that has not come to run anything yet would prove nothing.
                has_run = self.ledger.groups()
                self._kill(rng.choice([each for each in self._workers if each.process.pid in has_run] or self._workers))
            case "kill a dispatcher":
                self._kill(rng.choice(self._dispatchers))
            case "restart the broker":
                self._last_of_broker = event
                self.broker.restart()
            case "crash the broker":
                self._last_of_broker = event
                self.broker.crash()

    def _note(self, what: str) -> None:
        self.happened.append(f"{time.monotonic() - self._began:.1f} s: {what}, {len(self.ledger.ended)} jobs ended")

    def _kill(self, member: Member) -> None:
        group = member.kill()
        self._take_what_is_there(0)
        self.ledger.killed(group)
        member.start_again()

    def _listen(self, timeout: float) -> None:
        """Take all that tasks have told, or wait so long for something."""
        # Who is dead now has written all there is of it.
        dead = [process for process in self.ledger.processes() if not is_alive(process)]
        self._take_what_is_there(timeout)
        for process in dead:
            self._note(f"process {process} of the engine is dead")
            self.ledger.died(process, of=self._last_of_broker)

    def _take_what_is_there(self, timeout: float) -> None:
        while select.select([self._reader], [], [], timeout)[0]:
            self._pending += os.read(self._reader, 1 << 16)
            *lines, self._pending = self._pending.split(b"\n")
            for line in lines:
                self.ledger.take(line.decode())
            timeout = 0

    def _where_it_hangs(self, jobs: dict[int, str]) -> str:
        missing = sorted(number for number in jobs if number not in self.ledger.ended)
        logs = [member.end_of_log() for member in (*self._dispatchers, *self._workers)]
        return "\n".join([f"{len(missing)} jobs have never ended: {missing[:20]}", *self.happened, *logs])

    # The store, asked past the queue.

    async def _fetch(self, statement: str) -> list[asyncpg.Record]:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self.url)
        try:
            return await connection.fetch(statement)
        finally:
            await connection.close()

    async def _are_all_done(self) -> bool:
        states = {State(row["state"]) for row in await self._fetch("select distinct state from fairlane.jobs")}
        return all(state.is_final for state in states)

    async def _kept(self) -> dict[str, Kept]:
        rows = await self._fetch(
            "select jobs.id, state, 1 + count(attempts.job) as runs"
            " from fairlane.jobs left join fairlane.attempts"
            " on attempts.job = jobs.id and attempts.outcome <> 'released'"
            " group by jobs.id, state"
        )
        return {str(row["id"]): Kept(State(row["state"]), row["runs"]) for row in rows}
