"""The dispatcher: a worker that publishes what it claims."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

from fairlane.clock import microseconds
from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.forward.forwarder import Forwarder
from fairlane.forward.publishing import Publishing
from fairlane.policy.policy import Policy
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.worker.execution import Execution
from fairlane.worker.options import WorkerOptions
from fairlane.worker.worker import Worker

__all__ = ["Dispatcher", "Dispatching"]

log = logging.getLogger("fairlane.forward")

LONGEST_ROUND = timedelta(seconds=10)
"""Between two looks at what was published."""


class Dispatcher(Worker):
    """Publishes the jobs of some queues, in this process."""

    def __init__(self, forwarder: Forwarder, *given: Any, **named: Any) -> None:
        self._forwarder = forwarder
        super().__init__(*given, **named)
        publishing = self.publishing
        publishing.engine = forwarder
        publishing.forwarded = forwarder.forwarded
        publishing.republish_after = forwarder.republish_after
        publishing.troubles = self.troubles

    @property
    def publishing(self) -> Publishing:
        return cast(Publishing, self._execution)

    def _identify(self, name: str) -> WorkerIdentity:
        return WorkerIdentity.of_dispatcher(name)

    def _executes(self) -> Callable[..., Execution]:
        return Publishing

    def _start_loops(self) -> None:
        super()._start_loops()
        every = min(self.options.time("lease") / 3, self._forwarder.republish_after / 2, LONGEST_ROUND)
        self._supervisor.start("messages", self.publishing.follow(self._outage, microseconds(every)))

    async def _before_closing(self) -> None:
        try:
            await self.publishing.leave_to_messages()
        except StoreUnavailable as error:
            log.warning("what was published could not be left to its messages: %s; it may be published again", error)

    def _what_it_ran(self) -> str:
        return ""  # the engine's workers run what it publishes

    def _tell_what_is_left(self) -> None:
        super()._tell_what_is_left()
        # Threads that wait for a broker would keep the process from ending.
        self.left_running += len(self._forwarder.unanswered)


class Dispatching:
    """What runs a dispatcher, as an app runs a worker."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def worker(self, options: WorkerOptions | None = None) -> Dispatcher:
        """A dispatcher for the queues of this forwarder, or for those of them that are named."""
        forwarder, app = self._forwarder, self._forwarder.app
        if not forwarder.forwarded:
            raise ConfigurationError(f"{forwarder!r} forwards no task; declare one with forwarder.task(…, queue=…)")
        own = list(dict.fromkeys(each.task.queue for each in forwarder.forwarded.values()))
        options = replace((options or WorkerOptions()).serving(own), prefetch=0)
        for share in options.shares:
            _check_tasks(forwarder, share.name)
        store = await app.opened()
        if not forwarder.unbounded:
            await _check_limits(store, [share.name for share in options.shares])

        def make(*given: Any, **named: Any) -> Dispatcher:
            return Dispatcher(forwarder, *given, **named)

        return cast(Dispatcher, await app.make_worker(make, options))

    async def close(self) -> None:
        await self._forwarder.close()
        await self._forwarder.app.close()


def _check_tasks(forwarder: Forwarder, queue: str) -> None:
    others = [task.name for task in forwarder.app.registry.of_queue(queue) if task.name not in forwarder.forwarded]
    if others:
        raise ConfigurationError(
            f"queue {queue!r} has tasks that {forwarder!r} does not forward ({', '.join(others)}): their jobs would "
            f"wait in vain; give them a queue of their own"
        )


async def _check_limits(store: Store, queues: Sequence[str]) -> None:
    """How many jobs the engine holds at once is a limit of the queue, like any other; without one, it is all."""
    for name in queues:
        found = await store.policy(name)
        if found is not None and not _is_bounded(found.policy):
            raise ConfigurationError(
                f"queue {name!r} has no limit on what the engine holds at once, so that all that waits would move to "
                f"its broker, where no policy can see it; give it Concurrency(n) or AdaptiveConcurrency() without "
                f"`by`, or say unbounded=True"
            )


def _is_bounded(policy: Policy) -> bool:
    return any(limit.counts_in_flight and not limit.by for limit in policy.limits)
