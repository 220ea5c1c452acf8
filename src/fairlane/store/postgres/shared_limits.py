"""Limits that queues share, on PostgreSQL: each has a lock of its own, taken after the queue's and after the load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fairlane.clock import Instant
from fairlane.policy.gates import Limit
from fairlane.policy.keys import shared_gate_id
from fairlane.policy.policy import Policy, check_alike, shared_identity
from fairlane.scheduler.board import rings_for_all
from fairlane.scheduler.rebuild import Claimed, carried_over, counted_in, uncounted
from fairlane.scheduler.resident import Events
from fairlane.scheduler.snapshot import Contender, Plan, Ring, SharedGateRow, SharedRelease, Start
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.protocol import RELEASES_AT_MOST
from fairlane.store.rows import decode_keys, decode_limit, encode, encode_limit

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
        rung: list[bytes] = []
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
                    rung.append(row["id"])
        self._is_drained = bool(releases)
        events = msgspec.structs.replace(events, now=latest, shared=shared, shared_releases=releases, rung=rung)
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
        """Store what a plan has changed, and ring."""
        if plan.shared or plan.rings or self._is_drained:
            await self.put(plan.shared, plan.rings)

    async def count_running(self, policy: Policy) -> None:
        """Count what already runs by the shared limits that are new to its queue."""
        found = uncounted(
            policy,
            [
                Claimed(row["id"], row["priority"], decode_keys(row["keys"]), tuple(row["shared"] or ()))
                for row in await self._connection.fetch(STATEMENTS["lock_running_of_queue"], self._queue)
            ],
        )
        if found:
            known = await self.select(sorted({gate.id for _, gates in found for gate in gates}))
            await self.put(counted_in(policy.queue, found, known), ())
            marks = [
                (job.ref, [gate.id for gate in gates], [self._numbers[gate.limit] for gate in gates])
                for job, gates in found
            ]
            await self._connection.executemany(STATEMENTS["mark_shared"], marks)

    async def change_bound(self, limit: Limit, now: Instant) -> None:
        """Store a limit's new bound, and let every queue look at it."""
        await self._connection.execute(STATEMENTS["update_shared_limit"], limit.name, encode_limit(limit))
        found = await self._connection.fetch(STATEMENTS["select_shared_gates_of_limit"], limit.name)
        gates = [self.gate(row) for row in found if row["name"] == shared_identity(limit)]
        gates = carried_over(gates, limit, now)
        await self.put(gates, rings_for_all(gates))

    async def put_tokens(self, gates: Sequence[SharedGateRow]) -> None:
        """Store what was spent before a limit was shared."""
        if gates:
            await self.select([gate.id for gate in gates])
            await self.put(gates, ())

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

    async def put(self, gates: Sequence[SharedGateRow], rings: Sequence[Ring]) -> None:
        """Store these gates, and ring."""
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
            [ring.queue for ring in rings],
            [ring.gate for ring in rings],
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


async def declare(connection: Connection, policy: Policy) -> bool:
    """Store a queue that is new, and those of its shared limits that nobody has declared before. Was it new?"""
    await connection.execute(STATEMENTS["lock_declarations"])
    await _check(connection, policy)
    is_new = await connection.fetchrow(STATEMENTS["select_policy"], policy.queue) is None
    if is_new:
        await connection.execute(STATEMENTS["insert_queue"], policy.queue, policy.encoded, policy.digest)
        await _insert_limits(connection, policy)
    return is_new


async def put_in_force(connection: Connection, queue: int, policy: Policy) -> None:
    """Under the queue's lock: take the locks of all limits that it named or will name, and store the new ones."""
    await connection.execute(STATEMENTS["lock_declarations"])
    await _check(connection, policy)
    names = [bound.limit.name for bound in policy.shared_limits]
    for bound in policy.shared_limits:
        await connection.execute(STATEMENTS["insert_shared_limit"], bound.limit.name, encode_limit(bound.limit))
    await connection.execute(STATEMENTS["lock_shared_limits"], queue, names)


async def take_over(sharing: Sharing, connection: Connection, policy: Policy, now: Instant) -> None:
    """Once the queue's state is made anew: it names these limits, with these bounds, and they count what runs."""
    await _insert_limits(connection, policy)
    await sharing.learn_numbers(policy)
    for bound in policy.shared_limits:
        row = await connection.fetchrow(STATEMENTS["select_shared_limit"], bound.limit.name, policy.queue)
        assert row is not None
        if row["document"] != encode_limit(bound.limit):
            await sharing.change_bound(bound.limit, now)
    await sharing.count_running(policy)


async def _insert_limits(connection: Connection, policy: Policy) -> None:
    names = [bound.limit.name for bound in policy.shared_limits]
    for bound in policy.shared_limits:
        await connection.execute(STATEMENTS["insert_shared_limit"], bound.limit.name, encode_limit(bound.limit))
    await connection.execute(STATEMENTS["put_sharing"], policy.queue, names)


async def _check(connection: Connection, policy: Policy) -> None:
    """Refuse a policy whose shared limits are of another kind or scope in another queue."""
    for bound in policy.shared_limits:
        row = await connection.fetchrow(STATEMENTS["select_shared_limit"], bound.limit.name, policy.queue)
        if row is not None and row["other"] is not None:
            check_alike(policy.queue, bound.limit, row["other"], decode_limit(row["document"]))
