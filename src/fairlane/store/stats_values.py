"""Queues, keys and workers as stores show them to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.keys import By
from fairlane.policy.partitions import whole_of
from fairlane.scheduler.explain import Service
from fairlane.scheduler.settlement import DISPATCHER
from fairlane.scheduler.snapshot import LaneStats
from fairlane.stats.keys import Held, KeyStats, Span

COUNTED_AT_MOST = 10_000
"""What is counted row by row is counted up to this; beyond it, "at least" is shown."""
LANES_AT_MOST = 2_000
"""Lane events that no claim has folded and that are looked at one by one."""
LONG_RUNS_AT_MOST = 20
"""Of one worker."""

GONE_AFTER = 15 * 60 * SECOND
OVERLAP = 10 * SECOND
"""The last report of a process that died is older than its death."""


class Counted(msgspec.Struct, frozen=True):
    """A number that was counted up to a bound."""

    count: int = 0
    is_all: bool = True
    """False: there are at least so many."""


class AddedUp(msgspec.Struct, frozen=True):
    """What one pass of adding up did."""

    claims: int
    keys: int
    """Keys whose figures were written."""
    more: bool
    """It stopped at its bound."""


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue (one partition, if it has several) at a glance."""

    queue: str
    ready: int
    running: int
    lapsed: int = 0
    """Of these, those whose leases are over: their worker is gone, and nobody has taken them back."""
    unseen: int
    """Of those that are ready, how many no claim has seen yet."""
    events: int
    """Arrivals and ends that no claim has seen."""
    scheduled: Counted
    dead: Counted
    """Of the newest dead jobs of all queues, those of this one; `is_all` if all dead jobs were looked at."""
    held: dict[str, Held]
    """By limit, what it holds back. Gates of the whole queue hold back every ready job, and are not among them."""
    held_jobs: int
    """Of the ready ones, how many at least one of them holds back: see `jobs_held`."""
    oldest_ready_at: Instant | None
    """When the oldest job that still waits became ready."""
    counted_at: Instant | None
    """Up to when what claims did is in the stored stats; `None`: it never was."""
    uncounted: int
    """Claims that are not. They are added when somebody looks."""
    hours: tuple[Span, ...] = ()
    """The last day, the oldest first; hours in which nothing started or ended are left out."""


class KeySort(StrEnum):
    """What a list of keys is ordered by: most first, or by name."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    STARTED = "started"
    """The one that started last first."""
    NAME = "name"


class FlowWeight(msgspec.Struct, frozen=True):
    """The weight of a flow, as long as no operator has changed it."""

    weight: float
    is_brought: bool
    """A job has brought it along."""


class KeyPage(msgspec.Struct, frozen=True):
    """Some keys of a list, each with the partition that it was found in."""

    keys: list[tuple[str, KeyStats]]
    after: str | None
    """Where to go on; `None`: this was the end."""


class LanesCounted(msgspec.Struct, frozen=True):
    """Jobs by lane: those that are scheduled, or those that no claim has seen. Only keys, priority and `arrived` say
    something."""

    lanes: list[LaneStats]
    is_all: bool


PUBLISHING = "publishing"
"""The trouble of a dispatcher whose broker refuses."""


def unbegun_in(queue: str) -> str:
    """The trouble of a dispatcher whose messages for a queue nobody begins."""
    return f"unbegun in {whole_of(queue)}"


class AnyLongRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that takes longer than the runs of its task do, or that holds a limit for which others wait."""

    job: str
    task: str
    queue: str
    is_long: bool = True
    """False: it takes no longer than usual, and only holds a limit for which others wait."""
    limit: str | None = None
    """The limit that it holds and for which others wait, as one would write it in Python."""


class LongRun(AnyLongRun, frozen=True, kw_only=True):
    """The same, as a worker reports it."""

    since: Instant
    """When its handler was called."""
    usual: int | None = None
    """Microseconds that 95 of the last 100 runs of its task took at most; `None`: none has ended in this worker."""


class AnyBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Code that keeps, or kept, an event loop of a worker from everything else."""

    job: str | None = None
    """Whose handler it is; `None`: of no job that is known."""
    task: str | None = None
    where: str = ""
    """Functions and lines, the outermost first."""
    beside: list[str] = []
    """Other jobs that run on that event loop, and stand still with it; the first ten."""
    pid: int | None = None
    """Of the process whose event loop it is, if the worker runs its jobs in processes; `None`: the worker's own."""


class BlockedLoop(AnyBlock, frozen=True, kw_only=True):
    """The same, as a worker reports it."""

    since: Instant
    until: Instant | None = None
    """`None`: it still does."""


class AnyWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a worker about itself, every few seconds."""

    name: str
    host: str
    pid: int
    version: str
    """Of Fairlane."""
    queues: dict[str, float]
    """The queues it serves, with their weights."""
    concurrency: int
    running: int = 0
    waiting: int = 0
    """Claimed, and not started."""
    unsettled: int = 0
    is_well: bool = True
    is_stopping: bool = False
    loops: dict[str, str] = {}
    """Each loop by name: `running`, `ended`, or what it died of."""
    warnings: dict[str, str] = {}
    """Current failures that harm no job, by name; of a dispatcher, that its broker refuses."""
    tasks: list[str] = []
    """The tasks that it knows."""
    unknown_tasks: dict[str, str] = {}
    """Tasks of which it was given jobs lately and that it does not know, each with the queue of the last such job."""
    lost_runs: int = 0
    """Runs whose claims are lost and which have not ended: each still takes up a slot. Their jobs wait or run again."""
    stats: dict[str, float] = {}
    """What it has counted since it started, by the name of the metric."""


class WorkerReport(AnyWorker, frozen=True, kw_only=True):
    """The same, as it is reported every few seconds."""

    started_at: Instant
    every: int
    """Microseconds between two reports."""
    clock_offset: int = 0
    """The store's clock less the worker's, in microseconds."""
    long_runs: list[LongRun] = msgspec.field(default_factory=list)
    """The longest first, up to `LONG_RUNS_AT_MOST`."""
    blocks: list[BlockedLoop] = msgspec.field(default_factory=list)
    """What blocks its event loop, and those of its processes, the longest first; then what has blocked one of them
    last, if that is not long ago."""


def dead_loops(loops: Mapping[str, str]) -> dict[str, str]:
    """Of the loops of a worker, those that died, by name, with what each died of."""
    return {name: state for name, state in sorted(loops.items()) if state not in ("running", "ended")}


class WorkerSeen(msgspec.Struct, frozen=True):
    """A worker, and when it was last heard from. One that stopped has taken its report back."""

    id: str
    seen_at: Instant
    report: WorkerReport

    def is_late(self, now: Instant) -> bool:
        """It has missed several reports in a row: it is gone, or stands still."""
        return now - self.seen_at > 4 * self.report.every

    def takes_jobs(self, now: Instant) -> bool:
        """It is alive, and does not stop: who serves a queue starts its jobs."""
        return not self.is_late(now) and not self.report.is_stopping

    def is_gone(self, now: Instant) -> bool:
        """It has been late for so long that it will not be back."""
        return now - self.seen_at > GONE_AFTER

    @property
    def is_dispatcher(self) -> bool:
        """It publishes what it claims, and runs nothing."""
        return UUID(self.id).version == DISPATCHER


def replaced(workers: Iterable[WorkerSeen], now: Instant) -> set[str]:
    """The ids of those that are gone and whose queues are all served by live workers of their kind: by those that have
    started on their host, or under their name, since they were last heard of; and of those long gone, by any."""
    seen = list(workers)
    alive = [each for each in seen if not each.is_late(now)]
    return {
        each.id
        for each in seen
        if each.is_late(now)
        and set(each.report.queues)
        <= {queue for heir in alive if _is_heir(heir, each, now) for queue in heir.report.queues}
    }


def _is_heir(heir: WorkerSeen, gone: WorkerSeen, now: Instant) -> bool:
    if heir.is_dispatcher != gone.is_dispatcher:
        return False
    is_same_place = heir.report.host == gone.report.host or heir.report.name == gone.report.name
    return gone.is_gone(now) or (is_same_place and heir.report.started_at > gone.seen_at - OVERLAP)


def serves(served: Iterable[str], queues: Iterable[str]) -> bool:
    """Whether a worker with these queues serves one of those, by its name or that of the queue it is a partition of."""
    return not {name for queue in queues for name in (queue, whole_of(queue))}.isdisjoint(served)


def service_of(workers: Iterable[WorkerSeen], queues: Iterable[str], now: Instant) -> Service:
    """Who serves a queue, by its name and those of its partitions."""
    names = {name for queue in queues for name in (queue, whole_of(queue))}
    concerned = [each for each in workers if serves(each.report.queues, names)]
    alive = [each for each in concerned if each.takes_jobs(now)]
    refusals = [
        f"{each.report.warnings[PUBLISHING]} (dispatcher {each.report.name})"
        for each in alive
        if each.is_dispatcher and PUBLISHING in each.report.warnings
    ]
    unbegun = [
        each.report.warnings[key] for each in alive for key in map(unbegun_in, names) if key in each.report.warnings
    ]
    return Service(
        is_served=bool(alive),
        stopping=sum(each.report.is_stopping and not each.is_late(now) for each in concerned),
        is_forwarded=any(each.is_dispatcher for each in concerned),
        refusal=refusals[0] if refusals and len(refusals) == len(alive) else None,
        unbegun=unbegun[0] if unbegun else None,
        slots=sum(each.report.concurrency for each in alive),
    )


def slots_for(workers: Iterable[WorkerSeen], queue: str, busy: Mapping[str, int], now: Instant) -> int:
    """The slots that a queue gets beside others, of each of which so many jobs run or could start: what they leave of
    its workers, and no less than its part by weight."""
    slots = 0.0
    for report in (each.report for each in workers if each.takes_jobs(now)):
        if serves(report.queues, [queue]):
            rivals = [name for name in busy if name != queue and busy[name] > 0 and serves(report.queues, [name])]
            parts = Counter(map(whole_of, [queue, *rivals]))
            weights = {
                each: report.queues.get(each, report.queues.get(whole_of(each), 1.0)) for each in (queue, *rivals)
            }
            own, *others = (weight / parts[whole_of(each)] for each, weight in weights.items())
            slots += max(
                report.concurrency * own / (own + sum(others)), report.concurrency - sum(busy[each] for each in rivals)
            )
    return int(slots)


def key_scope(by: By) -> str:
    """A scope as text: `account`, `account,region`."""
    return ",".join(by)
