"""Queues whose policies, sharing and width change while claims come and go; every gate is held against what runs.

A step is a method with plain arguments, as in `Life`: a sequence of steps that showed a fault can be written down and
lived again. After each one, once every lane event is folded, the board must be what the jobs themselves say: lanes and
gates count what runs, shared gates count what holds them, a board made anew would say the same, and so does every
process that remembers it.

On PostgreSQL a step may also be a meeting: somebody else holds a table while up to three actions begin one after the
other, each in a process of its own, so that they wait for one another at that table or at a row that another has
locked. And a job may be settled in a caller's transaction, which stays open until somebody has to wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec
from uuid import UUID, uuid4

import asyncpg
import msgspec

from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, InvalidOverride, InvalidPolicy
from fairlane.job import Claim, State
from fairlane.policy import AdaptiveConcurrency, Breaker, Concurrency, Fair, Policy, Rate
from fairlane.policy import Sequence as InSequence
from fairlane.policy.limits import Limit, read_limit
from fairlane.policy.overrides import Kind, Override
from fairlane.policy.partitions import divided, partition_name, partition_of
from fairlane.scheduler.rebuild import rebuild
from fairlane.scheduler.settlement import settle
from fairlane.scheduler.snapshot import Contender, GateRow, KeptPlaces, LaneRow, QueueRow
from fairlane.store import operators, records
from fairlane.store.audit import Note
from fairlane.store.protocol import Store
from tests.model import boards
from tests.model.home import Home
from tests.model.steps import End, Ending
from tests.store.harness import LEASE, SECOND, OpenTransaction, claim_once, new_jobs, operations_on, worker_named
from tests.waiting import until_found

__all__ = ["LIMITS", "QUEUES", "TABLES", "Action", "Changes"]

P = ParamSpec("P")

KEYS = ("account", "k")
BY = ("k",)
ORDERED = "s"
"""Its jobs always run in sequence."""
QUEUES = ("a", "b", ORDERED)
SHARED: tuple[tuple[Limit, ...], ...] = (
    (Concurrency(2, name="gpu"),),
    (Concurrency(1, name="gpu"), Concurrency(1, by="account")),
    (Concurrency(1, by="account", name="gpu"),),
    (Concurrency(2, by="k", name="seats"), Concurrency(3, name="gpu")),
    (Rate(4, per="2s", name="quota"), Concurrency(2, by=KEYS, name="seats")),
)
OWN: tuple[tuple[Limit, ...], ...] = (
    (),
    (Concurrency(2),),
    (Concurrency(3), Concurrency(1, by="account"), Rate(4, per="5s", by="k")),
    (AdaptiveConcurrency(by="k", start=2, max=4), Breaker(2, cooldown="5s", by="k")),
    (Concurrency({"x": 1}, by="account"), Rate(3, per="2s", rolling=True, by="k")),
)
IN_SEQUENCE: tuple[tuple[Limit, ...], ...] = (
    (InSequence(by=BY),),
    (InSequence(by=BY), Concurrency(2)),
    (InSequence(by=BY), Concurrency(2, name="gpu")),
    (InSequence(by=BY), Concurrency(1, by="k", name="seats"), Breaker(2, cooldown="5s", by="k")),
)
LIMITS = {"a": OWN + SHARED, "b": OWN + SHARED + ((InSequence(by=KEYS), Concurrency(2, name="gpu")),), "s": IN_SEQUENCE}
NAMES = 4
"""So many names has every shared limit: a gate that has never been is another case than one that is there."""
TABLES = (
    *("shared_gates", "shared_gates", "shared_gates", "shared_gates"),
    *("shared_releases", "releases", "journal", "gates", "leases", "shared_limit_queues", "queues"),
)
"""Where actions meet: most often where they met in the wrong order once."""
# (Not `pg_stat_activity`, of which a transaction sees the same state until it ends.)
WAITING = "select count(distinct pid) from pg_locks where not granted"
OPERATOR = Note(actor="ada", action="change")

Action = tuple[str, tuple[Any, ...]]
"""The name of a step and what it is given: what meets another."""


@dataclass
class Ledger:
    """What the database says, read behind the protocol."""

    queues: dict[str, int]
    jobs: list[tuple[Any, ...]]
    """Those that run or keep a place: queue, state, lane, priority, keys, shared gates, keeps place."""
    ready: Counter[bytes]
    lanes: dict[int, list[LaneRow]]
    gates: dict[int, list[GateRow]]
    shared: list[tuple[Any, ...]]
    left: list[tuple[Any, ...]]
    """Releases of shared gates that nobody has folded, because no queue names their limit any more."""
    events: int


def _step(
    method: Callable[Concatenate[Changes, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[Changes, P], Coroutine[Any, Any, None]]:
    """What is done, written down, and followed by a look at every gate."""

    @wraps(method)
    async def taken(self: Changes, /, *args: P.args, **kwargs: P.kwargs) -> None:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        self.told.append(f"await life.{method.__name__}({', '.join(given)})")
        await self._unblocked(method(self, *args, **kwargs))
        self.steps += 1
        await self.check()

    return taken


@dataclass
class Changes:
    home: Home
    clock: ManualClock
    stores: list[Store] = field(default_factory=list)
    """Processes on one database."""
    held: list[Claim] = field(default_factory=list)
    jobs: list[UUID] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, 1))
    declared: dict[str, Policy] = field(default_factory=dict)
    steps: int = 0
    rests: int = 0
    gates_seen: int = 0
    boards_seen: int = 0
    told: list[str] = field(default_factory=list)
    orders: dict[str, list[UUID]] = field(default_factory=dict)
    """Jobs of the ordered queue that have not been delayed, by key, as they were enqueued."""
    started: set[UUID] = field(default_factory=set)
    open: list[tuple[OpenTransaction, Claim]] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    """How often actions waited for one another, by table."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _watch: Any = None
    _host: Any = None
    """Who holds the table at which others meet."""

    @property
    def is_fleet(self) -> bool:
        return self.home.database.kind == "postgres"

    async def begin(self) -> None:
        await self.home.open()
        await self._open_stores()
        for queue in QUEUES:
            self.declared[queue] = Policy(queue, limits=LIMITS[queue][0], keys=KEYS)
            await self.stores[0].declare(self.declared[queue])
        if self.is_fleet:
            self._watch, self._host = [await asyncpg.connect(self.home.database.url) for _ in range(2)]

    async def _open_stores(self) -> None:
        more = [await self.home.database.open(self.clock) for _ in range(2)]
        self.stores = [self.home.store, *more]

    async def end(self) -> None:
        await self._stack.aclose()
        if self._watch is not None:
            await self._watch.close()
            await self._host.close()
        await self.home.database.close()

    # The steps of producers and workers.

    @_step
    async def enqueue(self, queue: str, calls: Sequence[tuple[str, str]], delay: int | None = None) -> None:
        await self._enqueue(0, queue, calls, delay)

    async def _enqueue(
        self, process: int, queue: str, calls: Sequence[tuple[str, str]], delay: int | None = None
    ) -> None:
        for account, k in calls:
            place = partition_name(queue, partition_of((k,), self.widths[queue]))
            policy = _of_partition(self.declared[queue], place)
            (job,) = new_jobs(policy, {"account": account, "k": k}, delay=delay)
            await self.stores[process].enqueue([job])
            self.jobs.append(job.id)
            if queue == ORDERED and delay is None:
                self.orders.setdefault(k, []).append(job.id)

    @_step
    async def claim(self, queue: str, want: int, part: int = 0, process: int = 0) -> None:
        await self._claim(process, queue, want, part)

    async def _claim(self, process: int, queue: str, want: int, part: int = 0) -> None:
        name = partition_name(queue, part % self.widths[queue])
        got = await claim_once(self.stores[process], name, want, worker=worker_named(f"worker {process}"))
        self.held += got.claims
        for each in got.claims if queue == ORDERED else ():
            self._check_order(each)

    def _check_order(self, claim: Claim) -> None:
        """Of those that were never delayed, each starts for the first time once all before it have."""
        line = self.orders.get(claim.keys["k"] or "", [])
        self.started.add(claim.id)
        if claim.id in line:
            before = line[: line.index(claim.id)]
            late = [job for job in before if job not in self.started]
            assert not late, f"{claim.id} of {claim.keys} was started before {late[0]}"

    @_step
    async def settle(self, ends: Sequence[tuple[int, Ending]], process: int = 0) -> None:
        await self._settle(process, ends)

    async def _settle(self, process: int, ends: Sequence[tuple[int, Ending]]) -> None:
        chosen = {self.held[which % len(self.held)].id: how for which, how in ends if self.held}
        claims = {claim.id: claim for claim in self.held if claim.id in chosen}
        self.held = [claim for claim in self.held if claim.id not in chosen]
        settlements = [settle(claims[job], End(0, how).outcome, 1_000) for job, how in chosen.items() if job in claims]
        if settlements:
            await self.stores[process].settle(settlements)

    @_step
    async def settle_in_transaction(self, which: int, commit: bool) -> None:
        """Where others can go on beside it, the transaction stays open."""
        if not self.held:
            return
        claim = self.held.pop(which % len(self.held))
        mine = await self._stack.enter_async_context(self.home.database.transaction())
        await self.stores[0].settle([settle(claim, End(0).outcome, 1_000)], tx=mine.tx)
        self.open.append((mine, claim))
        if not self.is_fleet:
            await self._end_transactions(commit=commit)

    @_step
    async def end_transactions(self, commit: bool) -> None:
        await self._end_transactions(commit=commit)

    async def _end_transactions(self, *, commit: bool) -> None:
        ending, self.open = self.open, []
        for mine, claim in ending:
            await (mine.commit() if commit else mine.rollback())
            if not commit:
                self.held.append(claim)

    @_step
    async def adopt(self, which: int, process: int = 1) -> None:
        await self._adopt(process, which)

    async def _adopt(self, process: int, which: int) -> None:
        if not self.held:
            return
        claim = self.held.pop(which % len(self.held))
        adopted = await self.stores[process].adopt(
            claim.id, claim.lease, uuid4(), tasks=[claim.task], worker=worker_named("an adopter"), lease_for=LEASE
        )
        self.held += [] if adopted is None else [adopted.claim]

    @_step
    async def abandon(self, which: int) -> None:
        """Its worker is gone: nobody renews it."""
        if self.held:
            self.held.pop(which % len(self.held))

    @_step
    async def pass_time(self, seconds: float) -> None:
        self.clock.set(self.clock.now() + int(seconds * SECOND))

    @_step
    async def reap(self, process: int = 0) -> None:
        await self._reap(process)

    async def _reap(self, process: int) -> None:
        await self.stores[process].reap()

    @_step
    async def collect(self, queue: str) -> None:
        await self._collect(0, queue)

    async def _collect(self, process: int, queue: str) -> None:
        for name in self._parts(queue):
            await self.stores[process].collect(name)

    @_step
    async def crash(self) -> None:
        """Everything that these processes remember is gone."""
        await self._end_transactions(commit=False)
        await self.home.crash()
        await self._open_stores()

    # What operators do.

    @_step
    async def apply(self, queue: str, which: int, name: int = 0, fair: bool = False) -> None:
        await self._apply(0, queue, which, name, fair)

    async def _apply(self, process: int, queue: str, which: int, name: int = 0, fair: bool = False) -> None:
        limits = tuple(_renamed(limit, name % NAMES) for limit in LIMITS[queue][which % len(LIMITS[queue])])
        by = Fair(by="k") if fair else None
        try:
            parts = divided(Policy(queue, by, limits, keys=KEYS), self.widths[queue], BY)
            for part in parts:
                await self.stores[process].apply(part, accept_missing_keys=True)
                self.declared[queue] = Policy(queue, by, limits, keys=KEYS)
        except (InvalidPolicy, ConfigurationError):
            return  # it means something else in another queue, or cannot be divided

    @_step
    async def divide(self, queue: str, width: int) -> None:
        await self._divide(0, queue, width)

    async def _divide(self, process: int, queue: str, width: int) -> None:
        try:
            await operations_on(self.stores[process], rest=self._rest).partitions.change(
                queue, width, by=BY, accept_missing_keys=True, actor="ada"
            )
        except (InvalidPolicy, ConfigurationError):
            return
        finally:
            found = await self.stores[process].policy(queue)
            place = None if found is None else found.policy.partition
            self.widths[queue] = 1 if place is None else place.width

    async def _rest(self) -> None:
        """Whoever divides a queue waits for jobs to end."""
        await self._end_transactions(commit=True)
        if self.held:
            await self._settle(2, [(0, "done")])
        else:
            self.clock.set(self.clock.now() + 31 * SECOND)

    @_step
    async def override(self, queue: str, kind: str, value: int | None) -> None:
        await self._override(0, queue, kind, value)

    async def _override(self, process: int, queue: str, kind: str, value: int | None) -> None:
        store = self.stores[process]
        found = await store.policy(queue)
        assert found is not None
        put = []
        if value is not None:
            scope = (("k", "1"),) if kind == "pause" else ()
            name = next((b.name for b in found.policy.bound if isinstance(b.limit, Concurrency) and not b.limit.by), "")
            put = [
                Override(kind=Kind.PAUSE, scope=scope)
                if kind == "pause"
                else Override(kind=Kind.SUSPEND)
                if kind == "suspend"
                else Override(kind=Kind.LIMIT, limit=name, value=value)
            ]
        gone = [] if put else [each.id for each in found.policy.overrides.all]
        try:
            await store.change_overrides(self._parts(queue), put, gone, OPERATOR)
        except InvalidOverride:
            return

    @_step
    async def cancel(self, which: int) -> None:
        await self._cancel(0, which)

    async def _cancel(self, process: int, which: int) -> None:
        if self.jobs:
            job = self.jobs[-1 - which % len(self.jobs)]
            self.started.add(job)  # nobody waits for it
            await self.stores[process].cancel(job)

    @_step
    async def force(self, which: int) -> None:
        await self._force(0, which)

    async def _force(self, process: int, which: int) -> None:
        others = [job for job in self.jobs if not any(job in line for line in self.orders.values())]
        if others:
            await self.stores[process].run(operators.force([others[-1 - which % len(others)]], OPERATOR))

    # Meetings.

    @_step
    async def meet(self, table: str, actions: Sequence[Action]) -> None:
        """Begin these one after the other while nobody may write a table, then let them go on. Something runs then."""
        queue = next((given[0] for name, given in actions if name in ("apply", "divide", "override")), "a")
        await self._enqueue(0, queue, [("x", "1"), ("y", "2"), ("x", "3")])
        for part in range(self.widths[queue]):
            await self._claim(0, queue, 2, part)
        if not self.is_fleet:
            for process, (name, given) in enumerate(actions):
                await getattr(self, f"_{name}")(process % 3, *given)
            return
        running: list[asyncio.Task[None]] = []
        async with self._host.transaction():
            await self._host.execute(f"lock table fairlane.{table} in share mode")
            for process, (name, given) in enumerate(actions):
                running.append(asyncio.ensure_future(getattr(self, f"_{name}")(process % 3, *given)))
                if await self._ends_or_waits(running) > 1:
                    self.met[table] += 1
        await asyncio.gather(*running)

    async def _ends_or_waits(self, running: Sequence[asyncio.Task[None]]) -> int:
        """Return once all of these have ended or wait for a lock; how many wait."""
        waiting = 0

        async def all_do() -> bool:
            nonlocal waiting
            waiting = await self._host.fetchval(WAITING)
            return bool(waiting >= sum(not task.done() for task in running))

        await until_found(all_do)
        return waiting

    async def _unblocked(self, action: Coroutine[Any, Any, None]) -> None:
        """Let a step end; where it waits for a caller's transaction, that one commits."""
        if not self.is_fleet or not self.open:
            await action
            return
        task = asyncio.ensure_future(action)

        async def ends_or_waits() -> bool:
            return task.done() or await self._watch.fetchval(WAITING) > 0

        while not task.done():
            await until_found(ends_or_waits)
            if not task.done():
                await self._end_transactions(commit=True)
        await task

    def _parts(self, queue: str) -> list[str]:
        return [partition_name(queue, index) for index in range(self.widths[queue])]

    # What must be so.

    async def check(self) -> None:
        """At rest, every gate counts the jobs that run, and nothing else."""
        if self.open:
            return  # no rest: what a caller has settled is in nobody's sight
        store = self.stores[self.steps % len(self.stores)]
        for name in await store.run(records.queues()):
            await boards.fold(store, name)
            await self._check_boards(name, is_checkpoint=self.steps % 4 == 0)
        ledger = await self._read()
        assert ledger.events == 0
        self._check_shared(ledger)
        for name, number in ledger.queues.items():
            found = await store.policy(name)
            assert found is not None
            self._check_queue(ledger, found.policy, number)
        self.rests += 1
        self.gates_seen += sum(map(len, ledger.gates.values())) + len(ledger.shared)

    async def _check_boards(self, name: str, *, is_checkpoint: bool) -> None:
        """J01: whoever remembers the board as it is now remembers what the database says."""
        found = await boards.said(self.stores[0], name)
        for each in self.stores:
            board = await boards.remembered(each, name)
            if board is not None and board.mark == found.mark:
                assert boards.differences(board, found) == [], name
                self.boards_seen += 1
        if is_checkpoint:
            await boards.checkpoint(self.stores[self.steps % len(self.stores)], name)

    def _check_queue(self, ledger: Ledger, policy: Policy, number: int) -> None:
        running = [job for job in ledger.jobs if job[0] == number and job[1] == State.RUNNING]
        lanes = ledger.lanes[number]
        in_flight = Counter(job[2] for job in running)
        assert {lane.id: lane.in_flight for lane in lanes if lane.in_flight} == in_flight, f"{policy.queue}: lanes"
        assert {lane.id: lane.ready for lane in lanes if lane.ready} == {
            lane.id: ledger.ready[lane.id] for lane in lanes if ledger.ready[lane.id]
        }, f"{policy.queue}: ready jobs of lanes"
        kept = [
            KeptPlaces(priority, keys, 1)
            for queue, state, _, priority, keys, _, keeps in ledger.jobs
            if queue == number and keeps and state == State.SCHEDULED
        ]
        gates = ledger.gates[number]
        expected: Counter[bytes] = Counter()
        for job in running:
            for gate, bound in (*policy.gates_of(job[3], job[4]), *policy.queue_gates):
                if bound.limit.counts_in_flight and not bound.is_shared:
                    expected[gate] += 1
            held = {gate for gate, bound, _ in policy.shared_gates_of(job[3], job[4]) if bound.limit.counts_in_flight}
            assert held <= set(job[5]), f"{policy.queue}: a job runs that a shared limit does not count"
        for each in kept if policy.sequence is not None else ():
            found = policy.sequence_gate(each.priority, each.keys)
            expected[found[0] if found else b""] += 1
        stored = {gate.id: gate.in_flight for gate in gates if gate.in_flight}
        assert stored == +expected, f"{policy.queue}: gates"
        rows = [
            LaneRow(lane.id, b"", lane.priority, lane.keys, lane.ready, lane.in_flight, 0, 0, 0, None, 0.0)
            for lane in lanes
        ]
        anew = rebuild(policy, self.clock.now(), QueueRow(0.0, 0.0, 0, 0, 0.0), [], rows, gates, kept)
        assert {gate.id: gate.in_flight for gate in anew.gates if gate.in_flight} == stored, f"{policy.queue}: rebuilt"

    def _check_shared(self, ledger: Ledger) -> None:
        names = {number: name for name, number in ledger.queues.items()}
        by_queue = Counter((gate, names[job[0]]) for job in ledger.jobs if job[1] == State.RUNNING for gate in job[5])
        for gate, queue, ended in ledger.left:
            by_queue[gate, names[queue]] += ended
        held: Counter[bytes] = Counter()
        for (gate, _), count in by_queue.items():
            held[gate] += count
        for gate, limit, in_flight, contenders in ledger.shared:
            if limit.startswith("concurrency"):
                assert in_flight == held[gate], f"{limit}: {in_flight} in flight, {held[gate]} run"
                taken = {each.queue: each.taken for each in contenders if each.taken}
                assert taken == {queue: n for (id_, queue), n in by_queue.items() if id_ == gate and n}, limit

    async def come_to_rest(self) -> None:
        """Everything that is left runs and ends: no gate counts anything, and every slot can be taken (A14)."""
        await self._end_transactions(commit=True)
        for queue in QUEUES:
            await self._override(0, queue, "pause", None)
        states: Counter[State] = Counter()
        for _ in range(200):
            for queue in QUEUES:
                for part in range(self.widths[queue]):
                    await self._claim(0, queue, 20, part)
            await self._settle(0, [(n, "done") for n in range(len(self.held))])
            self.clock.set(self.clock.now() + 31 * SECOND)
            await self._reap(0)
            states = Counter([(await self.stores[0].job(job)).state for job in self.jobs])
            if all(state.is_final for state in states):
                break
        assert all(state.is_final for state in states), f"jobs wait, and nothing lets them start: {states}"
        await self.check()
        ledger = await self._read()
        assert [
            row for row in ledger.shared if row[2] > sum(left[2] for left in ledger.left if left[0] == row[0])
        ] == []

    async def _read(self) -> Ledger:
        """Behind the protocol, in the words of either store."""
        look = self.home.look
        queue, keys = (
            ("queue_id", "keys_of_lane(lane_keys, keys, task)::text") if self.is_fleet else ("queue", "lane_keys")
        )
        events = "select (select count(*) from releases) + (select count(*) from arrivals)"
        jobs = await look(
            f"select {queue}, state, lane, priority, {keys}, shared, keeps_place from jobs "
            "where state = 2 or keeps_place"
        )
        left_behind = f"select gate, {queue}, ended + unstarted from shared_releases"
        numbers: dict[str, int] = dict(await look("select name, id from queues"))
        found = {number: (await boards.said(self.stores[0], name)).now for name, number in numbers.items()}
        shared = await look('select id, "limit", in_flight, contenders from shared_gates')
        return Ledger(
            numbers,
            [(*row[:4], msgspec.json.decode(row[4]), _split(row[5]), bool(row[6])) for row in jobs],
            Counter(dict(await look("select lane, count(*) from jobs where state = 1 group by lane"))),
            {number: now.lanes for number, now in found.items()},
            {number: now.gates for number, now in found.items()},
            [(*row[:3], msgspec.json.decode(row[3], type=list[Contender])) for row in shared],
            await look(left_behind),
            (await look(events))[0][0],
        )


def _renamed(limit: Limit, name: int) -> Limit:
    return read_limit({**limit.to_document(), "name": f"{limit.name}{name or ''}"}) if limit.name else limit


def _split(shared: str | list[bytes] | None) -> list[bytes]:
    if isinstance(shared, str):
        raw = bytes.fromhex(shared)
        return [raw[n : n + 16] for n in range(0, len(raw), 16)]
    return shared or []


def _of_partition(policy: Policy, queue: str) -> Policy:
    return Policy(queue, policy.fair, policy.limits, keys=policy.keys)
