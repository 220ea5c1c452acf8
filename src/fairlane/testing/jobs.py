"""Jobs in tests: run everything that can run now, or becomes due, without waiting; and look up what was enqueued.

Jobs are claimed from the store of the app under its policies, and are run and settled by the code of a worker. What a
worker does on timers, this does when it is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from fairlane.app import App
from fairlane.clock import Instant, ManualClock, checked_time, microseconds
from fairlane.enqueue import BuildJob
from fairlane.errors import ConfigurationError, UndecodablePayload, UnknownQueue
from fairlane.job import Claim, JobRecord, State
from fairlane.operations.requests import find_jobs
from fairlane.parameters import checked, shown
from fairlane.policy.keys import canonical_keys
from fairlane.policy.partitions import parse_partition
from fairlane.queue import partitions_served
from fairlane.scheduler.settlement import RunOutcome, Settlement
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Listener, Store, WorkerIdentity
from fairlane.task import Call, Enqueued, Task
from fairlane.waits import Outage, StoreTime
from fairlane.worker.claims import QueueSlots, Slots
from fairlane.worker.execution import Execution, Run
from fairlane.worker.options import WorkerOptions
from fairlane.worker.runs import Enqueue, Middleware, Settling, current_run
from fairlane.worker.runtime import Program

LEASE = timedelta(days=1)
"""Longer than any test: nothing renews it."""
LOOK_AGAIN = 0.005
"""Seconds until the next look, while the open transaction of a producer may not have seen us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One attempt of a job."""

    job: UUID
    task: str
    attempt: int
    outcome: str
    """How the attempt ended: `done`, `failed`, `retry`, `snoozed`, `dead`, `cancelled` or `released`. The last attempt
    of a job that keeps failing also has `failed`; that the job is dead is in `state`."""
    state: State
    """The state of the job after this attempt."""
    error: str | None
    raised: BaseException | None
    """The exception that the task raised."""


@checked(unchecked=["queues", "concurrency"])
async def run_until_idle(
    app: App,
    *,
    advance: bool = False,
    queues: str | Sequence[str] = (),
    concurrency: int = 100,
    timeout: float = 30.0,
) -> list[Ran]:
    """Run every job that can run now, and the jobs that those enqueue, until none is left. Returns what ran.

    With `advance`, the `ManualClock` of the app is moved to whatever is due next (a delay, a retry, a refill, the end
    of a lease), again and again, until no job waits for time. `timeout` is in real seconds: a task that never ends is
    an error that names it. Schedules never end, and are not fired here: see `run_for`.
    """
    options = WorkerOptions(queues=queues, concurrency=concurrency)
    return await _bounded(app, options, timeout, None, advance)


@checked(unchecked=["duration", "queues", "concurrency"])
async def run_for(
    app: App,
    duration: timedelta | str | float,
    *,
    schedules: bool | str | Collection[str] = True,
    queues: str | Sequence[str] = (),
    concurrency: int = 100,
    timeout: float = 30.0,
) -> list[Ran]:
    """Let this much time pass on the `ManualClock` of the app, and run everything that becomes due, at its own time:
    delayed jobs, retries, schedules.

    `schedules` says which schedules to fire: all, none (`False`), or those with these names. A schedule that is left
    out stands still, and has missed its slots when it is fired again.
    """
    clock, time = _manual(app, "run_for"), checked_time("run_for: duration", duration)
    fired = _schedules_named(app, "run_for", schedules)
    options = WorkerOptions(queues=queues, concurrency=concurrency)
    return await _bounded(app, options, timeout, clock.now() + time, True, fired)


async def _bounded(
    app: App,
    options: WorkerOptions,
    timeout: float,
    until: Instant | None,
    advance: bool,
    schedules: Collection[str] = (),
) -> list[Ran]:
    if timeout <= 0:
        raise ConfigurationError(f"timeout={timeout!r} leaves no time to run anything; give seconds above 0")
    if advance:
        _manual(app, "advance=True")
    store = await app.opened()
    options = options.serving(app.queue_names)
    served = await partitions_served(store, [share.name for share in options.shares], app.queue_names)
    slots = Slots(options.shares, options.concurrency, options.order, lambda: 0, served)
    runner = Runner(app, store, await app.job_builder(), slots, schedules)
    try:
        async with asyncio.timeout(timeout):
            return await runner.run(advance, until)
    except TimeoutError:
        raise TimeoutError(
            f"after {timeout:g} s there is still something to run: {runner.unfinished()}; is it waiting for something "
            f"that never comes, or for a clock that stands still? Give timeout= if it only takes long"
        ) from None
    finally:
        await runner.stop()


def _manual(app: App, what: str) -> ManualClock:
    if not isinstance(app.clock, ManualClock):
        raise ConfigurationError(
            f"{what} moves a ManualClock, and this app has a {type(app.clock).__name__}; use "
            f"App(…, clock=ManualClock()), or in_memory(app)"
        )
    return app.clock


class Runner(Execution):
    """Claims, runs and settles in rounds."""

    def __init__(self, app: App, store: Store, build: BuildJob, slots: Slots, schedules: Collection[str]) -> None:
        program = Program(
            store=store,
            registry=app.registry,
            clock=app.clock,
            build=build,
            max_result=app.max_payload,
            middlewares=app.middlewares,
        )
        super().__init__(program, slots, StoreTime(app.clock), self._ended)
        self._app = app
        self._schedules = schedules
        self._identity = WorkerIdentity(uuid4(), f"test:{app!r}")
        self._settling = Settling(store, Outage())
        self._settler = asyncio.create_task(self._settling.run())
        self._claims: dict[UUID, Claim] = {}
        self._raised: dict[UUID, BaseException | None] = {}
        self._attempts: list[Ran] = []
        self._listener: Listener | None = None
        self._hearing: asyncio.Task[bool] | None = None
        self._next_due: Instant | None = None
        self._has_ended = False

    async def run(self, advance: bool, until: Instant | None) -> list[Ran]:
        while True:
            look_again = await self._start_all()
            if self.running:
                await self._until_something_happens(look_again)
                continue
            await self._settling.all_settled()
            if self._has_ended:
                continue  # a job that has ended may have opened a limit, or enqueued others
            if not advance:
                return self._attempts
            if until is None:
                # If no job is left, only upkeep is due, such as a lease that is no longer needed.
                left = (State.SCHEDULED, State.READY, State.RUNNING)
                pages = [await find_jobs(self.store, JobFilter(state=each), limit=1) for each in left]
                if not any(page.jobs or page.after for page in pages):
                    return self._attempts
            if not self._move_on(until):
                return self._attempts

    async def _start_all(self) -> bool:
        """Start what can start now. Returns whether a job may have been missed."""
        self._has_ended = False
        due = [(await self.store.reap()).next_due]
        if self._schedules:
            due.append(await self._app.fire_schedules(self._schedules))
        look_again = False
        for queue in list(self._slots.queues.values()):
            while (room := self._slots.room(queue)) > 0:
                begin_by = self._now() + microseconds(LEASE)
                asked = partial(self._slots.room, queue)
                claimed = await self.store.claim(
                    queue.name, asked, worker=self._identity, lease=LEASE, listener=self._listener
                )
                self._claims.update((each.id, each) for each in claimed.claims)
                self._slots.note_claimed(queue, len(claimed.claims), claimed.vtime)
                self.start(queue, claimed.claims, begin_by)
                look_again = look_again or claimed.look_again
                due.append(claimed.next_due)
                if len(claimed.claims) < room and not claimed.more:
                    break
        self._next_due = min((each for each in due if each is not None), default=None)
        return look_again

    def _end(
        self,
        run: Run,
        outcome: RunOutcome | None,
        error: BaseException | None = None,
        settlement: Settlement | None = None,
    ) -> Settlement | None:
        self._raised[run.claim.id] = error
        return super()._end(run, outcome, error, settlement)

    def _ended(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        claim = self._claims.pop(settlement.job)
        self._has_ended = True
        self._attempts.append(
            Ran(
                job=claim.id,
                task=claim.task,
                attempt=claim.attempt,
                outcome=settlement.outcome,
                state=settlement.to,
                error=settlement.error,
                raised=self._raised.pop(claim.id, None),
            )
        )
        self._settling.add(settlement, queue, may_be_settled=may_be_settled)

    async def _until_something_happens(self, look_again: bool) -> None:
        """Wait until a run ends or a job is enqueued: a task may wait for the result of another one."""
        if self._hearing is None:
            # From now on claims register this listener; jobs that arrived before are found by the next claim.
            self._listener = self._listener or await self.store.listen(self._identity)
            self._hearing = asyncio.create_task(self._listener.wait(None))
            return
        running = [run.handle for run in self.running if run.handle is not None]
        done, _ = await asyncio.wait(
            [*running, self._hearing],
            return_when=asyncio.FIRST_COMPLETED,
            timeout=LOOK_AGAIN if look_again else None,
        )
        if self._hearing in done:
            self._hearing = None
        await self._settling.all_settled()

    def _move_on(self, until: Instant | None) -> bool:
        """Set the clock to what is due next. Returns whether there is anything to do then."""
        clock = self._app.clock
        assert isinstance(clock, ManualClock)
        now, due = clock.now(), self._next_due
        if until is not None and (due is None or due > until):
            clock.set(max(now, until))
            return False
        if due is None:
            return False
        clock.set(max(due, now + 1))
        return True

    def unfinished(self) -> str:
        """What still runs, for an error message."""
        running = [f"job {run.claim.id} ({run.claim.task})" for run in self.running]
        return ", ".join(running) or "jobs that are enqueued faster than they run"

    async def stop(self) -> None:
        tasks: list[asyncio.Task[Any]] = [self._settler, *([] if self._hearing is None else [self._hearing])]
        tasks += [run.handle for run in self.running if run.handle is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.close()
        if self._listener is not None:
            await self._listener.close()


@checked()
@contextmanager
def immediate(app: App) -> Iterator[None]:
    """Inside the block, enqueuing a job of this app also runs it, and raises what its task raises.

    The job is stored, claimed, run and settled as usual: a job that is not due, or that a limit holds back, stays
    queued. Jobs that the task enqueues are run too.
    """
    running = _RunAtOnce(app)
    app.middlewares.insert(0, running)
    try:
        yield
    finally:
        app.middlewares.remove(running)


class _RunAtOnce(Middleware):
    def __init__(self, app: App) -> None:
        self._app = app

    async def around_enqueue(self, calls: Sequence[Call[Any]], enqueue: Enqueue) -> Enqueued[Any]:
        enqueued = await enqueue(calls)
        # Inside a task, the job is run next by whatever runs the task. In a caller's transaction it is not visible yet.
        if current_run.get(None) is None and all(call.options.tx is None for call in calls):
            for ran in await run_until_idle(self._app):
                if ran.raised is not None and ran.outcome in ("failed", "dead"):
                    raise ran.raised
        return enqueued


@checked()
@asynccontextmanager
async def in_memory(app: App, clock: ManualClock | None = None) -> AsyncIterator[ManualClock]:
    """Inside the block, the app uses an empty database in memory, and the clock that is returned."""
    url, own = app.url, app.clock
    chosen = clock or ManualClock()
    await app.close()
    app.move_to("sqlite://", chosen)
    try:
        yield chosen
    finally:
        await app.close()
        app.move_to(url, own)


SHOWN = 10
PAGE = 1_000


@dataclass(frozen=True, slots=True)
class EnqueuedJob:
    """A stored job, and the call that it was enqueued with."""

    record: JobRecord
    arguments: Mapping[str, Any]
    """The value of each parameter, defaults included; empty for a task that this app does not know."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        keys = f" {self.record.keys}" if self.record.keys else ""
        return f"{self.record.task}({given}) in {self.record.queue!r}, {self.record.state}{keys}"


@checked(unchecked=["task", "queue"])
async def enqueued_jobs(
    app: App, task: Task[..., Any] | str | None = None, *, queue: str | None = None
) -> list[EnqueuedJob]:
    """All stored jobs, in any state, in the order in which they were enqueued."""
    _check_queue(app, queue)
    name = None if task is None else _task_named(app, "enqueued_jobs", task).name
    store = await app.opened()
    found: list[JobRecord] = []
    after: str | None = None
    while (page := await find_jobs(store, JobFilter(queue=queue, task=name), after, PAGE)).after is not None:
        found += page.jobs
        after = page.after
    found += page.jobs
    return [EnqueuedJob(record, _arguments(app, record)) for record in reversed(found)]


def _arguments(app: App, record: JobRecord) -> Mapping[str, Any]:
    task = app.registry.find(record.task)
    try:
        return {} if task is None else _read(task, record.payload)
    except UndecodablePayload:
        return {}


def _read(task: Task[..., Any], payload: bytes) -> Mapping[str, Any]:
    """The value of each parameter, as a worker would see it."""
    args, kwargs = task.codec.decode_call(payload)
    bound = task.codec.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


@checked(unchecked=["expected", "queue"])
async def assert_enqueued(
    app: App,
    expected: Task[..., Any] | Call[Any] | str,
    *,
    count: int | None = None,
    queue: str | None = None,
    priority: int | None = None,
    keys: Mapping[str, object] | None = None,
    state: State | None = None,
) -> list[EnqueuedJob]:
    """Fail unless jobs of a task, or of exactly this call (`task.call(…)`), were enqueued: at least one, or `count`.

    All other arguments must match as well; a job may carry more keys than `keys`. Returns the jobs.
    """
    _check_queue(app, queue)
    task = _task_named(app, "assert_enqueued", expected)
    wanted = None
    if isinstance(expected, Call):  # through JSON, which may change the arguments
        wanted = _read(task, task.codec.encode_call(expected.args, expected.kwargs, 1 << 30))
    carried = canonical_keys(keys) if keys is not None else {}
    fitting = [
        job
        for job in await enqueued_jobs(app, task)
        if (wanted is None or job.arguments == wanted)
        and (queue is None or job.record.queue == queue)
        and (priority is None or job.record.priority == priority)
        and (state is None or job.record.state is state)
        and all(name in job.record.keys and job.record.keys[name] == value for name, value in carried.items())
    ]
    if fitting if count is None else len(fitting) == count:
        return fitting
    options = {"queue": queue, "priority": priority, "keys": keys, "state": None if state is None else str(state)}
    beside = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    what = repr(expected) if isinstance(expected, Call) else task.name
    asked = "at least 1" if count is None else str(count)
    jobs = await enqueued_jobs(app)
    listed = "".join(f"\n  {job!r}" for job in jobs[:SHOWN]) or " none"
    more = f"\n  and {len(jobs) - SHOWN} more" if len(jobs) > SHOWN else ""
    raise AssertionError(
        f"jobs of {what}{beside}: {len(fitting)} enqueued, expected {asked}; all enqueued jobs:{listed}{more}"
    )


def _check_queue(app: App, queue: object) -> None:
    """Refuse a queue that the app does not have; names of partitions are allowed."""
    if queue is None or (isinstance(queue, str) and queue in app.queue_names):
        return
    partition = parse_partition(queue) if isinstance(queue, str) else None
    if partition is None or partition[0] not in app.queue_names:
        raise UnknownQueue(f"queue={shown(queue)} is unknown; this app has {', '.join(app.queue_names)}")


def _schedules_named(app: App, what: str, given: bool | str | Collection[str]) -> tuple[str, ...]:
    """The names of all schedules of the app, of none, or of those that are given."""
    if isinstance(given, bool):
        return tuple(app.schedules) if given else ()
    names = (given,) if isinstance(given, str) else given
    for each in names:
        if each not in app.schedules:
            similar = get_close_matches(each, app.schedules, n=1)
            remedy = (
                f"did you mean {similar[0]!r}?" if similar else f"this app has {', '.join(app.schedules) or 'none'}"
            )
            raise ConfigurationError(f"{what}: schedules: there is no schedule {each!r}; {remedy}")
    return tuple(names)


def _task_named(app: App, what: str, given: object) -> Task[..., Any]:
    """A task of the app, given as a task, a call or a name."""
    if isinstance(given, Call):
        return given.task
    if isinstance(given, Task):
        return given
    if isinstance(given, str):
        return app.registry[given]
    raise ConfigurationError(
        f"{what}: {shown(given)} is neither a task nor a call of one; give the task, or task.call(…)"
    )
