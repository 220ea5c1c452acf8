"""The processes around an engine: its workers and the dispatcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.forward.brokers import ThrowawayBroker, dying_with_us

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STOP_WITHIN = 30.0
"""Seconds after which a process that was asked to stop is killed. Never the measure of anything."""


class Member:
    """A process with a group of its own, which can be started again when it was killed."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.name = name
        self._command = [*dying_with_us(), *command]
        self._environment = environment
        self._log = folder / f"{name}.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> int:
        """SIGKILL the whole group, and return its number once nobody of it is left."""
        group = self.process.pid
        os.killpg(group, signal.SIGKILL)
        self.process.wait()
        while alive_in(group):
            os.sched_yield()
        return group

    def start_again(self) -> None:
        self.process = self._start()

    def ask_to_stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end_of_log(self) -> str:
        return "\n".join([f"--- {self.name}", *self._log.read_text(errors="replace").split("\n")[-25:]])


def environment_with(**given: str) -> dict[str, str]:
    """What such a process finds in its environment."""
    here = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **here, **given}


def dispatcher_of(forwarder: str, *options: str) -> list[str]:
    """The command that runs a dispatcher."""
    return [sys.executable, "-m", "fairlane.cli", "forward", forwarder, *options]


def stop(members: Sequence[Member], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Ask all to stop, and see to it that they do."""
    for member in members:
        member.ask_to_stop()
    deadline = time.monotonic() + STOP_WITHIN
    for member in members:
        while member.process.poll() is None and time.monotonic() < deadline:
            meanwhile()
            try:
                member.process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
        if alive_in(member.process.pid):
            member.kill()
        member.process.wait()


@contextmanager
def running(members: Sequence[Member]) -> Iterator[None]:
    """While this block runs; what they told is shown if it fails."""
    try:
        yield
    except BaseException:
        print("\n".join(member.end_of_log() for member in members), file=sys.stderr)
        raise
    finally:
        stop(members)


@dataclass
class Place:
    """Where a shop is: its database, its broker, and its folder."""

    url: str
    broker: ThrowawayBroker
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return environment_with(FAIRLANE_URL=self.url, SHOP_BROKER=self.broker.url, SHOP_FOLDER=str(self.folder))


@contextmanager
def at_work(
    module: str, worker: Sequence[str], environment: dict[str, str], folder: Path, *options: str
) -> Iterator[None]:
    """The dispatcher of this module's forwarder, and a worker of its engine, while the block runs."""
    dispatcher = dispatcher_of(f"{module}:forwarder", *options)
    with running(
        [Member("dispatcher", dispatcher, environment, folder), Member("worker", worker, environment, folder)]
    ):
        yield


def alive_in(group: int) -> bool:
    """Whether a process of this group still runs."""
    return any(of_group == group for each in Path("/proc").glob("[0-9]*") if (of_group := group_of(each.name)))


def is_alive(process: int) -> bool:
    return group_of(str(process)) is not None


def group_of(process: str) -> int | None:
    """Its group, while it runs. One that is dead and not yet buried does nothing any more."""
    try:
        state, _, group = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(group)
