"""A process that runs one job at a time, with nothing beside it, for the worker that started it.

A job that was running when its process died may be what killed it. It runs here next: should this process die too, the
job is the culprit, and nobody died with it. The worker keeps the claim: it renews the lease, hears of cancellations and
settles. The process runs the handler, with the app, its middleware and its database (see `LoneRunner`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence

import msgspec

from fairlane.job import Claim
from fairlane.scheduler.settlement import Settlement
from fairlane.worker.outcomes import Stop
from fairlane.worker.processes import how

__all__ = ["Began", "Begin", "Ended", "Gone", "Interrupt", "LoneProcess", "Ready", "framed", "next_order", "send"]

LENGTH = 4


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Run this, if it can begin by then (by the monotonic clock, which all processes of a machine share)."""

    claim: Claim
    begin_by: int
    offset: int
    """What queue time is ahead of the monotonic clock."""
    ahead: int
    """And of the store's clock."""


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Stop what runs."""

    reason: Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has started, and waits for a job."""


class Began(msgspec.Struct, frozen=True, tag=True):
    """Its handler is called."""

    at: int
    """By the monotonic clock."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """What became of it."""

    settlement: Settlement
    may_be_settled: bool


_encode = msgspec.msgpack.Encoder().encode
_decode_order: Callable[[bytes], Begin | Interrupt] = msgspec.msgpack.Decoder(Begin | Interrupt).decode
_decode_news: Callable[[bytes], Ready | Began | Ended] = msgspec.msgpack.Decoder(Ready | Began | Ended).decode


class Gone(msgspec.Struct, frozen=True):
    """The process died of it, or beside it."""

    how: str
    had_begun: bool
    """Whether its handler had been called."""


def framed(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


def send(writer: asyncio.StreamWriter, message: Begin | Interrupt | Ready | Ended) -> None:
    writer.write(framed(message))


async def _receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH), "big"))


async def next_order(reader: asyncio.StreamReader) -> Begin | Interrupt:
    """What the worker wants next."""
    return _decode_order(await _receive(reader))


class LoneProcess:
    """The worker's end: one process, started when there is something for it to do, and kept for the next."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._has_started = False

    @property
    def is_ready(self) -> bool:
        """Whether a job could begin there at once."""
        return self._has_started and self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Have a process that waits for a job. `OSError` if there is none to be had."""
        if self.is_ready:
            return
        self._has_started = False
        ours, theirs = socket.socketpair()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, "--alone", str(theirs.fileno()), pass_fds=[theirs.fileno()], start_new_session=True
            )
        try:
            await _receive(self._reader)
        except (asyncio.IncompleteReadError, OSError):
            raise ChildProcessError(f"it died while it started ({await self._bury()})") from None
        except asyncio.CancelledError:
            self.kill()
            raise
        self._has_started = True

    async def run(self, begin: Begin, on_begin: Callable[[int], None]) -> Ended | Gone:
        """Run this job there: what became of it, or how the process died. `on_begin` hears when it is called."""
        assert self._reader is not None
        assert self._writer is not None
        reader, has_begun = self._reader, False
        send(self._writer, begin)
        try:
            while True:
                match _decode_news(await _receive(reader)):
                    case Began(at=at):
                        has_begun = True
                        on_begin(at)
                    case Ended() as ended:
                        return ended
        except (asyncio.IncompleteReadError, OSError):
            return Gone(await self._bury(), has_begun)

    def interrupt(self, reason: Stop) -> None:
        """Ask what runs to stop. A claim that is gone is nobody's any more: the process goes with it."""
        if reason is Stop.GONE:
            self.kill()
        elif self._writer is not None:
            send(self._writer, Interrupt(reason))

    def kill(self) -> None:
        if self._process is not None:
            _kill(self._process)

    async def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            await self._bury()

    async def _bury(self) -> str:
        process, writer = self._process, self._writer
        self._process = self._reader = self._writer = None
        if process is None or writer is None:
            return "stopped"  # by whoever closed us meanwhile
        writer.close()
        _kill(process)  # it may only have closed its end
        code = await process.wait()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return how(code)


def _kill(process: asyncio.subprocess.Process) -> None:
    # Its own `kill` asks first whether it has ended, and takes the answer from asyncio, which then reports code 255.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
