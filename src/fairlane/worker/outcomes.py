"""What a run's end means: what the handler raised, and why it was stopped, become an outcome."""

from __future__ import annotations

import asyncio
import random
import traceback
from enum import Enum
from typing import TYPE_CHECKING

from fairlane.clock import SECOND, Instant, as_instant, microseconds
from fairlane.errors import Cancel, Dead, FairlaneError, Retry, Signal, Snooze
from fairlane.scheduler.settlement import Cancelled, Died, Failed, Lost, Outcome, Retried, Snoozed

if TYPE_CHECKING:
    from fairlane.worker.execution import Run

__all__ = ["LONGEST_ERROR", "Stop", "describe", "outcome_of"]

LONGEST_ERROR = 8_000
"""Characters of an error that are kept; the end of a traceback says more than its beginning."""


class Stop(Enum):
    """Why a run was asked to stop before its handler had ended."""

    CANCELLED = "the job was cancelled while it ran"
    TIMEOUT = "the job ran longer than its timeout"
    GONE = "the job's claim was lost: it may run elsewhere"
    SHUTDOWN = "worker shut down"


def outcome_of(run: Run, error: BaseException, now: Instant) -> Outcome | None:
    """The outcome of a handler that raised; `None` where there is nothing left to settle. `now` is the store's."""
    match run.stop:
        case Stop.GONE:
            return None
        case Stop.CANCELLED:
            return Cancelled(Stop.CANCELLED.value)
        case Stop.TIMEOUT:
            return _timed_out(run)
        case Stop.SHUTDOWN if not isinstance(error, Signal) or isinstance(error, Cancel):
            # Interrupted by us, not by a fault of its own: it keeps its place, and the attempt counts as a lost one.
            return Lost(Stop.SHUTDOWN.value)
    try:
        return _signalled(run, error, now) if isinstance(error, Signal) else _failed(run, error, describe(error))
    except FairlaneError as nonsense:
        return _failed(run, nonsense, f"the handler raised {error!r}: {nonsense}")


def _signalled(run: Run, signal: Signal, now: Instant) -> Outcome:
    match signal:
        case Snooze(delay=delay):
            return Snoozed(str(signal), max(0, microseconds(delay)))
        case Retry(at=at) if at is not None:
            return Retried(str(signal), max(0, as_instant(at) - now))
        case Retry(delay=delay) if delay is not None:
            return Retried(str(signal), max(0, microseconds(delay)))
        case Retry():
            return Retried(str(signal), _backoff(run))
        case Cancel():
            return Cancelled(str(signal))
        case Dead():
            return Died(str(signal))
    return _failed(run, signal, describe(signal))


def _failed(run: Run, error: BaseException, text: str) -> Outcome:
    options = run.task.options
    if isinstance(error, options.dead_on):
        return Died(text)
    # A handler's own CancelledError or SystemExit is no Exception, and yet a failure like any other.
    if isinstance(error, options.retry_on) or not isinstance(error, Exception):
        return Failed(text, _backoff(run))
    return Died(text)


def _timed_out(run: Run) -> Outcome:
    after = (run.task.timeout or 0) / SECOND
    return _failed(run, TimeoutError(), f"TimeoutError: {Stop.TIMEOUT.value} of {after:g} s")


def _backoff(run: Run) -> int:
    return run.task.options.backoff.delay(run.claim.attempt, random.random())


def describe(error: BaseException) -> str:
    """The error in one line, then where it came from."""
    try:
        summary = "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # an error whose own text raises
        summary = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        summary = "CancelledError: the handler was cancelled by itself or by something it awaited"
    # The first frame is ours.
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    frames = "".join(traceback.format_tb(trace))
    text = f"{summary}\n\n{frames}".rstrip()
    if len(text) <= LONGEST_ERROR:
        return text
    return f"{summary[: LONGEST_ERROR // 2]}\n…\n{text[-LONGEST_ERROR // 2 :]}"
