"""The example shop, by the commands of its README."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

SHOP = Path(__file__).resolve().parents[2] / "examples" / "django_shop"
PYTHON = Path(sys.executable).parent


def commands() -> list[str]:
    return re.findall(r"^\$ (.+)$", (SHOP / "README.md").read_text(), re.MULTILINE)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A copy: the commands make files beside it."""
    return Path(shutil.copytree(SHOP, tmp_path / "django_shop", ignore=shutil.ignore_patterns("*.sqlite3*")))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{PYTHON}:{os.environ['PATH']}", **more}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_its_own_tests_pass(kind: str, shop: Path, request: pytest.FixtureRequest) -> None:
    command = "python manage.py test"
    assert command in commands()
    place = {"DATABASE_URL": request.getfixturevalue("empty_postgres_url")} if kind == "postgres" else {}
    done = subprocess.run(
        command,
        shell=True,
        cwd=shop,
        env=environment(**place),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def started(shop: Path) -> Iterator[str]:
    """The address of a shop that its one command has started."""
    command = "sh start.sh"
    assert command in commands()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        command.split(), cwd=shop, env=environment(PORT=str(port)), text=True, stderr=subprocess.PIPE
    ) as running:
        try:
            assert running.stderr is not None
            for line in running.stderr:
                if "Uvicorn running" in line:
                    break
            else:
                pytest.fail("the site did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            running.send_signal(signal.SIGTERM)
            running.communicate(timeout=60)


def test_it_starts_with_one_command_and_confirms_an_order(started: str, shop: Path) -> None:
    with urlopen(Request(f"{started}/orders", data=b"customer=ada&cents=4200")) as answer:
        order = json.load(answer)["order"]
    waiting = (
        "from fairlane.integrations.django import app; from fairlane.store.operators import JobFilter; "
        "(record,) = app.run_blocking(app.operations.list_jobs(JobFilter())).jobs; "
        "print(app.job(record.id).result_sync('60s'))"
    )
    done = subprocess.run(
        ["python", "manage.py", "shell", "-c", waiting],
        cwd=shop,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert f"order {order} of ada is confirmed" in done.stdout, done.stderr
    with urlopen(f"{started}/orders/{order}") as answer:
        assert json.load(answer) == {"customer": "ada", "is_confirmed": True}
