"""When schedules fire: through both clock changes, for every line, from every moment."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import ConfigurationError
from fairlane.clock import SECOND, Instant, as_datetime, as_instant
from fairlane.policy.recurrence import AT_ONCE, GRACE, Cron, Every, Missed, Recurrence, due_slots, recurrence_of

BERLIN = "Europe/Berlin"
ZONES = [BERLIN, "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Kathmandu", "UTC"]
LINES = [
    "30 2 * * *",
    "15,45 2 * * *",
    "0 1-4 * * *",
    "*/20 * * * *",
    "0 */3 * * *",
    "30 2 * * 0",
    "0 0 1 * *",
    "@daily",
]
HOUR, DAY = 3_600 * SECOND, 86_400 * SECOND

instants = st.integers(as_instant(datetime(2024, 1, 1, tzinfo=UTC)), as_instant(datetime(2030, 1, 1, tzinfo=UTC)))
recurrences: st.SearchStrategy[Recurrence] = st.one_of(
    st.builds(Cron, st.sampled_from(LINES), st.sampled_from(ZONES)),
    st.builds(Every, st.integers(SECOND, 40 * DAY)),
)


def at(*place: int) -> Instant:
    return as_instant(datetime(*place, tzinfo=UTC))  # type: ignore[misc,arg-type]


def slots(recurrence: Recurrence, start: Instant, count: int) -> list[str]:
    found, moment = [], start
    for _ in range(count):
        following = recurrence.next_after(moment)
        assert following is not None
        moment = following
        found.append(as_datetime(moment).strftime("%m-%d %H:%M"))
    return found


def test_a_time_that_the_clock_leaves_out_comes_when_it_jumps() -> None:
    # On 29 March 2026, at 01:00 UTC, Berlin's clocks go from 02:00 to 03:00.
    start = at(2026, 3, 28)
    assert slots(Cron("30 2 * * *", BERLIN), start, 3) == ["03-28 01:30", "03-29 01:00", "03-30 00:30"]
    assert slots(Cron("15,45 2 * * *", BERLIN), at(2026, 3, 28, 12), 3) == ["03-29 01:00", "03-30 00:15", "03-30 00:45"]


def test_a_time_that_comes_twice_is_taken_the_first_time() -> None:
    # On 25 October 2026, at 01:00 UTC, they go from 03:00 back to 02:00.
    cron = Cron("30 2 * * *", BERLIN)
    assert slots(cron, at(2026, 10, 24), 3) == ["10-24 00:30", "10-25 00:30", "10-26 01:30"]
    # Also for who asks between the two: the first 02:30 is over.
    for minute in range(31, 91):
        moment = at(2026, 10, 25) + minute * 60 * SECOND
        assert slots(cron, moment, 1) == ["10-26 01:30"]


@pytest.mark.parametrize("start", [at(2026, 3, 28, 23), at(2026, 10, 24, 23)])
def test_a_line_that_repeats_follows_the_time_that_passes(start: Instant) -> None:
    cron, moment = Cron("*/30 * * * *", BERLIN), start
    for _ in range(12):
        following = cron.next_after(moment)
        assert following is not None
        assert following - moment == 1_800 * SECOND
        moment = following


@given(recurrences, instants)
def test_the_next_slot_is_later_and_there_is_none_between(recurrence: Recurrence, moment: Instant) -> None:
    following = recurrence.next_after(moment)
    assert following is not None
    assert following > moment
    for between in (moment + 1, (moment + following) // 2, following - 1):
        if moment < between < following:
            assert recurrence.next_after(between) == following


@given(st.sampled_from(ZONES), st.integers(0, 23), st.integers(0, 59), st.dates(date(2024, 1, 1), date(2030, 1, 1)))
def test_a_daily_line_fires_once_on_every_day_of_its_place(zone: str, hour: int, minute: int, day: date) -> None:
    cron, place = Cron(f"{minute} {hour} * * *", zone), ZoneInfo(zone)
    moment = as_instant(datetime(day.year, day.month, day.day, tzinfo=place)) - 1
    days = []
    for _ in range(4):
        following = cron.next_after(moment)
        assert following is not None
        moment = following
        days.append(as_datetime(moment).astimezone(place).date())
    assert [each - days[0] for each in days] == [timedelta(days=number) for number in range(4)]


@given(recurrences, instants, st.integers(0, 90 * DAY), st.sampled_from(["skip", "once", "all"]))
def test_what_is_due_is_what_was_missed_by_the_rule(
    recurrence: Recurrence, since: Instant, away: int, missed: Missed
) -> None:
    next_at, now = recurrence.next_after(since), since + away
    assert next_at is not None
    due = due_slots(recurrence, next_at, now, missed)
    if next_at > now:
        assert (due.slots, due.next_at) == ((), next_at)
        return
    if missed == "all":
        assert due.slots[0] == next_at
        assert all(recurrence.next_after(one) == two for one, two in zip(due.slots, due.slots[1:], strict=False))
        assert len(due.slots) <= AT_ONCE
        assert due.next_at == recurrence.next_after(due.slots[-1])
        assert due.slots[-1] <= now
        return
    assert due.next_at is not None
    assert due.next_at > now
    last = due.slots[-1] if due.slots else None
    if missed == "once":
        assert last is not None
    if last is not None:
        assert next_at <= last <= now
        assert recurrence.next_after(last) == due.next_at
        assert missed == "once" or now - last <= GRACE


def test_a_minute_of_every_year_is_found_without_walking_through_it() -> None:
    cron, now = Cron("* * * * *"), at(2030, 1, 1, 0, 0, 30)
    due = due_slots(cron, at(2020, 1, 1), now, "once")
    assert due.slots == (at(2030, 1, 1),)
    rare = Cron("0 0 29 2 *")
    assert due_slots(rare, at(2020, 2, 29), at(2031, 1, 1), "once").slots == (at(2028, 2, 29),)


@given(recurrences)
def test_a_recurrence_is_what_it_was_once_it_is_read_back(recurrence: Recurrence) -> None:
    assert recurrence_of(recurrence.document()) == recurrence


@pytest.mark.parametrize(
    ("line", "timezone", "told"),
    [
        ("* * * * * *", "UTC", "five fields"),
        ("61 * * * *", "UTC", "no cron line"),
        ("@often", "UTC", "@daily"),
        ("0 0 31 2 *", "UTC", "no cron line"),
        ("0 9 * * *", "Europe/Atlantis", "timezone='Europe/Atlantis' is unknown"),
        ("0 9 * * *", "../etc/passwd", "timezone"),
        ("0 9 * * *", "", "timezone"),
    ],
)
def test_nonsense_is_refused_with_the_reason(line: str, timezone: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Cron(line, timezone)


@pytest.mark.parametrize("interval", [0, -SECOND, SECOND // 2, 400 * DAY])
def test_an_interval_lies_between_a_second_and_a_year(interval: int) -> None:
    with pytest.raises(ConfigurationError, match="does not lie between"):
        Every(interval)
