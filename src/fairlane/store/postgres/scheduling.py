"""One transaction that holds a queue's claim lock: load what the plan asks for, and write what it decides."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.policy.overrides import Override, Overrides
from fairlane.policy.policy import Policy
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    Forced,
    GateRow,
    Head,
    KeptPlaces,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Snapshot,
    Supply,
)
from fairlane.scheduler.tally import encode_tally
from fairlane.store.decoding import decode_overrides
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.housing import Housing
from fairlane.store.postgres.sharing import Sharing
from fairlane.store.postgres.together import Holder, deal
from fairlane.store.protocol import FOLD_AT_MOST, LANES_PER_SCANNED_FLOW, PROMOTE_AT_MOST, RELEASES_AT_MOST
from fairlane.store.queue_time import UNKNOWN, Expected

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["Loaded", "QueueHandle", "Raced", "Scheduling", "select_overrides"]

T = TypeVar("T")

IS_DUE, HAS_FORCED = 1, 2
"""What a claim has to see to besides: scheduled jobs whose time has come, jobs that an operator wants to start."""
MOST_POLICIES = 1_000
"""Policies that are kept decoded."""

_policies: dict[str, Policy] = {}


class QueueHandle(msgspec.Struct, frozen=True):
    """A queue's number, and how a transaction that holds its claim lock begins."""

    name: str
    id: int
    take_lock: str
    take_lock_unflushed: str
    take_over: str
    take_over_unflushed: str


class Loaded(msgspec.Struct, frozen=True):
    """What a claim starts from, and what it owes the queue's state."""

    snapshot: Snapshot
    arrivals_from: str
    releases_from: str
    all_folded: bool
    others_wait: bool
    policy: Policy
    """As it is stored: with overrides whose time has come."""
    expired: list[Override]
    gate_due: Instant | None
    """When the next gate is to be looked at, before this claim."""
    due: Instant | None
    """When something else opens by itself: a scheduled job, an override's end."""


class Raced(Exception):
    """A job was cancelled between the plan and the write."""


class Scheduling:
    """One transaction that holds a queue's claim lock."""

    def __init__(self, connection: Connection, queue: QueueHandle, now: Instant | None) -> None:
        self.connection = connection
        self.queue = queue
        self.time = now
        self._place: rows.Place = (0, 0)
        self._housing = Housing(queue.id)
        self.sharing = Sharing(connection, queue.id)

    async def load(
        self,
        want: int,
        expected: Expected = UNKNOWN,
        *,
        me: UUID | None = None,
        lag: int = 0,
        listens: bool = False,
        ahead: int | None = None,
    ) -> Loaded:
        """Drain the bells, promote what is due, and read what the plan starts from."""
        self._housing.forget()
        count = max(want, 1)
        found = await self._find(
            "load",
            self.queue.id,
            self.time,
            count,
            RELEASES_AT_MOST,
            FOLD_AT_MOST,
            LANES_PER_SCANNED_FLOW,
            me,
            *expected,
        )
        (
            place,
            digest,
            bounds,
            vtime,
            cursor,
            cost,
            now,
            cursor_tie,
            tie,
            release_rows,
            attention,
            others_wait,
            *dues,
        ) = found.queue
        self._place = place
        all_folded = len(found.arrivals) < FOLD_AT_MOST and release_rows < RELEASES_AT_MOST
        policy = await self.policy_of(digest)
        named_lanes: list[bytes] = []
        if attention & IS_DUE:
            promoted = await self._promote(now, policy)
            all_folded = all_folded and sum(bell.count for bell in promoted) < PROMOTE_AT_MOST
            found.arrivals += promoted
            named_lanes += [bell.lane for bell in promoted]
        forced: list[Forced] = []
        if attention & HAS_FORCED and want > 0:
            forced = [
                Forced(lane, Head(*head))
                for lane, *head in await self.connection.fetch(STATEMENTS["select_forced"], self.queue.id, want)
            ]
            named_lanes += [each.lane for each in forced]
        if named_lanes:
            named = await self.ask(Need(), named_lanes)
            found.lanes += named.lanes
            found.flows += named.flows
        expired = policy.overrides.expired(now)
        arrivals_from, releases_from, policy_since = bounds.split()
        snapshot = Snapshot(
            policy.without(expired),
            now,
            QueueRow(vtime, cursor, cursor_tie, tie, cost),
            found.arrivals,
            found.releases,
            found.lanes,
            found.flows,
            found.scanned,
            len(found.scanned) < count,
            found.gates,
            int(policy_since),
            forced,
            lag,
            listens=listens,
            ahead=ahead,
        )
        if policy.shared_limits:
            snapshot, places = await self.sharing.load(snapshot, self.time)
            self._housing.remember_gates(places)
        return Loaded(snapshot, arrivals_from, releases_from, all_folded, bool(others_wait), policy, expired, *dues)

    async def next_due(self, loaded: Loaded, plan: Plan) -> Instant | None:
        """When something opens by itself, once the plan is written."""
        # Who found nothing waits for leases to end as well. And the gate that was to be looked at first may be among
        # those that were.
        has_alarms = loaded.gate_due is not None or any(gate.wake_at is not None for gate in plan.gates)
        if not plan.starts or (plan.gates and has_alarms):
            due: Instant | None = await self.connection.fetchval(
                STATEMENTS["next_due"], self.queue.id, loaded.snapshot.now
            )
            return due
        return min((due for due in (loaded.gate_due, loaded.due) if due is not None), default=None)

    async def plan(self, snapshot: Snapshot, want: int) -> Plan:
        """Ask the plan, and answer what it asks."""
        return await self.answer(plan_claims(snapshot, want))

    async def answer(self, asking: Generator[Need, Supply, T]) -> T:
        """Give whoever asks for rows what it needs, until it has come to a result."""
        try:
            need = next(asking)
            while True:
                need = asking.send(await self._supply(need))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def write(self, loaded: Loaded, plan: Plan, holders: Sequence[Holder] = ()) -> list[Claim]:
        """Start the jobs of a plan and store what it changed; `Raced` if a job is not ready any more.

        The jobs are dealt to the holders. Returned is what the first of them gets.
        """
        now, state = loaded.snapshot.now, plan.queue
        self.sharing.learn_gates(plan.shared)
        changes = self._housing.changes(plan, now)
        if changes.new_flows or changes.new_lanes or changes.new_gates:
            await self.connection.execute(
                STATEMENTS["insert_state"], changes.new_flows, changes.new_lanes, changes.new_gates
            )
        started = await self.connection.fetch(
            STATEMENTS["write"],
            self.queue.id,
            state.vtime,
            state.cursor,
            state.cursor_tie,
            state.tie,
            state.cost,
            *self._housing.totals(plan),
            loaded.arrivals_from,
            loaded.releases_from,
            changes.flows,
            changes.lanes,
            changes.gates,
            [
                (start.head.ref, start.head.position, start.charge, holder, *self.sharing.passed(start), start.at)
                for start, holder in zip(plan.starts, deal(len(plan.starts), holders), strict=True)
            ],
            now,
            self._place,
            [holder.lease for holder in holders],
            [holder.worker for holder in holders],
            [holder.name for holder in holders],
            [now + holder.duration for holder in holders],
            changes.weights,
            changes.served,
            None if plan.tally is None else encode_tally(plan.tally),
            changes.given_by,
        )
        await self.sharing.write(plan)
        if plan.starts and (not started or started[0]["total"] < len(plan.starts)):
            raise Raced
        by_position = {row[0]: row[1:-1] for row in started}
        own, name = plan.starts[: len(started)], self.queue.name
        return [rows.claim_of(by_position[start.head.position], holders[0].lease, name, start.at) for start in own]

    async def fold_all(self) -> tuple[Loaded, Plan]:
        """Fold every bell, start nothing."""
        while True:
            loaded = await self.load(0)
            plan = await self.plan(loaded.snapshot, 0)
            await self.write(loaded, plan)
            if loaded.all_folded:
                return loaded, plan

    async def in_force(self) -> tuple[Policy, Instant]:
        """The queue's policy with what operators have changed, and the time."""
        row = await self.connection.fetchrow(STATEMENTS["select_in_force"], self.queue.id, self.time)
        assert row is not None
        return await self.policy_of(row["digest"]), row["now"]

    async def take_all(self) -> tuple[list[FlowRow], list[LaneRow], list[GateRow]]:
        """Everything that bells were folded into, removed from the tables."""
        found = await self._find("take_state", self.queue.id)
        self._housing.forget()
        self._place = found.queue[0]
        return found.flows, found.lanes, found.gates

    async def kept_places(self, policy: Policy) -> list[KeptPlaces]:
        """Where jobs keep their place in a sequence, as far as bells have been folded."""
        if policy.sequence is None:
            return []
        found = await self.connection.fetch(STATEMENTS["count_kept_places"], self.queue.id)
        return [KeptPlaces(priority, rows.decode_keys(keys), count) for priority, keys, count in found]

    async def _promote(self, now: Instant, policy: Policy) -> list[Arrival]:
        in_sequence = policy.sequence is not None
        found = await self.connection.fetch(STATEMENTS["promote"], self.queue.id, now, PROMOTE_AT_MOST, in_sequence)
        return [
            Arrival(
                lane, priority, rows.decode_keys(keys), count, floor, since, rows.decode_given(given), resumed, given_by
            )
            for lane, priority, keys, count, floor, since, given, resumed, given_by in found
        ]

    async def policy_of(self, digest: str) -> Policy:
        """A policy in force, by what the queue's row says of it."""
        key = f"{self.queue.name}/{digest}"
        if key not in _policies:
            row = await self.connection.fetchrow(STATEMENTS["select_policy"], self.queue.name)
            assert row is not None
            if len(_policies) >= MOST_POLICIES:
                _policies.clear()
            overrides = await select_overrides(self.connection, self.queue.id)
            _policies[key] = Policy.decode(row["policy"]).overridden(overrides)
        return _policies[key]

    async def _supply(self, need: Need) -> Supply:
        shared = await self.sharing.select(need.shared)
        if not (need.flows or need.gates or need.parked or need.lanes or need.scan):
            found = await self.connection.fetch(STATEMENTS["select_heads"], need.heads) if need.heads else []
            return Supply(heads=_by_lane(need, [(nth, Head(*head)) for nth, *head in found]), shared=shared)
        answer = await self.ask(need)
        heads = _by_lane(need, answer.heads)
        return Supply(answer.flows, answer.gates, answer.lanes, heads, answer.scanned, shared)

    async def ask(self, need: Need, lanes: Sequence[bytes] = ()) -> rows.Found:
        """What the plan needs, and lanes by id with their flows."""
        return await self._find(
            "supply",
            self.queue.id,
            need.flows,
            need.gates,
            [gate for gate, _ in need.parked],
            [count for _, count in need.parked],
            [flow for flow, _ in need.lanes],
            [count for _, count in need.lanes],
            need.heads,
            *(need.scan or (0.0, 0, 0)),
            LANES_PER_SCANNED_FLOW,
            lanes,
        )

    async def _find(self, statement: str, *args: Any) -> rows.Found:
        found = rows.Found(await self.connection.fetch(STATEMENTS[statement], *args))
        self._housing.remember(found)
        return found


async def select_overrides(connection: Connection, queue: int) -> Overrides:
    """What operators have changed."""
    return decode_overrides(text for (text,) in await connection.fetch(STATEMENTS["select_overrides"], queue))


def _by_lane(need: Need, found: Iterable[tuple[int, Head]]) -> dict[bytes, list[Head]]:
    """Heads under their lanes; each comes with the number of the question that it answers."""
    heads: dict[bytes, list[Head]] = {lane: [] for lane, _, _ in need.heads}
    asked = [heads[lane] for lane, _, _ in need.heads]
    for nth, head in found:
        asked[nth - 1].append(head)
    return heads
