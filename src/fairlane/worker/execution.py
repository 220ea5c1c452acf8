"""Running jobs: each in a task of its own, or in a thread, from claim to settlement.

Nothing here waits for the database. A run that ends frees its slot at once and hands its settlement on, so that
claiming, running and settling overlap. The cost of a job is kept small: no lock, no timer, one task.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from fairlane.clock import SECOND, Clock, lasting
from fairlane.enqueue import Stamp
from fairlane.errors import InvalidJob, UndecodablePayload
from fairlane.job import Claim, State
from fairlane.scheduler.settlement import SEEN, Cancelled, Died, Done, Lost, Outcome, Released, Settlement, settle
from fairlane.scheduler.snapshot import AHEAD, Pace
from fairlane.store import operators
from fairlane.store.protocol import Store
from fairlane.store.stats_values import BlockedLoop
from fairlane.task import Registry, Task
from fairlane.waits import Alarm, StoreTime
from fairlane.worker.claims import SHORTEST_RUN, Pacer, QueueSlots, Slots
from fairlane.worker.logs import claimed_jobs, log_end, log_lost, log_start, log_unreadable
from fairlane.worker.processes import Begin, Child, Gone, Handed, LoneProcess, Mate, ProcessPool
from fairlane.worker.runs import (
    JobContext,
    Middleware,
    RunningJob,
    RunTimes,
    Stop,
    around_run,
    current_run,
    outcome_of,
    settlement_of,
    wrapping_runs,
)

log = logging.getLogger("fairlane.worker")

STARTS_AT_ONCE = 250
"""Jobs that start in one turn of the event loop."""
HELD_AHEAD_AT_MOST = SECOND
"""A job that was claimed ahead and has not started by then is given back: the slots are busy for longer."""
LATE = "it could not start at the instant that its rate had for it"
MOST_PACED = 1_000
"""Jobs that wait for their instants."""
SETTLED_EVERY = SECOND // 200
"""Jobs that start one by one in quick succession are settled together, once in so long."""
NO_PACES: Mapping[UUID, Pace] = {}
STOOD_STILL = "its worker stood still for longer than its lease, and another may run it by now"
FIRST_START_LAG, LONGEST_START_LAG = SECOND // 20, SECOND // 4
"""What is assumed before any job has started, and what is believed at most: clocks can be wrong."""
NOT_YET_ALONE = "another job runs alone; its turn comes later"
PROCESS_STARTS = "the process that is to run it alone is starting"
ALONE_LATER, LONGEST_ALONE_LATER = SECOND, 30 * SECOND
"""A suspect whose turn to run alone has not come is given back for this long, and twice as long each time: it holds no
limit meanwhile. It is called back when the one that runs alone has ended."""
LONGEST_WAIT_TO_BE_ALONE = 60 * SECOND
"""Where there is no process for it, others wait for so long at most until what runs has ended. It begins with a second,
and doubles as often as it was not enough; they then have as long to themselves."""
FIRST_UNKNOWN_DELAY, LONGEST_UNKNOWN_DELAY = SECOND, 300 * SECOND
UNKNOWN_REMEMBERED = 10_000
UNKNOWN_TOLD_FOR = 2 * LONGEST_UNKNOWN_DELAY
"""A job of a task that nobody knows comes back within half of it."""
LEASES_REMEMBERED = 100


class SettleLater(Protocol):
    """Takes what has ended, and has it recorded."""

    def __call__(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None: ...


class Run(RunningJob):
    """One claim on its way through this worker."""

    __slots__ = ("begin_by", "child", "handle", "is_given_back", "mate", "pace", "queue")

    def __init__(
        self,
        home: Execution,
        queue: QueueSlots,
        claim: Claim,
        begin_by: int,
        task: Task[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        super().__init__(home, claim, task, args, kwargs)
        self.queue = queue
        self.begin_by = begin_by
        """By the monotonic clock: later its lease may have ended."""
        self.pace: Pace | None = None
        """By the monotonic clock too: when it may start, if it passes a smooth rate."""
        self.handle: asyncio.Task[None] | None = None
        self.child: Child | None = None
        """The process that its task runs in, if it has one of its own."""
        self.is_given_back = False
        """It will not begin here: decided once, by the event loop or by the watchdog, under the lock of both."""
        self.mate: Mate | None = None
        """The process that it was handed to."""


@dataclass(slots=True)
class PutOff:
    """A suspect that waits for its turn to run alone; by the monotonic clock."""

    since: int
    delay: int = ALONE_LATER
    due_at: int = 0


class Execution:
    """The runs of one worker."""

    sets_suspects_apart = True
    """What may have killed its process runs with nothing beside it."""
    keeps_pace = True
    """It starts jobs at their instants."""
    calls_handlers = True
    """It runs what it claims, in this process."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        slots: Slots,
        clock: Clock,
        settle_later: SettleLater,
        max_result: int,
        stamp: Stamp,
        middlewares: Sequence[Middleware] = (),
        *,
        lone: LoneProcess | None = None,
    ) -> None:
        self.store = store
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        """Where the loop runs."""
        self.log = log
        self.running: set[Run] = set()
        self.waiting: deque[Run] = deque()
        self.suspects: deque[Run] = deque()
        """Those that may have killed their process. They take no slot while they wait to run alone."""
        self._alone: Run | None = None
        self._lets_run_out_since: int | None = None
        """Since when nothing is started, for a suspect to be alone here."""
        self._lets_run_out_for = ALONE_LATER
        self._lone = lone
        self._put_off: dict[UUID, PutOff] = {}
        """Suspects that were given back because another runs alone, those that came first at the beginning."""
        self._recalls = Alarm(clock, self._recall)
        self._recalling: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self.mean_run = float(HELD_AHEAD_AT_MOST)
        """Microseconds that a job takes, over the last twenty or so. It begins high: nothing is claimed on a guess."""
        self.on_slot_freed: Callable[[], None] = lambda: None
        self.store_time = StoreTime()
        self.store_ahead = 0
        """How far queue time is ahead of the store's clock."""
        self.start_lag = FIRST_START_LAG
        """Microseconds from a claim until its jobs have started, about the most of late."""
        self._find: Callable[[str], Task[..., Any] | None] = registry.find
        self._slots = slots
        self._clock = clock
        self._now = clock.monotonic
        self.settle_later = settle_later
        self.max_result = max_result
        self.stamp = stamp
        self._middlewares = wrapping_runs(middlewares)
        self._unknown: OrderedDict[UUID, int] = OrderedDict()
        self._unknown_tasks: dict[str, tuple[str, int]] = {}
        self.run_times = RunTimes()
        self.beginning = threading.Lock()
        """Held by whoever decides whether a claim begins here or is given back: this loop, or the watchdog's thread."""
        self._revoked: set[UUID] = set()
        """Leases that the watchdog has given back before their claims were heard of here."""
        self._heard_of: deque[UUID] = deque(maxlen=LEASES_REMEMBERED)
        """The leases of the last claims."""
        self._threads: ThreadPoolExecutor | None = None
        self._children: ProcessPool | None = None
        # Each run begins with what was set around the worker, not with what the run that made room for it has set.
        self._around = contextvars.copy_context()
        self._timeouts = Alarm(clock, self._stop_overdue)
        self._stale = Alarm(clock, self._give_back_stale)
        self._pacer = Pacer(clock, self._launch, self._give_back_late)
        self.is_filling = False
        """There are jobs in hand and slots for them: they start in the next turns of the event loop."""
        self.attempts = 0
        """Attempts made so far, those that run included."""
        self.ended_otherwise: Counter[str] = Counter()
        """Those that ended other than done, by what became of their job. Successes are not counted one by one."""
        self._logs_each = False

    # From claim to handler.

    def start(
        self, queue: QueueSlots, claims: Sequence[Claim], begin_by: int, paces: Mapping[UUID, Pace] = NO_PACES
    ) -> None:
        """Take these claims in: whatever cannot run is settled at once, the others start, or wait for a slot or for
        their instant. None starts after `begin_by`, by the monotonic clock."""
        self._logs_each = log.isEnabledFor(logging.DEBUG)  # asked once a claim, not once a job
        if claims and not self._hear_of(claims[0].lease):
            queue.used -= len(claims)
            return
        for claim in claims:
            run = self._run_of(queue, claim, begin_by)
            if run is None:
                continue
            if (pace := paces.get(claim.id)) is not None:
                self._pace(run, pace)
            elif claim.is_suspect and self.sets_suspects_apart:
                self._set_apart(run)
            else:
                self.waiting.append(run)
        self._fill_slots()
        if self.waiting or self.suspects:
            self._stale.set(self._clock.monotonic() + HELD_AHEAD_AT_MOST)

    def _hear_of(self, lease: UUID) -> bool:
        """Whether these claims are still ours."""
        with self.beginning:
            self._heard_of.append(lease)
            return lease not in self._revoked

    def _run_of(self, queue: QueueSlots, claim: Claim, begin_by: int) -> Run | None:
        """What is to run; nothing, if it cannot, and was settled."""
        task = self._find(claim.task)
        if claim.cancel_requested:
            self._refuse(queue, claim, Cancelled("cancelled before it ran"))
        elif task is None:
            self._refuse(queue, claim, self._unknown_task(claim))
        else:
            try:
                args, kwargs = self._decoded(task, claim)
            except UndecodablePayload as error:
                log_unreadable(claim, error, log)
                self._refuse(queue, claim, Died(str(error)))
            else:
                return Run(self, queue, claim, begin_by, task, args, kwargs)
        return None

    def _decoded(self, task: Task[..., Any], claim: Claim) -> tuple[Any, Any]:
        return task.codec.decode_call(claim.payload)

    def _pace(self, run: Run, pace: Pace) -> None:
        """Let it wait for its instant. It takes no slot meanwhile."""
        run.pace = pace.moved(self._now() - self.store_now())
        run.begin_by = min(run.begin_by, run.pace.latest)
        run.queue.used -= 1
        self._pacer.add(run)

    def _set_apart(self, run: Run) -> None:
        """Let it wait to run alone, without a slot. One at a time is held, and only if it can begin at once: should
        this process die, nobody knows which of those that it held have run, and each would be charged with it."""
        if self._lone is not None:
            if not self._lone.is_ready:
                self._prepare_room()
                self._give_up_turn(run, PROCESS_STARTS, ALONE_LATER)
                return
            if not self._has_room_alone():
                self._put_off_until_alone(run, self._alone)
                return
            self._put_off.pop(run.claim.id, None)
        run.queue.used -= 1
        self.suspects.append(run)

    def _has_room_alone(self) -> bool:
        """Whether a suspect could begin at once with nothing beside it."""
        return self._lone is not None and self._lone.is_ready and not self.suspects and self._alone is None

    def _prepare_room(self) -> None:
        if self._lone is not None and not self._lone.is_ready and self._preparing is None:
            self._preparing = self.loop.create_task(self._prepare(self._lone), name="fairlane-lone")

    def _give_up_turn(self, run: Run, reason: str, delay: int) -> None:
        if run.pace is not None:
            self._pacer.drop(run)
        self._refuse(run.queue, run.claim, Released(reason, delay))

    def _put_off_until_alone(self, run: Run, alone: Run | None) -> None:
        """Another runs alone: give it back, for longer each time."""
        now = self._now()
        for job in [job for job, each in self._put_off.items() if each.due_at + 2 * LONGEST_ALONE_LATER < now]:
            del self._put_off[job]  # others have run them
        found = self._put_off.setdefault(run.claim.id, PutOff(now))
        reason = NOT_YET_ALONE
        if alone is not None and alone.started_at:
            ran, waited = lasting(self.ran(alone) / SECOND), lasting((now - found.since) / SECOND)
            reason = f"job {alone.claim.id} ({alone.claim.task}) has run alone for {ran}, and its turn comes later"
            reason += f"; it has waited for {waited}" if now - found.since >= SECOND else ""
        self._give_up_turn(run, reason, found.delay)
        found.due_at = now + found.delay
        found.delay = min(2 * found.delay, LONGEST_ALONE_LATER)

    def _recall(self) -> None:
        """One that runs alone has ended: let the suspect that has waited longest be due now. Should that one not come
        (a limit holds it), the next one follows."""
        now = self._now()
        sleeping = [(job, each) for job, each in self._put_off.items() if each.due_at > now]
        if not sleeping or self._slots.is_closed:
            return
        if not self._has_room_alone():
            self._prepare_room()
            return
        job, found = sleeping[0]
        found.due_at = now
        task = self.loop.create_task(self._make_due(job), name="fairlane-recall")
        self._recalling.add(task)
        task.add_done_callback(self._recalling.discard)
        self._recalls.set(now + ALONE_LATER)

    async def _make_due(self, job: UUID) -> None:
        try:
            await self.store.run(operators.retry_now([job]))
        except Exception as error:
            log.debug("job %s is not called back to run alone (%s); it comes by itself", job, error)

    async def _prepare(self, lone: LoneProcess) -> None:
        try:
            await lone.start()
        except OSError as error:
            log.error("no process could be started for jobs that are to run alone: %s", error)
        else:
            self._recall()
        finally:
            self._preparing = None

    def _launch(self, run: Run) -> None:
        """Its instant has come."""
        if run.is_given_back:
            self._pacer.drop(run)
            return
        run.queue.used += 1
        if run.claim.is_suspect and self.sets_suspects_apart:
            self._set_apart(run)
        else:
            self.waiting.append(run)
        self._fill_slots()
        self._stale.set(self._clock.monotonic() + HELD_AHEAD_AT_MOST)

    def _give_back_late(self, run: Run) -> None:
        if self.give_back(run):
            self.settle_later(settle(run.claim, self.released(run, LATE), 0), run.queue)

    @property
    def ahead(self) -> int | None:
        """How many more jobs may wait for their instants: as many as will have had a slot by then. None while most of
        those are in hand: claims are made for many at a time. `None`: it keeps no pace."""
        if not self.keeps_pace:
            return None
        most = min(MOST_PACED, int(self._slots.concurrency * AHEAD / max(self.mean_run, SHORTEST_RUN)))
        held = len(self._pacer)
        return most - held if 4 * held <= 3 * most else 0

    def revoke_paced(self, queue: QueueSlots) -> None:
        """The terms have changed by which these were claimed: give back what has not started."""
        for run in self._paced_of(queue):
            self._withdraw(run, self.released(run, "its queue's policy has changed"))
        self._refill()

    def holds_paced(self, queue: QueueSlots) -> bool:
        """Whether something of this queue waits for its instant, or for a slot since then."""
        return bool(self._paced_of(queue))

    def _paced_of(self, queue: QueueSlots) -> list[Run]:
        launched = [run for run in (*self.waiting, *self.running) if run.pace is not None and run.started_at == 0]
        return [run for run in (*self._pacer.runs(), *launched) if run.queue is queue]

    def released(self, run: Run, reason: str) -> Released:
        """It goes back to its place."""
        return Released(reason, is_spent=self._pacer.is_spent(run))

    def note_start(self, claimed_at: int) -> None:
        """How late the jobs of a claim have started: rates are kept for those who count their starts."""
        lag = max(0, min(self.store_now() - claimed_at, LONGEST_START_LAG))
        self.start_lag = lag if lag > self.start_lag else self.start_lag + (lag - self.start_lag) // 16

    def _refuse(self, queue: QueueSlots, claim: Claim, outcome: Outcome) -> None:
        queue.used -= 1
        self.settle_later(settle(claim, outcome, 0), queue)

    def _unknown_task(self, claim: Claim) -> Released:
        seen = self._unknown.pop(claim.id, 0)
        self._unknown[claim.id] = seen + 1
        if len(self._unknown) > UNKNOWN_REMEMBERED:
            self._unknown.popitem(last=False)
        self._unknown_tasks[claim.task] = (claim.queue, self._now())
        delay = min(FIRST_UNKNOWN_DELAY << min(seen, 20), LONGEST_UNKNOWN_DELAY)
        log.error(
            "job %s: this worker has no task named %r; given back for %g s; deploy it, or serve the queue elsewhere",
            claim.id,
            claim.task,
            delay / SECOND,
            extra={"claim": claim},
        )
        return Released(f"no task named {claim.task!r} on the worker that claimed it", delay)

    def _fill_slots(self) -> None:
        if (self.suspects or self._alone is not None) and self._try_suspect():
            return
        waiting, running, most = self.waiting, self.running, self._slots.concurrency
        create_task, around = self.loop.create_task, self._around
        run: Run | None = None
        # A few at a time: what the store answers meanwhile is heard between them, so that it works while they run.
        starting = min(len(waiting), most - len(running), STARTS_AT_ONCE)
        self.attempts += max(0, starting)
        for _ in range(starting):
            run = waiting.popleft()
            running.add(run)
            run.handle = create_task(
                self._run_async(run) if run.task.is_async else self._run_in_thread(run), context=around.copy()
            )
            if run.task.timeout is not None:
                self._timeouts.set(self._clock.monotonic() + run.task.timeout)
        if run is not None and not waiting and run.pace is None:
            # Once those that were just created have taken their first step.
            self.loop.call_soon(self.note_start, run.claim.claimed_at)
        if not self.is_filling and waiting and len(running) < most:
            self.is_filling = True
            self.loop.call_soon(self._go_on_filling)

    def _try_suspect(self) -> bool:
        """Let the next suspect run alone, if it can; say whether everything else must wait for that."""
        here = self._lone is None
        if self._alone is None and not (here and self.running):
            run = self._alone = self.suspects.popleft()
            run.queue.used += 1
            self.attempts += 1
            self.running.add(run)
            if not here:
                running = self._run_alone(run)
            else:
                running = self._run_async(run) if run.task.is_async else self._run_in_thread(run)
            run.handle = self.loop.create_task(running, context=self._around.copy())
            if here:
                self._lets_run_out_since, self._lets_run_out_for = None, ALONE_LATER
            if here and run.task.timeout is not None:
                self._timeouts.set(self._clock.monotonic() + run.task.timeout)
        elif self._alone is None and self._lets_run_out_since is None:
            self._lets_run_out_since = self._now()
            self._stale.set(self._now() + self._lets_run_out_for)
        return here

    def _give_up_being_alone(self) -> None:
        """What runs goes on for too long: let others go first for a while."""
        since, lasting = self._lets_run_out_since, self._lets_run_out_for
        if since is None:
            return
        if since + lasting > self._now():
            self._stale.set(since + lasting)
            return
        self._lets_run_out_since, self._lets_run_out_for = None, min(2 * lasting, LONGEST_WAIT_TO_BE_ALONE)
        for run in list(self.suspects):
            self._withdraw(run, Released("what ran beside it did not end; its turn comes later", lasting))
        self._refill()

    def _go_on_filling(self) -> None:
        if self.waiting and len(self.running) < self._slots.concurrency:
            self._fill_slots()
            self.loop.call_soon(self._go_on_filling)  # behind those that were just created
        else:
            self.is_filling = False

    @property
    def ends_soon(self) -> bool:
        """More will have ended in a moment: starts of a smooth rate follow each other one by one."""
        return self._pacer.starts_within(SETTLED_EVERY)

    # The run itself.

    def _begins(self, run: Run) -> bool:
        """Whether it may begin: from here on it runs, as far as anybody who finds us dead can tell."""
        if not self._may_begin(run):
            return False
        if run.pace is not None:
            self._pacer.began(run, run.started_at)
        return True

    def _may_begin(self, run: Run) -> bool:
        with self.beginning:
            if run.is_given_back:
                return False
            run.started_at = self._now()
        if run.started_at > run.begin_by:
            self._end(run, self._missed(run))
            return False
        return True

    def _missed(self, run: Run) -> Released:
        return Released(STOOD_STILL) if run.pace is None else self.released(run, LATE)

    async def _run_alone(self, run: Run) -> None:
        """In a process of its own, where it can harm nobody else."""
        current_run.set(run)
        assert self._lone is not None
        try:
            await self._lone.start()
        except OSError as error:
            self._end(run, Released(f"no process could be started to run it alone: {error}", ALONE_LATER))
            return
        if not self._may_begin(run):
            return

        def begins(at: int) -> None:
            if run.pace is not None:
                self._pacer.began(run, at)

        handed = Handed(run.claim, run.begin_by, run.pace is not None)
        begin = Begin([handed], self.store_time.offset, self.store_ahead)
        ended = await self._lone.run(begin, begins)
        if run.stop is Stop.GONE:
            self._end(run, None)
        elif isinstance(ended, Gone) and ended.had_begun:
            self._end(run, Lost(f"it ran alone, and its process died ({ended.how})", SEEN))
        elif isinstance(ended, Gone):
            self._end(run, Released(f"the process that was to run it alone died ({ended.how})", ALONE_LATER))
        elif ended.is_unbegun:
            self._end(run, self._missed(run))
        else:
            run.may_be_settled = ended.may_be_settled
            self._end(run, None, settlement=ended.settlement)

    async def _run_async(self, run: Run) -> None:
        current_run.set(run)
        if not self._begins(run):
            return
        if self._logs_each:
            log_start(run, log)
        try:
            if self._middlewares:
                value = await around_run(self._middlewares, JobContext(run), lambda: _awaited(run))
            else:
                value = await run.task.function(*run.args, **run.kwargs)
        except GeneratorExit:
            raise  # the loop itself has ended: there is nothing left to settle with
        except BaseException as error:
            self._end(run, outcome_of(run, error, self.store_wall()), error)
        else:
            self._end(run, None if run.stop is Stop.GONE else self._done(run, value))

    async def _run_in_thread(self, run: Run) -> None:
        current_run.set(run)
        if run.task.options.executor == "process":
            # Not started until there is a process for it: its timeout has not begun, and it can be given back.
            async with self._processes().child() as run.child:
                await self._run_blocking(run)
        else:
            await self._run_blocking(run)

    async def _run_blocking(self, run: Run) -> None:
        if not self._begins(run):
            return
        if self._logs_each:
            log_start(run, log)
        value, error = await (self._called_around(run) if self._middlewares else self._called(run))
        # A thread cannot be stopped. One that overran its timeout kept its slot and its lease until now.
        if error is None and run.stop is Stop.TIMEOUT:
            error = TimeoutError()
        if error is not None:
            self._end(run, outcome_of(run, error, self.store_wall()), error)
        else:
            self._end(run, None if run.stop is Stop.GONE else self._done(run, value))

    async def _called(self, run: Run) -> tuple[Any, BaseException | None]:
        if run.child is not None:
            return await self.loop.run_in_executor(self._pool(), run.child.call, run.task, run.args, run.kwargs)
        context = contextvars.copy_context()
        return await self.loop.run_in_executor(self._pool(), context.run, _call, run)

    async def _called_around(self, run: Run) -> tuple[Any, BaseException | None]:
        async def inside() -> Any:
            value, error = await self._called(run)
            if isinstance(error, StopIteration):
                raise RuntimeError(f"the task raised {error!r}") from error  # which no coroutine can raise
            if error is not None:
                raise error
            return value

        try:
            return await around_run(self._middlewares, JobContext(run), inside), None
        except GeneratorExit:
            raise
        except BaseException as error:
            return None, error

    def _processes(self) -> ProcessPool:
        if self._children is None:
            self._children = ProcessPool()
        return self._children

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._slots.concurrency, thread_name_prefix="fairlane-handler")
        return self._threads

    def _done(self, run: Run, value: Any) -> Outcome:
        try:
            return Done(run.task.codec.encode_result(value, self.max_result), run.effects)
        except InvalidJob as error:
            return outcome_of(run, error, self.store_wall()) or Died(str(error))

    def _end(
        self,
        run: Run,
        outcome: Outcome | None,
        error: BaseException | None = None,
        settlement: Settlement | None = None,
    ) -> Settlement | None:
        """What is to be recorded of a run that has ended; nothing, if its claim is lost. A run in a process of its own
        brings its settlement."""
        ran = self.ran(run)
        self.mean_run += (ran - self.mean_run) * 0.1
        self.running.discard(run)
        # Its task's context holds the run: left as a cycle, every job would wait for the collector.
        run.handle = None
        run.queue.used -= 1
        if run is self._alone:
            self._alone = None
            self._recall()
        if run.pace is not None:
            self._pacer.drop(run)
        if outcome is not None:
            settlement = settlement_of(run, outcome, ran)
            if settlement.unstarted and run.pace is not None:
                self._count(settlement)  # a start that was missed is no news
            elif type(outcome) is not Done:
                self._count(settlement)
                log_end(run, settlement, error, self.store_now(), log)
            elif self._logs_each:
                log_end(run, settlement, None, 0, log)
        elif settlement is None:
            self.ended_otherwise["lost"] += 1
        elif settlement.to is not State.DONE:
            self._count(settlement)
        if settlement is not None:
            self._note_time(settlement, run)
            self.settle_later(settlement, run.queue, may_be_settled=run.may_be_settled)
        self._refill()
        return settlement

    def _note_time(self, settlement: Settlement, run: Run) -> None:
        """Learn how long runs of its task take; one that was cut short or given back does not say."""
        if settlement.outcome not in ("lost", "released"):
            self.run_times.note(run.claim.task, settlement.ran)

    def _refill(self) -> None:
        """A slot may be free."""
        if (self.waiting or self.suspects) and not self.is_filling:
            self._fill_slots()
        self.on_slot_freed()

    def _count(self, settlement: Settlement) -> None:
        if settlement.unstarted:
            self.attempts -= 1
        elif settlement.to in (State.DEAD, State.CANCELLED):
            self.ended_otherwise[str(settlement.to)] += 1
        else:
            self.ended_otherwise["snoozed" if settlement.outcome == "snoozed" else "to be retried"] += 1

    def ran(self, run: RunningJob) -> int:
        """Microseconds since its handler was called."""
        return self._now() - run.started_at

    def store_now(self) -> int:
        return self._now() + self.store_time.offset

    def store_wall(self) -> int:
        return self.store_now() - self.store_ahead

    # Stopping runs.

    def interrupt(self, run: Run, reason: Stop) -> None:
        """Ask a run to stop: an async handler is cancelled, a thread sees its flag. A lost claim outranks all else."""
        if run.stop is not None and reason is not Stop.GONE:
            return
        if reason is Stop.GONE and run.may_be_settled:
            return  # by itself: should it not be so, its settlement will find out
        if reason is Stop.GONE:
            log_lost(run.claim, log)
        if run.started_at == 0:
            self._withdraw(run, None if reason is Stop.GONE else Cancelled(reason.value))
            self._refill()
            return
        first, run.stop = run.stop is None, reason
        if run is self._alone and self._lone is not None:
            self._lone.interrupt(run.claim.id, reason)
        elif first and run.task.is_async and run.handle is not None:
            run.handle.cancel()
        elif run.child is not None:
            run.child.kill()

    def _withdraw(self, run: Run, outcome: Outcome | None) -> None:
        """Take back a run whose handler has not been called."""
        if not self.give_back(run):
            outcome = None  # the watchdog has
        if run in self.running:
            self.running.discard(run)
            self.attempts -= 1
            assert run.handle is not None
            run.handle.cancel()
            if run is self._alone:
                self._alone = None
                self._recall()
        elif run in self.suspects:
            self.suspects.remove(run)
            run.queue.used += 1
        elif run in self.waiting:
            self.waiting.remove(run)
        else:
            run.queue.used += 1
        if run.pace is not None:
            self._pacer.drop(run)
        run.queue.used -= 1
        if outcome is not None:
            self.settle_later(settle(run.claim, outcome, 0), run.queue)

    def give_back(self, run: Run) -> bool:
        """Keep a run from beginning; False if it has begun, or was given back before. From any thread."""
        with self.beginning:
            if run.started_at or run.is_given_back:
                return False
            run.is_given_back = True
            return True

    def revoke(self, claims: Sequence[Claim]) -> list[Claim]:
        """Keep claims from being taken in, and return those of which nothing was heard so far. From any thread."""
        with self.beginning:
            unheard = [claim for claim in claims if claim.lease not in self._heard_of]
            self._revoked.update(claim.lease for claim in unheard)
            return unheard

    def settle_instead(self, settlement: Settlement) -> None:
        """The watchdog could not record this, as far as it knows."""
        self.settle_later(settlement, next(iter(self._slots.queues.values())), may_be_settled=True)

    def forget(self, runs: Iterable[Run]) -> None:
        """The watchdog has given these back while the event loop was blocked."""
        for run in runs:
            if run in self.running or run in self.waiting or run in self.suspects or run in self._pacer.runs():
                self._withdraw(run, None)
        self._refill()

    def _stop_overdue(self) -> None:
        now, soonest = self._now(), None
        for run in list(self.running):
            timeout = run.task.timeout
            if timeout is None or run.stop is not None or (run is self._alone and self._lone is not None):
                continue  # the process that runs it alone sees to it
            left = run.started_at + timeout - now if run.started_at else timeout
            if left <= 0:
                claim = run.claim
                log.warning("job %s (%s) ran longer than its timeout", claim.id, claim.task, extra={"claim": claim})
                self.interrupt(run, Stop.TIMEOUT)
            elif soonest is None or left < soonest:
                soonest = left
        if soonest is not None:
            self._timeouts.set(self._clock.monotonic() + soonest)

    def _give_back_stale(self) -> None:
        self._give_up_being_alone()
        if self.suspects and self._lone is not None:
            left = self.suspects[0].claim.claimed_at + HELD_AHEAD_AT_MOST - self.store_now()
            if left > 0:
                self._stale.set(self._clock.monotonic() + left)
            else:
                for run in list(self.suspects):
                    self._withdraw(run, Released(NOT_YET_ALONE, ALONE_LATER))
        if self.waiting:
            left = self.waiting[0].claim.claimed_at + HELD_AHEAD_AT_MOST - self.store_now()
            if left > 0:
                # Others have come meanwhile, in the place of those that have started.
                self._stale.set(self._clock.monotonic() + left)
                return
            # What waits was claimed ahead because jobs were short. They are not.
            self.mean_run = max(self.mean_run, float(HELD_AHEAD_AT_MOST))
            self._slots.ahead = 0
            self.give_back_unstarted("its worker was busy for longer than expected")

    def give_back_unstarted(self, reason: str) -> None:
        """Release every claim whose handler has not been called: at once, and in its old place."""
        unstarted = self.unstarted()
        for run in unstarted:
            self._withdraw(run, self.released(run, reason))
        if unstarted:
            log.info("%s given back unstarted: %s", claimed_jobs(len(unstarted)), reason)

    # For those who look.

    def blocks(self) -> list[BlockedLoop]:
        """What blocks, or has blocked last, the event loops of processes that run jobs for us. From any thread."""
        block = None if self._lone is None else self._lone.block
        return [] if block is None else [block]

    def unstarted(self) -> list[Run]:
        """Every claim in hand whose handler has not been called."""
        running = (run for run in tuple(self.running) if run.started_at == 0)
        return [*self._pacer.runs(), *self.waiting, *self.suspects, *running]

    @property
    def queues(self) -> list[str]:
        return list(self._slots.queues)

    def unknown_tasks(self) -> dict[str, str]:
        """Tasks of which jobs were claimed lately that are not known here, each with its queue."""
        lately = self._now() - UNKNOWN_TOLD_FOR
        self._unknown_tasks = {task: found for task, found in self._unknown_tasks.items() if found[1] > lately}
        return {task: queue for task, (queue, _) in self._unknown_tasks.items()}

    def held(self) -> list[Run]:
        """Every claim in hand that is worth keeping, started or not."""
        # In the order in which they move on: the watchdog looks from another thread, and must not miss one that does.
        held = (*self._pacer.runs(), *self.suspects, *self.waiting, *self.running)
        return [run for run in held if run.stop is not Stop.GONE]

    @property
    def is_holding(self) -> bool:
        """Whether something has begun here and has not ended, or is about to begin."""
        return bool(self.running or len(self._pacer))

    def misses(self, run: Run) -> bool:
        """Whether the loss of its claim is one."""
        return True

    def leases(self) -> set[UUID]:
        return {run.claim.lease for run in self.held()}

    def find(self, jobs: Iterable[UUID]) -> list[Run]:
        wanted = set(jobs)
        return [run for run in self.held() if run.claim.id in wanted]

    async def all_ended(self) -> None:
        """Return once nothing runs."""
        while self.running:
            await asyncio.wait([run.handle for run in self.running if run.handle is not None])

    async def kill_the_rest(self) -> None:
        """What would not stop is left behind: a thread cannot be killed."""

    async def leave(self, within: float) -> None:
        """Let processes end that run jobs for us, in so many seconds."""
        await self._stop_preparing()
        if self._lone is not None:
            await self._lone.leave(within)

    async def _stop_preparing(self) -> None:
        preparing = {*self._recalling, *([] if self._preparing is None else [self._preparing])}
        for each in preparing:
            each.cancel()
        if preparing:
            await asyncio.wait(preparing)

    def close(self) -> None:
        self._recalls.close()
        self._timeouts.close()
        self._stale.close()
        self._pacer.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._children is not None:
            self._children.close()


async def _awaited(run: Run) -> Any:
    return await run.task.function(*run.args, **run.kwargs)


def _call(run: Run) -> tuple[Any, BaseException | None]:
    # An error is returned, not raised: a StopIteration cannot pass through a future.
    try:
        return run.task.function(*run.args, **run.kwargs), None
    except BaseException as error:
        return None, error
