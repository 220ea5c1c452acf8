"""An example as its reader has it: a copy of its folder, and the very commands of its README."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG = 120.0


class Running:
    """A program that was started and goes on; what it says is read as it comes."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self.program = program
        self._lines: Queue[str | None] = Queue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        with self.program.stdout as said:
            for line in said:
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, words: str) -> str:
        """The first line that has these words."""
        while (line := self._lines.get(timeout=WATCHDOG)) is not None:
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError(f"it ended, and never said {words!r}:\n{''.join(self.said)}")

    def address(self) -> str:
        """Where its web server listens, once it does: `PORT=0` has let it choose."""
        line = self.wait_for("Uvicorn running on")
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        return found[0]

    def stop(self) -> str:
        """Ask it to stop, and wait until it has; all that it said."""
        self.program.send_signal(signal.SIGTERM)
        self.end()
        return "".join(self.said)

    def end(self) -> None:
        self.program.wait(WATCHDOG)
        self._reader.join(WATCHDOG)
        while not self._lines.empty():
            self.said.append(self._lines.get() or "")


class Example:
    """A copy of an example in a folder of its own, without the settings of this project."""

    def __init__(self, name: str, folder: Path, **environment: str) -> None:
        self.folder = folder / name
        ignored = shutil.ignore_patterns("__pycache__", "*.db*")
        shutil.copytree(ROOT / "examples" / name, self.folder, ignore=ignored)
        blocks = re.findall(r"^```console\n(.*?)^```$", (self.folder / "README.md").read_text(), re.M | re.S)
        self.commands: list[str] = [
            line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")
        ]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FAIRLANE"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
        own = {"PATH": path, "PORT": "0", "PYTHONUNBUFFERED": "1"}
        self.environment = {**kept, **own, **environment}

    def command(self, words: str) -> str:
        """The command of its README that has these words."""
        [found] = [each for each in self.commands if words in each]
        return found

    def run(self, words: str) -> str:
        """Run a command to its end, and return what it printed."""
        done = subprocess.run(
            ["bash", "-c", self.command(words)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WATCHDOG,
            check=False,
        )
        assert done.returncode == 0, f"{self.command(words)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def started(self, words: str) -> Iterator[Running]:
        """Start a command that goes on. It ends with the block at the latest."""
        program = subprocess.Popen(
            ["bash", "-c", self.command(words)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running = Running(program)
        try:
            yield running
        finally:
            program.kill()
            running.end()
