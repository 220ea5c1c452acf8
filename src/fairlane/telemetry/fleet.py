"""Figures of the whole fleet, from the database: looked up when somebody asks, and at most every ten seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic

from fairlane.telemetry.metrics import CATALOGUE, Failures, Labels, Metrics, as_text

Figures = Mapping[str, Iterable[tuple[Labels, float]]]
"""The values of fleet metrics, by their name."""
FleetSource = Callable[[int], Awaitable[Figures]]
"""Tells them; it is given how many keys to name."""

LOOKED_UP_EVERY = 10.0
FOUND_WITHIN = 5.0
FORGOTTEN_AFTER = 60.0
"""Seconds after which figures that could not be looked up again are no longer told: old ones lie."""

FLEET = tuple(metric.name for metric in CATALOGUE.values() if metric.scope == "fleet")


class Fleet:
    """What the database says of all workers and queues, kept for a moment."""

    def __init__(self, source: FleetSource, failures: Failures, keys: int) -> None:
        self._source = source
        self._keys = keys
        self._failures = failures
        self._figures: Figures = {}
        self._looked_at = self._found_at = -FORGOTTEN_AFTER
        self._looking = asyncio.Lock()

    def attach(self, metrics: Metrics) -> Callable[[], None]:
        """Let these metrics tell of it, until what is returned is called."""
        removals = [metrics.read(name, lambda name=name: self.value_of(name)) for name in FLEET]  # type: ignore[misc]

        def detach() -> None:
            for remove in removals:
                remove()

        return detach

    async def refresh(self) -> None:
        """Look again, unless somebody has just done so. It never raises."""
        async with self._looking:
            if monotonic() - self._looked_at < LOOKED_UP_EVERY:
                return
            self._looked_at = monotonic()
            try:
                async with asyncio.timeout(FOUND_WITHIN):
                    self._figures = await self._source(self._keys)
                self._found_at = monotonic()
            except Exception as error:
                self._failures.note("collector", "looking up the figures of the fleet failed", error)

    async def text(self) -> str:
        """All that is known now, for a scraper."""
        await self.refresh()
        return as_text((CATALOGUE[name], found) for name in FLEET if (found := self.value_of(name)))

    def value_of(self, name: str) -> list[tuple[Labels, float]]:
        is_old = monotonic() - self._found_at > FORGOTTEN_AFTER
        return [] if is_old else list(self._figures.get(name, ()))
