"""Logs as JSON: one object a line. What is logged while a job runs, by whomever, says which job that was."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from fairlane.job import Claim
from fairlane.worker.context import current_run

__all__ = ["JsonLines"]

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "claim", "job"}


class JsonLines(logging.Formatter):
    """Each record as a JSON object: `time`, `level`, `logger`, `message`, `worker`, and of a job what it is.

    What a program gives as `extra=` is in it too.
    """

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "worker": self._worker,
            **_about(record),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            told["exception"] = record.exc_text
        if record.stack_info:
            told["stack"] = self.formatStack(record.stack_info)
        for name, value in vars(record).items():
            if name not in _PLAIN:
                told.setdefault(name, value)
        return json.dumps(told, default=str, ensure_ascii=False)


def _about(record: logging.LogRecord) -> dict[str, Any]:
    """The job that a record is about: the one that it names, else the one that runs here."""
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
