"""Whether a worker is well, and what it is doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A worker at one moment. `is_well` is False as soon as one of its loops has died."""

    is_well: bool
    is_connected: bool
    is_stopping: bool
    loops: Mapping[str, str]
    """Each loop by name: `running`, `ended`, or what it died of."""
    running: int
    waiting: int
    unsettled: int
    telemetry_failures: int = 0
    """What went wrong with event handlers, metrics and traces. No job is the worse for it."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """What fails now without harm to any job, by name: figures that are not kept, reports that do not get through."""
