"""What a worker writes to its log: how each attempt ended and what happens next, one way for people and one as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fairlane import App, Backoff, Cancel, Dead, Retry, Snooze, State, context
from fairlane.clock import ManualClock, as_datetime
from fairlane.errors import JobFailed
from fairlane.redaction import TextLines, without_secrets
from fairlane.store.protocol import WorkerIdentity
from fairlane.worker import Middleware
from fairlane.worker.logs import JsonLines
from fairlane.worker.runs import Next
from tests.telemetry.worker_process import WorkerProcess, worker_process
from tests.waiting import PATIENCE
from tests.worker.harness import WatchedStore, reaches, working

STEADY = Backoff("10m", factor=1, jitter=0)


class Passing(Middleware):
    async def around_run(self, job: Any, run: Next) -> Any:
        return await run()


@contextmanager
def logged(formatter: logging.Formatter, level: int = logging.INFO) -> Iterator[io.StringIO]:
    """What the worker's log looks like in this format."""
    text, worker = io.StringIO(), logging.getLogger("fairlane.worker")
    handler, before = logging.StreamHandler(text), worker.level
    handler.setFormatter(formatter)
    worker.addHandler(handler)
    worker.setLevel(level)
    worker.propagate = False
    try:
        yield text
    finally:
        worker.propagate = True
        worker.removeHandler(handler)
        worker.setLevel(before)


def about_jobs(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if "job " in record.getMessage()]


def frames(record: logging.LogRecord) -> list[str]:
    """The functions in a record's traceback, outermost first."""
    assert record.exc_info is not None
    return [frame.name for frame in traceback.extract_tb(record.exc_info[2])]


async def test_a_failed_attempt_says_why_where_and_when_the_next_one_is(
    app: App, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """H1."""

    @app.task(max_attempts=2, backoff=STEADY)
    async def fetch() -> None:
        raise ConnectionError("no route")

    async with working(app):
        job = await fetch.enqueue()
        await reaches(job, State.SCHEDULED)
        clock.advance("10m")
        with pytest.raises(JobFailed):
            await job.result()
    (first, second) = [record for record in caplog.records if "no route" in record.getMessage()]
    assert first.levelname == "WARNING"
    assert re.fullmatch(
        rf"job {job.id} \({fetch.name}\) attempt 1 of 2 failed, next attempt in 10 min "
        r"\(\d\d:\d\d:\d\d UTC\): ConnectionError: no route",
        first.getMessage(),
    )
    assert (second.levelname, second.getMessage()) == (
        "ERROR",
        f"job {job.id} ({fetch.name}) attempt 2 of 2 failed, the job is dead: ConnectionError: no route",
    )
    assert [frames(each) for each in (first, second)] == [["fetch"], ["fetch"]]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "with a middleware"])
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_traceback_begins_in_the_program_and_not_in_fairlane(
    app: App, caplog: pytest.LogCaptureFixture, kind: str, wrapped: bool
) -> None:
    """H1."""
    if wrapped:
        app.middlewares.append(Passing())

    def inner() -> None:
        try:
            raise KeyError("order")
        except KeyError as error:
            raise LookupError("no such order") from error

    @app.task(max_attempts=1, name="in_loop")
    async def in_loop() -> None:
        inner()

    @app.task(max_attempts=1, name="in_thread")
    def in_thread() -> None:
        inner()

    task = in_loop if kind == "async" else in_thread
    async with working(app):
        job = await task.enqueue()
        with pytest.raises(JobFailed):
            await job.result()
    (record,) = [record for record in caplog.records if "no such order" in record.getMessage()]
    assert frames(record) == [*(["around_run"] if wrapped else []), task.function.__name__, "inner"]
    assert record.exc_info is not None
    text = logging.Formatter().formatException(record.exc_info)
    assert "KeyError: 'order'" in text
    assert "/fairlane/worker/" not in text
    (attempt,) = await job.attempts()
    assert "/fairlane/worker/" not in (attempt.error or "")


async def test_a_timeout_shows_where_the_handler_was_stuck(
    app: App, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """H1."""
    started = asyncio.Event()

    async def never_answers() -> None:
        started.set()
        await asyncio.Event().wait()

    @app.task(timeout="5s", max_attempts=1)
    async def call_out() -> None:
        await never_answers()

    async with working(app, lease="1h"):
        job = await call_out.enqueue()
        await started.wait()
        clock.advance("5s")
        with pytest.raises(JobFailed):
            await job.result()
    (record,) = [each for each in caplog.records if "attempt 1 of 1 failed, the job is dead" in each.getMessage()]
    assert record.getMessage().endswith("TimeoutError: the job ran longer than its timeout of 5 s")
    assert frames(record)[:2] == ["call_out", "never_answers"]


async def test_what_a_handler_asks_for_is_news_and_not_a_failure_with_a_traceback(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """H1. What made a handler ask for a retry is worth its traceback."""
    caplog.set_level(logging.INFO)

    @app.task(name="ask")
    async def ask(what: str) -> None:
        match what:
            case "snooze":
                raise Snooze("1h", reason="closed")
            case "cancel":
                raise Cancel("not wanted")
            case "dead":
                raise Dead("no such address")
        try:
            raise ConnectionError("busy")
        except ConnectionError as error:
            raise Retry("10m", reason="they are busy") from error

    async with working(app):
        jobs = {what: await ask.enqueue(what) for what in ("snooze", "cancel", "dead", "retry")}
        await reaches(jobs["snooze"], State.SCHEDULED)
        await reaches(jobs["cancel"], State.CANCELLED)
        await reaches(jobs["dead"], State.DEAD)
        await reaches(jobs["retry"], State.SCHEDULED)
    told = {}
    for record in caplog.records:
        for what, job in jobs.items():
            if str(job.id) in record.getMessage():
                words = re.sub(r" \(\d\d:\d\d:\d\d UTC\)", "", record.getMessage().partition("(ask) ")[2])
                told[what] = (record.levelname, words, frames(record) if record.exc_info else None)
    assert told == {
        "snooze": ("INFO", "attempt 1 of 5 snoozed, next attempt in 60 min: closed", None),
        "cancel": ("INFO", "attempt 1 of 5 cancelled: not wanted", None),
        "dead": ("ERROR", "attempt 1 of 5 failed for good, the job is dead: no such address", None),
        "retry": ("WARNING", "attempt 1 of 5 asked for a retry, next attempt in 10 min: they are busy", ["ask"]),
    }


async def test_a_job_that_succeeds_is_logged_at_debug_only(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """H1."""

    @app.task(name="greet")
    async def greet() -> None: ...

    caplog.set_level(logging.DEBUG, "fairlane.worker")
    async with working(app):
        job = await greet.enqueue()
        await job.result()
        started, done = about_jobs(caplog)
        assert started == ("DEBUG", f"job {job.id} (greet) attempt 1 of 5 started")
        assert (done[0], re.sub(r"\d+ ms", "x ms", done[1])) == (
            "DEBUG",
            f"job {job.id} (greet) attempt 1 of 5 done in x ms",
        )
        caplog.clear()
        caplog.set_level(logging.INFO, "fairlane.worker")
        await (await greet.enqueue()).result()
    assert about_jobs(caplog) == []


async def test_a_worker_that_stops_says_what_it_ran(
    app: App, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """H1. Attempts are counted, so a job that was retried counts more than once; what was given back did not run."""
    caplog.set_level(logging.INFO)

    @app.task(name="work", max_attempts=2, backoff=STEADY)
    async def work(number: int) -> None:
        if number == 1:
            raise ValueError("one")
        if number == 2:
            raise Dead("two")
        if number == 3:
            context().enqueue(work.using(id=jobs[0].id).call(0))  # which is taken

    async with working(app, lease="1d") as worker:
        jobs = [await work.enqueue(number) for number in (0, 0, 0, 1, 2)]
        for job, state in zip(jobs, [State.DONE] * 3 + [State.SCHEDULED, State.DEAD], strict=True):
            await reaches(job, state)
        await reaches(await work.using(max_attempts=1).enqueue(3), State.DEAD)
        clock.advance("10m")
        await reaches(jobs[3], State.DEAD)
    assert any("effects were refused, so this attempt has failed; the job is dead" in each for each in caplog.messages)
    assert caplog.messages[-1] == (
        f"worker {worker.identity.name} has stopped after 10 min; it made 7 attempts: 3 done, 1 to be retried, 3 dead"
    )


async def test_a_worker_that_ran_nothing_says_so(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """H1."""
    caplog.set_level(logging.INFO)
    app.queue("mail")
    async with working(app) as worker:
        pass
    assert caplog.messages[-1].startswith(f"worker {worker.identity.name} has stopped after ")
    assert caplog.messages[-1].endswith("; it ran no jobs")


async def test_the_text_log_has_one_line_at_the_margin_for_each_record(app: App) -> None:
    """H1, S5. What an exception says cannot begin a line of its own; its traceback is indented, and has an end."""
    forged = "first line\n2030-01-01 00:00:00,000 INFO     fairlane.worker: all is well\n"

    @app.task(max_attempts=1)
    async def fail() -> None:
        raise ValueError(forged + "x\n" * 50_000)

    with logged(TextLines()) as text:
        async with working(app):
            job = await fail.enqueue()
            with pytest.raises(JobFailed):
                await job.result()
    (line,) = [each for each in text.getvalue().splitlines() if "first line" in each and not each.startswith(" ")]
    assert line.endswith("attempt 1 of 1 failed, the job is dead: ValueError: first line …")
    below = [each for each in text.getvalue().splitlines() if "all is well" in each]
    assert [each.startswith("    ") for each in below] == [True]
    assert len(text.getvalue()) < 100_000


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines("one")], ids=["text", "json"])
async def test_an_error_that_no_encoding_can_write_is_logged_all_the_same(
    app: App, formatter: logging.Formatter
) -> None:
    """H1."""

    @app.task(max_attempts=1)
    async def fail() -> None:
        raise ValueError("half a pair \ud800")

    with logged(formatter) as text:
        async with working(app):
            job = await fail.enqueue()
            with pytest.raises(JobFailed):
                await job.result()
    assert b"half a pair ?" in text.getvalue().encode()


async def test_the_json_log_has_the_outcome_and_the_next_attempt_as_fields(app: App, clock: ManualClock) -> None:
    """H1."""

    @app.task(max_attempts=2, backoff=STEADY)
    async def fail() -> None:
        raise ValueError("no luck")

    with logged(JsonLines("one")) as text:
        async with working(app, lease="1d"):
            job = await fail.enqueue()
            await reaches(job, State.SCHEDULED)
            clock.advance("10m")
            due = as_datetime(clock.now()).isoformat()
            await reaches(job, State.DEAD)
    first, second = [line for line in map(json.loads, text.getvalue().splitlines()) if line.get("job") == str(job.id)]
    assert (first["outcome"], first["state"], first["attempt"], first["max_attempts"]) == ("failed", "scheduled", 1, 2)
    assert first["next_attempt_at"] == due
    assert (second["outcome"], second["state"], second["level"]) == ("failed", "dead", "error")
    assert "next_attempt_at" not in second
    assert second["exception"].splitlines()[-1] == "ValueError: no luck"


@pytest.mark.parametrize(("lost_before", "level"), [(0, "WARNING"), (4, "ERROR")])
async def test_a_job_that_dies_with_its_worker_is_an_error_in_the_log_of_another(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture, lost_before: int, level: str
) -> None:
    """H1."""

    @app.task(max_attempts=3)
    async def work() -> None: ...

    async with app:
        job = await work.enqueue()
        gone = WorkerIdentity(uuid4(), "gone")
        for _ in range(lost_before):
            await store.real.claim("default", lambda: 1, worker=gone, lease=timedelta(seconds=30))
            clock.advance("30s")
            await store.real.reap()
        await store.real.claim("default", lambda: 1, worker=gone, lease=timedelta(seconds=30))
        async with working(app, lease="30s"):
            clock.advance("30s")
            await reaches(job, State.DEAD if lost_before else State.DONE)
    (record,) = [each for each in caplog.records if "its lease ran out" in each.getMessage()]
    assert record.levelname == level


# Real processes.

SHOP = """
from fairlane import App, Concurrency, Fair, Rate
app = App()
limits = [Rate(100, per="1m", by="endpoint"), Concurrency(5, by="account")]
app.queue("webhooks", fair=Fair(by="account"), limits=limits)
app.queue("mail")

@app.task(queue="webhooks", max_attempts=1)
async def deliver(account: str, endpoint: str) -> None:
    raise ConnectionError(f"{endpoint} does not answer")

@app.task(queue="mail")
def send(to: str) -> None: ...
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


async def stopped(worker: WorkerProcess) -> list[str]:
    """Ask it to stop, and return all that it has said."""
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ended() == 0
    return worker.lines


def messages(lines: list[str]) -> list[str]:
    return [line.partition("fairlane.worker: ")[2].rstrip() for line in lines if "fairlane.worker: " in line]


async def test_a_worker_begins_with_what_it_is_and_what_it_serves(url: str, shop: Path) -> None:
    """H1."""
    async with worker_process(shop, url, "--queues", "webhooks,mail=2", "--slots", "mail=1:5") as worker:
        await worker.says("serves webhooks, mail")
        told = messages(await stopped(worker))
    assert re.fullmatch(r"fairlane \S+ on Python \S+, process \d+", told[0])
    assert told[1:7] == [
        "app:    shop:app with 2 tasks",
        f"store:  {without_secrets(url)}",
        "slots:  100",
        "queue:  webhooks: Fair(by='account', charge='time'), Rate(100, per='60s', burst=100, by='endpoint'), "
        "Concurrency(5, by='account')",
        "queue:  mail (weight 2, slots 1 to 5): no limits",
        "stop:   SIGTERM or Ctrl-C waits up to 30 s for running jobs; a second one stops at once",
    ]


async def test_the_banner_shows_no_password(shop: Path) -> None:
    """H1."""
    url = "postgresql://shop:s3cret@127.0.0.1:1/shop?password=t0psecret&sslmode=disable"
    async with worker_process(shop, url) as worker:
        line = await worker.says("store:")
    assert line.rstrip().endswith("postgresql://shop:***@127.0.0.1:1/shop?password=***")
    assert "s3cret" not in "".join(worker.lines)


async def test_several_processes_have_one_banner(shop: Path, tmp_path: Path) -> None:
    """H1."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    async with worker_process(shop, url, "--processes", "2", "--concurrency", "7") as worker:
        await worker.says("serves webhooks, mail with 14 slots")
        told = messages(await stopped(worker))
    assert [line for line in told if line.startswith(("app:", "slots:"))] == [
        "app:    shop:app with 2 tasks",
        "slots:  14, 7 in each of 2 processes",
    ]
    assert sum("has stopped after" in line for line in told) == 1


async def test_the_log_of_a_real_worker_has_the_traceback_and_the_summary(url: str, shop: Path) -> None:
    """H1."""
    async with worker_process(shop, url, "--log-level", "debug") as worker:
        await worker.says("serves webhooks, mail")
        await _enqueue(shop, url)
        await worker.says("the job is dead")
        await worker.says("(shop.send) attempt 1 of 5 done in")
        lines = await stopped(worker)
    at = next(number for number, line in enumerate(lines) if "the job is dead" in line)
    assert " ERROR    fairlane.worker: job " in lines[at]
    assert lines[at].endswith("ConnectionError: api.acme.com does not answer\n")
    assert lines[at + 1] == "    Traceback (most recent call last):\n"
    assert "shop.py" in lines[at + 2]
    assert messages(lines)[-1].endswith("it made 2 attempts: 1 done, 1 dead")


async def _enqueue(shop: Path, url: str) -> None:
    code = "import shop; shop.deliver.enqueue_sync('acme', 'api.acme.com'); shop.send.enqueue_sync('x')"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=shop, env={**os.environ, "FAIRLANE_URL": url}
    )
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 0


async def test_without_a_banner_a_worker_says_only_that_it_serves(shop: Path, tmp_path: Path) -> None:
    """H1."""
    async with worker_process(shop, f"sqlite:///{tmp_path / 'jobs.db'}", "--no-banner") as worker:
        await worker.says("serves webhooks, mail")
    assert "serves webhooks, mail" in messages(worker.lines)[0]


async def test_what_the_app_redacts_is_not_in_the_log_either(app: App) -> None:
    """O19. A traceback would show what the stored error does not."""
    app.redact = lambda value, disclosure: value.replace("ACME-4711", "…") if isinstance(value, str) else value

    @app.task(max_attempts=1)
    async def fail() -> None:
        raise ValueError("customer ACME-4711 was not found")

    with logged(TextLines()) as text:
        async with working(app):
            job = await fail.enqueue()
            with pytest.raises(JobFailed):
                await job.result()
    assert "the job is dead" in text.getvalue()
    assert "ACME-4711" not in text.getvalue()


class Plan(str, Enum):  # noqa: UP042 - programs have these, and `str` of one is its name
    LARGE = "large"


def test_what_a_program_adds_to_the_json_log_is_there_without_its_secrets() -> None:
    """S4: values that have a secret's name, whatever they are, and secrets within texts, however deep."""
    extra = {
        "password": "hunter2",
        "pin_token": 4711,
        "auth": ("ann", "hunter2"),
        "headers": {"Authorization": "Bearer hunter2", "accept": "*/*", "nested": [{"api_key": "hunter2"}]},
        "url": "postgresql://u:hunter2@h/x",
        "error": ConnectionError("token=hunter2"),
        "postgresql://u:hunter2@h": {"redis://:hunter2@h": 1},
        "tokens": 1200,
        "key": "acme",
        "plan": Plan.LARGE,
        "amounts": [1, 2.5, None, True],
        "secret": None,
    }
    text = JsonLines("one").format(logging.makeLogRecord({"msg": "paid", "name": "shop", **extra}))
    assert "hunter2" not in text
    told = json.loads(text)
    assert {name: told[name] for name in extra if name in told} == {
        "password": "***",
        "pin_token": "***",
        "auth": "***",
        "headers": {"Authorization": "***", "accept": "*/*", "nested": [{"api_key": "***"}]},
        "url": "postgresql://u:***@h/x",
        "error": "token=***",
        "tokens": 1200,
        "key": "acme",
        "plan": "large",
        "amounts": [1, 2.5, None, True],
        "secret": None,
    }
    assert told["postgresql://u:***@h"] == {"redis://:***@h": 1}


def test_a_structure_that_holds_itself_is_logged_all_the_same() -> None:
    around: list[object] = ["password=hunter2"]
    around.append(around)
    text = JsonLines("one").format(logging.makeLogRecord({"msg": "x", "name": "shop", "around": around}))
    assert json.loads(text)["around"][0] == "password=***"
    assert "hunter2" not in text
