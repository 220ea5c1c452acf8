"""Concurrency and rates: the arithmetic of their gates.

A gate of these keeps two numbers: how many jobs are in flight, and (for rates) the theoretical arrival time of GCRA.
That of a rolling rate remembers its starts instead (see `take_in_window`). Each limit says how much room a gate has,
what a start costs, and when a shut gate opens. All in whole numbers: what a limit admits never depends on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from functools import lru_cache
from typing import Any

from fairlane.clock import SECOND, Instant
from fairlane.errors import InvalidPolicy
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import (
    FROM_JOB,
    MAX_COUNT,
    Ending,
    FromJob,
    GateState,
    Limit,
    Reason,
    Source,
    Why,
    as_whole,
    duration_above_zero,
    from_job,
    is_number,
    is_whole,
    named_numbers,
    number_words,
    time_words,
)
from fairlane.policy.keys import By, checked_name, normalize_by, repr_by, repr_name

LONGEST_INTERVAL = 100 * 365 * 86_400 * SECOND
SMOOTH = SECOND // 2
"""A bucket that holds less than this much of its rate is a smooth one: what it does not give at its time is lost."""
PLANNED_AHEAD = SECOND
"""How far ahead of their instants starts are claimed."""
HEARD_WITHIN = SECOND // 10
"""How long it takes, at most, until workers know of a change."""
LATEST_IN_WINDOW = SECOND // 20
LONGEST_DEBT = 4 * 10**18
"""Microseconds: an instant must stay what a database can hold."""


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Concurrency(Limit):
    """Never more than `max` jobs in flight per key, over the whole fleet. Without `by`: in the whole queue.

    >>> Concurrency(5, by="account")
    Concurrency(5, by='account')
    >>> Concurrency({"acme": 5, "globex": 2}, by="account")  # other accounts: no limit
    Concurrency({'acme': 5, 'globex': 2}, by='account')
    >>> Concurrency(50, name="gpu")  # in all queues together that name it
    Concurrency(50, name='gpu')
    """

    max: int
    """0 where it is not the same for all keys: `at` says what holds for one."""
    by: By
    named: Mapping[str, int] = field(hash=False)
    from_job: FromJob | None
    name: str | None

    kind = "concurrency"
    parts = ("max",)
    is_shareable = True
    counted = "in flight"

    def __init__(
        self,
        max: int | Mapping[Any, int] | Source | FromJob,
        *,
        by: str | tuple[str, ...] | None = None,
        name: str | None = None,
    ) -> None:
        brought = from_job(max)
        what = f"Concurrency({brought or shown(max)})"
        names = normalize_by(what, by)
        named: dict[str, int] = {}
        if isinstance(max, Mapping) and brought is None:
            named = named_numbers(what, names, max, lambda number: _checked_max(what, number))
        self._set(
            max=0 if named or brought else _checked_max(what, max),
            by=names,
            named=named,
            from_job=brought,
            name=_shareable(what, name, named or brought),
        )

    def __repr__(self) -> str:
        number = self.from_job or self.named or self.max
        return f"Concurrency({number}{repr_by(self.by)}{repr_name(self.name)})"

    def room_at(self, gate: GateState, now: Instant) -> int:
        return self.max - gate.in_flight if gate.in_flight < self.max else 0

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.CONCURRENCY, gate.in_flight, self.max)

    def describe(self, where: str) -> str:
        if self.from_job is not None:
            return f"As many at the same time {where} as its jobs say"
        if self.named:
            return f"At the same time {where}: {number_words(self.named)}"
        return f"At most {self.max:,} at the same time {where}"

    def with_bound(self, bound: float) -> Concurrency:
        return _concurrency(as_whole(bound), self.by, self.name)

    @property
    def least_and_most(self) -> tuple[int, int]:
        return self.max, self.max

    def to_document(self) -> dict[str, Any]:
        return {**Limit.to_document(self), "max": FROM_JOB if self.from_job else dict(self.named) or self.max}


@lru_cache(maxsize=4_096, typed=True)
def _concurrency(number: int, by: By, name: str | None) -> Concurrency:
    return Concurrency(number, by=by, name=name)


def _checked_max(what: str, number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidPolicy(f"{what}: the maximum is a whole number of jobs, not a {type(number).__name__}")
    if not 0 <= number <= MAX_COUNT:
        raise InvalidPolicy(f"{what}: the maximum is at least 0 (0 stops its keys) and at most {MAX_COUNT:,}")
    return number


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Rate(Limit):
    """At most `burst + limit·t/per` starts in any time t, per key (GCRA). `burst` defaults to `limit`.

    With `rolling=True`: never more than `limit` starts in any window of length `per`, exactly.

    >>> Rate(100, per="1m", by="endpoint")
    Rate(100, per='60s', burst=100, by='endpoint')
    >>> Rate(0.5, per="1s").burst  # one job every two seconds
    1
    >>> Rate(100, per="1m", by="endpoint", rolling=True)
    Rate(100, per='60s', rolling=True, by='endpoint')
    >>> Rate({"acme": 10}, per="1s", by="account")  # other accounts: no limit
    Rate({'acme': 10}, per='1s', by='account')
    """

    limit: float
    """0 where it is not the same for all keys: `at` says what holds for one. So is `burst` if each has its own."""
    per: int
    burst: int
    by: By
    name: str | None
    interval: int
    rolling: bool
    named: Mapping[str, float] = field(hash=False)
    from_job: FromJob | None

    kind = "rate"
    parts = ("limit", "per", "burst")
    times = frozenset({"per"})
    is_shareable = True
    is_of_starts = True
    is_held_by_runs = False
    counts_in_flight = False

    def __init__(
        self,
        limit: float | Mapping[Any, float] | Source | FromJob,
        *,
        per: timedelta | str | float,
        burst: int | None = None,
        by: str | tuple[str, ...] | None = None,
        rolling: bool = False,
        name: str | None = None,
    ) -> None:
        brought = from_job(limit)
        what = f"Rate({brought or shown(limit)}, per={shown(per)}{', rolling=True' if rolling is True else ''})"
        names = normalize_by(what, by)
        if not isinstance(rolling, bool):
            raise InvalidPolicy(f"{what}: rolling={shown(rolling)} is neither True nor False; give one of them")
        window = duration_above_zero(what, "per", per)
        if burst is not None and (rolling or not is_whole(burst) or not 1 <= burst <= MAX_COUNT):
            raise InvalidPolicy(f"{what}: {_wrong_burst(burst, rolling=rolling)}")
        named: dict[str, float] = {}
        number, interval, allowed = 0.0, 0, burst or 0
        if brought is not None:
            pass
        elif isinstance(limit, Mapping):
            named = named_numbers(what, names, limit, lambda number: _checked_limit(what, number, window, rolling))
        else:
            number = _checked_limit(what, limit, window, rolling)
            # Rounded up: the rate that is kept is never above the one that was asked for.
            interval = math.ceil(Fraction(window) / Fraction(str(number)))
            allowed = _default_burst(number) if burst is None else burst
            if interval * allowed > LONGEST_DEBT:
                raise InvalidPolicy(f"{what}: burst={allowed} would take longer to refill than any clock can count")
        self._set(
            limit=number,
            per=window,
            burst=allowed,
            by=names,
            name=_shareable(what, name, named or brought),
            interval=interval,
            rolling=rolling,
            named=named,
            from_job=brought,
        )

    def __repr__(self) -> str:
        number = self.from_job or self.named or f"{self.limit:g}"
        how = ", rolling=True" if self.rolling else f", burst={self.burst}" if self.burst else ""
        return f"Rate({number}, per='{self.per / SECOND:g}s'{how}{repr_by(self.by)}{repr_name(self.name)})"

    @property
    def identity(self) -> str:
        """Names the limit's state. `per` takes part, so that 10 a minute and 600 an hour on one key stay apart."""
        return f"{'rolling' if self.rolling else 'rate'}/{self.per / SECOND:g}s:{','.join(self.by)}"

    def room(self, tat: Instant, now: Instant) -> int:
        """How many jobs may start now."""
        if tat <= now:
            return self.burst
        room = self.burst + (now - tat) // self.interval
        return room if room > 0 else 0

    def charged(self, tat: Instant, now: Instant, count: int) -> Instant:
        return (tat if tat > now else now) + count * self.interval

    def refunded(self, tat: Instant, count: int, held: int = 0) -> Instant:
        """Give back what never started, `held` microseconds after it was charged.

        The bucket has refilled for that long; had it been full, as much would have been lost. Given back whole, a
        token that was held would let one job too many start.
        """
        return tat - max(0, count * self.interval - held)

    def carried_over(self, tat: Instant, now: Instant) -> Instant:
        """The state of this limit when it had another bound: a bucket can be empty, it cannot be emptier than that."""
        return min(tat, now + self.burst * self.interval)

    def opens_at(self, tat: Instant) -> Instant | None:
        """The first instant at which one more job may start."""
        return tat + self.interval - self.burst * self.interval

    @property
    def paced(self) -> Rate | None:
        return self if self.is_smooth else None

    @property
    def is_smooth(self) -> bool:
        """Whether its starts are worth planning one by one: a start that comes late is never made up for."""
        return self.rolling or (self.burst - 1) * self.interval < SMOOTH

    @property
    def slack(self) -> int:
        """How many microseconds after its planned instant a start may be made, and be counted as made at it.

        An eighth of the distance between two. The last start of a claim may be late by it, and may have come that much
        too soon after the one before: whoever counts starts sees a quarter of a job too many, at most. A rolling window
        has no such tolerance, and counts every planned start from the last instant at which it may be made."""
        return min(LATEST_IN_WINDOW, self.per // 50) if self.rolling else self.interval // 8

    def starts_at(self, gate: GateState, now: Instant) -> Instant:
        """The first instant from now on at which a job may start."""
        opens = None if self.room_at(gate, now) > 0 else self.opens_again_at(gate)
        return now if opens is None else max(now, opens)

    def room_by(self, gate: GateState, now: Instant, until: Instant) -> int:
        """How many jobs may start from now until then, each at its own instant."""
        if self.rolling:
            return room_in_window(gate, self.burst, self.per, until)
        return max(0, (until + self.burst * self.interval - max(gate.tat, now)) // self.interval)

    def take_at(self, gate: GateState, at: Instant, now: Instant) -> None:
        """Charge a job that is to start at an instant, which is not before now."""
        if self.rolling:
            take_in_window(gate, self.per, now, 1, at + self.slack)
        else:
            gate.tat = self.charged(gate.tat, at, 1)

    def room_at(self, gate: GateState, now: Instant) -> int:
        if self.rolling:
            return room_in_window(gate, self.burst, self.per, now)
        return self.room(gate.tat, now)

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        if self.rolling:
            take_in_window(gate, self.per, now, count)
        else:
            gate.tat = self.charged(gate.tat, now, count)

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:
        """As if they had been taken when they start. A bucket that is not full gives its tokens later anyway."""
        if self.rolling:
            postpone_in_window(gate, self.per, now, lag)
        else:
            later = now + lag - (before if before > now else now)
            if later > 0:
                gate.tat += later

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
        """Tokens come back for what never started, unless they were never taken here."""
        if not ending.unstarted or held is None:
            return False
        if self.rolling:
            return give_back_in_window(gate, self.per, now, ending.unstarted, now - held)
        if gate.memo is not None and ending.since <= gate.memo["changed"] + PLANNED_AHEAD:
            return False  # planned by another number, and given back when that changed
        refunded = self.refunded(gate.tat, ending.unstarted, held)
        if self.is_smooth and (ending.since > now or gate.tat > now + self.burst * self.interval):
            # Starts are planned for later.
            if not self._were_last(gate, ending):
                # Others start after them, at instants that stay as they are: what lies between is gone.
                return False
            # Nothing opens before the first of them would have, though they were charged by another number.
            refunded = max(refunded, min(gate.tat, ending.since + (self.burst - 1) * self.interval))
        gate.tat = refunded
        return True

    def _were_last(self, gate: GateState, ending: Ending) -> bool:
        """Whether nothing that was charged is planned after these claims, which were not started."""
        return ending.since + (self.burst + ending.unstarted - 1) * self.interval + self.slack >= gate.tat

    def opens_again_at(self, gate: GateState) -> Instant | None:
        return window_opens_at(gate, self.burst, self.per) if self.rolling else self.opens_at(gate.tat)

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """What a rolling window remembers are facts, whatever the bound is. Starts that were planned by another number
        are void: a bucket no longer counts them, so that it must not take them back either."""
        if self.rolling:
            return
        carried = self.carried_over(gate.tat, now)
        if self.is_smooth:
            # Until every worker has heard of it, some of them may still start.
            carried = max(carried, min(gate.tat, now + HEARD_WITHIN))
        gate.tat = carried
        gate.memo = {"changed": now} if self.is_smooth else None

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(
            Reason.RATE, self.burst - self.room_at(gate, now), self.burst, f"{self.limit:g} per {_time(self.per)}"
        )

    def describe(self, where: str) -> str:
        per = time_words(self.per)
        if not self.has_one_number:
            said = number_words(self.named) if self.named else "as its jobs say"
            return f"So many starts per {per} {where}: {said}"
        if self.rolling:
            return f"Never more than {self.limit:g} starts within any {per} {where}"
        return f"At most {self.limit:g} starts per {per} {where}, {self.burst:g} at once"

    def with_bound(self, bound: float) -> Rate:
        """A burst that was left to the number goes with it."""
        goes = self.rolling or self.burst == (_default_burst(self.limit) if self.limit else 0)
        number = int(bound) if self.rolling and bound == int(bound) else bound
        return _rate(number, self.per, None if goes else self.burst, self.by, self.rolling, self.name)

    @property
    def counted(self) -> str:
        return self.identity.partition(":")[0]

    def never_binds(self, beside: Rate) -> bool:
        # With a higher limit and a smaller burst it binds at first.
        return self.limit >= beside.limit and (self.rolling or self.burst >= beside.burst)

    def round_of(self, gate: GateState, now: Instant, nth: int, turn: int) -> tuple[int, int]:
        """Places of a window come round with every window."""
        if not self.rolling:
            return nth, 0
        rounds, place = divmod(nth - 1, self.burst)
        return place + 1, rounds * self._round

    @property
    def _round(self) -> int:
        # A planned start is counted from the last instant at which it may be made.
        return self.per + self.slack

    def _place_at(self, gate: GateState, now: Instant, place: int) -> Instant:
        if not self.rolling:
            return max(now, max(gate.tat, now) + (place - self.burst) * self.interval)
        # A start takes the place of one that leaves the window.
        starts: list[list[int]] = gate.memo["starts"] if gate.memo else []
        leaving = [(at + self.per, count) for at, count in starts if at + self.per > now]
        room = self.burst - sum(count for _, count in leaving)
        for at, count in leaving:
            if place <= room:
                break
            now, room = at, room + count
        return now

    def take_many(self, gate: GateState, now: Instant, count: int, turn: int) -> None:
        if not self.rolling:
            self.take(gate, now, count)
            return
        places = min(count, self.room_at(gate, now))
        last = now + (-(-count // places) - 1) * self._round
        take_in_window(gate, self.per, now, places, last)

    def to_document(self) -> dict[str, Any]:
        number = FROM_JOB if self.from_job else dict(self.named) or self.limit
        document = {**Limit.to_document(self), "limit": number, "burst": self.burst or None}
        if self.rolling:
            # A kind of its own: a version that does not know it must refuse it, not keep a bucket instead.
            document["kind"] = "rolling_rate"
            del document["burst"]
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Rate:
        return cls(**cls.read(document), rolling=document["kind"] == "rolling_rate")

    @classmethod
    def needed(cls) -> tuple[str, ...]:
        return "limit", "per"

    def usual(self) -> dict[str, Any]:
        return {"burst": _default_burst(self.limit) if self.limit else None}


@lru_cache(maxsize=4_096, typed=True)
def _rate(limit: float, per: int, burst: int | None, by: By, rolling: bool, name: str | None) -> Rate:
    return Rate(limit, per=timedelta(microseconds=per), burst=burst, by=by, rolling=rolling, name=name)


def _default_burst(limit: float) -> int:
    return max(1, math.floor(limit))


def _wrong_burst(burst: object, *, rolling: bool) -> str:
    if rolling:
        return f"burst={shown(burst)} has no meaning in a rolling window, which holds `limit` jobs however they come"
    return f"burst={shown(burst)} is not a whole number from 1 to {MAX_COUNT:,}"


def _checked_limit(what: str, limit: object, window: int, rolling: bool) -> float:
    if not is_number(limit):
        raise InvalidPolicy(f"{what}: the rate is a number of jobs, such as 100 or 0.5")
    if limit <= 0:
        raise InvalidPolicy(
            f"{what} would never admit a job; give a rate above 0, or stop the key with Concurrency(0, by=…)"
        )
    if rolling and not isinstance(limit, int):
        raise InvalidPolicy(f"{what}: a rolling window counts whole jobs; give a whole number, or leave rolling out")
    if Fraction(window) / Fraction(str(limit)) > LONGEST_INTERVAL:
        raise InvalidPolicy(f"{what} is less than one job in a hundred years; stop the key instead: fairlane pause")
    if limit > window:
        raise InvalidPolicy(f"{what}: more than one job a microsecond cannot be told apart from no limit; remove it")
    return limit


def _shareable(what: str, name: str | None, differs: object) -> str | None:
    """The name by which queues share it. One number for all keys: queues would not agree on any other."""
    if name is not None and differs:
        raise InvalidPolicy(
            f"{what}: a limit that queues share by name={shown(name)} has one number for all keys; give a number, "
            "or leave the name out"
        )
    return checked_name(what, name)


def _time(amount: int) -> str:
    seconds = amount / SECOND
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"


EXACT_ENTRIES = 1_000
"""So many instants are remembered one by one."""
SLICES = 500
"""Where there are more, those of one slice of the window, a five-hundredth, count as made at the last of them."""


def room_in_window(gate: GateState, limit: int, per: int, now: Instant) -> int:
    """How many jobs may start now."""
    memo: dict[str, Any] | None = gate.memo
    if memo is None:
        return limit
    room: int = limit - memo["taken"]
    for instant, count in memo["starts"]:
        if instant + per > now:
            break
        room += count
    return room if room > 0 else 0


def take_in_window(gate: GateState, per: int, now: Instant, count: int, at: Instant | None = None) -> None:
    """Remember jobs that start, now or `at` a later instant, and forget those that have left the window."""
    memo = gate.memo or {"taken": 0, "starts": []}
    starts: list[list[int]] = memo["starts"]
    left = 0
    while left < len(starts) and starts[left][0] + per <= now:
        memo["taken"] -= starts[left][1]
        left += 1
    del starts[:left]
    # Never before the entry before it: that may lie ahead, because its jobs start late or a clock was set back.
    instant = max(now if at is None else at, starts[-1][0] if starts else 0)
    if starts and (starts[-1][0] == instant if at is not None else memo.get("now") == now):
        starts[-1][1] += count
    else:
        starts.append([instant, count])
        if len(starts) > EXACT_ENTRIES:
            memo["starts"] = starts = _merged(starts, max(1, per // SLICES))
    memo["taken"] += count
    memo["now"] = now
    gate.memo = memo
    gate.tat = starts[-1][0] + per


def postpone_in_window(gate: GateState, per: int, now: Instant, lag: int) -> None:
    """What was taken now is started by `now + lag`: it counts from then on."""
    memo: dict[str, Any] | None = gate.memo
    if memo is not None and memo.get("now") == now and memo["starts"]:
        last = memo["starts"][-1]
        last[0] = max(last[0], now + lag)
        gate.tat = last[0] + per


def _merged(starts: list[list[int]], width: int) -> list[list[int]]:
    """Entries of one slice as one, at the last of their instants.

    Slices lie still: were neighbours merged by their number alone, the oldest entry would be merged with the next for
    ever, and never leave.
    """
    merged: list[list[int]] = []
    for instant, count in starts:
        if merged and merged[-1][0] // width == instant // width:
            merged[-1] = [instant, merged[-1][1] + count]
        else:
            merged.append([instant, count])
    return merged


def give_back_in_window(gate: GateState, per: int, now: Instant, count: int, since: Instant) -> bool:
    """Forget starts that were not made, the oldest of them charged at `since`; say whether any still counted.

    They are taken from the entry of that instant, and what it does not hold from those after it, in order. If their own
    entries are later ones, what is left counts for too long, never too short.
    """
    memo: dict[str, Any] | None = gate.memo
    if memo is None or since + per <= now:
        # The first has left the window by itself, and how many of the others have is not known.
        return False
    starts: list[list[int]] = memo["starts"]
    owed = count
    for entry in starts:
        if entry[0] >= since and owed:
            taken = min(owed, entry[1])
            entry[1] -= taken
            owed -= taken
    memo["taken"] -= count - owed
    if starts and not starts[-1][1]:
        # The entry before it is of an earlier claim: what starts at this same instant must not be counted from then.
        memo.pop("now", None)
    memo["starts"] = starts = [entry for entry in starts if entry[1]]
    gate.memo = memo if starts else None
    gate.tat = starts[-1][0] + per if starts else 0
    return owed < count


def window_opens_at(gate: GateState, limit: int, per: int) -> Instant | None:
    """When enough of the oldest have left for one more to start."""
    memo: dict[str, Any] | None = gate.memo
    if memo is None:
        return None
    room = limit - memo["taken"]
    for instant, count in memo["starts"]:
        room += count
        if room > 0:
            return int(instant) + per
    return None


SMOOTHING = 0.1
"""The weight of one run in a moving average."""


def smoothed(average: float, observed: float, runs: int, weight: float = SMOOTHING) -> float:
    """A moving average of run time, after `runs` more of the mean length `observed`."""
    if average <= 0.0:
        return observed
    if runs == 1:
        return average + weight * (observed - average)
    return average + (1.0 - (1.0 - weight) ** runs) * (observed - average)
