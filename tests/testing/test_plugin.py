"""The fixtures for pytest, in a project of their own: a pytest that knows nothing of ours but what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SHOP = """
from fairlane import App

app = App()
app.queue("mail")

@app.task(queue="mail")
async def send(number: int) -> int:
    if number < 0:
        raise ValueError("no number")
    return number
"""

TESTS = """
import pytest
from fairlane.testing import assert_enqueued, run_until_idle
from shop import send

@pytest.mark.anyio
async def test_async(fairlane_app, fairlane_clock):
    assert fairlane_app.clock is fairlane_clock
    await send.using(delay="1d").enqueue(1)
    await assert_enqueued(fairlane_app, send.call(1), count=1)
    (ran,) = await run_until_idle(fairlane_app, advance=True)
    assert ran.outcome == "done"

def test_blocking(fairlane_app):
    send.enqueue_sync(2)
    fairlane_app.run_blocking(assert_enqueued(fairlane_app, send, count=1))

@pytest.mark.anyio
async def test_immediate(fairlane_app, fairlane_immediate):
    assert await (await send.enqueue(3)).result() == 3
    with pytest.raises(ValueError):
        await send.enqueue(-3)
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:xdist", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_app_of_a_project_is_in_memory_for_each_test(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfairlane_app = shop:app\nfilterwarnings = error\n")
    ran = run_pytest(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not (tmp_path / "fairlane.db").exists()


def test_without_an_app_the_fixture_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text("def test_app(fairlane_app): ...")
    assert 'Set fairlane_app = "module:app"' in run_pytest(tmp_path).stdout


def test_a_project_that_does_not_use_the_fixtures_does_not_load_fairlane(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("import sys\ndef test_none(): assert 'fairlane' not in sys.modules\n")
    ran = run_pytest(tmp_path)
    assert ran.returncode == 0, ran.stdout
