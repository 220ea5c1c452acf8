"""`fairlane dashboard`, as a user starts and stops it."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from fairlane.dashboard.server import MOST_OF_ONE_PEER
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
        found = re.search(r"at (http://[\d.]+:\d+)/", line)
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


@pytest.mark.parametrize(
    ("token", "why"), [("12345678", "at least 16"), ("a" * 40, "repeats"), ("passwordpassword", "repeats")]
)
@pytest.mark.parametrize("option", ["--token", "--viewer-token"])
def test_a_weak_token_is_refused_where_strangers_may_reach_it(
    shop: Path, fairlane: Fairlane, option: str, token: str, why: str
) -> None:
    """S5: an 8-character token was accepted on 0.0.0.0."""
    for host in ("0.0.0.0", "::", "10.1.2.3", "dashboard.internal"):
        told = fairlane("dashboard", "shop:app", "--host", host, "--port", "0", option, token, cwd=shop)
        assert told.returncode == 1
        assert f"{option} is too weak for {host}" in told.stderr
        assert why in told.stderr
        assert "secrets.token_urlsafe" in told.stderr
        assert token not in told.stderr


def test_a_weak_token_is_accepted_on_this_machine_and_a_strong_one_anywhere(shop: Path) -> None:
    for host, token in (("127.0.0.1", "12345678"), ("0.0.0.0", secrets.token_hex(16))):
        with running(shop, "shop:app", "--host", host, "--token", token) as (_, url):
            answer = httpx.get(
                f"http://127.0.0.1:{urlsplit(url).port}/api/queues",
                headers={"Authorization": f"Bearer {token}"},
                timeout=WATCHDOG,
            )
            assert answer.status_code == 200


def test_half_a_request_keeps_nobody_out_and_is_not_kept(shop: Path) -> None:
    """S5: 400 half-open requests were kept, for as long as their sender liked."""
    with running(shop, "shop:app", "--token", "a-token-for-tests-1") as (_, url), ExitStack() as half_open:
        address = ("127.0.0.1", urlsplit(url).port)
        sockets = []
        for _ in range(MOST_OF_ONE_PEER + 20):
            each = half_open.enter_context(socket.create_connection(address, timeout=WATCHDOG))
            each.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
            sockets.append(each)
        refused = [each.recv(1_000) for each in sockets[MOST_OF_ONE_PEER:]]
        assert all(each.startswith(b"HTTP/1.1 429 ") and b"Retry-After: 5" in each for each in refused)
        began = time.monotonic()
        for each in sockets[:MOST_OF_ONE_PEER]:
            assert each.recv(1_000).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < WATCHDOG
        assert httpx.get(f"{url}/healthz", timeout=WATCHDOG).status_code == 200


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
