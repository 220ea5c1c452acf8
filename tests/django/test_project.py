"""A Django project's own tests, by its own `manage.py test`: in memory, in a SQLite file, on PostgreSQL.

What they check is in project/works/check_*.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent / "project"


def manage(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the project, with what it printed."""
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(PROJECT / "manage.py"), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def database(kind: str, request: pytest.FixtureRequest, folder: Path) -> Mapping[str, str]:
    """What the project is told of its database. Its tests make one of their own beside it."""
    match kind:
        case "postgres":
            return {"TEST_DATABASE": request.getfixturevalue("empty_postgres_url")}
        case "sqlite-file":
            return {"TEST_DATABASE": str(folder / "real.db"), "TEST_FILE": str(folder / "test.db")}
    return {"TEST_DATABASE": str(folder / "real.db")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite-memory", "sqlite-file", "postgres"])
def test_the_tests_of_a_django_project_pass(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    told = database(kind, request, tmp_path)
    done = manage(
        "test", str(PROJECT), "--top-level-directory", str(PROJECT), "--pattern", "check_*.py", "--noinput", **told
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "real.db").exists(), "the tests wrote to the database that they are not for"


@pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="Django 6 needs Python 3.12: the backend is tested with the package django-tasks here, NOT with Django 6",
)
def test_the_backend_is_tested_with_the_framework_of_django_6(tmp_path: Path) -> None:
    done = manage(
        "shell", "-c", "from works.framework import NAME; print(NAME)", TEST_DATABASE=str(tmp_path / "real.db")
    )
    assert done.stdout.splitlines()[-1] == "django.tasks", done.stderr
