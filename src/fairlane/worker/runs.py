"""One run of a job: what its handler sees, what is put around it, what its outcome means, and how that is recorded.

One batch of outcomes is on its way at a time; what piles up meanwhile is the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Instant, as_instant, lasting, microseconds
from fairlane.codec import checked_key
from fairlane.effects import landed_of
from fairlane.enqueue import BuildJob, built_effects
from fairlane.errors import (
    Cancel,
    ClaimLost,
    ConfigurationError,
    Dead,
    FairlaneError,
    InvalidJob,
    Retry,
    Signal,
    Snooze,
    StoreUnavailable,
)
from fairlane.events import FollowUpsNotStored
from fairlane.job import BuiltEffects, Claim, Landed, Outcome, State
from fairlane.loop_thread import CallerThread, refuse_inside_a_loop
from fairlane.parameters import checked
from fairlane.policy.unique import Conflict
from fairlane.redaction import Audience, Redactor, Surface, error_text, without_secrets
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Interrupted,
    Retried,
    RunOutcome,
    Settlement,
    Snoozed,
    settle,
)
from fairlane.store import records
from fairlane.store.protocol import Landings, Store
from fairlane.task import LONGEST_DELAY, Call, Enqueued, Task
from fairlane.waits import Outage, back_off

if TYPE_CHECKING:
    from fairlane.worker.claims import QueueSlots, Slots
    from fairlane.worker.execution import Execution
    from fairlane.worker.reports import Watching

log = logging.getLogger("fairlane.worker")

NOTHING = BuiltEffects()
REMEMBERED = 100
"""Runs of a task whose times are kept."""
USUAL = 0.95
"""The share of them that take no longer than the usual time."""
FAR_BEYOND = 3
"""How many times the usual time a run may take before it is called long."""


def log_job(
    log: logging.Logger, level: int, job: Claim | UUID, words: str, *given: object, error: Any = None, **fields: object
) -> None:
    """Log something about a job: the line begins with it, and the record carries it and these fields."""
    if isinstance(job, Claim):
        fields["claim"] = job
        log.log(level, f"job %s (%s){words}", job.id, job.task, *given, exc_info=error, extra=fields)
    else:
        fields["job"] = job
        log.log(level, f"job %s{words}", job, *given, exc_info=error, extra=fields)


class Home(Protocol):
    """What a running job needs from what runs it: a worker, or a process of an engine."""

    store: Store
    loop: asyncio.AbstractEventLoop
    thread: int
    """The thread of the event loop."""
    log: logging.Logger
    max_result: int
    build: BuildJob

    def ran(self, run: Any, /) -> int:
        """Microseconds since its handler was called."""
        ...


@dataclass(slots=True, eq=False)
class RunningJob:
    """One claim whose handler has been called or is about to be."""

    home: Home
    claim: Claim
    task: Task[..., Any]
    args: Any
    kwargs: Any
    started_at: int = field(init=False, default=0)
    """By the monotonic clock; 0 until user code begins."""
    stop: Stop | None = field(init=False, default=None)
    effects: BuiltEffects = field(init=False, default=NOTHING)
    may_be_settled: bool = field(init=False, default=False)
    """Its handler has settled it in its own transaction; only the database knows whether that was committed."""
    late: int = field(init=False, default=0)
    """Effects that were added since then."""

    async def ack(self, value: Any, tx: Any) -> Landed:
        """Settle the job as done, with its effects, in its handler's transaction."""
        if self.stop is Stop.GONE:
            raise ClaimLost([self.claim.id])
        home = self.home
        done = Done(self.task.codec.encode_result(value, home.max_result), self.effects)
        settlement = settle(self.claim, done, home.ran(self))
        # Before it is written: from then on the claim may be gone because we have ended it.
        self.may_be_settled, self.late = True, 0
        landed: Landings = {}
        if lost := await home.store.settle([settlement], tx=tx, landed=landed):
            raise ClaimLost(lost)
        return landed_of(settlement.effects, landed.get(self.claim.id))

    def add(self, enqueue: Sequence[Call[Any]], put: Mapping[str, Any], delete: Sequence[str]) -> None:
        """Let these effects land with the job. Those that cannot be stored are refused at once: the handler notices."""
        more = built_effects(enqueue, put, delete, self.home.build, self.home.max_result)
        if self.may_be_settled:
            self.late += len(more.jobs) + len(more.puts) + len(more.deletes)
        before = self.effects
        self.effects = BuiltEffects(
            (*before.jobs, *more.jobs),
            {**{key: value for key, value in before.puts.items() if key not in more.deletes}, **more.puts},
            (*(key for key in before.deletes if key not in more.puts), *more.deletes),
        )


class RunTimes:
    """How long the runs of each task take, as seen by one worker."""

    def __init__(self) -> None:
        self._last: dict[str, deque[int]] = {}

    def note(self, task: str, ran: int) -> None:
        times = self._last.get(task)
        if times is None:
            times = self._last[task] = deque(maxlen=REMEMBERED)
        times.append(ran)

    def usual(self, task: str) -> int | None:
        """What 95 of the last 100 runs of a task took at most; `None` if none has ended yet."""
        times = sorted(self._last.get(task, ()))
        return times[int(USUAL * (len(times) - 1))] if times else None

    def long_after(self, task: Task[..., Any], at_least: int) -> int:
        """How long a run may take before it is called long: three times the usual time, at least `at_least`, and at
        most its timeout. If no run has ended yet, the timeout says what its author expects."""
        usual, timeout = self.usual(task.name), task.timeout
        if usual is None:
            return at_least if timeout is None else timeout
        after = max(at_least, FAR_BEYOND * usual)
        return after if timeout is None else min(after, timeout)


def settlement_of(run: RunningJob, outcome: RunOutcome, ran: int) -> Settlement:
    """What an outcome means for a job that ran, also if its effects should be refused."""
    settlement = settle(run.claim, outcome, ran)
    if settlement.error is not None and (redact := run.task.producer.redact) is not None:
        redactor = Redactor((redact,), Audience(Surface.WORKER))
        settlement = msgspec.structs.replace(settlement, error=redactor.error(settlement.error, run.claim))
    if settlement.effects is None:
        return settlement
    is_last = run.claim.attempt >= run.claim.max_attempts
    retry_after = None if is_last else run.task.options.backoff.delay(run.claim.attempt, 0.5)
    return msgspec.structs.replace(settlement, late_effects=run.late, retry_after=retry_after)


LONGEST_ERROR = 8_000
"""Characters of an error that are kept; the end of a traceback says more than its beginning."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
RUNTIME = tuple(os.path.join(_PACKAGE, folder, "") for folder in ("worker", "testing", "forward"))
"""The code that calls handlers: its frames are of no use to a user."""


class Stop(Enum):
    """Why a run was asked to stop before its handler had ended."""

    CANCELLED = "the job was cancelled while it ran"
    TIMEOUT = "the job ran longer than its timeout"
    GONE = "the job's claim was lost: it may run elsewhere"
    SHUTDOWN = "worker shut down"


def outcome_of(run: RunningJob, error: BaseException, now: Instant) -> RunOutcome | None:
    """The outcome of a handler that raised; `None` where nothing is left to settle. `now` is the store's clock."""
    match run.stop:
        case Stop.GONE:
            return None
        case Stop.CANCELLED:
            return Cancelled(Stop.CANCELLED.value)
        case Stop.TIMEOUT:
            after = (run.task.timeout or 0) / SECOND
            return _failed(run, TimeoutError(), f"TimeoutError: {Stop.TIMEOUT.value} of {after:g} s")
        case Stop.SHUTDOWN if not isinstance(error, Signal) or isinstance(error, Cancel):
            # Interrupted by us, not by a fault of its own: it keeps its place, and the attempt counts as a lost one.
            return Interrupted(Stop.SHUTDOWN.value)
    if not isinstance(error, Signal):
        return _failed(run, error, describe(error))
    try:
        return _signalled(run, error, now)
    except FairlaneError as nonsense:
        return _failed(run, nonsense, storable(f"the handler raised {error!r}: {nonsense}"))


def _signalled(run: RunningJob, signal: Signal, now: Instant) -> RunOutcome:
    reason = storable(str(signal))
    match signal:
        case Snooze(delay=delay):
            return Snoozed(reason, bounded(microseconds(delay)))
        case Retry(at=at) if at is not None:
            return Retried(reason, bounded(as_instant(at) - now))
        case Retry(delay=delay) if delay is not None:
            return Retried(reason, bounded(microseconds(delay)))
        case Retry():
            return Retried(reason, _backoff(run))
        case Cancel():
            return Cancelled(reason)
        case Dead():
            return Died(reason)
    return _failed(run, signal, describe(signal))


def bounded(delay: int) -> int:
    """A delay that a job can have, in microseconds; `InvalidJob` if it is too long."""
    if delay > LONGEST_DELAY:
        raise InvalidJob("a delay of more than a hundred years")
    return max(0, delay)


def _failed(run: RunningJob, error: BaseException, text: str) -> RunOutcome:
    options = run.task.options
    if isinstance(error, options.dead_on):
        return Died(text)
    # A handler's own CancelledError or SystemExit is no Exception, and yet a failure like any other.
    if isinstance(error, options.retry_on) or not isinstance(error, Exception):
        return Failed(text, _backoff(run))
    return Died(text)


def _backoff(run: RunningJob) -> int:
    return run.task.options.backoff.delay(run.claim.attempt, random.random())


def storable(text: str) -> str:
    """Text that every database accepts: without NUL or half a surrogate pair."""
    return text.replace("\x00", "\N{SYMBOL FOR NULL}").encode(errors="replace").decode()


def summary(error: BaseException) -> str:
    """What was raised, without its secrets. It may have several lines."""
    if isinstance(error, Signal):
        return without_secrets(storable(str(error)))
    if isinstance(error, asyncio.CancelledError):
        return "CancelledError: the handler was cancelled by itself or by something it awaited"
    try:
        return without_secrets(storable("".join(traceback.format_exception_only(error)).strip()))
    except Exception:  # an error whose own text raises
        return type(error).__name__


def describe(error: BaseException) -> str:
    """The error in one line, then where it came from."""
    first = summary(error)
    frames = "".join(traceback.format_tb(users_frames(error.__traceback__)))
    # Before it is cut: half of a secret would not be recognized.
    text = without_secrets(storable(f"{first}\n\n{frames}".rstrip()))
    if len(text) <= LONGEST_ERROR:
        return text
    return f"{first[: LONGEST_ERROR // 2]}\n…\n{text[-LONGEST_ERROR // 2 :]}"


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the runtime that called the handler."""
    frames = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(RUNTIME):
            frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


T = TypeVar("T")

current_run: ContextVar[RunningJob] = ContextVar("fairlane_run")


def context() -> JobContext:
    """The job that is running here: in its handler, in tasks the handler started, and in a thread's handler."""
    run = current_run.get(None)
    if run is None:
        raise ConfigurationError("no job is running here; context() works inside a task that a worker runs")
    return JobContext(run)


class JobContext:
    """The running job, seen from its handler."""

    __slots__ = ("_run",)

    def __init__(self, run: RunningJob) -> None:
        self._run = run

    @property
    def id(self) -> UUID:
        return self._run.claim.id

    @property
    def attempt(self) -> int:
        """Counts from 1."""
        return self._run.claim.attempt

    @property
    def max_attempts(self) -> int:
        return self._run.claim.max_attempts

    @property
    def keys(self) -> Mapping[str, str | None]:
        return self._run.claim.keys

    @property
    def queue(self) -> str:
        return self._run.claim.queue

    @property
    def task(self) -> str:
        return self._run.claim.task

    @property
    def cancelled(self) -> bool:
        """The job should stop: it was cancelled, timed out, was lost to another worker, or its worker shuts down."""
        return self._run.stop is not None

    def raise_if_cancelled(self) -> None:
        """For handlers in threads, which nobody can interrupt: call this from time to time."""
        if self._run.stop is not None:
            raise Cancel(self._run.stop.value)

    def enqueue(self, *calls: Call[Any]) -> None:
        """Store these calls as jobs when this one is done, in the same transaction; never if it is not."""
        self._run.add(calls, {}, ())

    def put(self, key: str, value: Any) -> None:
        """Set a value of the key-value store when this job is done, in the same transaction."""
        self._run.add((), {checked_key(key): value}, ())

    def delete(self, key: str) -> None:
        """Remove a key of the key-value store when this job is done, in the same transaction."""
        self._run.add((), {}, [key])

    async def ack(self, result: Any = None, *, tx: Any) -> Landed:
        """End this job as done in your own transaction `tx`: it is done, with this result and its effects, when you
        commit. Returns what became of each effect. Raises `ClaimLost` if the job may run elsewhere: roll back.

        After a rollback the job goes on and ends as its handler does. After a commit it has ended, whatever the handler
        returns or raises.
        """
        return await self._run.ack(result, tx)

    def ack_sync(self, result: Any = None, *, tx: Any) -> Landed:
        """`ack` for a handler in a thread, which uses its connection in that thread."""
        return self._blocking(self.ack(result, tx=tx))

    @checked(any_text=["message"])
    async def progress(self, fraction: float, message: str = "") -> None:
        """Note how far the job is, from 0 to 1. A database that cannot be reached does not fail the job."""
        if not 0 <= fraction <= 1:
            raise ConfigurationError(
                f"progress: fraction={fraction!r} does not lie between 0 and 1; give one that does"
            )
        run = self._run
        try:
            await run.home.store.run(records.report_progress(run.claim, float(fraction), storable(message) or None))
        except StoreUnavailable as error:
            run.home.log.warning("job %s: its progress was not noted: %s", run.claim.id, error)

    def progress_sync(self, fraction: float, message: str = "") -> None:
        """`progress` for a handler in a thread."""
        self._blocking(self.progress(fraction, message))

    def _blocking(self, work: Coroutine[Any, Any, T]) -> T:
        home = self._run.home
        if threading.get_ident() == home.thread:
            raise refuse_inside_a_loop(work)
        caller = CallerThread()
        return caller.wait_for(caller.submit(work, home.loop))


Next = Callable[[], Awaitable[Any]]
"""Runs what is inside, and returns what the task returned."""
Enqueue = Callable[[Sequence[Call[Any]]], Awaitable[Enqueued[Any]]]
"""Stores calls, and returns a handle for each."""


class Middleware:
    """Goes around runs and enqueues. Override what you need; what was added to the app first is the outermost."""

    async def around_run(self, job: JobContext, run: Next) -> Any:
        """Around one attempt, in the event loop, wherever the task itself runs. What this raises ends the attempt as if
        the task had raised it; what it returns is the job's result."""
        return await run()

    async def around_enqueue(self, calls: Sequence[Call[Any]], enqueue: Enqueue) -> Enqueued[Any]:
        """Around one enqueue, of one call or of many. You may pass on other calls (`call.using(…)`), but as many as
        were given."""
        return await enqueue(calls)


def wrapping(middlewares: Sequence[Middleware], method: Literal["around_run", "around_enqueue"]) -> list[Middleware]:
    return [each for each in middlewares if getattr(type(each), method) is not getattr(Middleware, method)]


async def around_run(middlewares: Sequence[Middleware], job: JobContext, run: Next) -> Any:
    """Run inside all of these, the first of them outermost."""
    for each in reversed(middlewares):
        run = partial(each.around_run, job, run)
    return await run()


async def around_enqueue(
    middlewares: Sequence[Middleware], calls: Sequence[Call[Any]], enqueue: Enqueue
) -> Enqueued[Any]:
    """Enqueue inside all of these, the first of them outermost."""
    for each in reversed(middlewares):
        enqueue = partial(_through, each, enqueue)
    return await enqueue(calls)


async def _through(middleware: Middleware, inside: Enqueue, calls: Sequence[Call[Any]]) -> Enqueued[Any]:
    return await middleware.around_enqueue(calls, inside)


AT_ONCE = 1_000


class Settling:
    """Records outcomes in the database, in batches."""

    def __init__(self, store: Store, outage: Outage, watching: Watching | None = None) -> None:
        self._store = store
        self._outage = outage
        self._watching = watching if watching is not None and watching.is_wanted else None
        self._pending: list[Settlement] = []
        self._in_flight: Sequence[Settlement] = ()
        self._arrived = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._queues: set[QueueSlots] = set()
        self._tried: set[UUID] = set()
        self._sent: set[UUID] = set()
        """Sent before, without an answer from the database."""
        self._landed: Landings = {}
        """Conflicts of follow-ups, including those of a try whose answer was lost: it may have landed."""
        self._most = AT_ONCE
        self.given_up = 0
        self.refused: Counter[str] = Counter()
        """Attempts that succeeded but whose effects were refused, by what became of their jobs."""
        self._loop = asyncio.get_running_loop()

    def count_unsettled(self) -> int:
        return len(self._pending) + len(self._in_flight)

    def add(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        """`may_be_settled`: its handler has settled it in its own transaction, which may have been committed."""
        self._pending.append(settlement)
        if may_be_settled:
            self._tried.add(settlement.job)
        self._queues.add(queue)
        if len(self._pending) == 1:
            self._arrived.set()
            self._empty.clear()

    def leases(self) -> set[UUID]:
        """Leases that must not end before their settlements have landed."""
        return {each.lease for each in self._pending} | {each.lease for each in self._in_flight}

    async def all_settled(self) -> None:
        await self._empty.wait()

    def let_go(self, leases: Collection[UUID]) -> None:
        """These leases are gone: nothing that the database refused so far can be recorded under them any more."""
        kept = []
        for each in self._pending:
            if each.lease in leases and each.job in self._sent:
                self._sent.discard(each.job)
                self._landed.pop(each.job, None)
                words = (
                    ": its outcome (%s) could not be recorded before its lease was gone; unless an answer of the "
                    "database was lost, it runs again"
                )
                log_job(log, logging.ERROR, each.job, words, each.outcome)
            else:
                kept.append(each)
        self._pending = kept
        self._note_if_empty()

    async def run(self, execution: Execution | None = None, slots: Slots | None = None) -> None:
        """Record outcomes, waiting for others that are about to end in this execution. The queues of these slots are
        asked again: a settlement may have opened a limit."""
        self._put_back()  # what an earlier run of this loop had in hand
        self._most = AT_ONCE
        refusals = 0
        while True:
            await self._arrived.wait()
            if execution is not None:
                # More will have ended in the next turns of the event loop: one settlement of many is cheaper than many.
                while execution.is_filling and len(self._pending) < AT_ONCE:  # noqa: ASYNC110 - every turn brings more
                    await asyncio.sleep(0)
                if (rest := execution.rest) > 0:
                    await asyncio.sleep(rest)
            self._in_flight, self._pending = self._pending[: self._most], self._pending[self._most :]
            queues, began = set(self._queues), self._loop.time()
            if not self._pending:
                self._queues.clear()
            jobs = {each.job for each in self._in_flight}
            try:
                await self._record(self._in_flight, was_tried=not jobs.isdisjoint(self._tried | self._sent))
            except StoreUnavailable:
                self._queues |= queues
                self._put_back()
                refusals += 1
                await asyncio.sleep(back_off(refusals))
                continue
            refusals, self._most = 0, min(self._most * 2, AT_ONCE)
            self._tried -= jobs
            self._sent -= jobs
            if self._watching is not None:
                self._watching.settled(len(self._in_flight), self._loop.time() - began)
            self._in_flight = ()
            self._note_if_empty()
            if slots is not None:
                slots.look_after_settling(queues)

    def _put_back(self) -> None:
        """Keep outcomes until they are recorded: in smaller batches, and refused ones behind the others, so that one
        that the database refuses does not hold up the rest for ever."""
        self._sent.update(each.job for each in self._in_flight)
        self._most = max(1, len(self._in_flight) // 2)
        self._pending = [*self._pending, *self._in_flight]
        self._in_flight = ()

    def _note_if_empty(self) -> None:
        if not self._pending and not self._in_flight:
            self._arrived.clear()
            self._empty.set()

    async def record(self, settlement: Settlement, *, was_tried: bool = False) -> None:
        """Record one outcome outside the loop, however long the database is away."""
        refusals = 0
        while True:
            try:
                await self._record([settlement], was_tried=was_tried)
            except StoreUnavailable:
                was_tried = True
                self._sent.add(settlement.job)
                refusals += 1
                await asyncio.sleep(back_off(refusals))
            else:
                self._sent.discard(settlement.job)
                return

    async def _record(self, batch: Sequence[Settlement], *, was_tried: bool = False) -> None:
        """Try to record a batch. What the database refuses for good is only logged. Raises `StoreUnavailable` if the
        batch is to be tried again."""
        try:
            lost = await self._outage.once(
                lambda: self._store.settle(batch, is_repeated=was_tried, landed=self._landed), "settling"
            )
        except StoreUnavailable:
            raise
        except Exception as error:
            if len(batch) > 1:
                # One bad apple: the others must not be lost with it. Some of them may have landed.
                for each in batch:
                    await self._record([each], was_tried=True)
            else:
                await self._refused(batch[0], error, was_tried=was_tried)
            return
        for each in batch:
            conflicts = self._landed.pop(each.job, None)
            if each.job not in lost and (conflicts or each.late_effects):
                self._tell_of_effects(each, conflicts)
        doubtful = self._sent.intersection(lost)
        if self._watching is not None and (late := [job for job in lost if job not in doubtful]):
            self._watching.claims_lost(late, "settled late")
        for job in lost:
            if job in doubtful:
                words = ": recorded just before the connection broke, or its claim is lost"
                log_job(log, logging.WARNING, job, words)
            else:
                words = ": ClaimLost: taken over before it was settled; its outcome is not recorded"
                log_job(log, logging.ERROR, job, words)

    async def _refused(self, settlement: Settlement, error: Exception, *, was_tried: bool) -> None:
        """The database refuses it for good. If its effects are to blame, the attempt is recorded as failed instead."""
        self._landed.pop(settlement.job, None)
        if not isinstance(error, InvalidJob) or not settlement.effects:
            self.given_up += 1
            words = ": its outcome (%s) could not be recorded; it runs again when its lease has ended"
            log_job(log, logging.CRITICAL, settlement.job, words, settlement.outcome, error=error)
            return
        instead = settlement.if_effects_refused(f"its effects were refused: {error_text(error)}")
        is_dead = instead.to is State.DEAD
        self.refused["dead" if is_dead else "to be retried"] += 1
        then = "the job is dead" if is_dead else f"next attempt in {lasting((instead.delay or 0) / SECOND)}"
        words = ": its effects were refused, so this attempt has failed; %s: %s"
        log_job(log, logging.ERROR, settlement.job, words, then, error)
        await self._record([instead], was_tried=was_tried)

    def _tell_of_effects(self, settlement: Settlement, conflicts: dict[UUID, Conflict] | None) -> None:
        """Log effects that were not stored: the handler has returned, so it cannot be raised there."""
        if conflicts is None:
            words = ": %d effects were not stored: they were added after the job was settled in a transaction"
            log_job(log, logging.WARNING, settlement.job, words, settlement.late_effects)
            return
        missing = landed_of(settlement.effects, conflicts).not_stored
        for each in missing:
            level = logging.WARNING if each.outcome is Outcome.REFUSED else logging.INFO
            words = ": its follow-up (%s) was not stored (%s): job %s holds its unique key"
            log_job(log, level, settlement.job, words, each.task, each.outcome, each.job)
        if missing and self._watching is not None:
            self._watching.tell(FollowUpsNotStored, job=settlement.job, follow_ups=tuple(missing))
