"""How often somebody may guess a token."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from fairlane.clock import SECOND, Clock, Instant

__all__ = ["Throttle"]

WINDOW = 60 * SECOND
OF_ONE_ADDRESS = 5
OF_ALL = 60
MOST_ADDRESSES = 1_000


@dataclass(slots=True)
class _Failures:
    since: Instant
    count: int = 0


class Throttle:
    """Counts wrong tokens by address and over all, a minute at a time. It remembers a bounded number of addresses."""

    def __init__(self, clock: Clock, *, of_one_address: int = OF_ONE_ADDRESS, of_all: int | None = OF_ALL) -> None:
        self._clock = clock
        self._of_one_address = of_one_address
        self._of_all = of_all
        self._all = _Failures(clock.monotonic())
        self._addresses: OrderedDict[str, _Failures] = OrderedDict()

    def wait(self, address: str) -> int:
        """Seconds until this address may try again; 0: now."""
        now = self._clock.monotonic()
        ends = [
            failures.since + WINDOW
            for failures, most in (
                (self._all, self._of_all),
                (self._addresses.get(address), self._of_one_address),
            )
            if failures is not None and most is not None and failures.count >= most and failures.since + WINDOW > now
        ]
        return -(-(max(ends) - now) // SECOND) if ends else 0

    def failed(self, address: str) -> None:
        now = self._clock.monotonic()
        known = self._addresses.pop(address, None) or _Failures(now)
        for failures in (self._all, known):
            if failures.since + WINDOW <= now:
                failures.since, failures.count = now, 0
            failures.count += 1
        self._addresses[address] = known
        while len(self._addresses) > MOST_ADDRESSES:
            self._addresses.popitem(last=False)
