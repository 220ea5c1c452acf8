"""A producer that sends jobs of its own accounts, again and again, until it reads a line; then it says how many."""

from __future__ import annotations

import asyncio
import sys

from tests.chaos.rolling_app import ACCOUNTS, app, send


async def main(name: str) -> None:
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    sent = 0
    async with app:
        while not ended.done():
            await app.enqueue_many([send.call(sent, f"{name}-{n}") for n in range(ACCOUNTS)])
            sent += 1
            await asyncio.wait({ended}, timeout=0.25)
    print(sent * ACCOUNTS, flush=True)


asyncio.run(main(sys.argv[1]))
