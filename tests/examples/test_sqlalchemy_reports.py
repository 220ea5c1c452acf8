"""The example with SQLAlchemy and Alembic, by the commands of its README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fairlane.store.scripts import Schema
from tests.examples.readme import ROOT, Example


@pytest.fixture(params=["sqlite", "postgres"])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Example:
    if request.param == "sqlite":
        return Example("sqlalchemy_reports", tmp_path)
    url: str = request.getfixturevalue("empty_postgres_url")
    return Example("sqlalchemy_reports", tmp_path, DATABASE_URL=url.replace("postgresql", "postgresql+psycopg", 1))


@pytest.mark.slow
def test_it_passes_its_own_test(example: Example) -> None:
    assert "2 passed" in example.run("pytest")


@pytest.mark.slow
def test_it_migrates_starts_a_worker_and_builds_a_report(example: Example) -> None:
    with example.started("alembic upgrade head") as worker:
        worker.wait_for("serves reports")
        assert example.run("python reports.py") == "acme in June: all is well\n1 built so far\n"
        assert "has stopped" in worker.stop()
        assert worker.program.returncode == 0


def test_its_migration_brings_the_newest_schema() -> None:
    versions = ROOT / "examples" / "sqlalchemy_reports" / "migrations" / "versions"
    found = re.search(r"to=(\d+)", (versions / "0001_reports_and_jobs.py").read_text())
    assert found is not None
    newest = {Schema.of("sqlite").newest, Schema.of("postgresql").newest}
    assert {int(found[1])} == newest, "a migration was added: the example needs its number, or one for each database"
