"""Limits that queues share, on PostgreSQL: each has a lock of its own, taken after the queue's and after the load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fairlane.clock import Instant
from fairlane.policy.keys import shared_gate_id
from fairlane.policy.policy import Policy, shared_identity
from fairlane.scheduler.rebuild import Claimed
from fairlane.scheduler.snapshot import Contender, Events, GateWakeup, Plan, SharedGateRow, SharedRelease, Start
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.protocol import RELEASES_AT_MOST
from fairlane.store.rows import decode_keys, decode_limit, encode

Place = tuple[int, int]
"""A row's `ctid`: block and line."""
MOST_RESOLVED = 1_000
"""Policies that are kept with their shared limits."""

_resolved: dict[tuple[object, ...], tuple[Policy, Policy]] = {}


class Sharing:
    """The shared limits of one queue, in a transaction that holds its claim lock and then theirs."""

    def __init__(self, connection: Connection, queue: int) -> None:
        self._connection = connection
        self._queue = queue
        self._states: list[tuple[Place, str]] = []
        self._numbers: dict[str, int] = {}
        self._limits: dict[bytes, int] = {}
        """By gate, the number of its limit: what a job that has passed it is to remember."""
        self._places: dict[bytes, Place] = {}
        self._is_drained = False

    async def load(self, policy: Policy, events: Events, now: Instant | None) -> tuple[Policy, Events]:
        """Take the locks, then read: the policy with the limits in force, and what the plan is to know besides."""
        await self._connection.execute(STATEMENTS["lock_shared_limits"], self._queue, [])
        of_queues = [shared_gate_id(bound.name, ()) for bound in policy.shared_limits if not bound.limit.by]
        found = await self._connection.fetch(STATEMENTS["load_shared"], self._queue, of_queues, RELEASES_AT_MOST, now)
        self._states = []
        self._places.clear()
        woken: list[bytes] = []
        shared: list[SharedGateRow] = []
        releases: list[SharedRelease] = []
        documents: list[str] = []
        latest = events.now
        for row in found:
            match row["kind"]:
                case "l":
                    documents.append(row["keys"])
                    self._states.append((row["place"], row["name"]))
                    self._numbers[shared_identity(decode_limit(row["keys"]))] = row["number"]
                    latest = row["i1"]
                case "r":
                    releases.append(SharedRelease(row["id"], row["keys"], row["name"], *row[7:14]))
                case "s":
                    shared.append(self.gate(row))
                case _:
                    woken.append(row["id"])
        self._is_drained = bool(releases)
        events = msgspec.structs.replace(events, now=latest, shared=shared, shared_releases=releases, woken=woken)
        return resolved(policy, documents), events

    async def look(self, policy: Policy, events: Events) -> tuple[Policy, Events]:
        """The same for those who only look: no lock, and what has happened stays where it is."""
        found = await self._connection.fetch(STATEMENTS["peek_shared_releases"], self._queue, RELEASES_AT_MOST)
        releases = [SharedRelease(*row) for row in found]
        documents = await self._connection.fetch(STATEMENTS["select_shared_limits"], policy.queue)
        shared = await self.select(sorted({release.gate for release in releases}))
        events = msgspec.structs.replace(events, shared=shared, shared_releases=releases)
        return resolved(policy, [document for _, document in documents]), events

    async def select(self, gates: Sequence[bytes]) -> list[SharedGateRow]:
        """Shared gates by id, where they exist."""
        if not gates:
            return []
        found = await self._connection.fetch(STATEMENTS["select_shared_gates"], gates)
        return [self.gate(row) for row in found]

    def learn_gates(self, gates: Sequence[SharedGateRow]) -> None:
        """Know the limits of these gates. Whatever a plan starts has changed every shared gate that it passes."""
        for row in gates:
            if row.limit in self._numbers:
                self._limits[row.id] = self._numbers[row.limit]

    def passed(self, start: Start) -> tuple[Sequence[bytes] | None, list[int] | None]:
        """The shared gates that a job passes, and their limits, as they are stored with it."""
        return (start.shared, [self._limits[gate] for gate in start.shared]) if start.shared else (None, None)

    async def write(self, plan: Plan) -> None:
        """Store what a plan has changed, and wake other queues."""
        if plan.shared or plan.wakeups or self._is_drained:
            await self.put(plan.shared, plan.wakeups)

    async def walk(self, after: bytes, limit: int) -> list[SharedGateRow]:
        """A stretch of the gates of the queue's limits."""
        found = await self._connection.fetch(STATEMENTS["walk_shared_gates"], self._queue, after, limit)
        return [self.gate(row) for row in found]

    async def running(self) -> list[Claimed]:
        """The jobs of the queue that run, locked, and the gates that count them."""
        return [
            Claimed(row["id"], row["priority"], decode_keys(row["keys"]), tuple(row["shared"] or ()))
            for row in await self._connection.fetch(STATEMENTS["lock_running_of_queue"], self._queue)
        ]

    async def mark(self, found: Sequence[tuple[Claimed, Sequence[SharedGateRow]]]) -> None:
        """These jobs hold these gates too."""
        marks = [
            (job.ref, [gate.id for gate in gates], [self._numbers[gate.limit] for gate in gates])
            for job, gates in found
        ]
        await self._connection.executemany(STATEMENTS["mark_shared"], marks)

    async def gates_of(self, limit: str) -> list[SharedGateRow]:
        """All gates of a shared limit, by its name."""
        return [
            self.gate(row) for row in await self._connection.fetch(STATEMENTS["select_shared_gates_of_limit"], limit)
        ]

    async def learn_numbers(self, policy: Policy) -> None:
        for bound in policy.shared_limits:
            row = await self._connection.fetchrow(STATEMENTS["select_shared_limit"], bound.limit.name, policy.queue)
            assert row is not None
            self._numbers[bound.name] = row["id"]

    def gate(self, row: Any) -> SharedGateRow:
        """A shared gate as it was read; where it was found is remembered for its writing."""
        self._places[row["id"]] = row["place"]
        key = msgspec.json.decode(row["keys"], type=list[str | None])
        waiting = msgspec.json.decode(row["contenders"], type=list[Contender])
        return SharedGateRow(row["id"], row["name"], key, row["i1"], row["i2"], waiting, row["memo"], row["value"])

    async def put(self, gates: Sequence[SharedGateRow], wakeups: Sequence[GateWakeup]) -> None:
        """Store these gates, and wake other queues."""
        changed, new = [], []
        for row in gates:
            waiting = encode(row.contenders)
            if (place := self._places.get(row.id)) is not None:
                changed.append((place, row.in_flight, row.tat, waiting, row.memo, row.value))
            else:
                number, key = self._numbers[row.limit], encode(row.key)
                new.append((number, row.id, row.limit, key, row.in_flight, row.tat, waiting, row.memo, row.value, 0, 0))
        states, self._states = self._states, []
        await self._connection.execute(
            STATEMENTS["write_shared"],
            [place for place, _ in states],
            [bound for _, bound in states],
            changed,
            new,
            [wakeup.queue for wakeup in wakeups],
            [wakeup.gate for wakeup in wakeups],
        )
        # What has been written has moved.
        self._places.clear()


def resolved(policy: Policy, documents: Sequence[str]) -> Policy:
    """The policy with its shared limits as they are in force."""
    # By the very object: it carries overrides, and stands for the policy of one queue in one database.
    key = (id(policy), *documents)
    known = _resolved.get(key)
    if known is None or known[0] is not policy:
        if len(_resolved) >= MOST_RESOLVED:
            _resolved.clear()
        limits = [decode_limit(document) for document in documents]
        found = policy.with_shared({limit.name: limit for limit in limits if limit.name is not None})
        known = _resolved[key] = (policy, found)
    return known[1]
