"""A stream of calls, however long, takes the memory of a few batches, and every job of it is reported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlane import App, Call
from fairlane.store import operators
from fairlane.store.operators import JobFilter

EARLY, ALL = 20_000, 100_000


@pytest.fixture(params=["sqlite-file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return f"sqlite:///{tmp_path / 'jobs.db'}"


async def test_a_stream_takes_no_more_memory_at_its_end_than_at_its_beginning(url: str, tmp_path: Path) -> None:
    app = App(url)

    @app.task
    async def work(number: int, text: str) -> None: ...

    blocks: dict[int, int] = {}

    def calls() -> Iterator[Call[None]]:
        for number in range(ALL):
            if number % 500 == 0:
                blocks[number] = sys.getallocatedblocks()
            yield work.call(number, "x" * 60)

    reported = tmp_path / "reported"
    async with app:
        gc.collect()
        with reported.open("wb") as file:  # not in memory, which is what is measured
            async for batch in app.enqueue_stream(calls(), batch=2_000):
                file.writelines(job.id.bytes for job in batch.stored)
        early = max(count for number, count in blocks.items() if number < EARLY)
        late = max(blocks.values())
        assert late - early < (ALL - EARLY) / 10, "something is kept of every job"
        content = reported.read_bytes()
        ids = [content[at : at + 16] for at in range(0, len(content), 16)]
        assert len(ids) == ALL
        assert sorted(ids) == await stored_ids(app)


async def stored_ids(app: App) -> list[bytes]:
    store = await app.opened()
    found: list[bytes] = []
    page = await store.run(operators.find_jobs(JobFilter(), limit=10_000))
    while True:
        found += [job.id.bytes for job in page.jobs]
        if page.after is None:
            return sorted(found)
        page = await store.run(operators.find_jobs(JobFilter(), page.after, limit=10_000))
