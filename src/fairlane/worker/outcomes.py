"""What a run's end means: what the handler raised, and why it was stopped, become an outcome."""

from __future__ import annotations

import asyncio
import os
import random
import traceback
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

from fairlane.clock import SECOND, Instant, as_instant, microseconds
from fairlane.errors import Cancel, Dead, FairlaneError, InvalidJob, Retry, Signal, Snooze
from fairlane.redaction import without_secrets
from fairlane.scheduler.settlement import Cancelled, Died, Failed, Interrupted, Outcome, Retried, Snoozed
from fairlane.task import LONGEST_DELAY

if TYPE_CHECKING:
    from fairlane.worker.runs import RunningJob

__all__ = ["LONGEST_ERROR", "Stop", "bounded", "describe", "outcome_of", "storable", "summary", "users_frames"]

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
