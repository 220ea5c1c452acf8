"""The small server: whatever is sent to it, it answers or lets go, and it keeps answering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fairlane.errors import ConfigurationError
from fairlane.telemetry.metrics import Failures
from fairlane.worker import WorkerOptions, reports
from fairlane.worker.reports import Answer, Endpoint
from tests.waiting import PATIENCE


async def fine() -> Answer:
    return Answer("fine\n")


async def broken() -> Answer:
    raise RuntimeError("a bug")


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
async def endpoint(failures: Failures) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint({"/fine": fine, "/broken": broken}, failures)
    await endpoint.open("127.0.0.1", 0)
    yield endpoint
    await endpoint.close()


async def sent(endpoint: Endpoint, question: bytes) -> str:
    """All that is answered."""
    port = int(endpoint.url.rpartition(":")[2])
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(question)
        try:
            answer = (await reader.read()).decode()
        except ConnectionResetError:
            answer = ""
        writer.close()
        return answer


@pytest.mark.parametrize(
    ("question", "status", "body"),
    [
        (b"GET /fine HTTP/1.1\r\nHost: here\r\n\r\n", "200 OK", "fine\n"),
        (b"GET /fine?a=b HTTP/1.0\r\n\r\n", "200 OK", "fine\n"),
        (b"HEAD /fine HTTP/1.1\r\n\r\n", "200 OK", ""),
        (b"POST /fine HTTP/1.1\r\n\r\n", "405 Method Not Allowed", "only GET\n"),
        (b"GET /none HTTP/1.1\r\n\r\n", "404 Not Found", "there is /fine, /broken\n"),
        (b"GET /../fine HTTP/1.1\r\n\r\n", "404 Not Found", "there is /fine, /broken\n"),
        (b"\xff\xfe\r\n\r\n", "404 Not Found", "there is /fine, /broken\n"),
        (b"GET /broken HTTP/1.1\r\n\r\n", "500 Internal Server Error", "RuntimeError\n"),
    ],
)
async def test_a_question_is_answered_and_the_connection_closed(
    endpoint: Endpoint, question: bytes, status: str, body: str
) -> None:
    head, _, found = (await sent(endpoint, question)).partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status}\r\n")
    assert "Connection: close" in head
    assert found == body


async def test_what_cannot_be_answered_is_counted(endpoint: Endpoint, failures: Failures) -> None:
    await sent(endpoint, b"GET /broken HTTP/1.1\r\n\r\n")
    assert failures.by_reason == {"endpoint": 1}


async def test_whoever_sends_too_much_or_too_slowly_is_let_go(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await sent(endpoint, b"GET /fine HTTP/1.1\r\nX: " + b"x" * 100_000) == ""
    monkeypatch.setattr(reports, "ANSWERED_WITHIN", 0.01)
    assert await sent(endpoint, b"GET /fine HTTP/1.1\r\n") == ""
    monkeypatch.undo()
    assert (await sent(endpoint, b"GET /fine HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 200")


async def test_more_connections_than_it_takes_are_turned_away(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "AT_ONCE", 0)
    assert await sent(endpoint, b"GET /fine HTTP/1.1\r\n\r\n") == ""
    monkeypatch.undo()
    assert (await sent(endpoint, b"GET /fine HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 200")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("metrics_port", -1),
        ("metrics_port", 65_536),
        ("metrics_port", True),
        ("metrics_port", "9100"),
        ("metrics_host", ""),
        ("metrics_keys", -1),
        ("metrics_keys", 501),
        ("metrics_keys", 1.5),
        ("metrics_fleet", "yes"),
        ("traces", "none"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(setting: str, value: Any) -> None:
    """O09."""
    with pytest.raises(ConfigurationError, match=rf"\A(worker: )?{setting}="):
        WorkerOptions(**{setting: value})
