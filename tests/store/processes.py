"""What tests run as processes of their own: `python -m tests.store.processes <what> <kind> <url>`.

Each says when it is ready, waits for a line so that all begin together, and tells as JSON what it did.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import get_args
from uuid import UUID, uuid5

import msgspec

from fairlane.job import BuiltEffects, Claim, State
from fairlane.policy import Policy
from fairlane.scheduler.settlement import Done, Failed, RunOutcome, settle
from fairlane.store import operators
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from tests.store.harness import Database, Kind, claim, finish, new_jobs, worker_named

__all__ = ["FOLLOW_UPS", "Run", "follow_up_of", "killed_while_it_acks", "run_together"]

FOLLOW_UPS = Policy("follow-ups")
ROOT = Path(__file__).resolve().parent.parent.parent
WATCHDOG = 600.0
"""Seconds after which processes that hang have failed. Never the measure of anything."""
AHEAD = 20
"""Acks by which a process may be ahead of whoever kills it, and who may be slow: its jobs never run out."""


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


async def killed_while_it_acks(database: Database, acks: int) -> None:
    """Let a process ack jobs, each with a follow-up and a value, and kill it in the middle of it."""
    process = await _started("ack", database)
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n", "a process did not come up; its error is on stderr"
    process.stdin.write(b"go\n" * (1 + acks + AHEAD))
    for _ in range(acks):
        assert await asyncio.wait_for(process.stdout.readline(), WATCHDOG) == b"acked\n"
    process.kill()
    await process.communicate()


def follow_up_of(job: UUID) -> UUID:
    return uuid5(job, "follow-up")


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


async def work(database: Database, outcome: Callable[[Claim], RunOutcome] = lambda _: Done(None)) -> list[Run]:
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
            if counts.ready + counts.events == 0 and not await _is_scheduled(store):
                break
        held, begun = claims, now
    await database.close()
    return runs


async def ack(database: Database) -> list[str]:
    """Claim and ack with effects, once for each line that it is given, and say so each time."""
    store = await database.open()
    _wait_for_the_others()
    while claims := await claim(store, "webhooks", 1):
        for each in claims:
            sys.stdin.readline()
            (job,) = new_jobs(FOLLOW_UPS)
            effects = BuiltEffects((msgspec.structs.replace(job, id=follow_up_of(each.id)),), {str(each.id): b"1"})
            assert await store.settle([settle(each, Done(None, effects), 1)]) == []
            print("acked", flush=True)
    await database.close()
    return []


async def share(database: Database) -> list[Run]:
    """Work on two queues that share limits, half of the processes beginning with one, half with the other."""
    store = await database.open()
    worker = worker_named("a process")
    _wait_for_the_others()
    runs: list[Run] = []
    held: list[tuple[Claim, int]] = []
    queues = ("train", "serve") if os.getpid() % 2 else ("serve", "train")
    while True:
        claims: list[tuple[Claim, int]] = []
        for queue in queues:
            brought = await claim(store, queue, 3, worker=worker)
            claims += [(each, time.monotonic_ns()) for each in brought]
        now = time.monotonic_ns()
        runs += [Run(str(each.id), each.queue, begun, now) for each, begun in held]
        await finish(store, [each for each, _ in held])
        if not claims and not held:
            counts = [await store.counts(queue) for queue in queues]
            if all(each.ready + each.events == 0 for each in counts):
                break
        held = claims
    await database.close()
    return runs


async def _is_scheduled(store: Store) -> bool:
    page = await store.run(operators.find_jobs(JobFilter(state=State.SCHEDULED), limit=1))
    return bool(page.jobs)


async def main(what: str, kind: str, url: str) -> list[str] | list[Run]:
    (chosen,) = (each for each in get_args(Kind) if each == kind)
    database = Database(chosen, url)
    match what:
        case "migrate":
            return await migrate(database)
        case "ack":
            return await ack(database)
        case "share":
            return await share(database)
        case "stumble":
            return await stumble(database)
        case _:
            return await work(database)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(main(*sys.argv[1:]))))
