"""Workloads: the jobs that a simulation runs, declared, or read from a trace.

A declared workload names classes of jobs: which keys they carry, when they arrive, how long they run. Its seed decides
everything that is left to chance, so the same workload is always the same jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from operator import attrgetter
from random import Random
from typing import Any

import msgspec

from fairlane.clock import SECOND, Instant, as_instant, microseconds
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.parameters import check_fields, checked, shown
from fairlane.policy.keys import canonical_keys
from fairlane.simulation.run import JobKind, SimulatedJob
from fairlane.task import Backoff

Duration = str | float
MOST_JOBS = 50_000_000
"""Of one class: more would not fit into memory."""
LONGEST_RUN = 365 * 86_400 * SECOND


class RunTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run times that differ: exactly one of these shapes."""

    uniform: tuple[Duration, Duration] | None = None
    """Between two."""
    exponential: Duration | None = None
    """Of this mean, mostly short, sometimes long."""
    lognormal: Duration | None = None
    """Of this median, with a long tail: at `sigma` 1.0 one in twenty takes over five times as long."""
    sigma: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "RunTimes")
        given = [each for each in (self.uniform, self.exponential, self.lognormal) if each is not None]
        if len(given) != 1:
            raise ConfigurationError("a run time is one of uniform, exponential and lognormal")
        if not 0.0 <= self.sigma <= 10.0:
            raise ConfigurationError(f"sigma={self.sigma} lies between 0 and 10")

    def draw(self, chance: Random) -> Callable[[], float]:
        """A source of run times, in microseconds."""
        if self.uniform is not None:
            low, high = (microseconds(each) for each in self.uniform)
            return lambda: chance.uniform(low, high)
        if self.exponential is not None:
            rate = 1.0 / max(1, microseconds(self.exponential))
            return lambda: chance.expovariate(rate)
        centre = math.log(max(1, microseconds(self.lognormal or 0)))
        return lambda: chance.lognormvariate(centre, self.sigma)

    def times(self) -> list[Duration]:
        return [each for each in (*(self.uniform or ()), self.exponential, self.lognormal) if each is not None]


class JobClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs that are alike. What is said of arrivals is said of each key: 100 keys of 10 jobs are 1,000 jobs."""

    name: str
    keys: dict[str, str | int | None] = {}
    """Stamped on each job; `{n}` in a value stands for 0, 1, … up to `count`."""
    count: int = 1
    """How many keys: so many times everything below."""
    jobs: int = 1
    at: Duration = 0
    """When the first of them arrives."""
    every: Duration | None = None
    """The time between two arrivals; without it (and without `poisson`) all arrive at once."""
    poisson: float | None = None
    """Or how many arrivals there are in a second, on average, at random times."""
    burst: int = 1
    """Jobs that arrive together."""
    run_time: Duration | RunTimes = "100ms"
    """Constant (`"50ms"`), or `{"uniform": ["10ms", "90ms"]}`, `{"exponential": "50ms"}`, `{"lognormal": "50ms"}`."""
    priority: int = 0
    task: str = ""
    failures: float = 0.0
    """The probability that a run fails."""
    max_attempts: int = 5
    backoff: Duration = "1s"
    """Before the second attempt; doubled before each further one."""
    numbers: dict[str, float] = {}
    """What its jobs bring along for a policy that takes numbers from jobs, by limit: `{"concurrency:account": 8}`."""

    def __post_init__(self) -> None:
        check_fields(self, f"class {shown(self.name)}")
        what = f"class {shown(self.name)}"
        if not self.name:
            raise ConfigurationError("a class of a workload needs a name, such as 'small'")
        if self.count < 1 or self.jobs < 0 or self.burst < 1 or self.max_attempts < 1:
            raise ConfigurationError(f"{what}: count, burst and max_attempts are at least 1, jobs at least 0")
        if self.count * self.jobs > MOST_JOBS:
            raise ConfigurationError(f"{what}: {self.count * self.jobs:,} jobs are more than {MOST_JOBS:,}")
        if self.every is not None and self.poisson is not None:
            raise ConfigurationError(f"{what}: give `every` or `poisson`, not both")
        if self.poisson is not None and not (self.poisson > 0 and math.isfinite(self.poisson)):
            raise ConfigurationError(f"{what}: poisson={self.poisson} is a number of arrivals a second, above 0")
        if not 0.0 <= self.failures <= 1.0:
            raise ConfigurationError(f"{what}: failures={self.failures} is a probability between 0 and 1")
        times = [self.at, self.backoff, 0 if self.every is None else self.every]
        times += self.run_time.times() if isinstance(self.run_time, RunTimes) else [self.run_time]
        try:
            if below := [each for each in times if microseconds(each) < 0]:
                raise ConfigurationError(f"{below[0]!r} is a time below 0")
            canonical_keys(self._keys_of(0))
        except FairlaneError as error:
            raise ConfigurationError(f"{what}: {error}") from None

    def _keys_of(self, nth: int) -> dict[str, str | int | None]:
        return {
            name: value.replace("{n}", str(nth)) if isinstance(value, str) else value
            for name, value in self.keys.items()
        }

    def simulated(self, seed: int) -> Iterator[SimulatedJob]:
        """Its jobs, key by key."""
        # A generator for each class: another class more, or a change to one, leaves the others as they were.
        chance = Random(f"{seed}/{self.name}")
        run_time = self.run_time.draw(chance) if isinstance(self.run_time, RunTimes) else None
        always = 0 if isinstance(self.run_time, RunTimes) else microseconds(self.run_time)
        backoff = Backoff(self.backoff, cap=max(SECOND * 3_600, microseconds(self.backoff)) / SECOND)
        for nth in range(self.count):
            keys = canonical_keys({**self._keys_of(nth), "task": self.task})
            kind = JobKind(self.name, keys, self.priority)
            for at in self._arrivals(chance):
                ran = min(LONGEST_RUN, max(0, round(run_time() if run_time else always)))
                retries, dies = self._failures(chance, backoff) if self.failures else ((), False)
                yield SimulatedJob(kind, at, ran, retries, dies, self.numbers or None)

    def _arrivals(self, chance: Random) -> Iterator[Instant]:
        at = float(microseconds(self.at))
        apart = 0 if self.every is None else microseconds(self.every)
        for nth in range(self.jobs):
            if nth % self.burst == 0 and (nth or self.poisson is not None):
                at += apart if self.poisson is None else chance.expovariate(self.poisson / SECOND)
            yield round(at)

    def _failures(self, chance: Random, backoff: Backoff) -> tuple[tuple[int, ...], bool]:
        delays: list[int] = []
        while chance.random() < self.failures:
            if len(delays) + 1 >= self.max_attempts:
                return tuple(delays), True
            delays.append(backoff.delay(len(delays) + 1, chance.random()))
        return tuple(delays), False


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Classes of jobs, and the seed of all that is left to chance."""

    classes: tuple[JobClass, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "Workload")
        names = [each.name for each in self.classes]
        if not names:
            raise ConfigurationError("classes: a workload needs at least one class of jobs; give JobClass(…)")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"the workload has two classes named {twice!r}; give each its own name")

    @classmethod
    @checked()
    def parse(cls, text: str | bytes, source: str = "the workload") -> Workload:
        """Read a TOML or JSON document. `source` names it in errors."""
        is_json = text.lstrip()[:1] in ("{", b"{")
        try:
            return msgspec.json.decode(text, type=cls) if is_json else msgspec.toml.decode(text, type=cls)
        except (msgspec.DecodeError, ValueError, FairlaneError) as error:
            raise ConfigurationError(f"{source}: {error}") from None

    def simulated(self, seed: int | None = None) -> list[SimulatedJob]:
        """All jobs in the order of their arrival; of those that arrive together, those of the first class first."""
        chosen = self.seed if seed is None else seed
        jobs = [job for each in self.classes for job in each.simulated(chosen)]
        jobs.sort(key=attrgetter("at"))
        return jobs


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, rename={"label": "class"}):
    """One job of a trace."""

    at: float | datetime
    run_time: Duration
    keys: dict[str, str | int | None] = {}
    priority: int = 0
    task: str = ""
    label: str | None = None
    numbers: dict[str, float] | None = None


def read_trace(lines: Iterable[str | bytes], source: str = "the trace") -> list[SimulatedJob]:
    """Jobs from JSON lines: `{"at": 0.5, "keys": {"account": "acme"}, "run_time": 0.05}`, in any order.

    `at` is in seconds, or a time with a zone; `run_time` in seconds, or as text. `priority`, `task`, `class` and
    `numbers` may be left out; a job without a class is counted by its task.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    kinds: dict[Any, JobKind] = {}
    jobs: list[SimulatedJob] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            jobs.append(_traced(decoder.decode(line), kinds))
        except (msgspec.DecodeError, FairlaneError) as error:
            raise ConfigurationError(f"{source}, line {number}: {error}; {_EXAMPLE}") from None
    if not jobs:
        raise ConfigurationError(f"{source}: there is no job in it; {_EXAMPLE}")
    jobs.sort(key=attrgetter("at"))
    return jobs


_EXAMPLE = 'a line looks like {"at": 0.5, "keys": {"account": "acme"}, "run_time": 0.05}'


def _traced(line: TraceLine, kinds: dict[Any, JobKind]) -> SimulatedJob:
    run_time = microseconds(line.run_time)
    if run_time < 0:
        raise ConfigurationError(f"run_time={line.run_time!r} is a time below 0")
    at = as_instant(line.at) if isinstance(line.at, datetime) else microseconds(line.at)
    label = line.task or "all jobs" if line.label is None else line.label
    kind = kind_of(label, {**line.keys, "task": line.task}, line.priority, kinds)
    return SimulatedJob(kind, at, run_time, numbers=line.numbers)


def kind_of(label: str, keys: dict[str, Any], priority: int, known: dict[Any, JobKind]) -> JobKind:
    """The one kind of jobs with this class, these keys and this priority."""
    identity = (label, priority, *keys.items())
    kind = known.get(identity)
    if kind is None:
        kind = known[identity] = JobKind(label, canonical_keys(keys), priority)
    return kind
