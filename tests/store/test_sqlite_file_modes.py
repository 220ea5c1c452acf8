"""Jobs are nobody's business but the owner's: files are private unless somebody says otherwise (S5)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fairlane import App
from fairlane.cli.program import program


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}


async def store_a_job(path: Path) -> App:
    app = App(f"sqlite:///{path}")

    @app.task(name="deliver")
    async def deliver() -> None: ...

    await app.__aenter__()
    await deliver.enqueue()
    return app


async def test_a_new_database_and_all_beside_it_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    app = await store_a_job(tmp_path / "shop.db")
    try:
        assert modes(tmp_path) == dict.fromkeys(("shop.db", "shop.db-wal", "shop.db-shm", "shop.db.lock"), 0o600)
    finally:
        await app.close()


@pytest.mark.parametrize("mode", [0o660, 0o640, 0o600])
async def test_a_file_that_is_there_keeps_its_mode_and_what_is_beside_it_has_the_same(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "shop.db"
    path.touch()
    path.chmod(mode)
    app = await store_a_job(path)
    try:
        assert set(modes(tmp_path).values()) == {mode}
    finally:
        await app.close()


def test_an_export_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    App(url).close_sync()
    run = CliRunner().invoke
    assert run(program, ["migrate", "--url", url]).exit_code == 0
    for output in ("jobs.jsonl", "jobs.csv"):
        place = tmp_path / output
        done = run(program, ["jobs", "export", "--url", url, "--format", place.suffix[1:], "--output", str(place)])
        assert done.exit_code == 0, done.output
        assert modes(tmp_path)[output] == 0o600
