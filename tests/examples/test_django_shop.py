"""The example shop, by the commands of its README."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.examples.readme import WATCHDOG, Example

WAIT_FOR_THE_JOB = """
from fairlane.integrations.django import app
from fairlane.store.operators import JobFilter
(record,) = app.run_blocking(app.operations.jobs.list(JobFilter())).jobs
print(app.job(record.id).result_sync("60s"))
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_its_own_tests_pass(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    place = {"DATABASE_URL": request.getfixturevalue("empty_postgres_url")} if kind == "postgres" else {}
    assert "Found 8 test(s)" in Example("django_shop", tmp_path, **place).run("manage.py test")


def test_it_starts_with_one_command_and_confirms_an_order(tmp_path: Path) -> None:
    shop = Example("django_shop", tmp_path)
    with shop.started("start.sh") as running:
        address = f"{running.address()}/orders"
        with urlopen(Request(address, data=b"customer=ada&cents=4200")) as answer:
            order = json.load(answer)["order"]
        waited = subprocess.run(
            ["python", "manage.py", "shell", "-c", WAIT_FOR_THE_JOB],
            cwd=shop.folder,
            env=shop.environment,
            text=True,
            capture_output=True,
            timeout=WATCHDOG,
            check=False,
        )
        assert f"order {order} of ada is confirmed" in waited.stdout, waited.stderr
        with urlopen(f"{address}/{order}") as answer:
            assert json.load(answer) == {"customer": "ada", "is_confirmed": True}
        assert "confirmations" in shop.run("fairlane status")
        running.stop()
