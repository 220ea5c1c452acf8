"""The dispatcher: a worker that publishes what it claims."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, lasting, microseconds
from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.forward.forwarder import Forwarder, Unpublishable
from fairlane.job import Claim
from fairlane.policy.partitions import whole_of
from fairlane.scheduler.settlement import Cancelled, Died, Released, settle
from fairlane.scheduler.snapshot import Pace
from fairlane.store import records
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.stats_values import PUBLISHING, unbegun_in
from fairlane.task import Task
from fairlane.waits import Outage, jittered, pause
from fairlane.worker.claims import QueueSlots
from fairlane.worker.execution import NO_PACES, Execution, Run
from fairlane.worker.options import WorkerOptions
from fairlane.worker.runs import Stop, summary
from fairlane.worker.runtime import Program, Warnings
from fairlane.worker.worker import Worker

log = logging.getLogger("fairlane.forward")

LONGEST_ROUND = timedelta(seconds=10)
"""The longest time between two checks of published messages."""


class Dispatcher(Worker):
    """Publishes the jobs of some queues, in this process."""

    def __init__(self, forwarder: Forwarder, program: Program, options: WorkerOptions) -> None:
        self._forwarder = forwarder
        super().__init__(program, options)

    @property
    def publishing(self) -> Publishing:
        return cast(Publishing, self._execution)

    def _identify(self, name: str) -> WorkerIdentity:
        return WorkerIdentity.of_dispatcher(name)

    def _executes(self) -> Callable[..., Execution]:
        return partial(Publishing, self._forwarder, self.warnings)

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
        return ""  # the workers of the engine run what it publishes

    def _tell_what_is_left(self) -> None:
        super()._tell_what_is_left()
        # Threads that wait for the broker would keep the process from exiting.
        self.left_running += len(self._forwarder.unanswered)


class Dispatching:
    """Makes dispatchers for a forwarder, as an app makes workers."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def worker(self, options: WorkerOptions | None = None) -> Dispatcher:
        """A dispatcher for the queues of this forwarder, or for those that are named."""
        forwarder, app = self._forwarder, self._forwarder.app
        if not forwarder.forwarded:
            raise ConfigurationError(f"{forwarder!r} forwards no task; declare one with forwarder.task(…, queue=…)")
        own = list(dict.fromkeys(each.task.queue for each in forwarder.forwarded.values()))
        options = replace((options or WorkerOptions()).serving(own), prefetch=0)
        queues = [share.name for share in options.shares]
        for queue in queues:
            others = [task.name for task in app.registry.of_queue(queue) if task.name not in forwarder.forwarded]
            if others:
                raise ConfigurationError(
                    f"queue {queue!r} has tasks that {forwarder!r} does not forward ({', '.join(others)}): their jobs "
                    "would never run; give them a queue of their own"
                )
        store = await app.opened()
        for name in () if forwarder.unbounded else queues:
            found = await store.policy(name)
            # Everything that waits would move to the engine's broker.
            if found is not None and not any(limit.counts_in_flight and not limit.by for limit in found.policy.limits):
                raise ConfigurationError(
                    f"queue {name!r} has no limit on what the engine holds at once, so that all that waits would move "
                    f"to its broker, where no policy can see it; give it Concurrency(n) or AdaptiveConcurrency() "
                    f"without `by`, or say unbounded=True"
                )
        return await app.make_worker(partial(Dispatcher, forwarder), options)

    async def close(self) -> None:
        await self._forwarder.close()
        await self._forwarder.app.close()


FIRST_PAUSE, LONGEST_PAUSE = SECOND // 10, 30 * SECOND
"""How long to pause after the broker refused a message."""
FIRST_DELAY, LONGEST_DELAY = SECOND, 60 * SECOND
"""The delay of a job that a reachable broker has refused more than once: it may be the message."""
REFUSALS_REMEMBERED = 10_000
QUIET = LONGEST_PAUSE
"""After this time without a refusal, the broker counts as well even if nothing was published."""
UNBEGUN = 60 * SECOND
"""How long messages of a queue may lie at the broker, and none begin, before a warning."""
NAMED = 3
"""How many tasks a warning names."""

Carried = Mapping[UUID, tuple[str | None, int]]
"""The stored context of each job, and how often its engine has retried it."""


class _Published(msgspec.Struct):
    """A message that is not known to have been adopted."""

    run: Run
    times: int
    first_at: int
    """When it was first published, by the monotonic clock."""
    again_at: int
    """When to publish it again."""


class Publishing(Execution):
    """What a dispatcher does with its claims. The only argument of its runs is what their messages carry."""

    sets_suspects_apart = False
    """It runs nothing: isolating suspects is up to the engine."""

    keeps_pace = False
    """When a message is taken from the broker is up to the engine."""

    calls_handlers = False
    """Handlers run in the workers of the engine."""

    def __init__(self, forwarder: Forwarder, warnings: Warnings, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.forwarder = forwarder
        self.warnings = warnings
        self._published: dict[UUID, _Published] = {}
        self._reading: asyncio.Future[Carried] | None = None
        """What the messages of the last claims carry."""
        self._refusals: OrderedDict[UUID, int] = OrderedDict()
        self._begun_at: dict[str, int] = {}
        """When a job of the queue was last seen to have begun."""
        self._begun_up_to: dict[str, int] = {}
        """When the latest message that has begun was published, by queue."""
        self._refused_at = 0
        self._pause = 0
        self._is_pausing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        # Jobs of another engine, or of native workers, are not ours to publish.
        find = self._find
        self._find = lambda name: find(name) if name in self.forwarder.forwarded else None

    # From claim to broker.

    def start(
        self, queue: QueueSlots, claims: Sequence[Claim], begin_by: int, paces: Mapping[UUID, Pace] = NO_PACES
    ) -> None:
        if claims:
            self._reading = asyncio.ensure_future(self._read_carried([claim.id for claim in claims]))
            # Each of its jobs gets an error. If none is left that waits for it, the error does not matter.
            self._reading.add_done_callback(lambda read: read.cancelled() or read.exception())
        super().start(queue, claims, begin_by, paces)

    def _decoded(self, task: Task[..., Any], claim: Claim) -> tuple[Any, Any]:
        return (self._reading,), {}  # its arguments are decoded where it runs

    async def _read_carried(self, jobs: Sequence[UUID]) -> Carried:
        contexts, retries = await self.store.run(records.contexts(jobs)), await self.store.run(records.retries(jobs))
        return {job: (contexts.get(job), retries.get(job, 0)) for job in jobs}

    async def _publish(self, claim: Claim, carried: Carried) -> None:
        await self.forwarder.publish(self.forwarder.message(claim, *carried[claim.id]))

    async def _body(self, run: Run) -> None:
        try:
            # Shielded: the whole batch waits for it. Until it is read, nothing has begun, and claims can be released.
            carried = await asyncio.shield(run.args[0])
        except Exception as error:
            log.exception("job %s (%s): what its message carries could not be read", run.claim.id, run.claim.task)
            reason = f"what its message carries could not be read: {summary(error)}"
            self._end(run, Released(reason, self._delay_of(run.claim.id)))
            return
        if not self._begins(run):
            return
        try:
            await self._publish(run.claim, carried)
        except Unpublishable as error:
            self._end(run, Died(str(error)), error)
        except Exception as error:
            self._refused(error)
            self._end(run, Released(f"broker refused: {summary(error)}", self._delay_of(run.claim.id)))
        except BaseException:
            # Stopped in the middle of publishing: it is not known whether the broker has the message.
            self._keep(run)
            raise
        else:
            self._accepted()
            self._refusals.pop(run.claim.id, None)
            self._keep(run)

    def _keep(self, run: Run) -> None:
        """It is published: free its slot, and hold its claim until it is adopted."""
        self._let_go(run)
        run.handle = None
        if run.stop is Stop.CANCELLED:
            self._cancel(run)
        elif run.stop is None:
            now = self._now()
            self._published[run.claim.id] = _Published(run, 1, now, now + self._patience(1))
        self._refill()

    def _patience(self, times: int) -> int:
        return jittered(microseconds(self.forwarder.republish_after) << min(times - 1, 10))

    # A broker that refuses.

    def _refused(self, error: Exception) -> None:
        self._note_refusal(error)
        if self._is_pausing is None:
            self._pause = min(max(FIRST_PAUSE, self._pause * 2), LONGEST_PAUSE)
            self._slots.is_paused = True
            self._is_pausing = self.loop.create_task(self._wait_for_broker(), name="fairlane-broker")
            self.loop.call_soon(self.give_back_unstarted, f"broker refused: {summary(error)}")

    def _delay_of(self, job: UUID) -> int:
        """None at first, so that it keeps its place. Then growing, so that others get past one that is never taken."""
        seen = self._refusals.pop(job, 0)
        self._refusals[job] = seen + 1
        if len(self._refusals) > REFUSALS_REMEMBERED:
            self._refusals.popitem(last=False)
        return min(FIRST_DELAY << min(seen - 1, 20), LONGEST_DELAY) if seen else 0

    async def _wait_for_broker(self) -> None:
        while True:
            await pause(self._clock, jittered(self._pause))
            try:
                await self.forwarder.reach()
            except Exception as error:
                self._note_refusal(error)
                self._refusals.clear()  # the messages were not at fault
                self._pause = min(self._pause * 2, LONGEST_PAUSE)
            else:
                break
        self._is_pausing = None
        self._slots.is_paused = False
        self.publish_again_soon()
        self._slots.note_freed()

    def _note_refusal(self, error: Exception) -> None:
        self.warnings.note(PUBLISHING, error)
        self._refused_at = self._now()

    def _accepted(self) -> None:
        if self._is_pausing is None and self._pause:
            self._pause = 0
            self.warnings.clear(PUBLISHING)

    def publish_again_soon(self) -> None:
        """The broker was away and may have lost messages: publish again what is not adopted. At once the first time,
        then with growing pauses: a broker that refuses now and then must not be flooded with copies."""
        for each in self._published.values():
            wait = 0 if each.times == 1 else SECOND << min(each.times, 20)
            each.again_at = min(each.again_at, self._now() + wait)

    # What was published.

    async def follow(self, outage: Outage, every: int) -> None:
        """Look after what was published, until cancelled."""
        while True:
            await pause(self._clock, jittered(every))
            await self.look_after(outage)

    async def look_after(self, outage: Outage) -> None:
        """Forget messages that were adopted; publish again those that are overdue."""
        known = list(self._published.values())
        asked = records.held([(each.run.claim.id, each.run.claim.lease) for each in known])
        held = set(await outage.ride_out(lambda: self.store.run(asked), "following messages")) if known else set()
        for each in known:
            if each.run.claim.id not in held:
                self._forget(each)
            elif each.again_at <= self._now() and not self._slots.is_paused and not self._slots.is_closed:
                await self._publish_again(each)
        self._warn_of_unbegun()
        if self._now() - self._refused_at > QUIET:
            self._accepted()

    def _forget(self, published: _Published) -> None:
        """A worker of the engine has begun it."""
        queue = whole_of(published.run.claim.queue)
        self._published.pop(published.run.claim.id, None)
        self._begun_at[queue] = self._now()
        self._begun_up_to[queue] = max(published.first_at, self._begun_up_to.get(queue, 0))

    def _warn_of_unbegun(self) -> None:
        """Warn of messages that lie at the broker while none of their queue begins: nobody consumes it, or all workers
        are busy. If only one of the engine's own queues is stuck, later messages overtake those in it. A message that
        is overtaken may also be lost, and is published once more."""
        now = self._now()
        waiting: dict[str, list[_Published]] = {whole_of(name): [] for name in self._slots.queues}
        for each in self._published.values():
            waiting.setdefault(whole_of(each.run.claim.queue), []).append(each)
        for queue, lying in waiting.items():
            begun = self._begun_up_to.get(queue, 0)
            overtaken = [each for each in lying if each.first_at <= now - UNBEGUN and each.first_at < begun]
            for each in overtaken:
                if each.times == 1:
                    each.again_at = now
            since = max(min((each.first_at for each in lying), default=now), self._begun_at.get(queue, 0))
            if now - since >= UNBEGUN:
                stuck = lying
                words = f"no worker of the engine has begun one for {lasting((now - since) / SECOND)}: none consumes "
                words += "the queue, or all are busy"
            elif overtaken:
                stuck = overtaken
                tasks = sorted({each.run.claim.task for each in overtaken})
                words = "later ones have begun: no worker consumes the engine's queue for them, or they wait behind a "
                words += f"long job ({', '.join(tasks[:NAMED])}{', …' if len(tasks) > NAMED else ''})"
            else:
                self.warnings.clear(unbegun_in(queue), "no more")
                continue
            many = "1 job is" if len(stuck) == 1 else f"{len(stuck):,} jobs are"
            oldest = lasting((now - min(each.first_at for each in stuck)) / SECOND)
            self.warnings.tell(unbegun_in(queue), f"{many} at the broker, the oldest for {oldest}, and {words}")

    async def _publish_again(self, published: _Published) -> None:
        claim = published.run.claim
        log.warning("job %s (%s) was published and not begun; publishing it again", claim.id, claim.task)
        published.times += 1
        published.again_at = self._now() + self._patience(published.times)
        try:
            await self._publish(claim, await self._read_carried([claim.id]))
        except Exception as error:
            published.again_at = self._now()
            if not isinstance(error, StoreUnavailable):
                self._refused(error)

    # What a worker asks of its execution.

    def held(self) -> list[Run]:
        return [*super().held(), *(each.run for each in self._published.values())]

    @property
    def is_holding(self) -> bool:
        return bool(self.running or self._published)

    def misses(self, run: Run) -> bool:
        return run.claim.id not in self._published  # otherwise it was adopted, as it should be

    def interrupt(self, run: Run, reason: Stop) -> None:
        published = self._published.get(run.claim.id)
        if published is None or published.run is not run:
            if reason is Stop.CANCELLED or (reason is Stop.GONE and run.started_at):
                # It is just being published. If it is gone, a worker was faster than the answer of the broker.
                run.stop = run.stop or reason
            else:
                super().interrupt(run, reason)
        elif reason is Stop.CANCELLED:
            del self._published[run.claim.id]
            self._cancel(run)
        elif reason is Stop.GONE:
            # It was adopted, as it should be.
            self._forget(published)

    def _cancel(self, run: Run) -> None:
        """Cancel it here if no worker of the engine has begun it. If one has, it learns of the cancellation itself."""

        async def cancel() -> None:
            try:
                await self.store.settle([settle(run.claim, Cancelled("cancelled before it ran"), 0)])
            except Exception as error:
                log.warning(
                    "job %s: could not be cancelled at the broker: %s; its message will be", run.claim.id, error
                )

        task = self.loop.create_task(cancel(), name="fairlane-cancel")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _stop_overdue(self) -> None:
        """The engine's own time limits apply."""

    async def leave_to_messages(self) -> None:
        """The dispatcher stops: hold the claims of published messages for as long as it would have waited for them."""
        leases = sorted({each.run.claim.lease for each in self._published.values()})
        if leases:
            await self.store.renew(leases, max(self.forwarder.republish_after, timedelta(seconds=1)))
            log.info(
                "published jobs not known to have begun: %d; they are left to their messages", len(self._published)
            )

    def close(self) -> None:
        if self._is_pausing is not None:
            self._is_pausing.cancel()
        super().close()
