"""What operators see, as values: the same for programs, commands, the JSON API and the dashboard.

Times are datetimes in UTC, durations are seconds. Everything here can be encoded as JSON as it stands.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

import msgspec

from fairlane.clock import lasting
from fairlane.policy.gates import Origin
from fairlane.store.stats_values import AnyBlock, AnyLongRun, AnyWorker, dead_loops
from fairlane.store.stats_values import Counted as Counted
from fairlane.store.stats_values import KeySort as KeySort


def jobs_wait(count: int) -> str:
    return "1 job waits" if count == 1 else f"{count:,} jobs wait"


def jobs_left(ready: int, running: int) -> str:
    """What nobody serves. What a worker that died was running counts as running until somebody is there to notice."""
    were = f"{running:,} {'was' if running == 1 else 'were'} running"
    return ", ".join([jobs_wait(ready)] * (ready > 0 or not running) + [were] * (running > 0))


class QueueStatus(StrEnum):
    """How a queue is doing, in one word. A limit that does its work is no fault."""

    IDLE = "idle"
    """Nothing waits and nothing runs."""
    FLOWING = "flowing"
    """What waits is being started."""
    LIMITED = "limited"
    """Limits or pauses hold back all that waits, or rates let it start as they open, as the policy requires."""
    LAGGING = "lagging"
    """Jobs could start, and have waited for a while: there are too few slots."""
    PAUSED = "paused"
    """An operator has paused it."""
    STOPPED = "stopped"
    """Jobs wait, and no worker serves it, or none that does knows their tasks."""


class HintKind(StrEnum):
    """What a hint is about."""

    LIMIT = "limit"
    """A limit does its work; here is the knob, should it be too tight."""
    LAG = "lag"
    """We are behind."""
    WARNING = "warning"
    """Something takes too long or may break soon; more workers are no help."""
    FAULT = "fault"
    """Something is broken."""
    PAUSE = "pause"
    """An operator's doing."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth knowing, and the knob to turn."""

    kind: HintKind
    queue: str | None
    words: str
    knob: str
    """What to do about it: a command, as one would type it, or a sentence."""
    keys: dict[str, str | None] = {}
    limit: str | None = None


class HeldView(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that one limit or pause holds back."""

    limit: str
    words: str
    """The limit as one would write it in Python; a pause in words."""
    by: list[str]
    keys: int
    jobs: int


class KeyMinute(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to jobs of a key within a minute."""

    at: datetime
    started: int = 0
    ended: int = 0
    failed: int = 0
    mean_wait: float = 0.0
    """Seconds from ready to start, of those that started."""
    mean_run: float = 0.0


class MinuteView(KeyMinute, frozen=True, kw_only=True):
    """What happened in queues within a minute."""

    arrived: int = 0
    longest_wait: float = 0.0
    denied: dict[str, int] = {}
    """How often a limit turned somebody away, by limit."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """The last hour, minute by minute, the oldest first, up to the one that has begun; quiet minutes are there too."""

    minutes: list[MinuteView]
    denied: dict[str, int]
    """How often a limit turned somebody away, over all of them, by limit, the most first."""


class LongRunView(AnyLongRun, frozen=True, kw_only=True):
    """A run that takes longer than the runs of its task do, or that holds a limit for which others wait."""

    worker: str
    """By name."""
    since: datetime
    ran: float
    """Seconds so far."""
    usual: float | None
    """Seconds that 95 of the last 100 runs of its task took at most; `None`: none has ended in its worker."""


class BlockView(AnyBlock, frozen=True, kw_only=True):
    """Code that keeps, or kept, an event loop of a worker from everything else."""

    since: datetime
    until: datetime | None
    """`None`: it still does."""
    seconds: float

    @property
    def words(self) -> str:
        """Which event loop, for how long, by whom and where."""
        whose = "its event loop" if self.pid is None else f"the event loop of its process {self.pid}"
        when = "has been" if self.until is None else "was"
        return f"{whose} {when} blocked for {lasting(self.seconds)} by {self.who}, at {self.where}"

    @property
    def who(self) -> str:
        return "code of no known job" if self.job is None else f"job {self.job} ({self.task})"


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What is counted of a queue, or of all together."""

    ready: int = 0
    """All that could run as far as time is concerned: with those that limits hold back."""
    held_jobs: int = 0
    """Of the ready ones, those that at least one limit or pause holds back. Where limits of unrelated scopes hold jobs
    at the same time, it may be too large, but never too small."""
    running: int = 0
    scheduled: Counted = Counted()
    dead: Counted = Counted()
    oldest_wait: float | None = None
    """Seconds since the oldest ready job became ready; `None`: nothing waits, or it is not known yet."""
    ended: int = 0
    """Ended in the last 24 hours, failures included."""
    failed: int = 0
    """Of these."""
    started_per_minute: float = 0.0
    """In the last 60 seconds, as the next two; claims that were given back do not count. Of a minute that is partly
    older, those count that came since, if they came evenly from the first to the last of that minute."""
    ended_per_minute: float = 0.0
    failed_per_minute: float = 0.0
    workers: int = 0
    """Workers that serve it: they are alive, and not stopping."""
    workers_stopping: int = 0
    """Workers that served it, are stopping and take no new jobs: none of their slots count."""
    slots: int = 0
    """What they run at the same time at most, for all their queues."""


class QueueView(QueueCounts, frozen=True, kw_only=True):
    """A queue with all its partitions, at a glance."""

    queue: str
    status: QueueStatus
    words: str
    """The status in a sentence."""
    held: list[HeldView]
    lapsed: int = 0
    """Of the running ones, those whose leases are over: their worker is gone, and nobody has taken them back."""
    recently_started: int = 0
    """In the last five minutes and the one that has begun, as the next two."""
    recently_ended: int = 0
    recently_failed: int = 0
    recently_denied: int = 0
    """How often limits turned jobs away in that time."""
    rates: dict[str, str] = msgspec.field(default_factory=dict)
    """Rates that turned jobs away in this minute or the one before, by name, as one would write them in Python: each
    lets jobs start as it opens, and a look may fall into a moment in which it is open."""
    slots_free: int
    """Of the slots, how many nothing runs in, of whatever queue: its jobs could start there."""
    is_paused: bool
    partitions: int
    unseen: int
    """Of the ready ones, those that no claim has seen yet."""
    stats_as_of: datetime
    """When it was looked at: all of its figures are of that moment."""
    is_forwarded: bool | None = False
    """An engine runs its jobs, as far as is known here: the app says so, or a dispatcher was heard of."""
    refusal: str | None = None
    """What the engine's broker says, while it refuses all that is published."""
    unbegun: str | None = None
    """What a dispatcher says of messages that no worker of the engine begins."""
    long_runs: list[LongRunView] = msgspec.field(default_factory=list)
    """Runs that take longer than usual, or hold a limit for which others wait, the longest first."""
    unknown_tasks: list[str] = msgspec.field(default_factory=list)
    """Tasks of its jobs that no live worker which serves it knows: they are given back again and again."""

    @property
    def is_left(self) -> bool:
        """Jobs that ran when their worker died wait for somebody to serve the queue."""
        return self.lapsed > 0 and not self.workers


class Totals(QueueCounts, frozen=True, kw_only=True):
    """All queues together."""

    workers_late: int = 0


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Is work flowing, who waits and why, what can be done about it."""

    now: datetime
    totals: Totals
    queues: list[QueueView]
    hints: list[Hint]
    chart: Chart


class GaugeView(msgspec.Struct, frozen=True, kw_only=True):
    """How full a limit is for one key, or for the whole queue."""

    limit: str
    words: str
    """The limit as one would write it in Python, with the bound in force."""
    reason: str
    used: float
    bound: float
    room: int
    saturation: float
    """From 0 to 1."""
    opens_at: datetime | None
    bound_from: Origin = Origin.POLICY
    """Where the number came from."""

    @property
    def is_overridden(self) -> bool:
        return self.bound_from is Origin.OVERRIDE


class LimitView(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of a queue, and how it fares."""

    limit: str
    words: str
    by: list[str]
    gauge: GaugeView | None
    """Of a limit of the whole queue; by key, the keys have one each."""
    held_keys: int
    held_jobs: int
    denied: int
    """In the last hour: how often claims were turned away."""
    is_suspended: bool
    overridden_keys: int


class OneQueue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's page."""

    now: datetime
    view: QueueView
    policy: str
    """As one would write it in Python."""
    version: int
    policy_words: list[str]
    """The same in sentences."""
    limits: list[LimitView]
    scopes: list[list[str]]
    """What its keys can be listed by."""
    partitions: list[QueueView]
    """Each by itself, if it has several."""
    hints: list[Hint]
    chart: Chart


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key (or several that are a scope together) and its jobs."""

    keys: dict[str, str | None]
    queue: str
    """The partition that it lives in."""
    waiting: int
    """Ready, with those that limits hold back."""
    scheduled: Counted
    running: int
    held_by: list[str]
    """Limits and pauses of this scope that hold jobs of it back, by name."""
    ended: int
    """In the last 24 hours, as `failed`."""
    failed: int
    run_time: float | None
    """Moving average in seconds, of runs that were not lost; `None`: none has ended yet."""
    share: float | None
    """Its part of all run time of the queue in the last 24 hours."""
    weight: float | None
    """What turns are dealt by, boost included, where they are taken by this scope."""
    is_paused: bool
    gauges: list[GaugeView]
    """The limits of exactly this scope."""
    last_arrived_at: datetime | None
    """When a job of it last became ready: enqueued, due, or due again; of jobs that came together, the first counts."""
    last_started_at: datetime | None
    hours: list[int]
    """What ended in each of the last 24 hours, the oldest first."""
    mean_wait: float | None = None
    """Seconds from ready to start, in the minutes of the last hour in which jobs started; `None`: none did."""
    waits: list[float | None] = []
    """The same minute by minute, the oldest first."""
    drained_in: float | None
    """Seconds until what waits will have started: as all its limits allow it, with the jobs of other queues that share
    them, and no faster than jobs really started.
    `None`: nothing says so, no run has ended yet, it is paused, or no live worker serves its queue."""
    drains_at_least: bool = False
    """It may take longer: limits by other keys, which only some of its jobs pass, are left out, because its jobs are in
    several flows or in more than 200 lanes."""
    weight_from: Origin | None = None
    """Where the weight came from, a boost aside."""
    boost: float = 1.0
    """What an operator has multiplied the weight with."""

    @property
    def weight_words(self) -> str:
        """Where the weight came from, in words; nothing for what the policy declares."""
        if self.weight is None or self.weight_from is None:
            return ""
        if self.boost == 1.0:
            return self.weight_from.words
        own = f"{self.weight / self.boost:g} {self.weight_from.words}".rstrip()
        return f"{own}, boosted {self.boost:g} times"


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a queue's keys."""

    now: datetime
    queue: str
    by: list[str]
    scopes: list[list[str]]
    sort: str
    search: str
    held_only: bool
    keys: list[KeyView]
    after: str | None
    """Where the next page begins; `None`: this is the last one."""
    unserved: str | None = None
    """That nobody starts the queue's jobs, in words; `None`: somebody does, or none of these keys has jobs waiting."""


class LaneView(msgspec.Struct, frozen=True, kw_only=True):
    """A lane of a key: its jobs that no limit can tell apart."""

    keys: dict[str, str | None]
    priority: int
    waiting: int
    running: int
    held_by: str | None


class NextJob(msgspec.Struct, frozen=True, kw_only=True):
    """A ready job of a key, in the order in which they would run."""

    id: str
    task: str
    priority: int
    keys: dict[str, str | None]
    attempt: int
    enqueued_at: datetime


class OneKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key's page."""

    now: datetime
    view: KeyView
    hours_failed: list[int]
    minutes: list[KeyMinute]
    """The last hour, the oldest first, up to the minute that has begun; quiet minutes are there too."""
    lanes: list[LaneView]
    running: list[NextJob]
    next_jobs: list[NextJob]
    why: list[str]
    """What holds its jobs back, in words."""
    overrides: list[str]
    """What operators have changed for it, in words."""


UNEVEN_CLOCK = 5.0
"""Seconds between the store's clock and a worker's from which on it is reported."""


class WorkerView(AnyWorker, frozen=True, kw_only=True):
    """A worker process."""

    id: str
    is_late: bool
    """It has not been heard of for a while: it is gone, or stands still."""
    is_gone: bool
    """Nor for so long that its leases have ended, and what it ran runs elsewhere: that is past."""
    started_at: datetime
    seen_at: datetime
    clock_offset: float
    """The store's clock less the worker's, in seconds."""
    is_dispatcher: bool = False
    """It publishes what it claims, for an engine to run."""
    is_replaced: bool = False
    """It is late, and others have taken its place."""
    long_runs: list[LongRunView] = msgspec.field(default_factory=list)
    blocks: list[BlockView] = msgspec.field(default_factory=list)
    """What blocks its event loop, and those of its processes, the longest first; then the last that has done so in the
    last ten minutes."""

    @property
    def state(self) -> Literal["late", "unwell", "blocked", "troubled", "stopping", "replaced", "well"]:
        """The worst that is known of it."""
        if self.is_late:
            return "replaced" if self.is_replaced else "late"
        if not self.is_well:
            return "unwell"
        if self.is_blocked:
            return "blocked"
        if self.warnings:
            return "troubled"
        return "stopping" if self.is_stopping else "well"

    @property
    def takes_jobs(self) -> bool:
        """It is alive, and does not stop: who serves a queue starts its jobs."""
        return not self.is_late and not self.is_stopping

    @property
    def is_blocked(self) -> bool:
        """Something blocks its event loop now, or that of one of its processes."""
        return any(each.until is None for each in self.blocks)

    @property
    def lost_words(self) -> str:
        """How many runs go on for nothing."""
        if self.lost_runs == 1:
            return "1 run whose claim is lost still takes up a slot"
        return f"{self.lost_runs:,} runs whose claims are lost still take up slots" if self.lost_runs else ""

    @property
    def dead_loops(self) -> dict[str, str]:
        """What each died of."""
        return dead_loops(self.loops)

    @property
    def has_uneven_clock(self) -> bool:
        return abs(self.clock_offset) > UNEVEN_CLOCK


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """Every worker that is known."""

    now: datetime
    workers: list[WorkerView]
    alive: int
    """With those that are stopping."""
    late: int
    stopping: int = 0
    """Alive, and taking no new jobs."""
    slots: int
    """Of those that are alive and not stopping."""
    running: int
    """In these slots."""
