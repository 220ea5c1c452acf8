"""A small HTTP server for those who watch a process: scrapers and probes. It answers GET, closes, and keeps nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from fairlane.errors import ConfigurationError
from fairlane.telemetry.metrics import Failures

log = logging.getLogger("fairlane.telemetry")

LONGEST_REQUEST = 8 * 1024
ANSWERED_WITHIN = 10.0
"""Seconds from the first byte of a request to the last of the response."""
AT_ONCE = 32
"""Connections at most; more are turned away."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a path answers."""

    body: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], Awaitable[Answer]]]


class Endpoint:
    """Serves its routes from the event loop that it was opened in: one that hangs does not answer, as it should."""

    def __init__(self, routes: Routes, failures: Failures) -> None:
        self._routes = routes
        self._failures = failures
        self._server: asyncio.Server | None = None
        self._open = 0
        self.url = ""

    async def open(self, host: str, port: int) -> None:
        """Listen, or raise `ConfigurationError` if that is not possible."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=LONGEST_REQUEST)
        except OSError as error:
            raise ConfigurationError(
                f"metrics_port={port}, metrics_host={host!r}: cannot listen there: {error.strerror or error}; "
                "give another port, or 0 for any that is free"
            ) from error
        bound = self._server.sockets[0].getsockname()
        self.url = f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), 1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            # Whoever asks badly, slowly or not at all is let go of.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(ANSWERED_WITHIN):
                    if self._open <= AT_ONCE:
                        answer, with_body = await self._answer(await reader.readuntil(b"\r\n\r\n"))
                        writer.write(_response(answer, with_body=with_body))
                        await writer.drain()
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, question: bytes) -> tuple[Answer, bool]:
        method, _, rest = question.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in self._routes:
            return Answer(f"there is {', '.join(self._routes)}\n", HTTPStatus.NOT_FOUND), True
        if method not in ("GET", "HEAD"):
            return Answer("only GET\n", HTTPStatus.METHOD_NOT_ALLOWED), True
        try:
            return await self._routes[path](), method == "GET"
        except Exception as error:
            self._failures.note("endpoint", f"answering {path} failed", error)
            return Answer(f"{type(error).__name__}\n", HTTPStatus.INTERNAL_SERVER_ERROR), True


def _response(answer: Answer, *, with_body: bool) -> bytes:
    body = answer.body.encode()
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
