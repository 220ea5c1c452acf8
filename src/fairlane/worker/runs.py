"""One run of a job: what its handler sees, what is put around it, and what its outcome means."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Instant, as_instant, microseconds
from fairlane.effects import Effects, checked_key, landed_of
from fairlane.enqueue import Stamp, stamped_effects
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
from fairlane.handle import Enqueued
from fairlane.job import Claim, Landed, StampedEffects
from fairlane.loop_thread import CallerThread, refuse_inside_a_loop
from fairlane.parameters import checked
from fairlane.redaction import Audience, Redactor, Surface, without_secrets
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Interrupted,
    Outcome,
    Retried,
    Settlement,
    Snoozed,
    settle,
)
from fairlane.store import records
from fairlane.store.protocol import Landings, Store
from fairlane.task import LONGEST_DELAY, Call, Task

NOTHING = StampedEffects()
REMEMBERED = 100
"""Runs of a task whose times are kept."""
USUAL = 0.95
"""The share of them that take no longer than what is called usual."""
FAR_BEYOND = 3
"""How many times the usual a run may take before it is called long."""


class Home(Protocol):
    """What a job that runs asks of whatever runs it: a worker, or an engine's process."""

    store: Store
    loop: asyncio.AbstractEventLoop
    thread: int
    """Where the loop runs."""
    log: logging.Logger
    max_result: int
    stamp: Stamp

    def ran(self, run: Any, /) -> int:
        """Microseconds since its handler was called."""
        ...


class RunningJob:
    """One claim whose handler has been called, or is about to be."""

    __slots__ = ("args", "claim", "effects", "home", "kwargs", "late", "may_be_settled", "started_at", "stop", "task")

    def __init__(self, home: Home, claim: Claim, task: Task[..., Any], args: Any, kwargs: Any) -> None:
        self.home = home
        self.claim = claim
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.started_at = 0
        """By the monotonic clock; 0 until user code begins."""
        self.stop: Stop | None = None
        self.effects = NOTHING
        self.may_be_settled = False
        """Its handler has settled it in a transaction of its own; only the database knows whether that committed."""
        self.late = 0
        """Effects that were added since."""

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

    def add(self, given: Effects) -> None:
        """Let these land with the job. Refused at once if they cannot be stored: the handler hears of it."""
        more = stamped_effects(given, self.home.stamp, self.home.max_result)
        if self.may_be_settled:
            self.late += len(more.jobs) + len(more.puts) + len(more.deletes)
        before = self.effects
        self.effects = StampedEffects(
            (*before.jobs, *more.jobs),
            {**{key: value for key, value in before.puts.items() if key not in more.deletes}, **more.puts},
            (*(key for key in before.deletes if key not in more.puts), *more.deletes),
        )


class RunTimes:
    """How long the runs of each task take, as far as one worker has seen."""

    def __init__(self) -> None:
        self._last: dict[str, deque[int]] = {}

    def note(self, task: str, ran: int) -> None:
        times = self._last.get(task)
        if times is None:
            times = self._last[task] = deque(maxlen=REMEMBERED)
        times.append(ran)

    def usual(self, task: str) -> int | None:
        """What 95 of the last 100 runs of a task took at most; `None`: none has ended yet."""
        times = sorted(self._last.get(task, ()))
        return times[int(USUAL * (len(times) - 1))] if times else None

    def long_after(self, task: Task[..., Any], at_least: int) -> int:
        """How long a run may take before it is called long: three times the usual, and `at_least` so long; but no
        longer than its timeout. Where nothing is known, the timeout is its author's word on it."""
        usual, timeout = self.usual(task.name), task.timeout
        if usual is None:
            return at_least if timeout is None else timeout
        after = max(at_least, FAR_BEYOND * usual)
        return after if timeout is None else min(after, timeout)


def settlement_of(run: RunningJob, outcome: Outcome, ran: int) -> Settlement:
    """What an outcome means for a job that ran, also if its effects should be refused."""
    settlement = settle(run.claim, outcome, ran)
    if settlement.error is not None and (redact := run.task.producer.redact) is not None:
        redactor = Redactor((redact,), Audience(Surface.WORKER))
        settlement = msgspec.structs.replace(settlement, error=redactor.error(settlement.error, run.claim))
    if settlement.effects is None:
        return settlement
    refused = Failed("its effects were refused", run.task.options.backoff.delay(run.claim.attempt, 0.5))
    return msgspec.structs.replace(settlement, late_effects=run.late, fallback=settle(run.claim, refused, ran))


LONGEST_ERROR = 8_000
"""Characters of an error that are kept; the end of a traceback says more than its beginning."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
RUNTIME = tuple(os.path.join(_PACKAGE, folder, "") for folder in ("worker", "testing", "forward"))
"""Where the code lives that calls handlers: its frames tell a user nothing."""


class Stop(Enum):
    """Why a run was asked to stop before its handler had ended."""

    CANCELLED = "the job was cancelled while it ran"
    TIMEOUT = "the job ran longer than its timeout"
    GONE = "the job's claim was lost: it may run elsewhere"
    SHUTDOWN = "worker shut down"


def outcome_of(run: RunningJob, error: BaseException, now: Instant) -> Outcome | None:
    """The outcome of a handler that raised; `None` where nothing is left to settle. `now` is the store's clock."""
    match run.stop:
        case Stop.GONE:
            return None
        case Stop.CANCELLED:
            return Cancelled(Stop.CANCELLED.value)
        case Stop.TIMEOUT:
            return _timed_out(run)
        case Stop.SHUTDOWN if not isinstance(error, Signal) or isinstance(error, Cancel):
            # Interrupted by us, not by a fault of its own: it keeps its place, and the attempt counts as a lost one.
            return Interrupted(Stop.SHUTDOWN.value)
    if not isinstance(error, Signal):
        return _failed(run, error, describe(error))
    try:
        return _signalled(run, error, now)
    except FairlaneError as nonsense:
        return _failed(run, nonsense, storable(f"the handler raised {error!r}: {nonsense}"))


def _signalled(run: RunningJob, signal: Signal, now: Instant) -> Outcome:
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
    """A delay that a job can have, in microseconds."""
    if delay > LONGEST_DELAY:
        raise InvalidJob("a delay of more than a hundred years")
    return max(0, delay)


def _failed(run: RunningJob, error: BaseException, text: str) -> Outcome:
    options = run.task.options
    if isinstance(error, options.dead_on):
        return Died(text)
    # A handler's own CancelledError or SystemExit is no Exception, and yet a failure like any other.
    if isinstance(error, options.retry_on) or not isinstance(error, Exception):
        return Failed(text, _backoff(run))
    return Died(text)


def _timed_out(run: RunningJob) -> Outcome:
    after = (run.task.timeout or 0) / SECOND
    return _failed(run, TimeoutError(), f"TimeoutError: {Stop.TIMEOUT.value} of {after:g} s")


def _backoff(run: RunningJob) -> int:
    return run.task.options.backoff.delay(run.claim.attempt, random.random())


def storable(text: str) -> str:
    """Text that every database takes: neither NUL nor half a surrogate pair."""
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
    # Before it is cut: half of a secret could not be told from other text.
    text = without_secrets(storable(f"{first}\n\n{frames}".rstrip()))
    if len(text) <= LONGEST_ERROR:
        return text
    return f"{first[: LONGEST_ERROR // 2]}\n…\n{text[-LONGEST_ERROR // 2 :]}"


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the runtime that called the handler, its middlewares included."""
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
        self._run.add(Effects(enqueue=calls))

    def put(self, key: str, value: Any) -> None:
        """Set a value of the key-value store when this job is done, in the same transaction."""
        self._run.add(Effects(put={checked_key(key): value}))

    def delete(self, key: str) -> None:
        """Remove a key of the key-value store when this job is done, in the same transaction."""
        self._run.add(Effects(delete=[key]))

    async def ack(self, result: Any = None, *, tx: Any) -> Landed:
        """End this job as done in your own transaction `tx`: it is done, with this result and its effects, when you
        commit. `ClaimLost`: it may run elsewhere; roll back. Returned is what became of each effect.

        After a rollback the job goes on, and ends as its handler does. After the commit it has ended, whatever the
        handler returns or raises.
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
        with CallerThread() as caller:
            running = asyncio.run_coroutine_threadsafe(work, home.loop)
        return caller.wait_for(running)


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
        """Around one enqueue: of one call, or of a bulk. The calls handed on may be others (`call.using(…)`), as many
        as were given."""
        return await enqueue(calls)


def wrapping_runs(middlewares: Sequence[Middleware]) -> list[Middleware]:
    """Those that have something to do with a run."""
    return [each for each in middlewares if type(each).around_run is not Middleware.around_run]


def wrapping_enqueues(middlewares: Sequence[Middleware]) -> list[Middleware]:
    """Those that have something to do with an enqueue."""
    return [each for each in middlewares if type(each).around_enqueue is not Middleware.around_enqueue]


async def around_run(middlewares: Sequence[Middleware], job: JobContext, run: Next) -> Any:
    """Run through all of these, the first of them outermost."""

    async def step(nth: int) -> Any:
        if nth == len(middlewares):
            return await run()
        return await middlewares[nth].around_run(job, lambda: step(nth + 1))

    return await step(0)


async def around_enqueue(
    middlewares: Sequence[Middleware], calls: Sequence[Call[Any]], enqueue: Enqueue
) -> Enqueued[Any]:
    """Enqueue through all of these, the first of them outermost."""

    async def step(nth: int, given: Sequence[Call[Any]]) -> Enqueued[Any]:
        if nth == len(middlewares):
            return await enqueue(given)
        return await middlewares[nth].around_enqueue(given, lambda passed: step(nth + 1, passed))

    return await step(0, calls)
