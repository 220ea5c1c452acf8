"""Listening: the worker's one ear for nudges, opened again whenever it is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from fairlane.errors import StoreUnavailable
from fairlane.store.protocol import Listener, Store, WorkerIdentity
from fairlane.waits import Outage
from fairlane.worker.claiming import Claiming

__all__ = ["Listening"]


class Listening:
    """Passes nudges on to the claimer, to whoever looks for cancellations, and to whoever fires schedules."""

    def __init__(
        self, store: Store, identity: WorkerIdentity, claiming: Claiming, outage: Outage, on_nudge: Callable[[], None]
    ) -> None:
        self._store = store
        self._identity = identity
        self._claiming = claiming
        self._outage = outage
        self._on_nudge = on_nudge
        self.on_schedules: Callable[[], None] = lambda: None

    async def run(self) -> None:
        while True:
            listener = await self._outage.ride_out(lambda: self._store.listen(self._identity), "listening")
            self._claiming.listener = listener
            # Whatever came while nobody listened is found by asking; the claim registers the new ear.
            self._claiming.look_everywhere()
            self.on_schedules()
            try:
                await self._hear(listener)
            finally:
                self._claiming.listener = None
                await self._close(listener)

    async def _hear(self, listener: Listener) -> None:
        while True:
            try:
                nudged = await listener.wait(None)
            except StoreUnavailable:
                return
            if nudged:
                if listener.schedules_changed():
                    self.on_schedules()
                self._on_nudge()
                self._claiming.nudge()

    async def _close(self, listener: Listener) -> None:
        # If that fails, its registrations go with the first nudge that finds nobody.
        with contextlib.suppress(StoreUnavailable):
            await listener.close()
