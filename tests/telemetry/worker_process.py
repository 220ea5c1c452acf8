"""A real `fairlane worker` with an endpoint, and what a scraper and a reader of its log see of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from tests.waiting import PATIENCE


@dataclass
class WorkerProcess:
    """One process, its log so far, and where it answers."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    said: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self.said:
                self.lines.append(line.decode())
                if found := re.search(r"answers at (http\S+)/metrics", self.lines[-1]):
                    self.urls.append(found[1])
                self.said.notify_all()

    async def says(self, text: str) -> str:
        """The first line with this text, once it is there."""
        async with self.said, asyncio.timeout(PATIENCE):
            await self.said.wait_for(lambda: any(text in line for line in self.lines))
        return next(line for line in self.lines if text in line)

    async def answers_at(self, count: int = 1) -> list[str]:
        """Where it, or each of its children, answers."""
        async with self.said, asyncio.timeout(PATIENCE):
            await self.said.wait_for(lambda: len(self.urls) >= count)
        return sorted(self.urls)

    async def get(self, path: str) -> tuple[int, str]:
        """The status and the body of an answer."""
        [url] = await self.answers_at()
        return await asyncio.to_thread(_get, f"{url}{path}")

    async def get_until(self, path: str, status: int) -> str:
        """The first answer that has this status."""
        async with asyncio.timeout(PATIENCE):
            while True:
                found, body = await self.get(path)
                if found == status:
                    return body

    def told(self) -> list[dict[str, Any]]:
        """Its log, where it is JSON."""
        return [json.loads(line) for line in self.lines]

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


def _get(url: str) -> tuple[int, str]:
    try:
        with urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


@asynccontextmanager
async def worker_process(folder: Path, url: str, *options: str) -> AsyncIterator[WorkerProcess]:
    """`fairlane worker shop:app` in this folder, killed at the end if it has not ended."""
    paths = filter(None, [os.environ.get("PYTHONPATH")])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fairlane.cli",
        "worker",
        "shop:app",
        *options,
        cwd=folder,
        # Before what is there: the sources under test may be on it.
        env={**os.environ, "FAIRLANE_URL": url, "PYTHONPATH": os.pathsep.join((str(folder), *paths))},
        stderr=asyncio.subprocess.PIPE,
    )
    worker = WorkerProcess(process)
    reading = asyncio.create_task(worker.read())
    try:
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
