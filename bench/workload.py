"""The app whose jobs the benchmark runs, by the public API with default settings, and the calls of each work."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from bench.ledger import HandlerLedger
from fairlane import App, Call, Concurrency, Fair, Rate

__all__ = ["ACCOUNTS", "GATED", "NAP", "WHALE_NAP", "app", "calls", "ping", "plain_noop"]

ACCOUNTS = 1_000
ENDPOINTS = 50
FILLER = "x" * 60
"""Makes a payload of about 110 bytes."""
NAP = 0.02
WHALE_NAP = 0.005
HOT, SMALL, EACH = 5_000, 100, 10
"""The whale: so many jobs of one account first, then so many accounts with so many each."""


class Gated:
    """Limits of each key: wide enough not to bind, and checked all the same."""

    CONCURRENCY = 20
    STARTS = 1_000
    """In a second, and as a burst."""
    INTERVAL = 1_000_000_000 // STARTS
    """Nanoseconds."""


GATED = Gated()
_PER_ACCOUNT = Concurrency(GATED.CONCURRENCY, by="account")

app = App()
app.queue("plain")
app.queue("fair", fair=Fair(by="account"))
app.queue("gated", fair=Fair(by="account"), limits=[_PER_ACCOUNT, Rate(GATED.STARTS, per="1s", by="account")])
app.queue("lanes", fair=Fair(by="account"), limits=[_PER_ACCOUNT, Rate(GATED.STARTS, per="1s", by="endpoint")])
app.queue("one_flow", limits=[Concurrency(GATED.CONCURRENCY, by="endpoint")])
app.queue("small")
app.queue("whale", fair=Fair(by="account"))
app.queue("whale_fifo")
app.queue("ping")

LEDGER = HandlerLedger()


# Named as in bench/past.py: claims by hand put jobs back that a worker runs.
@app.task(queue="plain", name="plain_noop")
async def plain_noop(number: int, text: str) -> None:
    LEDGER.count()


@app.task(queue="plain")
async def timed_noop(number: int, text: str) -> None:
    now = monotonic_ns()
    LEDGER.note(number, 0, now, now)


@app.task(queue="fair", name="fair_noop")
async def fair_noop(number: int, account: str, text: str) -> None:
    LEDGER.count()


@app.task(queue="gated")
async def gated_noop(number: int, account: str, key: int, text: str) -> None:
    now = monotonic_ns()
    LEDGER.note(number, key, now, now)


@app.task(queue="lanes")
async def endpoint_noop(number: int, account: str, endpoint: str, text: str) -> None:
    LEDGER.count()


@app.task(queue="one_flow")
async def one_flow_noop(number: int, endpoint: str, text: str) -> None:
    LEDGER.count()


@app.task(queue="small")
async def nap(number: int, seconds: float) -> None:
    began = monotonic_ns()
    await asyncio.sleep(seconds)
    LEDGER.note(number, 0, began, monotonic_ns())


@app.task(queue="whale")
async def whale_nap(number: int, account: str, key: int, seconds: float) -> None:
    began = monotonic_ns()
    await asyncio.sleep(seconds)
    LEDGER.note(number, key, began, monotonic_ns())


@app.task(queue="ping")
async def ping(number: int, sent: int, text: str) -> None:
    LEDGER.note(number, 0, sent, monotonic_ns())


def calls(work: str, count: int, keys: int = ACCOUNTS, text: str = FILLER) -> Iterator[Call[Any]]:
    """The jobs of one work, spread over so many keys in turn."""
    match work:
        case "plain":
            return (plain_noop.call(n, text) for n in range(count))
        case "timed":
            return (timed_noop.call(n, text) for n in range(count))
        case "fair":
            return (fair_noop.call(n, f"account-{n % keys}", text) for n in range(count))
        case "gated":
            return (gated_noop.call(n, f"account-{n % keys}", n % keys, text) for n in range(count))
        case "lanes":
            return (endpoint_noop.call(n, *_endpoint(n, keys), text) for n in range(count))
        case "one_flow":
            return (one_flow_noop.call(n, f"endpoint-{n % keys}", text) for n in range(count))
        case "small":
            return (nap.call(n, NAP) for n in range(count))
        case "whale" | "whale_fifo":
            return _whale(work)
        case _:
            raise SystemExit(f"unknown work {work!r}")


def _endpoint(number: int, accounts: int) -> tuple[str, str]:
    account = f"account-{number % accounts}"
    return account, f"{account}/endpoint-{number // accounts % ENDPOINTS}"


def _whale(queue: str) -> Iterator[Call[Any]]:
    """Key 0 is the whale."""
    task = whale_nap.using(queue=queue)
    yield from (task.call(n, "hot", 0, WHALE_NAP) for n in range(HOT))
    for n in range(SMALL * EACH):
        small = n % SMALL + 1
        yield task.call(HOT + n, f"small-{small}", small, WHALE_NAP)


if folder := os.environ.get("BENCH_LEDGER"):
    atexit.register(LEDGER.leave, folder)
