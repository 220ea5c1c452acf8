from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.clock import MAX_DURATION, ManualClock, as_datetime, as_instant, microseconds, parse_duration
from fairlane.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1us", 1),
        ("250ms", 250_000),
        ("10m", 600_000_000),
        ("1h30m", 5_400_000_000),
        (" 1h 30m ", 5_400_000_000),
        ("7d", 604_800_000_000),
        ("0.5s", 500_000),
        ("1.000001s", 1_000_001),
        ("0s", 0),
    ],
)
def test_a_duration_is_read_exactly(text: str, expected: int) -> None:
    assert parse_duration(text) == expected == microseconds(text)


@pytest.mark.parametrize("text", ["", " ", "10", "m", "1x", "-1s", "1s!", "1h,30m", "1 0s", "1e3s", ".5s", "1s 2"])
def test_text_that_is_no_duration_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_duration(text)
    assert repr(text) in str(error.value)


def test_a_duration_beyond_all_numbers_is_refused_like_any_other() -> None:
    with pytest.raises(ConfigurationError):
        parse_duration("9" * 400 + "d")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1]])
def test_a_value_that_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="not a duration"):
        microseconds(value)  # type: ignore[arg-type]


@given(st.timedeltas(max_value=timedelta(microseconds=MAX_DURATION), min_value=-timedelta(microseconds=MAX_DURATION)))
def test_a_timedelta_keeps_every_microsecond(duration: timedelta) -> None:
    assert timedelta(microseconds=microseconds(duration)) == duration


KATHMANDU = timezone(timedelta(hours=5, minutes=45))


# The first hours of the year 1 east of Greenwich lie before the first moment that UTC can tell.
@given(st.datetimes(datetime(1, 1, 2), timezones=st.just(UTC) | st.just(KATHMANDU)))  # noqa: DTZ001
def test_an_instant_and_its_datetime_are_the_same_moment(moment: datetime) -> None:
    assert as_datetime(as_instant(moment)) == moment


@given(st.integers(-(10**15), 4 * 10**15))
def test_a_datetime_and_its_instant_are_the_same_moment(moment: int) -> None:
    assert as_instant(as_datetime(moment)) == moment


def test_a_datetime_without_a_timezone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="timezone"):
        as_instant(datetime(2030, 1, 1))  # noqa: DTZ001


async def test_a_manual_clock_wakes_sleepers_in_the_order_of_their_times() -> None:
    clock = ManualClock()
    woken: list[int] = []

    async def sleeper(seconds: int) -> None:
        await clock.sleep_until(clock.now() + seconds * 1_000_000)
        woken.append(seconds)

    tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3, 1, 2)]
    await _settle()
    clock.advance("5s")
    await asyncio.gather(*tasks)
    assert woken == [1, 2, 3]


async def test_a_manual_clock_wakes_a_sleeper_when_its_time_has_come_and_not_before() -> None:
    clock = ManualClock()
    woken: list[int] = []

    async def sleeper(seconds: int) -> None:
        await clock.sleep_until(clock.now() + seconds * 1_000_000)
        woken.append(seconds)

    tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3, 1, 2)]
    await _settle()
    clock.advance("1s")
    await _settle()
    assert woken == [1]
    clock.advance(0.999999)
    await _settle()
    assert woken == [1]
    clock.advance(timedelta(microseconds=1))
    await _settle()
    assert woken == [1, 2]
    clock.advance(5)
    await asyncio.gather(*tasks)
    assert woken == [1, 2, 3]


async def test_sleeping_until_a_moment_that_has_come_returns_at_once() -> None:
    clock = ManualClock(datetime(2030, 1, 1, tzinfo=UTC))
    sleepers = [asyncio.create_task(clock.sleep_until(clock.now() - late)) for late in (0, 1)]
    await _settle()
    assert [each.done() for each in sleepers] == [True, True]


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep_until(clock.now() + 1))
    await _settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock._sleepers == []


async def test_a_clock_that_was_set_back_lets_nobody_oversleep() -> None:
    clock = ManualClock()
    start = clock.now()
    task = asyncio.create_task(clock.sleep_until(start + 10))
    await _settle()
    clock.set(start - 5)
    await _settle()
    assert not task.done()
    clock.set(start + 10)
    await task


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_instant_that_no_datetime_can_hold_is_told_as_the_last_or_the_first() -> None:
    assert as_datetime(9 * 10**18) == datetime.max.replace(tzinfo=UTC)
    assert as_datetime(-(9 * 10**18)) == datetime.min.replace(tzinfo=UTC)
    assert as_datetime(as_instant(datetime.min.replace(tzinfo=KATHMANDU))) == datetime.min.replace(tzinfo=UTC)
