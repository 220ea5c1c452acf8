"""Simulations: a policy tried on a workload, on a trace, or on what a queue has just been through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypedDict, Unpack
from uuid import UUID

from fairlane.clock import SECOND, Instant, duration_of
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.job import JobRecord, State
from fairlane.operations.requests import find_jobs
from fairlane.parameters import checked
from fairlane.policy.keys import normalize_by
from fairlane.policy.policy import Policy
from fairlane.simulation.measures import Simulation, measure
from fairlane.simulation.run import Fleet, Recording, SimulatedJob, play
from fairlane.simulation.workload import Workload, kind_of
from fairlane.store import records
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store

CLAIM_TIME = "4ms"
SETTLE_TIME = "4ms"
"""What a claim and a settlement take a worker beside its database, with all that lies between them and the handler."""
HISTORY_LIMIT = 200_000
"""Jobs of a queue's history that are looked at by default."""
PAGE = 1_000

OnProgress = Callable[[int], None]


class RunOptions(TypedDict, total=False):
    """How jobs are run: `slots=100`, `seed=None`, `claim_time="4ms"`, `settle_time="4ms"`, `until=None`."""

    slots: int
    seed: int | None
    claim_time: str | float
    settle_time: str | float
    until: str | float | None
    on_progress: OnProgress | None


@checked()
def simulate(
    policy: Policy,
    workload: Workload | Iterable[SimulatedJob],
    *,
    by: str | tuple[str, ...] | None = None,
    **options: Unpack[RunOptions],
) -> Simulation:
    """Run a workload under a policy on a virtual clock, with the plan that real claims use.

    `slots` is how many jobs the whole fleet runs at once; `claim_time` and `settle_time` are what a claim and a
    settlement take. It stops when nothing can start any more, or after `until`. `by` names the keys that the
    result is grouped by; by default, what takes turns.
    """
    return measure(record(policy, workload, **options), normalize_by("simulate()", by))


def record(
    policy: Policy,
    workload: Workload | Iterable[SimulatedJob],
    *,
    slots: int = 100,
    seed: int | None = None,
    claim_time: str | float = CLAIM_TIME,
    settle_time: str | float = SETTLE_TIME,
    until: str | float | None = None,
    on_progress: OnProgress | None = None,
) -> Recording:
    """The same, run by run, for other measures and plots."""
    if slots < 1:
        raise ConfigurationError(f"slots={slots}: a fleet has at least one slot; give a number above 0")
    fleet = Fleet(
        slots=slots,
        claim_time=duration_of("claim_time", claim_time),
        settle_time=duration_of("settle_time", settle_time),
    )
    if min(fleet.claim_time, fleet.settle_time) < 0:
        raise ConfigurationError(f"claim_time={claim_time!r} and settle_time={settle_time!r} are times of at least 0")
    jobs: Iterable[SimulatedJob] = workload.simulated(seed) if isinstance(workload, Workload) else workload
    listed = list(jobs)
    _check_numbers(policy, listed)
    end = None if until is None else (listed[0].at if listed else 0) + duration_of("until", until)
    return play(policy, listed, fleet, until=end, on_progress=on_progress)


def _check_numbers(policy: Policy, jobs: Iterable[SimulatedJob]) -> None:
    """Refuse numbers that a policy would refuse where jobs bring them."""
    every = (item for job in jobs if job.numbers for item in job.numbers.items())
    for name, number in sorted({item for item in every if item[0] in policy.brought}):
        try:
            policy.check_brought(name, number)
        except FairlaneError as error:
            raise ConfigurationError(f"numbers: {name}: {error}") from None


async def read_history(
    store: Store,
    queue: str,
    now: Instant,
    last: int = 3_600 * SECOND,
    *,
    limit: int = HISTORY_LIMIT,
    on_progress: OnProgress | None = None,
) -> list[SimulatedJob]:
    """The jobs that ran to their end in the last so many microseconds: when they came, how long they ran, and the
    numbers that they brought along.

    A job that came before that time waits from its beginning on. Only its last run is known; for a job that was
    scheduled, or tried again, the time at which it was enqueued stands for that at which it was due.
    """
    since = now - last
    kinds: dict[Any, Any] = {}
    found: list[tuple[Instant, UUID, SimulatedJob]] = []
    for state in (State.DONE, State.DEAD):
        wanted = JobFilter(queue=queue, state=state, finished_since=since, finished_until=now)
        after: str | None = None
        while len(found) < limit:
            page = await find_jobs(store, wanted, after, min(PAGE, limit - len(found)))
            ran = [each for each in page.jobs if each.claimed_at is not None]
            given = await store.run(records.given([each.id for each in ran]))
            found += [(each.enqueued_at, each.id, _remembered(each, since, kinds, given.get(each.id))) for each in ran]
            after = page.after
            if on_progress is not None:
                on_progress(len(found))
            if after is None:
                break
    # In the order of their enqueue, also where all have waited from the beginning on: the newest number holds.
    found.sort(key=lambda each: each[:2])
    return [job for _, _, job in found]


def _remembered(
    job: JobRecord, since: Instant, kinds: dict[Any, Any], numbers: dict[str, float] | None
) -> SimulatedJob:
    kind = kind_of(job.task, {**job.keys, "task": job.task}, job.priority, kinds)
    run_time = max(0, (job.finished_at or 0) - (job.claimed_at or 0))
    return SimulatedJob(kind, max(since, job.enqueued_at), run_time, (), job.state is State.DEAD, numbers)
