"""`python -m tests.forward.chaos_producer MODULE JOBS` enqueues jobs of a chaos module, and prints their ids."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any

from tests.forward.chaos import TENANTS


async def produce(module: Any, jobs: int) -> list[str]:
    calls = [module.work.call(number, TENANTS[number % len(TENANTS)]) for number in range(jobs)]
    async with module.app:
        return [str(job.id) for job in await module.app.enqueue_many(calls)]


if __name__ == "__main__":
    print("\n".join(asyncio.run(produce(import_module(sys.argv[1]), int(sys.argv[2])))))
