"""From the wheel that was kept to this version: with its schema, and beside its workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlane import App, State
from fairlane.operations import JobFilter
from tests.waiting import until_blocking

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WHEEL = HERE / "fairlane-0.1.0-py3-none-any.whl"
PATIENCE = 240.0
JOBS = 300


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept version, as a folder to import it from."""
    folder = tmp_path_factory.mktemp("kept")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture(params=["sqlite-file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database in which nobody has been yet."""
    if request.param == "sqlite-file":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    found: str = request.getfixturevalue("empty_postgres_url")
    return found


class Shop:
    """The processes of a program, each on one of the versions, and what its handlers wrote."""

    def __init__(self, url: str, folder: Path, kept: Path) -> None:
        self.url, self._ledger, self._kept = url, folder / "ledger", kept
        self._workers: list[subprocess.Popen[bytes]] = []

    def _command(self, arguments: tuple[str, ...], *, is_kept: bool) -> tuple[list[str], dict[str, str]]:
        version = self._kept if is_kept else ROOT / "src"
        environment = dict(
            os.environ,
            FAIRLANE_URL=self.url,
            SHOP_LEDGER=str(self._ledger),
            PYTHONPATH=os.pathsep.join((str(version), str(ROOT))),
        )
        return [sys.executable, "-m", *arguments], environment

    def run(self, *arguments: str, is_kept: bool = False) -> str:
        """Run a program to its end; what it wrote."""
        command, environment = self._command(arguments, is_kept=is_kept)
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def enqueue(self, first: int, *, is_kept: bool) -> None:
        self.run("tests.upgrades.shop", str(first), str(JOBS), is_kept=is_kept)

    def work(self, *, is_kept: bool = False) -> subprocess.Popen[bytes]:
        command, environment = self._command(
            ("fairlane.cli", "worker", "tests.upgrades.shop:app", "--log-level", "error"), is_kept=is_kept
        )
        worker = subprocess.Popen(command, env=environment, cwd=ROOT)
        self._workers.append(worker)
        return worker

    def runs(self) -> Counter[str]:
        return Counter(self._ledger.read_text().splitlines()) if self._ledger.exists() else Counter()

    def stop(self, worker: subprocess.Popen[bytes]) -> int:
        worker.send_signal(signal.SIGTERM)
        return worker.wait(PATIENCE)

    def close(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()


@pytest.fixture
def shop(url: str, tmp_path: Path, kept: Path) -> Iterator[Shop]:
    shop = Shop(url, tmp_path, kept)
    yield shop
    shop.close()


def expected(count: int) -> Counter[str]:
    """Each job once, and once more where its first attempt fails."""
    deliveries = Counter({f"deliver {number}": 1 + (number % 25 == 1) for number in range(count)})
    return deliveries + Counter(f"book {number}" for number in range(0, count, 10))


async def ends(url: str) -> Counter[State]:
    async with App(url) as app:
        found: Counter[State] = Counter()
        after: str | None = None
        while True:
            page = await app.operations.jobs.list(JobFilter(), after=after, limit=500)
            found.update(job.state for job in page.jobs)
            if (after := page.after) is None:
                return found


def test_the_kept_version_is_another_one(shop: Shop) -> None:
    """Else these tests would compare this version with itself."""
    places = [Path(shop.run("tests.upgrades.place", is_kept=is_kept).strip()) for is_kept in (True, False)]
    assert places[0].is_relative_to(shop._kept)
    assert places[1].is_relative_to(ROOT / "src")


def test_functions_that_have_changed_since_come_with_a_migration(kept: Path) -> None:
    """Functions are created anew with the newest migration: without one, no database would get them."""
    stores = [each / "fairlane" / "store" / "postgres" for each in (kept, ROOT / "src")]
    functions = [(store / "functions.sql").read_text() for store in stores]
    migrations = [sorted(path.name for path in (store / "migrations").glob("*.sql")) for store in stores]
    assert functions[0] == functions[1] or len(migrations[0]) < len(migrations[1]), "add a migration"


def test_a_database_of_the_kept_version_is_brought_up_to_date_and_every_job_ends_once(shop: Shop) -> None:
    shop.run("fairlane.cli", "migrate", is_kept=True)
    shop.enqueue(0, is_kept=True)
    worker = shop.work(is_kept=True)
    until_blocking(lambda: len(shop.runs()) >= 50, PATIENCE)
    assert shop.stop(worker) == 0
    before = shop.runs()
    shop.run("fairlane.cli", "migrate")
    shop.enqueue(JOBS, is_kept=False)
    worker = shop.work()
    until_blocking(lambda: shop.runs() == expected(2 * JOBS), PATIENCE)
    assert shop.stop(worker) == 0
    assert before <= shop.runs() == expected(2 * JOBS)
    assert asyncio.run(ends(shop.url)) == {State.DONE: 2 * JOBS + 2 * JOBS // 10}


def test_a_migration_under_workers_and_producers_of_the_kept_version_loses_nothing(shop: Shop) -> None:
    """A rolling deploy: the schema first, then one process after the other."""
    shop.run("fairlane.cli", "migrate", is_kept=True)
    shop.enqueue(0, is_kept=True)
    old = shop.work(is_kept=True)
    until_blocking(lambda: len(shop.runs()) >= 20, PATIENCE)
    shop.run("fairlane.cli", "migrate")
    new = shop.work()
    shop.enqueue(JOBS, is_kept=False)
    until_blocking(lambda: len(shop.runs()) >= 150, PATIENCE)
    shop.stop(old)
    until_blocking(lambda: shop.runs() == expected(2 * JOBS), PATIENCE)
    assert shop.stop(new) == 0
    assert shop.runs() == expected(2 * JOBS)
    assert asyncio.run(ends(shop.url)) == {State.DONE: 2 * JOBS + 2 * JOBS // 10}
