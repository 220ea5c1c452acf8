"""What an error of the database means for the caller. Every store decides by these tables, and nowhere else.

Generous by default: only an error that is known to be the fault of the program is raised as such. Everything else,
unknown errors included, is an outage: worker loops wait and ask again, and callers get `StoreUnavailable`.
"""

from __future__ import annotations

import sqlite3
from enum import Enum

from fairlane.errors import FairlaneError


class Fault(Enum):
    """Whose fault an error is, and so what helps."""

    OURS = "the statement, or a value given to it, is wrong: asking again brings the same answer"
    CONFLICT = "the server has undone it in favour of another transaction: ask again at once"
    AWAY = "the database, or the way to it, cannot serve us now: ask again later, over a new connection"


OUR_CLASSES = frozenset(
    {
        "21",  # cardinality violation
        "22",  # data exception
        "23",  # integrity constraint violation
        "3F",  # invalid schema name: like a table that is not there
        "42",  # syntax error or access rule violation
        "44",  # with check option violation
        "54",  # program limit exceeded: a value too large for its index, a statement too complex
        "FL",  # what Fairlane's own functions refuse
    }
)
"""Classes of SQLSTATE that say that the program is wrong, or what it was given."""
NOT_OURS = frozenset(
    {
        "42501",  # insufficient privilege: somebody else grants and revokes
        "42P05",  # duplicate prepared statement: a pooler has mixed up two sessions
    }
)
CONFLICTS = frozenset({"40001", "40P01"})
"""Serialization failure and deadlock: PostgreSQL asks to try these again."""

REMEDIES = {
    "08": "start it, or check the host, the port and the network",
    "25006": "this is a standby, or default_transaction_read_only is on: connect to the primary, or switch it off",
    "28": "check the user and the password in the database URL, and pg_hba.conf on the server",
    "3D": "create the database, or check its name in the database URL",
    "40": "other transactions are in the way: try again",
    "42501": "grant this role its rights: see Roles in docs/how-to/use-postgresql.md",
    "53": "free connections, memory or disk space on the server, or raise its limits",
    "53100": "make room on the server's disk",
    "53300": "close other connections, or raise max_connections",
    "55": "wait until the session that is in the way has ended, then try again",
    "55000": "the database may not accept connections: alter database … allow_connections true",
    "55P03": "another session holds a lock for longer than lock_timeout: end it, or raise the timeout",
    "57": "wait until the server is up, then try again",
    "57014": "the statement took longer than statement_timeout, or was cancelled: find what it waited for, or raise it",
}
"""By SQLSTATE, or by its class."""


def of_sqlstate(sqlstate: str | None) -> Fault:
    """What an error of a PostgreSQL server means."""
    if sqlstate is None:
        return Fault.AWAY
    if sqlstate in CONFLICTS:
        return Fault.CONFLICT
    if sqlstate[:2] in OUR_CLASSES and sqlstate not in NOT_OURS:
        return Fault.OURS
    return Fault.AWAY


def remedy_for(sqlstate: str | None) -> str:
    """What an operator can do about it."""
    code = sqlstate or "08"
    return REMEDIES.get(code) or REMEDIES.get(code[:2], "look at the server's log, then try again")


OUR_RESULTS = frozenset(
    {
        sqlite3.SQLITE_ERROR,  # a syntax error, a table that is not there
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
    }
)
"""Result codes of SQLite that say that the program is wrong. A full disk, an I/O error, a lock do not."""


def of_sqlite(error: BaseException) -> Fault | None:
    """What an error of SQLite, or of the files that it keeps, means; `None` for any other."""
    if isinstance(error, OSError) and not isinstance(error, FairlaneError):
        return Fault.AWAY
    if not isinstance(error, sqlite3.Error):
        return None
    # Without a code it is the driver's own: a closed connection, a wrong number of parameters.
    code = getattr(error, "sqlite_errorcode", None)
    return Fault.OURS if code is None or code & 0xFF in OUR_RESULTS else Fault.AWAY
