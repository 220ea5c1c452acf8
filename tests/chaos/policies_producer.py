"""Fills the queues of `policies_app`: each argument says how many jobs of which queue."""

from __future__ import annotations

import asyncio
import sys

from tests.chaos.policies_app import app, work

KEYS = {"capped": 4, "metered": 1, "rolling": 1, "train": 10, "serve": 10, "ordered": 6}


async def main(arguments: list[str]) -> None:
    async with app:
        for argument in arguments:
            queue, count = argument.split("=")
            calls = [work.using(queue=queue).call(n, f"{queue}-{n % KEYS[queue]}") for n in range(int(count))]
            await app.enqueue_many(calls)


asyncio.run(main(sys.argv[1:]))
