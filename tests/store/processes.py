"""What tests run as processes of their own: `python -m tests.store.processes <what> <kind> <url>`.

Each says when it is ready, waits for a line so that all begin together, and tells as JSON what it did.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec

from fairlane.job import Claim, State
from fairlane.scheduler.settlement import Done, Failed, Outcome
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from tests.store.harness import Database, Kind, claim, finish, worker_named

__all__ = ["Run", "run_together"]

ROOT = Path(__file__).resolve().parent.parent.parent
WATCHDOG = 120.0


class Run(msgspec.Struct, frozen=True):
    """One run of a job, as the process that ran it saw it: never longer than the database holds it to be."""

    job: str
    account: str
    start: int
    end: int


async def run_together(what: str, database: Database, count: int) -> list[bytes]:
    """Start so many processes, let them all begin at once, and return what each has told."""
    processes = [await _started(what, database) for _ in range(count)]
    try:
        return await asyncio.wait_for(asyncio.gather(*(_told(each) for each in processes)), WATCHDOG)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _started(what: str, database: Database) -> Process:
    command = [sys.executable, "-m", "tests.store.processes", what, database.kind, database.url]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT)


async def _told(process: Process) -> bytes:
    assert process.stdout is not None
    assert process.stdin is not None
    assert await process.stdout.readline() == b"ready\n", "a process did not come up; its error is on stderr"
    process.stdin.write(b"go\n")
    told, _ = await process.communicate()
    assert process.returncode == 0, f"a process ended with status {process.returncode}; its error is on stderr"
    return told


def _wait_for_the_others() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


async def migrate(database: Database) -> list[str]:
    """Bring the schema up to date; tell what was applied here."""
    store = database.connect()
    _wait_for_the_others()
    applied = await store.migrate()
    await store.close()
    return applied


async def stumble(database: Database) -> list[Run]:
    """The same, but every third job fails at its first attempt, and is tried again a little later."""
    return await work(
        database, lambda each: Failed("stumbled", 5_000) if each.attempt == 1 and each.id.int % 3 == 0 else Done(None)
    )


async def work(database: Database, outcome: Callable[[Claim], Outcome] = lambda _: Done(None)) -> list[Run]:
    """Claim and finish until nothing is left; hold each batch until the next one has been claimed."""
    store = await database.open()
    worker = worker_named("a process")
    _wait_for_the_others()
    runs: list[Run] = []
    held: list[Claim] = []
    begun = 0
    while True:
        claims = await claim(store, "webhooks", 4, worker=worker)
        now = time.monotonic_ns()
        runs += [Run(str(each.id), str(each.keys["account"]), begun, now) for each in held]
        for each in held:
            await finish(store, [each], outcome(each))
        if not claims and not held:
            counts = await store.counts("webhooks")
            if counts.ready + counts.bells == 0 and not await _is_scheduled(store):
                break
        held, begun = claims, now
    await database.close()
    return runs


async def _is_scheduled(store: Store) -> bool:
    page = await store.find_jobs(JobFilter(state=State.SCHEDULED), limit=1)
    return bool(page.jobs)


async def main(what: str, kind: str, url: str) -> list[str] | list[Run]:
    (chosen,) = (each for each in get_args(Kind) if each == kind)
    database = Database(chosen, url)
    match what:
        case "migrate":
            return await migrate(database)
        case "stumble":
            return await stumble(database)
        case _:
            return await work(database)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(main(*sys.argv[1:]))))
