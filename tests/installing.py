"""Programs of the system that tests need, installed where we may: on Debian, as root."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest

POLICY = Path("/usr/sbin/policy-rc.d")


def may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Of the processes that run tests side by side, one installs and the others wait."""
    with (Path(gettempdir()) / f"fairlane-tests-install-{os.geteuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def apt_install(*packages: str) -> None:
    """Install them, and start nothing: a container has no services, and a laptop wants none of ours."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _no_service_starts():
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
            done = subprocess.run(["apt-get", *command], env=quiet, capture_output=True, text=True, timeout=900)
            if done.returncode:
                pytest.fail(f"apt-get {' '.join(command)}: {done.stderr[-1_000:]}")


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    if POLICY.exists():  # the machine's own word on it
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
