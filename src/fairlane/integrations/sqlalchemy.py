"""Fairlane beside SQLAlchemy: in the same database, or in another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fairlane.errors import ConfigurationError
from fairlane.integrations.extras import missing
from fairlane.job import Outcome
from fairlane.task import Call, Producer

try:
    from sqlalchemy import URL, Connection, Engine, event, make_url
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, SessionTransaction, scoped_session
    from sqlalchemy.util import await_only
    from sqlalchemy.util.concurrency import in_greenlet
except ImportError as error:
    raise missing("sqlalchemy", error) from error

__all__ = ["enqueue_after_commit", "url_of"]

log = logging.getLogger("fairlane.integrations.sqlalchemy")

AnySession = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]
Place = Engine | AsyncEngine | Connection | AsyncConnection | URL | str

# fmt: off
UNDERSTOOD = {
    "database", "dbname", "gsslib", "host", "krbsrvname", "options", "passfile", "password", "port", "service",
    "sslcert", "sslcrl", "sslkey", "sslmode", "sslnegotiation", "sslpassword", "sslrootcert",
    "ssl_max_protocol_version", "ssl_min_protocol_version", "target_session_attrs", "user",
}
"""Parameters of libpq that our driver understands as well."""
OWN_AFFAIRS = {
    "application_name", "async_fallback", "client_encoding", "command_timeout", "connect_timeout",
    "fallback_application_name", "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval",
    "max_cached_statement_lifetime", "prepare_threshold", "prepared_statement_cache_size",
    "prepared_statement_name_func", "statement_cache_size", "tcp_user_timeout", "timeout",
}
"""Parameters that configure the program's own connections, and do not say where the database is."""
# fmt: on


def url_of(place: Place) -> str:
    """The URL for an `App` in the database of an engine, a connection or a URL of SQLAlchemy, its password included.

    What the engine was given beside its URL (`connect_args`, `creator`) is not in it.
    """
    url = _url(place)
    match url.get_backend_name():
        case "postgresql":
            return _postgres(url)
        case "sqlite":
            return _sqlite(url)
        case other:
            raise ConfigurationError(
                f"Fairlane keeps its jobs in PostgreSQL or SQLite, not in {other}; give it a database of its own, and "
                "enqueue with enqueue_after_commit(session, task.call(…))"
            )


def _url(place: Place) -> URL:
    match place:
        case str() | URL():
            return make_url(place)
        case Engine() | AsyncEngine():
            return place.url
        case Connection() | AsyncConnection():
            return place.engine.url
    raise ConfigurationError(
        f"url_of takes an engine, a connection or a URL of SQLAlchemy, not a {type(place).__name__}"
    )


def _sqlite(url: URL) -> str:
    path = url.database or ""
    if path.startswith("file:"):
        path = "" if url.query.get("mode") == "memory" else path.removeprefix("file:").partition("?")[0]
    if path in ("", ":memory:"):
        raise ConfigurationError("a SQLite database in memory belongs to one connection; use a file to share it")
    # Absolute, as in the engine: it stays valid if the program changes its folder.
    return f"sqlite:///{Path(path).absolute()}"


def _postgres(url: URL) -> str:
    given = {name: value if isinstance(value, str) else value[-1] for name, value in url.query.items()}
    for name in ("host", "port"):  # of which there may be several
        if isinstance(values := url.query.get(name), tuple):
            given[name] = ",".join(values)
    if "ssl" in given:  # the name of asyncpg's argument, which SQLAlchemy passes on
        given["sslmode"] = given.pop("ssl")
    if strange := sorted(given.keys() - UNDERSTOOD - OWN_AFFAIRS):
        raise ConfigurationError(
            f"{strange[0]!r} in the URL of this engine means nothing to asyncpg, with which Fairlane connects; write "
            "its URL yourself: App('postgresql://user@host/database')"
        )
    query = {name: value for name, value in given.items() if name in UNDERSTOOD}
    return url.set(drivername="postgresql", query=query).render_as_string(hide_password=False)


# Enqueueing after the commit, where the jobs are in another database.


def enqueue_after_commit(session: AnySession, *calls: Call[Any]) -> None:
    """Enqueue these calls once the session has committed; a rollback, also of a savepoint, drops them.

    For jobs in another database than that of the session: a crash between the commit and the enqueue loses them. In the
    same database, `task.using(tx=session)` stores them together with your rows.
    """
    for call in calls:
        if not isinstance(call, Call):
            raise ConfigurationError(f"enqueue_after_commit takes calls, task.call(…), not a {type(call).__name__}")
        if call.options.tx is not None:
            raise ConfigurationError(f"{call!r} names a transaction of its own, with tx=; enqueue it there")
    # As `AsyncSession.run_sync` does, SQLAlchemy may run this for async code.
    is_for_async_code = "greenlet" in sys.modules and in_greenlet()
    if isinstance(session, Session | scoped_session) and _is_in_event_loop() and not is_for_async_code:
        raise ConfigurationError(
            "enqueue_after_commit: a Session that commits inside an event loop blocks it; use an AsyncSession"
        )
    found: Any = session() if isinstance(session, scoped_session | async_scoped_session) else session
    blocking: Session = found.sync_session if isinstance(found, AsyncSession) else found
    _follower_of(blocking).add(blocking, calls)


class _Follower:
    """The calls to enqueue after a session commits. A savepoint has calls of its own until it is released."""

    def __init__(self) -> None:
        self._waiting: dict[SessionTransaction, list[Call[Any]]] = {}
        self._committed: list[Call[Any]] = []

    def add(self, session: Session, calls: Iterable[Call[Any]]) -> None:
        transaction = session.get_nested_transaction() or session.get_transaction() or session.begin()
        self._waiting.setdefault(transaction, []).extend(calls)

    def on_commit(self, session: Session) -> None:
        savepoint, root = session.get_nested_transaction(), session.get_transaction()
        assert root is not None
        if savepoint is None:
            self._committed += self._waiting.pop(root, [])
        elif calls := self._waiting.pop(savepoint, []):
            self._waiting.setdefault(_outer(savepoint), []).extend(calls)

    def on_end(self, session: Session, transaction: SessionTransaction) -> None:
        self._waiting.pop(transaction, None)  # still there, so this was not committed
        if transaction.parent is None:
            # Not at the commit itself: only now is the session in a clean state, even if enqueuing fails.
            calls, self._committed = self._committed, []
            _enqueue(calls)


_followers: WeakKeyDictionary[Session, _Follower] = WeakKeyDictionary()


def _follower_of(session: Session) -> _Follower:
    if (found := _followers.get(session)) is not None:
        return found
    follower = _followers[session] = _Follower()
    event.listen(session, "after_commit", follower.on_commit)
    event.listen(session, "after_transaction_end", follower.on_end)
    return follower


def _outer(savepoint: SessionTransaction) -> SessionTransaction:
    """The transaction that a savepoint is released into: another savepoint's, or the whole."""
    outer = savepoint.parent
    while outer is not None and outer.parent is not None and not outer.nested:
        outer = outer.parent
    assert outer is not None
    return outer


def _enqueue(calls: Iterable[Call[Any]]) -> None:
    by_app: dict[Producer, list[Call[Any]]] = {}
    for call in calls:
        by_app.setdefault(call.task.producer, []).append(call)
    for app, its_own in by_app.items():
        try:
            enqueueing = app.enqueue_many(its_own)
            report = await_only(enqueueing) if _is_in_event_loop() else app.run_blocking(enqueueing)
        except Exception:
            # Arguments do not belong in a log.
            names = ", ".join(call.task.name for call in its_own)
            log.error("the session has committed, and jobs of these tasks were not enqueued: %s", names)
            raise
        for call, job in zip(its_own, report, strict=True):
            if job.outcome in (Outcome.REFUSED, Outcome.FULL):
                log.error("the session has committed, and a job of %s was refused: %r", call.task.name, job)


def _is_in_event_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False
