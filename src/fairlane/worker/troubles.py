"""What goes wrong in loops that nobody's job depends on. It is told, counted and shown, and stops nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from fairlane.redaction import error_text

__all__ = ["Troubles"]

log = logging.getLogger("fairlane.worker")

T = TypeVar("T")


class Troubles:
    """By loop, what it fails with now, and how often it has failed."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self.failures: Counter[str] = Counter()

    @property
    def now(self) -> Mapping[str, str]:
        return dict(self._now)

    async def endure(self, name: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """What the call brings; `None` where it fails. It is logged when that starts and when it ends."""
        try:
            result = await call()
        except Exception as error:
            self.note(name, error)
            return None
        self.clear(name)
        return result

    def note(self, name: str, error: Exception) -> None:
        """It fails."""
        self.failures[name] += 1
        if name not in self._now:
            log.error("%s fails (%s); jobs go on, trying again", name, error, exc_info=error)
        self._now[name] = error_text(error)

    def tell(self, name: str, words: str) -> None:
        """Something is amiss that no error says."""
        if name not in self._now:
            log.warning("%s: %s", name, words)
        self._now[name] = words

    def clear(self, name: str, words: str | None = None) -> None:
        """It does not, or no more; `words` say so."""
        if self._now.pop(name, None) is not None:
            log.warning("%s", words or f"{name} works again")
