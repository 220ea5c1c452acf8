"""A year of schedules with two workers, through the clock changes of two continents: each slot once, and none besides.

What is expected is worked out here from the calendar and `zoneinfo` alone, and not by what is tested.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

import pytest

from fairlane import App
from fairlane.clock import ManualClock, as_instant
from fairlane.job import JobRecord
from fairlane.store import operators
from fairlane.store.operators import JobFilter
from tests.store.by_hand import url_of
from tests.store.harness import Database

Moments = list[datetime]

BEGAN = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
ENDED = BEGAN + timedelta(days=365)
# In 2026 the clocks change on March 8 and November 1 in New York, on March 29 and October 25 in Berlin. Nobody is there
# for ten days of summer, nor when the clocks of Berlin are set back.
AWAY = (
    (datetime(2026, 7, 1, 12, 10, tzinfo=UTC), datetime(2026, 7, 11, 12, 10, tzinfo=UTC)),
    (datetime(2026, 10, 24, 12, 10, tzinfo=UTC), datetime(2026, 10, 26, 12, 10, tzinfo=UTC)),
)
ZONES = ("Europe/Berlin", "America/New_York")
RULES = int(os.environ.get("FAIRLANE_SCHEDULE_RULES", "1"))
"""Rules for missed slots that each line is tried with; all three are three times the work."""
MISSED: tuple[Literal["skip", "once", "all"], ...] = ("skip", "once", "all")


def every_day(zone: ZoneInfo, at: time) -> Moments:
    """Once for each day: where the clock leaves the time out, when it jumps; where it comes twice, the first time."""
    found = []
    for number in range(-1, 367):
        local = datetime.combine(date(2026, 1, 1) + timedelta(days=number), at, zone)
        if local.astimezone(UTC).astimezone(zone).time() != at:
            local = local.replace(minute=0)  # both zones leave out a whole hour, and this is where it would begin
        found.append(local.astimezone(UTC))
    return found


def sunday_half_hours(zone: ZoneInfo) -> Moments:
    """Every half hour that really passes while the clock shows 1, 2 or 3 of a Sunday."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    passing = ((start + timedelta(minutes=30 * number)).astimezone(zone) for number in range(2 * 24 * 367))
    return [each.astimezone(UTC) for each in passing if each.isoweekday() == 7 and 1 <= each.hour <= 3]


def every_25_hours() -> Moments:
    found = [datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=25 * number) for number in range(21_000)]
    return [each for each in found if each > BEGAN - timedelta(days=2)]


LINES: dict[str, Callable[[ZoneInfo], Moments]] = {
    "30 2 * * *": lambda zone: every_day(zone, time(2, 30)),
    "30 1 * * *": lambda zone: every_day(zone, time(1, 30)),
    "*/30 1-3 * * 0": sunday_half_hours,
}


def to_be_fired(slots: Moments, missed: str) -> Moments:
    """What is left of a year's slots by the rule for missed ones."""
    found = {each for each in slots if BEGAN < each < ENDED}
    for left, returned in AWAY:
        absent = sorted(each for each in found if left < each <= returned)
        found -= {"skip": set(absent), "once": set(absent[:-1]), "all": set[datetime]()}[missed]
    return sorted(found)


def scheduled(url: str, clock: ManualClock) -> tuple[App, dict[str, Moments]]:
    """A program with all the schedules, and the slots that each is to fire."""
    app, expected = App(url, clock=clock), {}

    @app.task(name="report")
    async def report() -> None: ...

    for place, zone in enumerate(ZONES):
        for number, (line, slots) in enumerate(LINES.items(), place):
            for missed in rules(number):
                name = f"{line} {zone} {missed}"
                app.schedule(line, report, timezone=zone, missed=missed, name=name)
                expected[name] = to_be_fired(slots(ZoneInfo(zone)), missed)
    for missed in rules(1):
        app.schedule(report, every="25h", missed=missed, name=f"25h {missed}")
        expected[f"25h {missed}"] = to_be_fired(every_25_hours(), missed)
    return app, expected


def rules(number: int) -> list[Literal["skip", "once", "all"]]:
    """Those that a line is tried with; every rule has its turn in each zone."""
    return [MISSED[(number + turn) % len(MISSED)] for turn in range(RULES)]


def somebody_is_there(due: int) -> int:
    """The moment itself, or the end of the absence that it falls into."""
    for left, returned in AWAY:
        if as_instant(left) < due <= as_instant(returned):
            return as_instant(returned)
    return due


@pytest.mark.slow
async def test_two_workers_fire_every_slot_of_a_year_once_through_the_clock_changes_of_two_continents(
    shared_database: Database, stack: AsyncExitStack
) -> None:
    clock = ManualClock(BEGAN)
    (one, expected), (two, _) = (scheduled(url_of(shared_database), clock) for _ in range(2))
    workers = (one, two)
    for app in workers:
        stack.push_async_callback(app.close)
    cron_runner = [each for app in workers if (each := app._cron_runner(await app._connected())) is not None]
    for each in cron_runner:
        await each.declare()
    while True:
        dues = await asyncio.gather(*(each.look() for each in cron_runner))
        due = min(each for each in dues if each is not None)
        if due >= as_instant(ENDED):
            break
        clock.set(somebody_is_there(max(due, clock.now())))
    found: dict[str, Moments] = {name: [] for name in expected}
    for job in await all_jobs(workers[0]):
        found[job.context["schedule"]].append(datetime.fromisoformat(job.context["slot"]))
    for name, slots in expected.items():
        assert sorted(found[name]) == slots, name
    # A day is a day, on each of the 365, whatever its clock does.
    whole = [name for name in found if name.startswith("30 ") and name.endswith("all")]
    assert {len(found[name]) for name in whole} == {365}


async def all_jobs(app: App) -> list[JobRecord]:
    store, after = await app.opened(), None
    found: list[JobRecord] = []
    while True:
        page = await store.run(operators.find_jobs(JobFilter(), after, 1_000))
        found += page.jobs
        if (after := page.after) is None:
            return found
