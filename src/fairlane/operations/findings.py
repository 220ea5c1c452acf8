"""What is wrong, or worth knowing, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    FAULT = "fault"
    """Jobs stand still, are lost in a crash, or run otherwise than somebody thinks."""
    WARNING = "warning"
    """It works now, and may not for long."""
    NOTE = "note"
    """Perhaps on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that was found, and what to do about it."""

    check: str
    queue: str | None
    """`None`: it is about the database, or about a worker."""
    message: str
    remedy: str
    level: Level = Level.FAULT

    @property
    def words(self) -> str:
        """The message, with the queue that it is about."""
        return self.message if self.queue is None else f"{self.queue}: {self.message}"


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first."""
    order = list(Level)
    return sorted(findings, key=lambda each: order.index(each.level))
