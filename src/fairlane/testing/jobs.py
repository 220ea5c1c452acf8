"""Jobs in a test: running all that can run now, or that becomes due, without waiting, and asking what was enqueued.

The jobs are claimed from the app's own store under its own policies, and run and settled by the code that a worker
runs. What a worker does by its own time, this does when it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any
from uuid import UUID, uuid4

from fairlane.app import App
from fairlane.clock import Instant, ManualClock, microseconds
from fairlane.declaration_checks import checked_time
from fairlane.enqueue import Stamp
from fairlane.errors import ConfigurationError, UndecodablePayload, UnknownQueue
from fairlane.handle import Enqueued
from fairlane.job import Claim, JobRecord, State
from fairlane.operations.requests import find_jobs
from fairlane.parameters import checked, shown
from fairlane.policy.keys import canonical_keys
from fairlane.policy.partitions import parse_partition
from fairlane.queue import partitions_served
from fairlane.scheduler.settlement import Settlement
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Claimed, Listener, Store, WorkerIdentity
from fairlane.task import Call, Task
from fairlane.waits import Outage, StoreTime
from fairlane.worker.claims import QueueSlots, Slots
from fairlane.worker.execution import Execution
from fairlane.worker.options import WorkerOptions
from fairlane.worker.runs import Enqueue, JobContext, Middleware, Next, Settling, current_run
from fairlane.worker.runtime import Program

LEASE = timedelta(days=1)
"""Nobody renews it: a test does not last as long."""
LOOK_AGAIN = 0.005
"""Seconds until another look while a producer's transaction is open that may not have seen us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One attempt that was made."""

    job: UUID
    task: str
    attempt: int
    outcome: str
    """How the attempt ended: `done`, `failed`, `retry`, `snoozed`, `dead`, `cancelled` or `released`. The last attempt
    of a job that keeps failing has `failed` too: that the job is dead is its `state`."""
    state: State
    """The state of the job after this attempt."""
    error: str | None
    raised: BaseException | None
    """What the task raised."""


@checked(unchecked=["queues", "concurrency"])
async def run_until_idle(
    app: App,
    *,
    advance: bool = False,
    queues: str | Sequence[str] = (),
    concurrency: int = 100,
    timeout: float = 30.0,
) -> list[Ran]:
    """Run every job that can run now, and what those enqueue, until nothing is left that can. Returns what ran.

    With `advance`, the app's `ManualClock` is moved on to whatever is due next (a delay, a retry, a refill, the end of
    a lease), again and again, until no job waits for time any more. `timeout` is in real seconds: a task that never
    ends is an error that names it. Schedules have no end, and are left alone: `run_for` fires them.
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
    """Let so much time pass on the app's `ManualClock`, and run whatever becomes due meanwhile, at its own time:
    delayed jobs, retries, schedules.

    `schedules` says which schedules are fired: all, none (`False`), or those of these names. One that is left out
    stands still, and has missed its slots when it is fired again.
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
    slots = Slots(options.shares, options.concurrency, options.order, _none, served)
    runner = Runner(app, store, await app.stamper(), slots, schedules)
    try:
        async with asyncio.timeout(timeout):
            return await runner.run(advance, until)
    except TimeoutError:
        raise TimeoutError(
            f"after {timeout:g} s there is still something to run: {runner.told()}; is it waiting for something that "
            f"never comes, or for a clock that stands still? Give timeout= if it only takes long"
        ) from None
    finally:
        await runner.close()


def _manual(app: App, what: str) -> ManualClock:
    if not isinstance(app.clock, ManualClock):
        raise ConfigurationError(
            f"{what} moves a ManualClock, and this app has a {type(app.clock).__name__}; use "
            f"App(…, clock=ManualClock()), or in_memory(app)"
        )
    return app.clock


def _none() -> int:
    return 0


class Runner:
    """Claims, runs and settles, one round after the other."""

    def __init__(self, app: App, store: Store, stamp: Stamp, slots: Slots, schedules: Collection[str]) -> None:
        name = f"test:{app!r}"
        self._app = app
        self._schedules = schedules
        self._store = store
        self._slots = slots
        self._watch = _Watch()
        self._identity = WorkerIdentity(uuid4(), name)
        self._settling = Settling(store, Outage())
        program = Program(
            store=store,
            registry=app.registry,
            clock=app.clock,
            stamp=stamp,
            max_result=app.max_payload,
            middlewares=[self._watch, *app.middlewares],
        )
        self._execution = Execution(program, slots, StoreTime(app.clock), self._ended)
        self._settler = asyncio.create_task(self._settling.run())
        self._claims: dict[UUID, Claim] = {}
        self._ran: list[Ran] = []
        self._listener: Listener | None = None
        self._hearing: asyncio.Task[bool] | None = None
        self._next_due: Instant | None = None
        self._has_ended = False

    async def run(self, advance: bool, until: Instant | None) -> list[Ran]:
        while True:
            look_again = await self._start_all()
            if self._execution.running:
                await self._until_something_happens(look_again)
                continue
            await self._settling.all_settled()
            if self._has_ended:
                continue  # what has ended since the last look may have opened a limit, or enqueued something
            if not advance or (until is None and await self._is_done()) or not self._move_on(until):
                return self._ran

    async def _is_done(self) -> bool:
        """Whether no job is left: what is due then is upkeep, such as a lease that nobody needs any more."""
        left = (State.SCHEDULED, State.READY, State.RUNNING)
        pages = [await find_jobs(self._store, JobFilter(state=each), limit=1) for each in left]
        return not any(page.jobs or page.after for page in pages)

    async def _start_all(self) -> bool:
        """Start what can start now. Returns whether something may have been missed."""
        self._has_ended = False
        self._next_due = (await self._store.reap()).next_due
        if self._schedules and (slot := await self._app.fire_schedules(self._schedules)) is not None:
            self._next_due = min(slot, self._next_due or slot)
        look_again = False
        for queue in list(self._slots.queues.values()):
            while (room := self._slots.room(queue)) > 0:
                claimed = await self._claim(queue, room)
                look_again = look_again or claimed.look_again
                if claimed.next_due is not None:
                    self._next_due = min(claimed.next_due, self._next_due or claimed.next_due)
                if len(claimed.claims) < room and not claimed.more:
                    break
        return look_again

    async def _claim(self, queue: QueueSlots, room: int) -> Claimed:
        begin_by = self._app.clock.monotonic() + microseconds(LEASE)
        claimed = await self._store.claim(
            queue.name, lambda: room, worker=self._identity, lease=LEASE, listener=self._listener
        )
        self._claims.update((each.id, each) for each in claimed.claims)
        self._slots.note_claimed(queue, len(claimed.claims), claimed.vtime)
        self._execution.start(queue, claimed.claims, begin_by)
        return claimed

    def _ended(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        claim = self._claims.pop(settlement.job)
        self._has_ended = True
        self._ran.append(
            Ran(
                job=claim.id,
                task=claim.task,
                attempt=claim.attempt,
                outcome=settlement.outcome,
                state=settlement.to,
                error=settlement.error,
                raised=self._watch.raised.pop(claim.id, None),
            )
        )
        self._settling.add(settlement, queue, may_be_settled=may_be_settled)

    async def _until_something_happens(self, look_again: bool) -> None:
        """Until a run ends, or somebody enqueues: a task may wait for the result of another one."""
        if self._hearing is None:
            # From now on claims register this ear. What came before it did is found by the next one.
            self._listener = self._listener or await self._store.listen(self._identity)
            self._hearing = asyncio.create_task(self._listener.wait(None))
            return
        running = [run.handle for run in self._execution.running if run.handle is not None]
        done, _ = await asyncio.wait(
            [*running, self._hearing],
            return_when=asyncio.FIRST_COMPLETED,
            timeout=LOOK_AGAIN if look_again else None,
        )
        if self._hearing in done:
            self._hearing = None
        await self._settling.all_settled()

    def _move_on(self, until: Instant | None) -> bool:
        """Put the clock to what is due next. Returns whether there is anything left to do by then."""
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

    def told(self) -> str:
        """What still runs, or waits."""
        running = [f"job {run.claim.id} ({run.claim.task})" for run in self._execution.running]
        return ", ".join(running) or "jobs that are enqueued faster than they run"

    async def close(self) -> None:
        tasks = [self._settler, *(run.handle for run in self._execution.running if run.handle is not None)]
        tasks += [self._hearing] if self._hearing is not None else []  # type: ignore[list-item]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._execution.close()
        if self._listener is not None:
            await self._listener.close()


class _Watch(Middleware):
    """Sees what tasks raise."""

    def __init__(self) -> None:
        self.raised: dict[UUID, BaseException] = {}

    async def around_run(self, job: JobContext, run: Next) -> Any:
        try:
            return await run()
        except BaseException as error:
            self.raised[job.id] = error
            raise


@checked()
@contextmanager
def immediate(app: App) -> Iterator[None]:
    """Inside the block, enqueueing a job of this app runs it, and what its task raises is raised there.

    The job is stored, claimed, run and settled as ever: what is not due yet, or held by a limit, stays where it is.
    Jobs that a task enqueues have run too by then.
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
        # Inside a task: whoever runs that one runs this one next. In a caller's transaction: nobody can see it yet.
        if current_run.get(None) is None and all(call.options.tx is None for call in calls):
            for ran in await run_until_idle(self._app):
                if ran.raised is not None and ran.outcome in ("failed", "dead"):
                    raise ran.raised
        return enqueued


@checked()
@asynccontextmanager
async def in_memory(app: App, clock: ManualClock | None = None) -> AsyncIterator[ManualClock]:
    """Let an app use an empty database in memory, and the clock that this gives, inside the block."""
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
    """A job that is stored, and the call that it stands for."""

    record: JobRecord
    arguments: Mapping[str, Any]
    """What each parameter of the task is given, defaults included; empty for a task that this app does not know."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        keys = f" {self.record.keys}" if self.record.keys else ""
        return f"{self.record.task}({given}) in {self.record.queue!r}, {self.record.state}{keys}"


@checked(unchecked=["task", "queue"])
async def enqueued_jobs(
    app: App, task: Task[..., Any] | str | None = None, *, queue: str | None = None
) -> list[EnqueuedJob]:
    """The jobs that are stored, whatever has become of them, in the order in which they were enqueued."""
    _check_queue(app, queue)
    name = None if task is None else _task_named(app, "enqueued_jobs", task).name
    store = await app.opened()
    found: list[JobRecord] = []
    after: str | None = None
    while True:
        page = await find_jobs(store, JobFilter(queue=queue, task=name), after, PAGE)
        found += page.jobs
        after = page.after
        if after is None:
            break
    return [EnqueuedJob(record, _arguments(app, record)) for record in reversed(found)]


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

    Of what is given besides, all must hold; of `keys`, a job may carry more. Returns the jobs.
    """
    _check_queue(app, queue)
    task = _task_named(app, "assert_enqueued", expected)
    wanted = _bound(expected.task, expected.args, expected.kwargs) if isinstance(expected, Call) else None
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
    many = "no job" if not fitting else f"{len(fitting)} job{'s' * (len(fitting) > 1)}"
    asked = "" if count is None else f", where {count} should be"
    raise AssertionError(f"{many} of {what}{beside} enqueued{asked}; {_told(await enqueued_jobs(app))}")


def _told(jobs: Sequence[EnqueuedJob]) -> str:
    if not jobs:
        return "nothing was enqueued at all"
    listed = "".join(f"\n  {job!r}" for job in jobs[:SHOWN])
    more = f"\n  and {len(jobs) - SHOWN} more" if len(jobs) > SHOWN else ""
    return f"enqueued were:{listed}{more}"


def _arguments(app: App, record: JobRecord) -> Mapping[str, Any]:
    task = app.registry.find(record.task)
    if task is None:
        return {}
    try:
        args, kwargs = task.codec.decode_call(record.payload)
    except UndecodablePayload:
        return {}
    return _bound_as_is(task, args, kwargs)


def _bound(task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call as a worker would see them: what goes through JSON may come back as something else."""
    payload = task.codec.encode_call(tuple(args), dict(kwargs), 1 << 30)
    return _bound_as_is(task, *task.codec.decode_call(payload))


def _bound_as_is(task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    bound = task.codec.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _check_queue(app: App, queue: object) -> None:
    """Refuse a queue that the app does not have; partitions go by their own names, too."""
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
    """A task of the app, by itself or by its name."""
    if isinstance(given, Call):
        return given.task
    if isinstance(given, Task):
        return given
    if isinstance(given, str):
        return app.registry[given]
    raise ConfigurationError(
        f"{what}: {shown(given)} is neither a task nor a call of one; give the task, or task.call(…)"
    )
