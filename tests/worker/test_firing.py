"""Workers that fire schedules: on time, by themselves, and each slot once across processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from fairlane import App, FairlaneError, Unique
from fairlane.clock import SECOND, ManualClock
from fairlane.errors import ConfigurationError
from fairlane.store import operators
from fairlane.store.operators import JobFilter
from tests.waiting import until
from tests.worker.harness import WatchedStore, turns, working

SHOP = """
import os
from fairlane import App

app = App(os.environ["FAIRLANE_URL"])

@app.task(name="tick")
async def tick() -> None: ...

app.schedule(tick, every="1s", missed="all", name="each-second")
app.schedule(tick, every="2s", missed="all", name="each-other-second")
"""


async def test_a_waiting_worker_fires_at_the_slot_itself(app: App, store: WatchedStore, clock: ManualClock) -> None:
    ran: list[int] = []

    @app.task
    async def note() -> None:
        ran.append(clock.now())

    app.schedule(note, every="1s")
    began = clock.now()
    async with working(app):
        await store.finished("schedules", 2)
        clock.advance(0.999999)
        await turns()
        assert ran == []
        clock.advance(0.000001)
        await until(lambda: ran)
    assert ran == [began + SECOND]


async def test_a_worker_rides_out_an_outage_and_makes_up_for_the_slot(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    ran: list[int] = []

    @app.task
    async def note() -> None:
        ran.append(clock.now())

    app.schedule(note, every="1h")
    async with working(app) as worker:
        await store.finished("schedules", 2)
        store.lose("fire_schedule")
        clock.advance("1h")
        await store.called("fire_schedule", 2)
        assert ran == []
        store.restore()
        await until(lambda: ran)
        assert worker.health().is_well
        assert worker.health().loops["schedules"] == "running"


async def test_a_slot_that_cannot_be_stamped_is_told_and_stops_nothing(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    app.queue("mail", keys=["account"])
    ran: list[str] = []

    @app.task(queue="mail", keys=("account",))
    async def send() -> None: ...

    @app.task(unique=Unique(lambda: [].pop()))
    async def count() -> None: ...

    @app.task
    async def note() -> None:
        ran.append("note")

    app.schedule(send, every="1h", name="broken")
    app.schedule(count, every="1h", name="raising")
    app.schedule(note, every="1h", name="well")
    async with working(app) as worker:
        await store.finished("schedules", 2)
        clock.advance("1h")
        await until(lambda: ran)
        assert worker.health().is_well
    assert "schedule 'broken' cannot be fired, and is tried again" in caplog.text
    assert "schedule 'raising' cannot be fired, and is tried again" in caplog.text


async def test_what_cannot_be_a_schedule_is_refused_where_it_is_declared(app: App) -> None:
    @app.task(name="send")
    async def send(number: int) -> None: ...

    other = App("sqlite://")
    for refused, told in (
        (lambda: app.schedule("0 9 * * *", send), "missing a required argument"),
        (lambda: app.schedule(send, 1), "cron line first"),  # type: ignore[call-overload]
        (lambda: app.schedule("0 9 * * *", print), "neither a task"),  # type: ignore[call-overload]
        (lambda: app.schedule("0 9 * * *", send.call(1), 2), "its arguments already"),
        (lambda: app.schedule("0 9 * * *", send.using(id="0" * 32).call(1)), "leave id= out"),
        (lambda: app.schedule("0 9 * * *", send, 1, missed="never"), "missed='never'"),  # type: ignore[call-overload]
        (lambda: app.schedule(send, 1, every="1m", timezone="Europe/Berlin"), "every timezone"),  # type: ignore[call-overload]
        (lambda: app.schedule(send, 1, every="1m", name=" "), "no name"),
        (lambda: other.schedule(send, 1, every="1m"), "another app"),
    ):
        with pytest.raises(FairlaneError, match=told):
            refused()
    app.schedule(send, 1, every="1m")
    with pytest.raises(ConfigurationError, match="declared twice"):
        app.schedule(send, 2, every="1h")
    assert repr(app.schedules["send"]) == "<schedule 'send': every 1m>"


LINE = "0 9 * * *"


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ((), {}, "give a cron line first"),
        ((LINE,), {}, "say what is to be enqueued"),
        ((b"0 9 * * *",), {}, "cron line first, .*, not b'0 9"),
        ((LINE,), {"every": "1m"}, "both say when"),
        (("send",), {}, "'send' does not have five fields"),
        ((LINE, "send"), {}, "'send' is neither a task .* write @app.task"),
        ((LINE, None), {"name": 5}, "name=5 is no name; give a text"),
        ((LINE, None), {"name": b"daily"}, "name=b'daily' is no name"),
        ((LINE, None), {"name": False}, "name=False is no name"),
        ((LINE, None), {"name": "\ud800"}, "is no name"),
        ((LINE, None), {"name": "n" * 201}, "is no name"),
        ((LINE, None), {"timezone": None}, "timezone=None is not the name of one; use a name such as 'Europe/Berlin'"),
        ((LINE, None), {"timezone": ZoneInfo("Asia/Tokyo")}, "is not the name of one; write 'Asia/Tokyo'"),
        ((LINE, None), {"timezone": UTC}, "is not the name of one; use a name such as"),
        ((LINE, None), {"timezone": ""}, "timezone='' is not the name of one; use a name such as"),
        ((LINE, None), {"timezone": "/etc/localtime"}, "is not the name of one; use a name such as"),
        ((LINE, None), {"timezone": "../zoneinfo/UTC"}, "is not the name of one; use a name such as"),
        ((LINE, None), {"timezone": "localtime"}, "not the same on every machine; use a name such as"),
        ((LINE, None), {"timezone": "posixrules"}, "not the same on every machine; use a name such as"),
        ((LINE, None), {"timezone": "right/Europe/Berlin"}, "not the same on every machine; use a name such as"),
        ((LINE, None), {"missed": None}, "missed=None is unknown; use 'skip'"),
        ((None,), {"every": True}, "every: True is not a duration"),
        ((None,), {"every": [1]}, r"every: \[1\] is not a duration"),
        ((None,), {"every": ""}, "every: '' is not a duration"),
        ((None,), {"every": 0}, "every: '0d' does not lie between 1s and 366d"),
    ],
)
def test_every_wrong_word_about_a_schedule_is_named_with_a_remedy(
    given: tuple[Any, ...], options: dict[str, Any], told: str
) -> None:
    app = App("sqlite://")

    @app.task(name="send")
    async def send() -> None: ...

    with pytest.raises(ConfigurationError, match=told):
        app.schedule(*(send if each is None else each for each in given), **options)
    assert not app.schedules


@pytest.mark.slow
def test_two_processes_fire_every_second_once_although_one_of_them_is_killed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.setenv("FAIRLANE_URL", url)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "fairlane.cli", "worker", "shop:app"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    app = App(url)
    workers = [start(), start()]
    try:
        assert slots_after(app, 4)
        workers[0].send_signal(signal.SIGKILL)
        workers.append(start())
        seconds, others = slots_after(app, 9)
    finally:
        for each in workers:
            each.kill()
            each.wait()
        app.close_sync()
    for slots, apart in ((seconds, 1), (others, 2)):
        times = sorted(datetime.fromisoformat(slot).timestamp() for slot in slots)
        assert max(Counter(times).values()) == 1
        assert [later - earlier for earlier, later in pairwise(times)] == [apart] * (len(times) - 1)


def slots_after(app: App, count: int) -> tuple[list[str], list[str]]:
    """The slots of both schedules, once the first has fired so many."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        store = app.run_blocking(app.opened())
        jobs = app.run_blocking(store.run(operators.find_jobs(JobFilter(), None, 1_000))).jobs
        slots: dict[str, list[str]] = {"each-second": [], "each-other-second": []}
        for job in jobs:
            slots[job.context["schedule"]].append(job.context["slot"])
        if len(slots["each-second"]) >= count:
            return slots["each-second"], slots["each-other-second"]
    raise AssertionError("the schedules were not fired")
