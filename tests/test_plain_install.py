"""What `pip install fairlane` gives by itself: nothing that an extra brings is imported, wherever a program begins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BLOCK = """
import sys
from importlib.machinery import PathFinder

class Plain(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path = [Plain if each is PathFinder else each for each in sys.meta_path]
"""

PROGRAM = """
import asyncio
from fairlane import App, Concurrency, Fair

app = App()
app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(5, by="account")])

@app.task(queue="webhooks")
async def deliver(event: int, account: str) -> int:
    return event

async def main() -> None:
    async with app:
        worker = asyncio.create_task((await app.worker()).run())
        job = await deliver.enqueue(42, account="acme")
        assert await job.result(timeout="60s") == 42
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)

asyncio.run(main())
"""


def normalized(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def absent() -> set[str]:
    """The modules of everything that is not installed with Fairlane, as far as it is here."""
    given = {normalized(each) for each in PROJECT["dependencies"]}
    extras = {normalized(each) for extra in PROJECT["optional-dependencies"].values() for each in extra} - given
    drivers = {"psycopg", "psycopg-pool", "aiosqlite", "opentelemetry-sdk", "pytest", "anyio"}
    modules = packages_distributions()
    found = {name for name, brought in modules.items() if {normalized(each) for each in brought} & (extras | drivers)}
    assert {"opentelemetry", "starlette", "jinja2", "sqlalchemy", "django", "celery"} <= found
    return found


@pytest.mark.parametrize(
    "program",
    [
        PROGRAM,
        "from fairlane.cli import main; sys.argv = ['fairlane', '--help']; main()",
        "from fairlane.cli import main; sys.argv = ['fairlane', 'worker', '--help']; main()",
        "from fairlane.cli import main; sys.argv = ['fairlane', 'version']; main()",
        "from fairlane.cli import main; sys.argv = ['fairlane', 'migrate']; main()",
        "import fairlane.errors, fairlane.events, fairlane.operations, fairlane.simulation, fairlane.worker",
    ],
)
def test_a_plain_installation_needs_no_extra(program: str, tmp_path: Path) -> None:
    environment = {**os.environ, "FAIRLANE_URL": f"sqlite:///{tmp_path / 'jobs.db'}"}
    ran = subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent=absent()) + program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ModuleNotFoundError" not in ran.stderr
    assert ran.returncode == 0, ran.stderr


def test_the_dashboard_says_what_it_lacks(tmp_path: Path) -> None:
    program = "from fairlane.cli import main; sys.argv = ['fairlane', 'dashboard']; main()"
    environment = {**os.environ, "FAIRLANE_URL": f"sqlite:///{tmp_path / 'jobs.db'}"}
    ran = subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent=absent()) + program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode != 0
    assert "pip install 'fairlane[dashboard]'" in ran.stderr
