"""A loopback TCP proxy that is far away: `python -m bench.proxy TARGET_PORT ROUND_TRIP_MS` prints its own port.

Each direction is late by half a round trip. What is sent stays in order, and as much may be under way as was sent: it
delays, it does not slow down.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

__all__ = ["far_away"]


class Direction(asyncio.Protocol):
    """Hands on what arrives at one side to the other, each piece `delay` after it came."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[bytes | None] = deque()
        self.to: asyncio.Transport | None = None

    def data_received(self, data: bytes) -> None:
        self._send_later(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._send_later(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send_later(self, data: bytes | None) -> None:
        # Timers of one time may fire in any order: each sends what is oldest, whoever it was made for.
        self._under_way.append(data)
        self._loop.call_later(self._delay, self._send_oldest)

    def _send_oldest(self) -> None:
        data = self._under_way.popleft()
        if self.to is None:
            return
        if data is None:
            self.to.close()
        else:
            self.to.write(data)


async def serve(target: int, round_trip: float) -> None:
    loop = asyncio.get_running_loop()

    async def connect(near: asyncio.Transport, there: Direction) -> None:
        try:
            far, back = await loop.create_connection(lambda: Direction(round_trip / 2), "127.0.0.1", target)
        except OSError:
            near.close()
            return
        there.to, back.to = far, near
        near.resume_reading()

    class Accepted(Direction):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            assert isinstance(transport, asyncio.Transport)
            transport.pause_reading()  # until there is somebody to hand it to
            self.opening = loop.create_task(connect(transport, self))

    server = await loop.create_server(lambda: Accepted(round_trip / 2), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def far_away(url: str, round_trip_ms: float) -> Iterator[str]:
    """The same database, a round trip further away, for as long as the block."""
    where = urlsplit(url)
    command = [sys.executable, "-m", "bench.proxy", str(where.port), str(round_trip_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield where._replace(netloc=where.netloc.replace(str(where.port), str(port))).geturl()
        finally:
            process.terminate()


if __name__ == "__main__":
    # The usual selector rounds a wait up to a whole millisecond, which is all of ours.
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner,
    ):
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1_000))
