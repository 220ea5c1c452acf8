"""The FastAPI example, by the commands of its README."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.examples.readme import Example


@pytest.fixture(params=["sqlite", "postgres"])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Example:
    if request.param == "sqlite":
        return Example("fastapi_webhooks", tmp_path)
    url: str = request.getfixturevalue("empty_postgres_url")
    example = Example("fastapi_webhooks", tmp_path, DATABASE_URL=url.replace("postgresql", "postgresql+asyncpg", 1))
    example.run("fairlane migrate")
    return example


@pytest.mark.slow
def test_it_passes_its_own_test(example: Example) -> None:
    assert "2 passed" in example.run("pytest")


@pytest.mark.slow
def test_it_starts_takes_a_webhook_delivers_it_and_stops_in_order(example: Example) -> None:
    with example.started("uvicorn") as site:
        taken = httpx.post(f"{site.address()}/webhooks/acme", json={"id": "a-1", "body": "hello"}, timeout=60)
        assert taken.status_code == 202
        site.wait_for("delivered a-1 to acme")
        assert "Application shutdown complete" in site.stop()
