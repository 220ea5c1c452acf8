"""The app: its settings, its queues and tasks, the loops and threads it is used from."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import fairlane
from fairlane import App, Fair, Policy
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.store.rows import Declared
from tests.worker.harness import watched_app, working


def test_the_database_is_the_one_given_then_the_environments_then_a_file_beside_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAIRLANE_URL", "postgresql://host/base")
    assert App("sqlite://").url == "sqlite://"
    assert App().url == "postgresql://host/base"
    monkeypatch.delenv("FAIRLANE_URL")
    assert App().url == f"sqlite:///{Path(__file__).resolve().parent / 'fairlane.db'}"


@pytest.mark.parametrize("url", ["redis://host", "mysql://root:secret@host/x", "jobs.db", "sqlite:jobs.db"])
def test_an_unknown_url_is_refused_with_what_is_possible(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"possible are sqlite:///file.db, .* and postgresql://") as refused:
        App(url)
    assert "secret" not in str(refused.value)


def test_a_sqlite_url_with_a_host_says_how_to_write_it() -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:////absolute\.db"):
        App("sqlite://jobs.db")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_payload": 0},
        {"max_payload": 1.5},
        {"retention": "-1s"},
        {"dead_retention": -1},
        {"retention_count": -1},
        {"retention_count": True},
        {"retention_count": 10**7},
    ],
)
def test_a_setting_of_the_app_that_makes_no_sense_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        App("sqlite://", **settings)


def test_an_app_does_not_show_its_password() -> None:
    for password in ("secret", "sec ret", "s@cret", "sec:ret"):
        shown = repr(App(f"postgresql://user:{password}@127.0.0.1:1/base"))
        assert "cret" not in shown.partition("@127")[0], shown
        assert "127.0.0.1:1/base" in shown
    with pytest.raises(ConfigurationError, match="%2F") as refused:
        App("postgresql://user:se/cret@host/base")
    assert "cret" not in str(refused.value)
    assert "se/" not in str(refused.value)


def test_queues_and_tasks_are_declared_once() -> None:
    app = App("sqlite://")
    app.queue("mail")
    with pytest.raises(ConfigurationError, match="queue 'mail' is declared twice"):
        app.queue("mail")
    app.task(name="send")(lambda: None)
    with pytest.raises(ConfigurationError, match=r"task 'send' is defined twice, in .*test_app.py:\d+ and in"):
        app.task(name="send")(lambda: None)


def test_an_option_that_there_is_not_is_refused_with_the_one_that_is_meant() -> None:
    app = App("sqlite://")
    declare: Any = app.task
    with pytest.raises(ConfigurationError, match=r"task: there is no option max_attempt=; did you mean max_attempts="):
        declare(max_attempt=3)
    with pytest.raises(ConfigurationError, match=r"task: there is no option colour=; there are queue, name, max_att"):
        declare(colour="red")
    schedule: Any = app.schedule
    report = app.task(name="report")(lambda kind: None)
    with pytest.raises(ConfigurationError, match=r"schedule: there is no option time_zone=; did you mean timezone="):
        schedule("@daily", report, "x", time_zone="UTC")
    with pytest.raises(ConfigurationError, match=r"no option kind=; arguments by name .* task.call\(kind=…\)"):
        schedule("@daily", report, kind="x")


async def test_a_task_of_a_queue_that_was_not_declared_is_refused(app: App) -> None:
    @app.task(queue="mial", name="send")
    async def send() -> None: ...

    with pytest.raises(UnknownQueue, match=r"task 'send': declare its queue with app.queue\('mial'"):
        await send.enqueue()


async def test_a_job_for_an_unknown_queue_is_refused(app: App) -> None:
    @app.task(name="send")
    async def send() -> None: ...

    with pytest.raises(UnknownQueue, match="task 'send': queue 'mial' is unknown"):
        await send.using(queue="mial").enqueue()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_attempts": 0}, "max_attempts=0"),
        ({"priority": 1000}, "priority=1000"),
        ({"timeout": 0}, "timeout=0"),
        ({"retry_on": "Exception"}, "retry_on='Exception'"),
        ({"dead_on": (ValueError, 5)}, "dead_on="),
        ({"backoff": 5}, "backoff=5"),
    ],
)
def test_a_task_option_that_makes_no_sense_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    app = App("sqlite://")

    def work() -> None: ...

    with pytest.raises(ConfigurationError, match=f"task 'work': .*{reason}"):
        app.task(name="work", **options)(work)


def test_a_generator_is_no_task() -> None:
    with pytest.raises(ConfigurationError, match="is a generator"):

        @App("sqlite://").task
        def numbers() -> Any:
            yield 1


async def test_the_policy_in_force_decides_about_keys_and_drift_is_told(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    app, store = watched_app(clock)
    app.queue("mail", fair=Fair(by="account"))

    @app.task(queue="mail")
    async def send(account: str, region: str) -> None: ...

    in_force = Policy("mail", fair=Fair(by="region"))
    await store.real.open()
    await store.real.declare(in_force)

    async def declare(policy: Policy) -> Declared:
        return Declared(in_force, 1, is_drift=True)  # as PostgreSQL does

    store.__dict__["declare"] = declare
    job = await send.enqueue("acme", "eu")
    assert (await job.record()).keys == {"region": "eu"}
    assert "queue 'mail': the policy in force (version 1) differs from the one declared here" in caplog.text
    await app.close()


async def test_a_policy_that_was_applied_later_is_followed(app: App, clock: ManualClock) -> None:
    app.queue("mail", fair=Fair(by="account"))

    @app.task(queue="mail")
    async def send(account: str, region: str) -> None: ...

    await send.enqueue("acme", "eu")
    await (await app.opened()).apply(Policy("mail", fair=Fair(by="region")), accept_missing_keys=True)
    clock.advance("30s")
    job = await send.enqueue("acme", "eu")
    assert (await job.record()).keys == {"region": "eu"}


def test_an_app_that_was_opened_in_another_loop_says_so() -> None:
    app = App("sqlite://")
    asyncio.run(app.opened())
    with pytest.raises(ConfigurationError, match="opened in another event loop that has ended; use `async with app:`"):
        asyncio.run(app.opened())
    asyncio.run(app.close())


def test_an_app_that_was_closed_can_be_opened_in_another_loop(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path / 'jobs.db'}")

    @app.task
    async def work() -> str:
        return "done"

    async def produce() -> uuid.UUID:
        async with app:
            return (await work.enqueue()).id

    async def consume(job: uuid.UUID) -> str:
        async with app, working(app):
            result: str = await app.job(job).result()
            return result

    assert asyncio.run(consume(asyncio.run(produce()))) == "done"


def test_code_that_is_not_async_enqueues_by_blocking(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path / 'jobs.db'}")

    @app.task
    async def work(number: int) -> None: ...

    jobs = [work.enqueue_sync(1), work.using(priority=3).enqueue_sync(2)]
    records = [app.run_blocking(job.record()) for job in jobs]
    assert [record.priority for record in records] == [0, 3]
    app.close_sync()


async def test_a_blocking_enqueue_inside_the_loop_is_refused_and_inside_a_thread_works(app: App) -> None:
    @app.task
    async def work() -> None: ...

    with pytest.raises(ConfigurationError, match="a blocking call inside an event loop would stop it"):
        work.enqueue_sync()

    @app.task
    def fan_out() -> str:
        return str(work.enqueue_sync().id)

    async with working(app):
        made = await (await fan_out.enqueue()).result()
        assert await app.job(made).result() is None


def test_a_script_and_the_worker_that_imports_it_agree_on_the_names_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from fairlane import App\napp = App('sqlite://')\n"
        "@app.task\nasync def deliver() -> None: ...\nprint(deliver.name)\n"
    )

    def printed(*command: str) -> str:
        ran = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    for command in (["shop.py"], ["-m", "shop"], ["-c", "import shop"]):
        assert printed(*command) == "shop.deliver"


def test_the_public_names_are_those_of_the_design() -> None:
    for name in ("App", "Concurrency", "Fair", "Rate", "Snooze", "Retry", "Dead", "Cancel", "context"):
        assert name in fairlane.__all__
    assert all(hasattr(fairlane, name) for name in fairlane.__all__)
    assert os.path.exists(Path(fairlane.__file__).parent / "py.typed")
