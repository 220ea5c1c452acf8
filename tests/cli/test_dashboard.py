"""`fairlane dashboard`, as a user starts and stops it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Fairlane

WATCHDOG = 60.0

SHOP = """
from fairlane import App

app = App("sqlite:///shop.db")
app.queue("webhooks")

@app.task(queue="webhooks")
async def deliver(account: str) -> int:
    return 1
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))
    code = "from shop import app, deliver; deliver.enqueue_sync('acme'); app.close_sync()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    return tmp_path


@contextmanager
def running(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The dashboard, and the address that it has printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fairlane.cli", "dashboard", "--port", "0", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:\d+)/", line)
        assert found is not None, line + process.stdout.read()
        yield process, found[1]
    finally:
        process.kill()
        process.wait(WATCHDOG)
        process.stdout.close()


def test_a_token_is_made_up_and_printed_with_the_address_to_log_in_at(shop: Path) -> None:
    with running(shop, "shop:app") as (process, address):
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(rf"log in: {address}/login#token=(\S{{20,}})\n", line)
        assert found is not None, line
        headers = {"Authorization": f"Bearer {found[1]}"}
        assert httpx.get(f"{address}/", headers=headers, timeout=WATCHDOG).status_code == 200
        assert httpx.get(f"{address}/", timeout=WATCHDOG).status_code == 303
        assert httpx.get(f"{address}/readyz", timeout=WATCHDOG).text == "ok\n"


def test_a_token_that_was_given_is_not_printed(shop: Path) -> None:
    url = f"sqlite:///{shop}/shop.db"
    with running(shop, "--url", url, FAIRLANE_DASHBOARD_TOKEN="known-to-everybody") as (process, address):
        headers = {"Authorization": "Bearer known-to-everybody"}
        assert httpx.get(f"{address}/", headers=headers, timeout=WATCHDOG).status_code == 200
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=WATCHDOG)
        assert said == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_well_although_somebody_is_looking(shop: Path, number: signal.Signals) -> None:
    with running(shop, "shop:app", "--token", "known-to-everybody") as (process, address):
        headers = {"Authorization": "Bearer known-to-everybody"}
        with httpx.stream("GET", f"{address}/live?page=/&every=2", headers=headers, timeout=WATCHDOG) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(":")
            process.send_signal(number)
            list(lines)
        assert process.wait(WATCHDOG) == 0


def test_a_port_that_is_taken_is_told_in_one_line(shop: Path, fairlane: Fairlane) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = fairlane("dashboard", "shop:app", "--port", port)
    assert told.returncode == 1
    assert told.stdout == ""
    assert told.stderr.count("\n") == 1
    assert f"cannot listen at 127.0.0.1 port {port}" in told.stderr


def test_looking_through_the_dashboard_creates_nothing(tmp_path: Path, fairlane: Fairlane) -> None:
    told = fairlane("dashboard", "--url", f"sqlite:///{tmp_path}/none.db", "--port", "0")
    assert told.returncode == 1
    assert "does not exist yet" in told.stderr
    assert not (tmp_path / "none.db").exists()


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(shop: Path, fairlane: Fairlane) -> None:
    hidden = shop / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['starlette'] = None\n")
    told = fairlane("dashboard", "shop:app", PYTHONPATH=str(hidden))
    assert told.returncode == 1
    assert told.stderr.count("\n") == 1
    assert "pip install 'fairlane[dashboard]'" in told.stderr
