from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Fairlane = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty folder for temporary files. Its name is short: a socket's whole path may take 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        yield Path(folder)


@pytest.fixture
def fairlane(tmp_path: Path, scratch: Path) -> Fairlane:
    """Runs the program as a user would, in a folder of the test's own, and returns what it said."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fairlane.cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(scratch), "COLUMNS": "100", **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """A worker that was started in this process has its own way to end, which is none for the tests after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_modules_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command imports is a test's own: another has a module of the same name.

    Nor is it left as bytecode: Python takes that for the program as long as the file has the same size and was written
    within the same second, and tests are quicker than that in writing another version.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    own = tmp_path_factory.getbasetemp()
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(own):
            del sys.modules[name]
