"""The engine's side: a message is delivered; its job is adopted, run and settled.

Of all messages with the same token, the first to be delivered adopts the job: the claim moves from the dispatcher to a
new lease of this process. Later messages find the token stale and are skipped. While jobs run here, one heartbeat
renews all their leases.

Blocking engines call the `_sync` forms, from any thread; the work is done in the app's background loop, which is opened
after a fork and never inherited. Async engines await the other forms, in the one event loop of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import SECOND, microseconds
from fairlane.enqueue import BuildJob
from fairlane.errors import InvalidJob, JobNotFound, UndecodablePayload
from fairlane.job import State
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Released,
    Retried,
    RunOutcome,
    Settlement,
    settle,
)
from fairlane.store.protocol import Adopted, Store, WorkerIdentity
from fairlane.task import Task
from fairlane.waits import Outage, StoreTime, pause
from fairlane.worker.logs import log_end, log_lost, log_unreadable
from fairlane.worker.reports import Watching
from fairlane.worker.runs import (
    RunningJob,
    Settling,
    Stop,
    bounded,
    current_run,
    outcome_of,
    settlement_of,
    storable,
    summary,
)
from fairlane.worker.worker import name_of_process

if TYPE_CHECKING:
    from fairlane.app import App

log = logging.getLogger("fairlane.forward")

T = TypeVar("T")

HEADER = "fairlane"
"""The name of the header, option or label that carries the token."""
UNKNOWN_DELAY = 30 * SECOND
"""The delay of a job that was delivered to a process that does not know its task."""


class Token(msgspec.Struct, frozen=True):
    """A job and its lease. Of all messages with the same token, the first to be delivered runs."""

    job: UUID
    lease: UUID

    def __str__(self) -> str:
        return f"{self.job}/{self.lease}"

    @classmethod
    def parse(cls, text: object) -> Token:
        """The token in this text, or `InvalidJob`."""
        job, _, lease = str(text).partition("/")
        try:
            return cls(UUID(job), UUID(lease))
        except ValueError:
            raise InvalidJob(
                f"{str(text)[:80]!r} is not the token of a forwarded job: its message was written by others"
            ) from None


class Delivery(RunningJob):
    """A message whose job runs in this process, until it is settled."""

    __slots__ = ("handle", "kept_at", "lag", "process", "retry_in", "was_sent_again")

    def __init__(
        self, home: _Process, adopted: Adopted, kept_at: int, task: Task[..., Any], args: Any, kwargs: Any
    ) -> None:
        super().__init__(home, adopted.claim, task, args, kwargs)
        self.process = home
        self.lag = max(0, adopted.at.now - adopted.claim.claimed_at)
        """Microseconds from claim to adoption."""
        self.kept_at = kept_at
        """When its lease was last requested or renewed, by the monotonic clock."""
        self.handle: asyncio.Task[Any] | None = None
        """The task that runs it, in an async engine: cancelled if the claim is lost or the job is cancelled."""
        self.retry_in: timedelta | None = None
        """The engine has decided to retry it after this delay."""
        self.was_sent_again = False
        """The engine has sent it again with other arguments, as a separate job."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within this block, `fairlane.context()` is about this job."""
        before = current_run.set(self)
        try:
            yield
        finally:
            current_run.reset(before)


class Deliveries:
    """The deliveries of one forwarder in a process of the engine."""

    def __init__(self, app: App, lease: timedelta) -> None:
        self._app = app
        self._lease = lease
        self._here: _Process | None = None
        self._outage = Outage()
        self._ending: set[asyncio.Future[Any]] = set()
        self.retryable: dict[str, Delivery] = {}
        """Deliveries in this process that the engine may retry, by the text of their tokens."""
        self._message: ContextVar[tuple[str, Any] | None] = ContextVar("message", default=None)

    # Which message this thread or asyncio task processes, for engines that show it to a middleware.

    def processes(self, name: str, message: Any) -> None:
        """Record the message that is processed here, for this task of the engine; `None` if it is not forwarded."""
        self._message.set((name, message))

    def take(self, name: str | None = None) -> Any | None:
        """The message that is processed here, if it is one for that task of the engine; once."""
        found = self._message.get()
        self._message.set(None)
        return found[1] if found is not None and name in (None, found[0]) else None

    # Begin: the job is ours, or there is nothing to do.

    async def begin(self, token: Token | str, tasks: Sequence[str], *, cancellable: bool = False) -> Delivery | None:
        """Adopt the job of a message for one of these tasks, if that is possible. `None`: skip the message and let the
        engine acknowledge it; whatever had to be recorded has been. `InvalidJob`: the message was written by others,
        and nothing has changed. `cancellable`: cancel the current asyncio task if the job is cancelled or lost while it
        runs. If the caller is cancelled before this returns, the job has failed."""
        interrupted: Future[BaseException] = Future()
        handle = asyncio.current_task() if cancellable else None
        try:
            return await self._to_its_end(self._begin(token, tasks, handle, interrupted))
        except asyncio.CancelledError:
            interrupted.set_result(TimeoutError("the engine broke it off before it began, for a time limit or to stop"))
            raise

    async def _begin(
        self,
        token: Token | str,
        tasks: Sequence[str],
        handle: asyncio.Task[Any] | None,
        interrupted: Future[BaseException],
    ) -> Delivery | None:
        """`interrupted` gets the error of a caller that was interrupted: then the heartbeat must not hold the job for
        ever."""
        token = token if isinstance(token, Token) else Token.parse(token)
        here = await self._process()
        found = await here.adopt(token, tasks)
        if found is None and (other := await here.task_of(token.job)) is not None and other not in tasks:
            if self._app.registry.find(other) is not None:
                raise InvalidJob(
                    f"job {token.job} is one of {other!r}, and its token came with a message for {tasks[0]!r}, which "
                    f"was written by others; it is refused, and the job waits for its own"
                )
            found = await here.adopt(token, [other])
        if found is None:
            log.info(
                "job %s: this message is stale: it was delivered before, or its claim has ended; skipped", token.job
            )
            return None
        adopted, asked_at = found
        claim = adopted.claim
        task = self._app.registry.find(claim.task)
        outcome: RunOutcome
        if claim.cancel_requested:
            outcome = Cancelled("cancelled before it ran")
        elif task is None:
            log.error("job %s: no task named %r here; deploy it to this engine's workers", claim.id, claim.task)
            outcome = Released(f"no task named {claim.task!r} on the engine's worker that was given it", UNKNOWN_DELAY)
        else:
            try:
                args, kwargs = task.codec.decode_call(claim.payload)
            except UndecodablePayload as error:
                log_unreadable(claim, error, log)
                outcome = Died(str(error))
            else:
                delivery = Delivery(here, adopted, asked_at, task, args, kwargs)
                delivery.handle = handle
                if await here.start(delivery):
                    interrupted.add_done_callback(lambda error: self._abandon(delivery, error.result()))
                    return delivery
                return None
        await here.settling.record(settle(claim, outcome, 0))
        return None

    def _abandon(self, delivery: Delivery, error: BaseException) -> None:
        """The caller was interrupted: by a time limit of the engine, perhaps (the job has failed), or asked to stop (it
        is lost)."""
        is_lost = isinstance(error, SystemExit | KeyboardInterrupt)
        asyncio.run_coroutine_threadsafe(self.failed(delivery, error, is_lost=is_lost), delivery.process.loop)

    # End: exactly one of these is called.

    async def done(self, delivery: Delivery, value: Any) -> None:
        """Its function has returned. Durable when this returns. If the claim was lost, nothing is recorded."""
        try:
            result = delivery.task.codec.encode_result(value, self._app.max_payload)
        except InvalidJob as error:
            await self.failed(delivery, error)
        else:
            await delivery.process.end(delivery, Done(result, delivery.effects))

    async def failed(
        self, delivery: Delivery, error: BaseException, *, is_final: bool = False, is_lost: bool = False
    ) -> State | None:
        """Its function has raised: the outcome is decided as on native workers. `is_final`: the engine does not retry
        this, so a failure ends the job. `is_lost`: its process was asked to stop, which is not a failure of the job; it
        runs again when its lease expires, as if the process had been killed. Not at once: the engine may be about to
        report that it ended the job itself, by its time limit or because it was revoked. Signals such as `Retry` mean
        what they always mean. Returns the new state of the job; `None` if nothing is recorded."""
        outcome: RunOutcome | None = outcome_of(delivery, error, delivery.process.time.wall())
        if isinstance(outcome, Failed) and (is_lost or is_final):
            outcome = None if is_lost else Died(outcome.error)
        settlement = await delivery.process.end(delivery, outcome, error)
        return None if settlement is None else settlement.to

    async def retried(self, delivery: Delivery, reason: str, delay: timedelta) -> None:
        """The engine has decided to retry it after this delay: the job goes back to its queue and gives up its slot. It
        counts as an attempt; only the engine's own limit bounds the number of retries."""
        again = Retried(storable(reason), bounded(microseconds(delay)), is_bounded=False)
        await delivery.process.end(delivery, again)

    # The same for engines that block.

    def begin_sync(self, token: Token | str, tasks: Sequence[str]) -> Delivery | None:
        interrupted: Future[BaseException] = Future()
        try:
            return self._blocking(self._begin(token, tasks, None, interrupted))
        except BaseException as error:
            interrupted.set_result(error)
            raise

    def done_sync(self, delivery: Delivery, value: Any) -> None:
        self._blocking(self.done(delivery, value))

    def failed_sync(
        self, delivery: Delivery, error: BaseException, *, is_final: bool = False, is_lost: bool = False
    ) -> State | None:
        return self._blocking(self.failed(delivery, error, is_final=is_final, is_lost=is_lost))

    def retried_sync(self, delivery: Delivery, reason: str, delay: timedelta) -> None:
        self._blocking(self.retried(delivery, reason, delay))

    def _blocking(self, work: Coroutine[Any, Any, T]) -> T:
        return self._app.run_blocking(self._to_its_end(work))

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish this even if its caller is interrupted: a job that has run must not run again because of that, and one
        whose message the engine has dropped must not wait for another message."""
        ending = asyncio.ensure_future(work)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return await asyncio.shield(ending)

    async def open(self) -> Store:
        """Open the app in this loop; wait while the database is away."""
        return await self._outage.ride_out(self._app.opened, "opening")

    async def _process(self) -> _Process:
        store = await self.open()
        build = await self._outage.ride_out(self._app.job_builder, "opening")
        here = self._here
        # After a fork, or when the app was closed and opened again, there is another store.
        if here is None or here.store is not store:
            here = self._here = _Process(store, self._app, build, self._lease, self._outage)
        return here


class _Process:
    """The jobs that run in this process of the engine, and the heartbeat that renews their leases."""

    def __init__(self, store: Store, app: App, build: BuildJob, lease: timedelta, outage: Outage) -> None:
        self.store = store
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.log = log
        self.build = build
        self.max_result = app.max_payload
        self._identity = WorkerIdentity(uuid4(), name_of_process())
        self._clock = app.clock
        self._lease = lease
        self.time = StoreTime(app.clock)
        self._held: dict[UUID, Delivery] = {}
        """By lease; each job has its own."""
        self._beating: asyncio.Task[None] | None = None
        self._outage = outage
        self._watching = Watching(app.telemetry, self._identity, store, self.time)
        self.settling = Settling(store, outage, self._watching)

    async def adopt(self, token: Token, tasks: Sequence[str]) -> tuple[Adopted, int] | None:
        """The claim, and when it was requested, by the monotonic clock."""
        asked_at = 0
        # Chosen before the first try: a try whose answer was lost may have succeeded, and a later one finds that.
        own = uuid4()

        async def once() -> Adopted | None:
            nonlocal asked_at
            asked_at = self._clock.monotonic()
            return await self.store.adopt(
                token.job, token.lease, own, tasks=tasks, worker=self._identity, lease_for=self._lease
            )

        adopted = await self._outage.ride_out(once, "adopting")
        if adopted is None:
            return None
        self.time.offset, self.time.ahead = adopted.at.now - self._clock.monotonic(), adopted.at.ahead
        return adopted, asked_at

    async def task_of(self, job: UUID) -> str | None:
        try:
            return (await self._outage.ride_out(lambda: self.store.job(job), "adopting")).task
        except JobNotFound:
            return None

    async def start(self, delivery: Delivery) -> bool:
        """Hold it from now on. Returns whether it may begin: nothing begins under a lease that has expired because this
        process was suspended, since another worker may have the job by now."""
        delivery.started_at = self._clock.monotonic()
        self._held[delivery.claim.lease] = delivery
        if self._beating is None:
            self._beating = self.loop.create_task(self._beat(), name="fairlane-heartbeat")
        if self._watching.is_wanted:
            try:
                await self._watching.find_origins([delivery.claim])
            except BaseException:
                self._let_go(delivery)
                raise
            # Its span does not become the current one of this thread, which may have one of the engine's.
            self._watching.left(self._watching.started(delivery))
        if self._clock.monotonic() - delivery.kept_at <= microseconds(self._lease):
            return True
        await self.end(delivery, Released("the engine's process stood still for longer than its lease"))
        return False

    def ran(self, run: RunningJob) -> int:
        return self._clock.monotonic() - run.started_at

    async def end(
        self, delivery: Delivery, outcome: RunOutcome | None, error: BaseException | None = None
    ) -> Settlement | None:
        """Record how it ended; nothing if its claim is lost."""
        delivery.handle = None  # only this settlement could still be cancelled
        settlement: Settlement | None = None
        ran = self.ran(delivery)
        try:
            if outcome is not None and delivery.stop is not Stop.GONE:
                settlement = msgspec.structs.replace(settlement_of(delivery, outcome, ran), lag=delivery.lag)
                if type(outcome) is not Done:
                    log_end(delivery, settlement, error, self.time.now(), log)
                await self.settling.record(settlement, was_tried=delivery.may_be_settled)
        finally:
            self._let_go(delivery)
            if self._watching.is_wanted:
                self._watching.ended(delivery, settlement, ran, error)
        return settlement

    def _let_go(self, delivery: Delivery) -> None:
        self._held.pop(delivery.claim.lease, None)
        if not self._held and self._beating is not None:
            self._beating.cancel()
            self._beating = None

    # The heartbeat.

    async def _beat(self) -> None:
        while True:
            await pause(self._clock, microseconds(self._lease) // 3)
            if leases := list(self._held):
                try:
                    await self._renew(leases)
                except Exception as error:
                    # We do not end the engine's worker, and whatever runs here must keep its claim.
                    log.critical("leases could not be renewed: %s; trying again", summary(error), exc_info=error)

    async def _renew(self, leases: list[UUID]) -> None:
        asked_at = self._clock.monotonic()
        renewed = await self._outage.ride_out(lambda: self.store.renew(leases, self._lease), "renewing leases")
        gone, cancelled = set(renewed.gone), set(renewed.cancelled)
        for lease in leases:
            delivery = self._held.get(lease)
            if delivery is None:
                continue
            delivery.kept_at = asked_at
            if lease in gone and not delivery.may_be_settled:
                log_lost(delivery.claim, log)
                del self._held[lease]
                self._interrupt(delivery, Stop.GONE)
            elif delivery.claim.id in cancelled and delivery.stop is None:
                self._interrupt(delivery, Stop.CANCELLED)

    def _interrupt(self, delivery: Delivery, reason: Stop) -> None:
        is_first, delivery.stop = delivery.stop is None, reason
        if is_first and delivery.handle is not None:
            delivery.handle.cancel()
