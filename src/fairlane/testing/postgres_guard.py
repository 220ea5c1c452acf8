"""Runs one throw-away PostgreSQL server and takes it down, folder and all, when the parent process is gone.

A process of its own, because nothing inside the parent survives SIGKILL. It is run by path with only the
standard library in reach: `python -I -S postgres_guard.py FOLDER USER COMMAND…`, and holds until its standard
input ends. `USER` is the uid to run the server as, or -1 to keep the present one.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

# Data that is thrown away needs no checkpoint: an immediate shutdown, which still frees shared memory.
STOP = signal.SIGQUIT
PR_SET_PDEATHSIG = 1
LOOK_AGAIN_AFTER = 0.25  # seconds


def start(command: list[str], user: int) -> subprocess.Popen[bytes]:
    """Start the server as `user`, to die with this process even if this process is killed."""
    libc = ctypes.CDLL(None)
    owner = user if user >= 0 else None

    def die_with_parent() -> None:
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, STOP)

    # preexec_fn runs after the change of user, which would clear the signal. This process has one thread.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        user=owner,
        group=owner,
        extra_groups=None if owner is None else [],
        preexec_fn=die_with_parent,
    )


def hold(server: subprocess.Popen[bytes], parent: int) -> None:
    """Return when the parent lets go, has died, or the server has stopped by itself."""
    # A child that the parent forked may hold the other end of the pipe open, so its end alone proves too little.
    while server.poll() is None and os.getppid() == parent:
        if select.select([sys.stdin], [], [], LOOK_AGAIN_AFTER)[0]:
            return


def stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(STOP)
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main(folder: str, user: str, *command: str) -> int:
    parent = os.getppid()
    signal.signal(signal.SIGTERM, leave)
    server = start(list(command), int(user))
    try:
        hold(server, parent)
        died_by_itself = server.poll()
    except SystemExit:
        died_by_itself = None
    if died_by_itself is not None:
        return died_by_itself or 1  # the parent still wants to read the log
    stop(server)
    shutil.rmtree(Path(folder), ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
