"""The worker's log: what it says about jobs, and its JSON format.

Facts come first in a message and what a program said comes last, so that an error's text cannot pass for a fact.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fairlane.clock import SECOND, Instant, as_datetime, lasting, measured
from fairlane.errors import Signal, UndecodablePayload
from fairlane.job import Claim, State
from fairlane.redaction import exception_text, json_text, without_secrets, without_secrets_in
from fairlane.scheduler.settlement import Settlement
from fairlane.worker.runs import Stop, current_run, log_job, summary, users_frames

if TYPE_CHECKING:
    from fairlane.worker.runs import RunningJob


LONGEST_REASON = 500
"""Characters of an error in a message; the traceback has the rest."""

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "claim", "job"}
_ENDINGS = {"retry": "asked for a retry", "dead": "failed for good"}
_NEWS = ("snoozed", "cancelled")
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


# What is said about jobs.


def log_start(run: RunningJob, log: logging.Logger) -> None:
    """A handler is about to be called."""
    claim = run.claim
    log_job(log, logging.DEBUG, claim, " attempt %d of %d started", claim.attempt, claim.max_attempts)


def claimed_jobs(count: int) -> str:
    """The subject of a sentence about claims that were given back."""
    return "1 claimed job was" if count == 1 else f"{count:,} claimed jobs were"


def log_end(
    run: RunningJob, settlement: Settlement, error: BaseException | None, now: Instant, log: logging.Logger
) -> None:
    """How an attempt ended and what becomes of its job; `now` is the store's."""
    claim = run.claim
    # What the app redacts is only seen redacted: as the settlement has it.
    if run.task.producer.redact is not None:
        error = None
    # An error raised because we stopped the run says nothing. The settlement says why we did.
    reason = summary(error) if error is not None and run.stop is None else settlement.error or ""
    level, then = logging.INFO if settlement.outcome in _NEWS else logging.WARNING, ""
    fields: dict[str, Any] = {"max_attempts": claim.max_attempts, "outcome": settlement.outcome}
    fields |= {"state": str(settlement.to), "ran_ms": round(settlement.ran / 1_000, 3)}
    match settlement.to:
        case State.DONE:
            level, then = logging.DEBUG, f" in {measured(settlement.ran / SECOND)}"
        case State.DEAD:
            level, then = logging.ERROR, ", the job is dead"
        case State.READY:
            then = ", the job is ready again"
        case State.SCHEDULED:
            delay = (settlement.delay or 0) / SECOND
            at = as_datetime(now + (settlement.delay or 0))
            wait = lasting(delay) if delay >= 1 else measured(delay)
            then = f", next attempt in {wait} ({at:{'%H:%M:%S' if delay < 86_400 else '%Y-%m-%d %H:%M'}} UTC)"
            fields["next_attempt_at"] = at.isoformat()
    said = f"{_ENDINGS.get(settlement.outcome, settlement.outcome)}{then}{f': {_first_line(reason)}' if reason else ''}"
    trace = _worth_a_traceback(run, settlement, error)
    words = " attempt %d of %d %s"
    log_job(log, level, claim, words, claim.attempt, claim.max_attempts, said, error=trace, **fields)


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    if len(line) > LONGEST_REASON or len(line) < len(text.strip()):
        return f"{line[:LONGEST_REASON].rstrip()} …"
    return line


def _worth_a_traceback(run: RunningJob, settlement: Settlement, error: BaseException | None) -> _ExcInfo | None:
    """What was raised, without our own frames; for a signal that a handler raised, its cause."""
    if error is None or settlement.outcome in _NEWS or run.stop not in (None, Stop.TIMEOUT):
        return None
    found: BaseException | None = error
    if isinstance(error, Signal):
        found = error.__cause__ or error.__context__
    if found is None:
        return None
    for each in _chain(found):
        each.__traceback__ = users_frames(each.__traceback__)
    return type(found), found, found.__traceback__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def log_lost(claim: Claim, log: logging.Logger) -> None:
    """A run goes on in vain."""
    log_job(log, logging.ERROR, claim, ": ClaimLost: %s; nothing of this run is recorded", Stop.GONE.value)


def log_unreadable(claim: Claim, error: UndecodablePayload, log: logging.Logger) -> None:
    log_job(log, logging.ERROR, claim, " is set aside as dead: %s", error)


# The format.


class JsonLines(logging.Formatter):
    """Each record as a JSON object: `time`, `level`, `logger`, `message`, `worker`, and the job it is about, or that
    was running where it was written.

    Values that a program gives as `extra=` are included, with secrets removed.
    """

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
            "worker": self._worker,
            **_about(record),
        }
        if exception := exception_text(record):
            line["exception"] = exception
        if record.stack_info:
            line["stack"] = without_secrets(record.stack_info)
        for name, value in vars(record).items():
            if name not in _PLAIN:
                line.setdefault(without_secrets(name), without_secrets_in(value, name))
        return json_text(line)


def _about(record: logging.LogRecord) -> dict[str, Any]:
    """The job that a record is about: the one that it names, or else the one that runs here."""
    claim = getattr(record, "claim", None)
    job = getattr(record, "job", None)
    if not isinstance(claim, Claim):
        run = current_run.get(None)
        if run is None or (job is not None and job != run.claim.id):
            return {} if job is None else {"job": str(job)}
        claim = run.claim
    return {
        "job": str(claim.id),
        "queue": claim.queue,
        "task": claim.task,
        "keys": claim.keys,
        "attempt": claim.attempt,
    }
