"""`fairlane status`, `queues`, `keys`, `workers`, `top` and `doctor`, run as somebody runs them at 3 a.m."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner, Result

from fairlane import App, Concurrency, Fair
from fairlane.cli.program import program
from fairlane.scheduler.settlement import Done, settle
from fairlane.store import records
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.stats_values import WorkerReport

Run = Callable[..., Result]
SECOND = 1_000_000
ME = WorkerIdentity(UUID(int=1), "web-1:77")
WATCHDOG = 60.0
SCREEN = (24, 80)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def on_store(url: str, work: Callable[[Store], Any]) -> None:
    async def run() -> None:
        store = App(url).make_store()
        await store.open()
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(run())


async def report(store: Store, **given: Any) -> None:
    stats: dict[str, Any] = {
        "name": "web-1:77",
        "host": "web-1",
        "pid": 77,
        "version": "1",
        "queues": {"webhooks": 1.0},
        "concurrency": 20,
        "started_at": await store.now(),
        "every": 600 * SECOND,
        "running": 2,
        "loops": {"claiming": "running"},
        "tasks": ["deliver"],
    }
    await store.run(records.report(ME.id, WorkerReport(**(stats | given))))


@pytest.fixture
def shop(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """acme has 12 jobs: two run, which is its limit, one has ended, and nine wait. bolt has a scheduled one."""
    monkeypatch.setenv("FAIRLANE_URL", url)

    async def enqueue() -> None:
        app = App(url)
        app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(2, by="account"), Concurrency(50)])
        app.queue("email")

        @app.task(queue="webhooks", name="deliver")
        async def deliver(account: str) -> None: ...

        async with app:
            for _ in range(12):
                await deliver.enqueue("acme")
            await deliver.using(delay="1h").enqueue("bolt")

    async def work(store: Store) -> None:
        lease = timedelta(hours=1)
        first, *_ = (await store.claim("webhooks", lambda: 5, worker=ME, lease=lease)).claims
        await store.settle([settle(first, Done(None), 1)])
        assert len((await store.claim("webhooks", lambda: 5, worker=ME, lease=lease)).claims) == 1
        await store.claim("webhooks", lambda: 5, worker=ME, lease=lease)
        await store.add_up("webhooks")
        await report(store)

    asyncio.run(enqueue())
    on_store(url, work)
    return url


@pytest.fixture
def run(shop: str) -> Run:
    return lambda *arguments: CliRunner().invoke(program, arguments)


def told(run: Run, *arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_status_tells_all_queues_and_the_knob_of_the_limit_that_holds(run: Run) -> None:
    seen = told(run, "status")
    assert [(each["queue"], each["status"]) for each in seen["queues"]] == [("email", "idle"), ("webhooks", "limited")]
    assert (seen["totals"]["ready"], seen["totals"]["held_jobs"], seen["totals"]["running"]) == (9, 9, 2)
    assert (seen["totals"]["scheduled"]["count"], seen["totals"]["workers"]) == (1, 1)
    text = run("status").stdout
    assert "limits hold back everything that waits (9 jobs), as the policy requires" in text
    assert "account=acme is held by its limit of 2: 9 jobs wait" in text
    assert "→ fairlane limit set webhooks concurrency:account NUMBER --key account=acme" in text
    assert "1 worker with 20 slots" in text


def test_looking_changes_nothing(run: Run, shop: str) -> None:
    def state() -> str:
        jobs = told(run, "jobs", "list")["jobs"]
        return json.dumps(
            [jobs, told(run, "audit"), told(run, "policy", "show"), told(run, "keys", "webhooks")["keys"]]
        )

    def without_time(text: str) -> str:
        """What passes by itself: ages, and the last 24 hours, which move on when the clock strikes."""
        return re.sub(r'"(now|oldest_wait|drained_in)": [^,}]+|"hours": \[[^]]*\]', "", text)

    before = without_time(state())
    for command in ("status", "queues", "queues webhooks", "keys webhooks", "workers", "top", "doctor", "jobs export"):
        assert run(*command.split()).exit_code in (0, 1), command
    assert without_time(state()) == before


def test_queues_are_listed_and_one_is_shown_with_its_policy_and_its_limits(run: Run) -> None:
    assert [each["queue"] for each in told(run, "queues")] == ["email", "webhooks"]
    one = told(run, "queues", "webhooks")
    assert [(each["limit"], each["held_jobs"]) for each in one["limits"]] == [
        ("concurrency:account", 9),
        ("concurrency:", 0),
    ]
    text = run("queues", "webhooks").stdout
    assert "At most 2 at the same time for each account." in text
    assert re.search(r"█░+ +4%  2 of 50  Concurrency\(50\)", text)
    assert "LAST HOUR" in text
    unknown = run("queues", "webhook")
    assert (unknown.exit_code, "did you mean 'webhooks'?" in unknown.stderr) == (1, True)


def test_keys_are_listed_searched_and_paged_and_one_is_shown(run: Run) -> None:
    seen = told(run, "keys", "webhooks")
    assert [(each["keys"]["account"], each["waiting"], each["running"]) for each in seen["keys"]] == [
        ("acme", 9, 2),
        ("bolt", 0, 0),
    ]
    assert [each["keys"]["account"] for each in told(run, "keys", "webhooks", "--search", "BOL")["keys"]] == ["bolt"]
    assert [each["keys"]["account"] for each in told(run, "keys", "webhooks", "--held")["keys"]] == ["acme"]
    assert [each["keys"] for each in told(run, "keys", "webhooks", "--by", "task")["keys"]] == [{"task": "deliver"}]
    one = told(run, "keys", "webhooks", "--key", "account=acme")
    assert len(one["next_jobs"]) == 9
    order = [each["enqueued_at"] for each in one["next_jobs"]]
    assert order == sorted(order), "O06: in the order in which they would run"
    text = run("keys", "webhooks", "--key", "account=acme").stdout
    assert "WHY IT WAITS" in text
    assert "██████████  100%  2 of 2" in text
    for wrong, said in (
        (("--by", "region"), "has no key 'region'"),
        (("--after", "x"), "after='x'"),
        (("--key", "account=acme", "--held"), "leave out"),
    ):
        result = run("keys", "webhooks", *wrong)
        assert (result.exit_code, said in result.stderr) == (1, True), result.output


def test_workers_are_listed_and_checked(run: Run, shop: str) -> None:
    well = run("workers", "--check")
    assert well.exit_code == 0
    assert re.search(r"web-1:77 +well +2/20", well.stdout)
    on_store(shop, lambda store: report(store, is_well=False, loops={"claiming": "ValueError: no"}))
    sick = run("workers", "--check")
    assert sick.exit_code == 1
    assert "its loop claiming died: ValueError: no" in sick.stdout
    assert run("workers").exit_code == 0
    on_store(shop, lambda store: report(store, every=0))
    late = run("workers", "--check")
    assert (late.exit_code, "late" in late.stdout) == (1, True)
    assert told(run, "workers")["late"] == 1


def test_top_prints_once_in_a_pipe(run: Run) -> None:
    seen = told(run, "top")
    assert sorted(seen["queues"]) == ["email", "webhooks"]
    assert seen["keys"][0]["keys"] == {"account": "acme"}
    assert told(run, "top", "webhooks", "--sort", "name")["sort"] == "name"
    assert "by waiting" in run("top").stdout
    assert "name it" in run("top", "--by", "account").stderr


def test_the_doctor_is_red_at_a_fault_and_green_without(run: Run, shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairlane.operations import diagnosis as diagnosis_database

    monkeypatch.setattr(diagnosis_database, "DURABILITY", ())  # the server of the tests does not wait for its disk
    green = run("doctor")
    assert (green.exit_code, green.stdout) == (0, "nothing is wrong\n")
    run("pause", "webhooks", "--key", "account=nobody")
    noted = run("doctor", "--strict")
    assert noted.exit_code == 0
    assert noted.stdout.startswith("note    webhooks: key that no job carries: ")
    assert noted.stdout.endswith("no fault was found\n")
    on_store(shop, lambda store: report(store, clock_offset=90 * SECOND))
    red = run("doctor")
    assert red.exit_code == 1
    assert red.stdout.startswith("fault   clock skew: the clock of worker web-1:77 differs")
    assert [each["level"] for each in json.loads(run("doctor", "--json").stdout)] == ["fault", "note"]


def test_a_schema_that_is_out_of_date_is_told_by_the_doctor(empty_postgres_url: str) -> None:
    result = CliRunner().invoke(program, ["doctor", "--url", empty_postgres_url])
    assert result.exit_code == 1
    assert result.stdout.startswith("fault   schema: the database is at migration 0, this version needs ")
    assert "run `fairlane migrate`" in result.stdout
    gone = CliRunner().invoke(program, ["doctor", "--url", "postgresql://127.0.0.1:1/none", "--json"])
    assert (gone.exit_code, [each["check"] for each in json.loads(gone.stdout)]) == (1, ["database"])


# Watching, in processes of their own.


def started(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    return subprocess.Popen([sys.executable, "-m", "fairlane.cli", *arguments], env=environment, **options)


def test_watching_in_a_pipe_prints_a_document_a_line_until_ctrl_c(shop: str) -> None:
    watching = started("status", "--watch", "0.2", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert watching.stdout is not None
    try:
        seen = [json.loads(watching.stdout.readline()) for _ in range(2)]
        assert seen[0]["now"] < seen[1]["now"]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=WATCHDOG)
        assert (watching.returncode, errors) == (0, b"")
    finally:
        watching.kill()


def test_watching_for_people_in_a_pipe_prints_a_block_each_time(shop: str) -> None:
    watching = started("status", "--watch", "0.2", stdout=subprocess.PIPE)
    assert watching.stdout is not None
    try:
        lines = [watching.stdout.readline().decode() for _ in range(40)]
        assert sum(bool(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", line)) for line in lines) >= 2
        assert not any("\x1b" in line for line in lines)
        watching.terminate()
        watching.communicate(timeout=WATCHDOG)
        assert watching.returncode == 0
    finally:
        watching.kill()


class Terminal:
    """A terminal of 80 by 24, and a command in it."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *SCREEN, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.process = started(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        self._theirs = theirs
        self._seen = b""

    def until(self, text: str) -> str:
        """Everything that was shown since the last time, up to and with this."""
        signal.alarm(int(WATCHDOG))
        try:
            while text.encode() not in self._seen:
                self._seen += os.read(self._ours, 65_536)
        finally:
            signal.alarm(0)
        shown, _, self._seen = self._seen.partition(text.encode())
        return shown.decode() + text

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def mode(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def make(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_top_obeys_the_keyboard_and_leaves_the_terminal_as_it_was(shop: str, terminal: Callable[..., Terminal]) -> None:
    screen = terminal("top", "webhooks", "--every", "3600")
    shown = screen.until("q quit")
    assert "by waiting" in shown
    assert shown.index("acme") < shown.index("bolt")
    screen.press("n")
    assert screen.until("by name")
    assert "acme" in screen.until("q quit")
    screen.press("r")
    screen.until("by running")
    screen.press("xq")
    assert screen.process.wait(WATCHDOG) == 0
    assert screen.mode() == screen.before


def test_top_ends_at_ctrl_c_and_the_status_too(shop: str, terminal: Callable[..., Terminal]) -> None:
    for command, last in ((("top", "webhooks"), "q quit"), (("status", "--watch"), "account=acme")):
        screen = terminal(*command)
        screen.until(last)
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(WATCHDOG) == 0
        assert screen.mode() == screen.before


def test_no_line_of_a_screen_is_wider_than_the_screen(shop: str, terminal: Callable[..., Terminal]) -> None:
    screen = terminal("top", "webhooks")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.until("q quit"))
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]+", shown)) <= SCREEN[1]
