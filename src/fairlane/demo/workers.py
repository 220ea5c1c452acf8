"""The worker processes of an act: started by the public command, watched, and stopped by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from fairlane.demo.scenarios import Act, Workload
from fairlane.errors import FairlaneError

STOP_WITHIN = 10.0  # seconds
GRACE = 3.0


class DemoFailed(FairlaneError):
    """The demo could not be played to its end."""


class Troupe:
    """`fairlane worker` processes that exist for as long as a `with` block."""

    def __init__(self, act: Act, workload: Workload, url: str, stage: Path) -> None:
        self._act = act
        self._workload = workload
        self._environment = {**os.environ, "FAIRLANE_URL": url, STAGE_VARIABLE: str(stage)}
        self._stage = stage
        self._workers: dict[Path, subprocess.Popen[bytes]] = {}

    @property
    def command(self) -> list[str]:
        options = ["--queues", self._act.queue, "--concurrency", str(self._workload.slots), "--log-level", "warning"]
        return ["fairlane", "worker", "fairlane.demo.app:app", *options]

    def __enter__(self) -> Self:
        try:
            for nth in range(1, self._workload.processes + 1):
                self._start(self._stage / f"worker-{nth}.log")
        except BaseException:
            self._stop_at_once()
            raise
        return self

    def _start(self, log: Path) -> None:
        # The same program and the same Python as this one, whatever PATH says.
        command = [sys.executable, "-m", "fairlane.cli", *self.command[1:]]
        with log.open("wb") as output:
            self._workers[log] = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then stops its workers itself
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._drain()
        else:
            self._stop_at_once()

    def check(self) -> None:
        """Raise `DemoFailed` when a worker has ended by itself."""
        for log, worker in self._workers.items():
            if worker.poll() is not None:
                raise DemoFailed(
                    f"a worker ended by itself with status {worker.returncode}; its last words: {_tail(log)}"
                )

    def _drain(self) -> None:
        self.check()
        for worker in self._workers.values():
            worker.send_signal(signal.SIGTERM)
        try:
            for log, worker in self._workers.items():
                if worker.wait(STOP_WITHIN) != 0:
                    raise DemoFailed(f"a worker stopped with status {worker.returncode}; its last words: {_tail(log)}")
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"a worker had not stopped {STOP_WITHIN:g} s after SIGTERM") from None
        finally:
            self._kill()

    def _stop_at_once(self) -> None:
        """Give the workers a moment to remove what they made, such as sockets, and then end whatever is left."""
        for worker in self._workers.values():
            worker.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        """End what is left, with everything it started: each worker leads a process group of its own."""
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        for worker in self._workers.values():
            worker.wait()


def _tail(log: Path, lines: int = 3) -> str:
    return " / ".join(log.read_text(errors="replace").rstrip().splitlines()[-lines:]) or "(none)"


STAGE_VARIABLE = "FAIRLANE_DEMO_STAGE"
"""Names the folder that an act's processes share."""
LOOK_EVERY = 0.005
LOOK_FOR_PARENT_EVERY = 0.5


def wait_for_curtain(stage: Path) -> None:
    """In a worker process: return when all of them are ready. Ends this process if whoever started it is gone."""
    parent = os.getppid()
    (stage / f"{os.getpid()}.ready").touch()
    while not (stage / "curtain").exists():
        if os.getppid() != parent:
            raise SystemExit("whoever started this worker is gone")
        time.sleep(LOOK_EVERY)
    threading.Thread(target=_leave_with, args=(parent,), name="fairlane-demo-parent", daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_FOR_PARENT_EVERY)
    os.kill(os.getpid(), signal.SIGTERM)


def count_ready(stage: Path) -> int:
    return sum(1 for _ in stage.glob("*.ready"))


def raise_curtain(stage: Path) -> None:
    (stage / "curtain").touch()
