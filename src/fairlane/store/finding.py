"""Listing the jobs of a queue with all its partitions, as if it were one."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from fairlane.job import State
from fairlane.policy.partitions import parse_partition, partition_name
from fairlane.store.operators import Cursor, JobFilter, JobPage
from fairlane.store.protocol import Store


async def known_partitions(store: Store, queue: str) -> list[str]:
    """A queue and every partition of it that the database knows, in order: also those that it has no more. Of a
    partition that is named by itself, only that one."""
    return partitions_among([] if parse_partition(queue) else await store.queues(), queue)


def partitions_among(names: Iterable[str], queue: str) -> list[str]:
    """The same, where these are all queues that the database knows."""
    alone = parse_partition(queue)
    if alone is not None:
        return [partition_name(*alone)]
    places = [parse_partition(name) for name in names]
    return [queue, *(partition_name(*place) for place in sorted(filter(None, places)) if place[0] == queue)]


async def find_jobs(store: Store, wanted: JobFilter, after: str | None = None, limit: int = 100) -> JobPage:
    """A page of the jobs that fit, the newest first; of a queue, those of all its partitions."""
    names = [] if wanted.queue is None else await known_partitions(store, wanted.queue)
    if len(names) <= 1:
        return await store.find_jobs(msgspec.structs.replace(wanted, queue=next(iter(names), None)), after, limit)
    if wanted.state is State.RUNNING or wanted.is_by_end:
        # Such listings walk the jobs of all queues anyway.
        page = await store.find_jobs(msgspec.structs.replace(wanted, queue=None), after, limit)
        return JobPage([job for job in page.jobs if job.queue in names], page.after)
    pages = [await store.find_jobs(msgspec.structs.replace(wanted, queue=name), after, limit) for name in names]
    # Where one of the walks has not come to its end, the others may be ahead of it: what is beyond waits for its page.
    reached = max((UUID(hex=page.after) for page in pages if page.after is not None), default=None)
    jobs = [job for page in pages for job in page.jobs if reached is None or job.id >= reached]
    jobs.sort(key=lambda job: job.id, reverse=True)
    if len(jobs) > limit:
        return JobPage(jobs[:limit], Cursor(jobs[limit - 1].id).encode())
    return JobPage(jobs, None if reached is None else Cursor(reached).encode())
