"""How many connections the dashboard's own server keeps, and for how long one may take to ask for something.

The server has no bounds of its own before a request is complete: whoever opened connections and sent half a request on
each of them would keep everybody else out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

MOST_CONNECTIONS = 1_000
MOST_OF_ONE_PEER = 100
"""A browser opens six; a hundred are enough for an office behind one address."""
HEAD_WITHIN = 10.0
"""Seconds from the first byte to the end of a request's headers. The body has its own limit; see `access`."""
RETRY_AFTER = 5


def bounded(protocol: Any, *, per_peer: bool = True) -> Any:
    """The server's protocol with bounds that all of its connections share."""
    peers: Counter[str] = Counter()

    class Bounded(protocol):  # type: ignore[misc]
        """One connection. What is refused is answered here, before the server sees it."""

        _peer: str
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            address = transport.get_extra_info("peername")
            self._peer = str(address[0]) if isinstance(address, tuple) else ""
            if peers.total() >= MOST_CONNECTIONS:
                transport.set_protocol(asyncio.Protocol())
                _refuse(transport, "503 Service Unavailable", "too many connections")
            elif per_peer and peers[self._peer] >= MOST_OF_ONE_PEER:
                transport.set_protocol(asyncio.Protocol())
                _refuse(transport, "429 Too Many Requests", "too many connections from this address")
            else:
                peers[self._peer] += 1
                super().connection_made(transport)
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, error: Exception | None) -> None:
            peers[self._peer] -= 1
            if not peers[self._peer]:
                del peers[self._peer]
            self._stop_watching()
            super().connection_lost(error)

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_watching()  # the headers are complete, and it is being answered
            elif self._timer is None:
                # Not again with every byte: whoever sends one every few seconds would never be done.
                self._timer = asyncio.get_running_loop().call_later(HEAD_WITHIN, self._too_slow)

        def _stop_watching(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                _refuse(self.transport, "408 Request Timeout", f"send a request within {HEAD_WITHIN:.0f} s")

    return Bounded


def _refuse(transport: asyncio.Transport, status: str, message: str) -> None:
    body = f"{message}\n".encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {RETRY_AFTER}\r\nConnection: close\r\n\r\n"
    )
    transport.write(head.encode() + body)
    transport.close()
