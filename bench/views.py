"""`python -m bench views`: what people look at, over 100,000 keys and 1,000,000 jobs, and what it takes to keep it.

Told are the time of each question that pages and commands ask (the median of some runs), and that of the passes which
add up what claims did. With `--unseen`, no claim has seen any of the jobs, and nobody serves the queue: what `status`
and `keys` say must be right all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

from fairlane import App
from fairlane.job import NewJob, new_job_ids
from fairlane.policy import Concurrency, Fair, Policy, Rate, lane_id
from fairlane.scheduler.settlement import Done, settle
from fairlane.store import policies
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.sqlite import SqliteStore
from fairlane.store.stats import Moment
from fairlane.store.stats_values import KeySort
from fairlane.testing.postgres import ThrowawayPostgres

QUEUE = "webhooks"
ACCOUNT = ("account",)
POLICY = Policy(
    QUEUE, fair=Fair(by="account"), limits=(Concurrency(2, by="account"), Rate(600, per="1m", by="account"))
)
WORKER = WorkerIdentity(uuid4(), "a bench")
LEASE = timedelta(minutes=10)
AT_ONCE = 5_000
RUNS = 7

Question = Callable[[], Awaitable[object]]


def jobs_of(accounts: Sequence[int], each: int) -> list[NewJob]:
    found = []
    for account in accounts:
        keys: dict[str, str | None] = {"account": f"account-{account:06}"}
        lane_keys = {**keys, "task": "deliver"}
        lane = lane_id(QUEUE, 0, lane_keys)
        found += [
            NewJob(job, QUEUE, "deliver", 0, lane, lane_keys, keys, b'{"event": 42}', 3) for job in new_job_ids(0, each)
        ]
    return found


async def enqueue(store: Store, keys: int, jobs: int) -> None:
    """So many jobs wait."""
    await store.declare(POLICY)
    each = max(1, jobs // keys)
    for first in range(0, keys, AT_ONCE // each):
        await store.enqueue(jobs_of(range(keys)[first : first + AT_ONCE // each], each))


async def fill(store: Store, keys: int, jobs: int) -> None:
    """So many jobs wait, and claims know of them; some are scheduled."""
    await enqueue(store, keys, jobs)
    await store.run(policies.lanes(QUEUE))
    await store.enqueue([_later(job) for job in jobs_of(range(keys)[:2_000], 10)])


def _later(job: NewJob) -> NewJob:
    return NewJob(
        job.id,
        job.queue,
        job.task,
        job.priority,
        job.lane,
        job.lane_keys,
        job.keys,
        job.payload,
        job.max_attempts,
        delay=3_600_000_000,
    )


async def claims(store: Store, count: int, want: int) -> float:
    """Seconds for so many claims, with what they settle."""
    started = time.perf_counter()
    for _ in range(count):
        claimed = await store.claim(QUEUE, lambda: want, worker=WORKER, lease=LEASE)
        await store.settle([settle(claim, Done(None), 1_000) for claim in claimed.claims])
    return time.perf_counter() - started


async def tallied(store: Store) -> list[tuple[float, int, int]]:
    """Every pass until there is nothing left: seconds, claims, keys."""
    passes = []
    while True:
        started = time.perf_counter()
        done = await store.add_up(QUEUE)
        passes.append((time.perf_counter() - started, done.claims, done.keys))
        if not done.more:
            return passes


def questions(store: Store) -> dict[str, Question]:
    one = ("account-000077",)
    wanted = {QUEUE: [(POLICY.bound[0], (f"account-{n:06}",)) for n in range(50)]}
    asked: dict[str, Question] = {
        "survey": lambda: store.ask(lambda moment: moment.survey([QUEUE])),
        "minutes": lambda: store.ask(lambda moment: moment.minutes([QUEUE], 0)),
        "keys_named": lambda: store.ask(lambda moment: moment.keys_named([QUEUE], [(ACCOUNT, one)])),
        "scheduled_by_lane": lambda: store.ask(lambda moment: moment.scheduled_by_lane([QUEUE])),
        "boards": lambda: store.ask(lambda moment: moment.boards(wanted)),
        "next_jobs": lambda: store.ask(lambda moment: moment.next_jobs(QUEUE, {"account": one[0]})),
        "workers": lambda: store.ask(Moment.workers),
    }
    listed = partial(Moment.list_keys, queues=[QUEUE], by=ACCOUNT)
    for sort in KeySort:
        asked[f"list_keys by {sort}"] = partial(store.ask, partial(listed, sort=sort))
    asked["list_keys, search: common"] = partial(store.ask, partial(listed, search="77"))
    asked["list_keys, search: none"] = partial(store.ask, partial(listed, search="nobody"))
    asked["list_keys, held"] = partial(store.ask, partial(listed, held_only=True))
    asked["list_keys, held, by ended"] = partial(store.ask, partial(listed, sort=KeySort.ENDED, held_only=True))
    return asked


async def measure(name: str, store: Store, keys: int, jobs: int) -> None:
    await store.migrate()
    await store.open()
    try:
        started = time.perf_counter()
        await fill(store, keys, jobs)
        print(f"{name}: {jobs:,} jobs of {keys:,} keys in {time.perf_counter() - started:.0f} s")
        _tell_passes("first passes, which count anew", await tallied(store))
        took = await claims(store, 100, 200)
        print(f"  100 claims of 200, settled: {took:.1f} s")
        _tell_passes("passes over them", await tallied(store))
        for what, ask in questions(store).items():
            print(f"  {what:32} {await _median(ask) * 1_000:8.1f} ms")
        listed = partial(Moment.list_keys, queues=[QUEUE], by=ACCOUNT)
        after = None
        for _ in range(41):
            after = (await store.ask(partial(listed, limit=500, after=after))).after
        far = await _median(partial(store.ask, partial(listed, after=after)))
        print(f"  {'list_keys, page 400':32} {far * 1_000:8.1f} ms")
    finally:
        await store.close()


async def measure_unseen(name: str, url: str, keys: int, jobs: int) -> None:
    """What `status` and the first page of `keys` take, and whether they are right."""
    async with App(url) as app:
        store = await app.opened()
        started = time.perf_counter()
        await enqueue(store, keys, jobs)
        print(f"{name}: {jobs:,} jobs of {keys:,} keys that no claim has seen in {time.perf_counter() - started:.0f} s")
        view = next(each for each in (await app.operations.overview()).queues if each.queue == QUEUE)
        page = await app.operations.keys.list(QUEUE, "account")
        waiting = [each.waiting for each in page.keys]
        is_right = (view.ready, view.running) == (jobs, 0) and waiting == [jobs // keys] * 50
        print(f"  {'right' if is_right else 'WRONG'}: {view.ready:,} ready, {waiting[:3]} … of the first keys")
        for what, ask in {
            "status": lambda: app.operations.overview(),
            "keys, first page": lambda: app.operations.keys.list(QUEUE, "account"),
            "keys, by name": lambda: app.operations.keys.list(QUEUE, "account", sort="name"),
            "one key": lambda: app.operations.keys.show(QUEUE, {"account": "account-000077"}),
        }.items():
            print(f"  {what:32} {await _median(ask) * 1_000:8.1f} ms")


async def _median(ask: Question) -> float:
    took = []
    for _ in range(RUNS):
        started = time.perf_counter()
        await ask()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def _tell_passes(what: str, passes: list[tuple[float, int, int]]) -> None:
    seconds = sum(each[0] for each in passes)
    told, keys = sum(each[1] for each in passes), sum(each[2] for each in passes)
    longest = max(each[0] for each in passes)
    print(f"  {what}: {len(passes)} in {seconds:.1f} s (longest {longest:.2f}), {told:,} claims, {keys:,} keys written")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench views", description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--store", choices=["postgres", "sqlite", "both"], default="both")
    parser.add_argument("--unseen", action="store_true", help="no claim has seen any of the jobs")
    given = parser.parse_args(arguments)
    if given.store != "sqlite":
        with ThrowawayPostgres() as server:
            url = asyncio.run(server.create_database("views"))
            if given.unseen:
                asyncio.run(PostgresStore(url).migrate())
                asyncio.run(measure_unseen("PostgreSQL", url, given.keys, given.jobs))
            else:
                asyncio.run(measure("PostgreSQL", PostgresStore(url), given.keys, given.jobs))
    if given.store != "postgres":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "jobs.db"
            if given.unseen:
                asyncio.run(measure_unseen("SQLite", f"sqlite:///{path}", given.keys, given.jobs))
            else:
                asyncio.run(measure("SQLite", SqliteStore(str(path)), given.keys, given.jobs))
    return 0
