"""What a store knows about its own condition, for diagnosis. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.scheduler.snapshot import Standing
from fairlane.store.procedures import Procedure, on_board, query, snapshot
from fairlane.store.rows import decode_key


class ConnectionLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on connections to PostgreSQL, and how many there are."""

    setting: str
    """`max_connections`, or whose own limit it is."""
    used: int
    most: int
    """For us: without those that are kept for superusers."""


class HorizonHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody whose old snapshot keeps PostgreSQL from removing dead rows."""

    kind: str
    """`session`, `prepared transaction` or `replication slot`."""
    name: str
    pid: int | None
    user: str
    state: str
    open_for: int | None
    """Microseconds; `None` where only its transactions can be counted."""
    transactions: int
    """How many have begun since."""


class TableHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One of our tables, as autovacuum sees it."""

    name: str
    live: int
    dead: int
    due_at: int
    """Dead rows at which it is to be vacuumed."""
    is_vacuumed: bool
    """False: autovacuum is switched off for it."""
    vacuumed_for: int | None
    """Microseconds since it last was; `None`: never."""


class PostgresHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The condition of a PostgreSQL server, as far as this role may see it."""

    settings: dict[str, str]
    connections: list[ConnectionLimit]
    tables: list[TableHealth]
    holders: list[HorizonHolder]
    """The oldest ones first."""


class SqliteHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The condition of a SQLite database."""

    path: str | None
    """`None`: it is in memory."""
    journal_mode: str
    size: int
    """Bytes, as the next ones."""
    wal_size: int
    free_space: int | None
    """On its disk."""
    others: list[int]
    """Other processes that have it open, as far as this user may see them."""


Health = PostgresHealth | SqliteHealth


class Standstill(msgspec.Struct, frozen=True):
    """Jobs whose turn does not come: a flow that the scan of flows has passed by, or lanes on a gate that was to wake
    them long ago. Neither can be, as long as somebody claims."""

    queue: str
    limit: str | None
    """Of the gate; `None`: it is a flow."""
    key: list[str | None]
    lanes: int
    since: Instant | None
    """When the gate was to wake them."""


@snapshot
def standstills(queues: Sequence[str], before: Instant, limit: int = 10) -> Procedure[list[Standstill]]:
    """Flows of these queues where no claim looks, and gates that were to wake their lanes before a certain time: at
    most `limit` of each queue and kind."""
    found: list[Standstill] = []
    for queue in queues:
        loaded = yield on_board(queue, "load")
        flows, _, gates = map(list, loaded.board.changed)
        rows = yield query("select_standstills", [queue], before, limit, flows, gates)
        found += [Standstill(name, gate, decode_key(key), lanes, since) for name, gate, key, lanes, since in rows]
        # Those among pieces that have changed since the tables were written.
        cursor, changed = (loaded.state.cursor, loaded.state.cursor_tie), loaded.board.changed_rows()
        for flow in changed.flows:
            if flow.standing == Standing.READY and (flow.vtime, flow.tie) < cursor:
                found.append(Standstill(queue, None, flow.key, flow.open, None))
        for row in changed.gates:
            if row.waiting > 0 and row.wake_at is not None and row.wake_at < before:
                found.append(Standstill(queue, row.limit, row.key, row.waiting, row.wake_at))
    return found


class Traces(msgspec.Struct, frozen=True):
    """What jobs and workers have left behind in a queue."""

    found: frozenset[bytes]
    """Of the flows and gates asked for, those that there are: jobs wait or run there, or did so not long ago."""
    listeners: int
    """Workers that wait for a job of this queue now. Those whose slots are all in use are not among them."""


@snapshot
def traces(queue: str, flows: Sequence[bytes], gates: Sequence[bytes]) -> Procedure[Traces]:
    """What there is of a queue to see besides its counts; each flow and gate is looked up by its id."""
    board = (yield on_board(queue, "load")).board
    number = yield on_board(queue, "number")
    ((stored_flows, stored_gates, listeners),) = yield query("select_traces", number, list(flows), list(gates))
    known = {each for each in (*flows, *gates) if each in board.flows or each in board.gates}
    return Traces(frozenset({*stored_flows, *stored_gates, *known}), listeners)
