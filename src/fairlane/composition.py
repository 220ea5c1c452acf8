"""Which store a URL stands for. Only here, and where programs are put together, is a concrete store known."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from fairlane.clock import Clock, SystemClock
from fairlane.errors import ConfigurationError
from fairlane.parameters import shown
from fairlane.producing import Producing
from fairlane.queue import Hand
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.waiting import Ear
from fairlane.worker.worker import name_of_process

__all__ = ["Connection", "actor_of_process", "hand_of", "is_in_memory", "store_factory", "without_password"]


HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(:(?P<port>[0-9]*))?")


@dataclass(slots=True)
class Connection:
    """An open store, the event loop that it belongs to, and what an app does with it."""

    store: Store
    loop: asyncio.AbstractEventLoop
    hand: Hand
    producing: Producing

    async def close(self) -> None:
        await self.producing.telemetry.hooks.flush()
        await self.hand.ear.close()
        await self.store.close()


def store_factory(url: str, clock: Clock, durable_claims: bool) -> Callable[[], Store]:
    """How to make the store of a URL; checked now, made later."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite":
        path = rest.removeprefix("/") or None
        if path is not None and not rest.startswith("/"):
            raise ConfigurationError(
                f"{shown(url)} names a host; a SQLite file is written sqlite:///relative.db or sqlite:////absolute.db"
            )

        def sqlite() -> Store:
            from fairlane.store.sqlite import SqliteStore

            return SqliteStore(path, clock=clock, durable_claims=durable_claims)

        return sqlite
    if separator and scheme in ("postgresql", "postgres"):
        _check_hosts(url, rest)

        def postgres() -> Store:
            from fairlane.store.postgres import PostgresStore

            # The machine's own clock is no better than the database's, and differs from machine to machine.
            own = None if isinstance(clock, SystemClock) else clock
            return PostgresStore(url, clock=own, durable_claims=durable_claims)

        return postgres
    raise ConfigurationError(
        f"{shown(without_password(url))} is not a database URL that Fairlane knows; possible are sqlite:///file.db, "
        f"sqlite:// (in memory) and postgresql://user@host/database"
    )


def is_in_memory(url: str) -> bool:
    """Whether nobody but the store that was made for this URL can see what is in it."""
    return url in ("sqlite://", "sqlite:///")


def _check_hosts(url: str, rest: str) -> None:
    """Refuse what no driver can connect to. There may be several hosts, or none, or the folder of a socket."""
    hosts = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
    for host in hosts.split(","):
        found = HOST.fullmatch(host)
        if found is None or int(found["port"] or 0) > 65_535:
            raise ConfigurationError(
                f"{without_password(url)!r} is not a database URL: {host!r} is neither a host nor a host and a port "
                "from 1 to 65535; write postgresql://user@host:5432/database"
            )


def hand_of(store: Store, clock: Clock) -> Hand:
    """With what this process claims by hand."""
    name = name_of_process()
    # The ear has an id of its own: a claim that fills its slots withdraws its worker, and the ear waits for others.
    return Hand(store, WorkerIdentity(uuid4(), name), Ear(store, clock, WorkerIdentity(uuid4(), name)))


def actor_of_process() -> str:
    """Who acts where nobody is named: FAIRLANE_ACTOR, else user@host."""
    if named := os.environ.get("FAIRLANE_ACTOR", "").strip():
        return named
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


_SECRETS = re.compile(r"(?<=[?&])((?:ssl)?password)=[^&]*", re.IGNORECASE)


def without_password(url: str) -> str:
    """A URL that may be shown."""
    head, at, tail = url.rpartition("@")
    scheme, separator, login = head.partition("://")
    shown = f"{scheme}{separator}{login.partition(':')[0]}{at}{tail}" if at else url
    return _SECRETS.sub(r"\1=…", shown)
