"""What went wrong with telemetry itself: it never stops a job, and it does not hide either."""

from __future__ import annotations

import logging
from collections import Counter

from fairlane.redaction import error_text

log = logging.getLogger("fairlane.telemetry")

REASONS = ("handler", "dropped", "trace", "export", "collector", "endpoint")
"""An event handler raised, was too slow; a span, an exporter, a look at figures, an answer to a scraper failed."""


class Failures:
    """Counts failures by reason. The first of a kind is logged, then the 10th, the 100th and so on."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self._kinds: Counter[tuple[str, str, str]] = Counter()

    @property
    def total(self) -> int:
        return self.by_reason.total()

    def note(self, reason: str, what: str, error: BaseException | None = None, count: int = 1) -> None:
        """`what` names the thing that failed."""
        assert reason in REASONS, reason
        self.by_reason[reason] += count
        kind = (reason, what, "" if error is None else type(error).__name__)
        before = self._kinds[kind]
        self._kinds[kind] += count
        if len(str(before)) == len(str(before + count)) and before:
            return
        told = "" if error is None else f": {error_text(error)}"
        log.error("%s (%s, %d so far; jobs go on)%s", what, reason, before + count, told, exc_info=error)
