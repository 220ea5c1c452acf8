"""ARCHITECTURE.md says what the code says: its rooms, its layers, and the files that one job goes through."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import asyncpg

from fairlane import App, Concurrency, Fair, Rate, context
from tests.test_architecture import LAYERS, ROOT, SOURCE
from tests.waiting import PATIENCE, until_found

PACKAGE = SOURCE / "fairlane"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PRESCRIBED = {"integrations/django/management", "integrations/django/templatetags"}
"""Folders that Django looks for by name."""
WALK = "The files of the walk"
ON_THEIR_OWN_TIME = {
    "cron/schedules.py",
    "stats/keys.py",
    "store/procedures.py",
    "store/records.py",
    "store/stats.py",
    "store/stats_rows.py",
    "store/stats_sums.py",
    "store/stats_values.py",
    "store/upkeep.py",
    "worker/reports.py",
    "worker/runtime.py",
    "worker/upkeep.py",
    "worker/watchdog.py",
}
"""What a worker's timers run: it is about the fleet, not about the job."""
WALKS = 3
"""Jobs whose walk is recorded: what a rare timer runs is in one of them, not in each."""


def section(title: str) -> str:
    found = re.search(rf"^(#+) {title}.*?$(.*?)(?=^#{{1,3}} |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"ARCHITECTURE.md has no section {title!r}"
    return found[2]


def listed_on_the_walk() -> list[str]:
    rows = [line for line in section(WALK).splitlines() if line.startswith("|")]
    return re.findall(r"`([\w/]+\.py)`", "\n".join(rows))


def rooms() -> set[str]:
    """Packages, with a slash, and modules at the root."""
    packages = {
        str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE
    }
    own = {name for name in packages if not any(f"{name}/".startswith(f"{each}/") for each in PRESCRIBED)}
    return {f"{name}/" for name in own} | {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}


def test_every_package_and_root_module_has_one_line_and_no_line_is_of_another() -> None:
    assert Counter(re.findall(r"^\| `([\w/.]+)` \|", section("The rooms"), re.MULTILINE)) == Counter(rooms())


def test_the_layers_are_those_that_are_enforced() -> None:
    printed = re.findall(r"^(\d+)\. (.+)$", section("The layers"), re.MULTILINE)
    assert [int(number) for number, _ in printed] == list(range(1, len(LAYERS) + 1))
    assert [set(re.findall(r"`(\w+)`", line)) for _, line in printed] == LAYERS


def test_no_layer_has_a_module_that_is_not_there() -> None:
    there = {room.removesuffix("/").removesuffix(".py") for room in rooms()} | {"fairlane"}
    assert set().union(*LAYERS) - there == set()


def test_the_files_of_the_walk_exist_and_are_counted() -> None:
    files = listed_on_the_walk()
    sql = set(re.findall(r"`(store/postgres/[\w/]+\.sql)`", section(WALK)))
    assert [name for name in [*files, *sql] if not (PACKAGE / name).is_file()] == []
    assert [name for name, times in Counter(files).items() if times > 1] == []
    claims = r": (\d+) Python files and (\d+) of SQL$|stops in (\d+) of them|^The other (\d+) are"
    said = [int(number) for numbers in re.findall(claims, PAGE, re.MULTILINE) for number in numbers if number]
    parts = [set(re.findall(r"`([\w/]+\.py)`", part)) for part in section(WALK).split("The other ")]
    assert said == [len(files), len(sql), *map(len, parts)]


class Recorder:
    """Which files of Fairlane run in this thread while it records."""

    def __init__(self) -> None:
        self.recordings: list[set[str]] = []

    def start(self) -> None:
        self.recordings.append(set())
        sys.setprofile(self._see)

    def stop(self) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.recordings[-1].add(str(path.relative_to(PACKAGE)))


async def walks_recorded(url: str) -> list[set[str]]:
    """The files that run from an enqueue until a claim has folded the release of its job, for some jobs in a row."""
    app, recorder, claimed_next = App(url), Recorder(), asyncio.Event()
    app.queue(
        "webhooks",
        fair=Fair(by="account"),
        limits=[Rate(100, per="1m", by="endpoint"), Concurrency(5, by="account")],
    )

    @app.task(queue="webhooks")
    async def receipt(event: int, account: str, endpoint: str) -> None:
        # The claim that brought this follow-up has folded the release of the job before it.
        recorder.stop()
        claimed_next.set()

    @app.task(queue="webhooks")
    async def deliver(event: int, account: str, endpoint: str) -> int:
        context().enqueue(receipt.call(event, account, endpoint))
        context().put(f"delivered/{event}", True)
        return event * 2

    connection = await asyncpg.connect(url)

    async def worker_is_idle() -> bool:
        waits = "select exists (select from fairlane.waiters) and not exists (select from fairlane.leases)"
        return bool(await connection.fetchval(waits))

    try:
        async with app:
            worker = await app.worker()
            running = asyncio.create_task(worker.run())
            for event in range(WALKS + 1):
                await until_found(worker_is_idle)
                claimed_next.clear()
                if event > 0:  # the first opens connections and boards
                    recorder.start()
                await deliver.enqueue(event, account="acme", endpoint="api.acme.com")
                await asyncio.wait_for(claimed_next.wait(), PATIENCE)
            worker.stop()
            await running
    finally:
        recorder.stop()
        await connection.close()
    return recorder.recordings


async def test_one_job_on_postgres_goes_through_these_files_and_no_other(postgres_url: str) -> None:
    recordings = await walks_recorded(postgres_url)
    assert len(recordings) == WALKS
    always, listed = set.intersection(*recordings), set(listed_on_the_walk())
    assert sorted(listed - always) == []
    assert sorted(always - listed - ON_THEIR_OWN_TIME) == []
