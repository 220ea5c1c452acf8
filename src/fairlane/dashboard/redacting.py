"""What may be seen of what a job carries, by the rule that the dashboard was given."""

from __future__ import annotations

import logging
from typing import Any

from fairlane.job import JobRecord
from fairlane.operations import Redact

__all__ = ["redacted"]

log = logging.getLogger("fairlane.dashboard")


def redacted(redact: Redact | None, job: JobRecord, payload: Any) -> Any:
    """What may be seen. Where that cannot be said, it is nothing."""
    if redact is None or payload is None:
        return payload
    try:
        return redact(job, payload)
    except Exception:
        log.exception("redact failed for job %s", job.id)
        return "(hidden: redact failed, the log of the dashboard says why)"
