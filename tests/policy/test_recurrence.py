"""When schedules fire: through both clock changes, for every line, from every moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.clock import SECOND, Instant, as_datetime, as_instant
from fairlane.cron.recurrence import AT_ONCE, GRACE, Cron, Every, Missed, Recurrence, due_slots, recurrence_of
from fairlane.errors import ConfigurationError

BERLIN = "Europe/Berlin"
LORD_HOWE = "Australia/Lord_Howe"
ZONES = [
    BERLIN,
    "America/New_York",
    LORD_HOWE,  # half an hour
    "Africa/Casablanca",  # back for the month of Ramadan
    "Asia/Kathmandu",  # three quarters of an hour off
    "America/St_Johns",  # half an hour off; until 2011 clocks were set a minute after midnight
    "America/Havana",  # clocks are set at midnight
    "Antarctica/Troll",  # two hours
    "Pacific/Apia",  # 30 December 2011 was left out
    "UTC",
]
CHANGES: dict[str, list[tuple[int, ...]]] = {  # about when clocks were set, in UTC
    LORD_HOWE: [(2026, 4, 4, 15), (2026, 10, 3, 15, 30)],
    "Africa/Casablanca": [(2026, 2, 15, 2), (2026, 3, 22, 2)],
    "America/St_Johns": [(2010, 3, 14, 3, 31), (2010, 11, 7, 2, 31), (2026, 11, 1, 4, 30)],
    "America/Havana": [(2026, 3, 8, 5), (2026, 11, 1, 5)],
    "Antarctica/Troll": [(2026, 3, 29, 1), (2026, 10, 25, 1)],
    "Pacific/Apia": [(2011, 12, 30, 10), (2011, 4, 2, 14)],
    BERLIN: [(2026, 3, 29, 1), (2026, 10, 25, 1)],
}
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
MINUTE, HOUR, DAY = 60 * SECOND, 3_600 * SECOND, 86_400 * SECOND

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


@dataclass(frozen=True)
class Plain:
    """A line, and what it means, told without a parser: the minutes and hours, and the weekdays (Monday is 0)."""

    line: str
    minutes: range
    hours: range
    weekdays: range = range(7)

    @property
    def is_fixed(self) -> bool:
        return not any(field.startswith("*") for field in self.line.split()[:2])

    def fits(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours and wall.weekday() in self.weekdays

    def slots(self, zone: str, start: Instant, end: Instant) -> list[Instant]:
        """Every one of them after start, until end, found by looking at the clock minute by minute."""
        found, (_, reached) = set(), shown(zone, start, end)[0]
        for moment, wall in shown(zone, start, end)[1:]:
            if not self.is_fixed and self.fits(wall):
                found.add(moment)
            while reached < wall:  # minutes that the clock reaches for the first time, or jumps over
                reached += timedelta(minutes=1)
                if self.is_fixed and self.fits(reached):
                    found.add(moment)
        return sorted(found)


@cache
def shown(zone: str, start: Instant, end: Instant) -> list[tuple[Instant, datetime]]:
    """What the clocks of a place show, minute by minute."""
    place = ZoneInfo(zone)
    return [(at, as_datetime(at).astimezone(place).replace(tzinfo=None)) for at in range(start, end + 1, MINUTE)]


PLAIN = [
    Plain("*/10 2 * * *", range(0, 60, 10), range(2, 3)),
    Plain("*/30 1-3 * * *", range(0, 60, 30), range(1, 4)),
    Plain("15-45/5 * * * *", range(15, 46, 5), range(24)),
    Plain("0 * * * *", range(1), range(24)),
    Plain("*/15 0 * * *", range(0, 60, 15), range(1)),
    Plain("*/20 23 * * *", range(0, 60, 20), range(23, 24)),
    Plain("0 */2 * * *", range(1), range(0, 24, 2)),
    Plain("*/30 * * * SUN", range(0, 60, 30), range(24), range(6, 7)),
    Plain("30 2 * * *", range(30, 31), range(2, 3)),
    Plain("0,15,30,45 1-3 * * *", range(0, 60, 15), range(1, 4)),
    Plain("0 0 * * *", range(1), range(1)),
    Plain("0 0 * * SUN", range(1), range(1), range(6, 7)),
    Plain("45 23 * * *", range(45, 46), range(23, 24)),
    Plain("0 9 * * FRI", range(1), range(9, 10), range(4, 5)),  # 30 December 2011 was a Friday
]
clock_changes = st.sampled_from([(zone, at(*place)) for zone, places in CHANGES.items() for place in places])


@given(st.sampled_from(PLAIN), clock_changes, st.lists(st.integers(-3 * HOUR, 27 * HOUR), max_size=5))
def test_around_a_clock_change_the_slots_are_the_same_from_wherever_one_asks(
    plain: Plain, changed: tuple[str, Instant], asked: list[int]
) -> None:
    zone, change = changed
    cron, start, end = Cron(plain.line, zone), change - 3 * HOUR, change + 30 * HOUR
    slots = plain.slots(zone, start, end)
    walked, moment = [], start
    while (following := cron.next_after(moment)) is not None and following <= end:
        assert following > moment
        walked.append(following)
        moment = following
    assert walked == slots
    at_slots = [slot + nearby for slot in slots[:10] for nearby in (-1, 0, 1)]
    for moment in [*(change + each for each in asked), *at_slots]:
        expected = next((slot for slot in slots if slot > moment), None)
        found = cron.next_after(moment)
        assert found == expected if expected is not None else found is None or found > end


def test_the_half_hour_that_comes_twice_loses_no_slot_after_it() -> None:
    # On 5 April 2026, at 02:00, Lord Howe's clocks go back to 01:30: 15:00 UTC of the day before.
    expected = ["04-04 15:30", "04-04 15:40", "04-04 15:50", "04-04 16:00"]
    for start in (at(2026, 4, 4, 12), at(2026, 4, 4, 14, 45), at(2026, 4, 4, 15, 10)):
        assert slots(Cron("*/10 2 * * *", LORD_HOWE), start, 4) == expected


def test_a_day_that_a_place_left_out_comes_as_the_next_begins() -> None:
    # Apia went from 29 to 31 December 2011, at 10:00 UTC of the 30th.
    cron = Cron("0 9 * * *", "Pacific/Apia")
    assert slots(cron, at(2011, 12, 29), 3) == ["12-29 19:00", "12-30 10:00", "12-30 19:00"]


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
        ("0 9 * * *", "europe/berlin", "did you mean 'Europe/Berlin'"),
        ("0 9 * * *", "CEST", "use a name such as 'Europe/Berlin'"),
        ("0 9 * * *", "../etc/passwd", "timezone='../etc/passwd' is not the name of one; use a name such as"),
        ("0 9 * * *", "/etc/localtime", "is not the name of one; use a name such as"),
        ("0 9 * * *", "", "timezone='' is not the name of one; use a name such as"),
    ],
)
def test_nonsense_is_refused_with_the_reason(line: str, timezone: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Cron(line, timezone)


@pytest.mark.parametrize("interval", [0, -SECOND, SECOND // 2, 400 * DAY])
def test_an_interval_lies_between_a_second_and_a_year(interval: int) -> None:
    with pytest.raises(ConfigurationError, match="does not lie between"):
        Every(interval)
