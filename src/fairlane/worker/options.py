"""The settings of a worker, checked where they are given, by the name under which they were given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from fairlane.clock import duration_of, microseconds
from fairlane.errors import ConfigurationError
from fairlane.parameters import check_value, known_options, shown

Duration = timedelta | str | float
Order = Literal["weighted", "strict"]
Traces = Literal["linked", "nested"]

MOST_SLOTS = 10_000
MOST_PROCESSES = 1_000
_SHARE = re.compile(r"(?P<name>[^=:\s]+)(=(?P<weight>\d+(\.\d+)?))?(:(?P<min>\d+)?-(?P<max>\d+)?)?\Z")


@known_options
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueShare:
    """What a worker gives to one queue: its weight beside the others, and how few or many slots it may have."""

    name: str
    weight: float = 1.0
    min_slots: int = 0
    """Slots that no other queue of this worker may use."""
    max_slots: int | None = None

    def __post_init__(self) -> None:
        check_value("queues", "name", self.name, str)
        what = f"queues: {shown(self.name)}"
        if not self.name.strip():
            raise ConfigurationError(f"{what} is no name of a queue; give one, such as 'webhooks'")
        check_value(what, "weight", self.weight, float)
        if not 1e-3 <= self.weight <= 1e6:
            raise ConfigurationError(
                f"{what}: weight={shown(self.weight)} is not a number between 0.001 and 1,000,000; give one"
            )
        _whole(f"{what}: min_slots", self.min_slots, 0, MOST_SLOTS)
        if self.max_slots is not None:
            _whole(f"{what}: max_slots", self.max_slots, max(1, self.min_slots), MOST_SLOTS)

    @classmethod
    def parse(cls, text: str) -> QueueShare:
        """`email`, `email=2` (weight 2), `email=2:1-10` (at least 1 and at most 10 slots), `email:-10`."""
        check_value("queues", "text", text, str)
        found = _SHARE.match(text.strip())
        if found is None:
            raise ConfigurationError(
                f"queues: {shown(text)} is not a queue; write name, name=weight or name=weight:min-max"
            )
        return cls(
            name=found["name"],
            weight=float(found["weight"] or 1),
            min_slots=int(found["min"] or 0),
            max_slots=int(found["max"]) if found["max"] else None,
        )


@known_options
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker works. Every time is kept as a `timedelta`, and every queue as a `QueueShare`."""

    queues: tuple[QueueShare, ...] | str | Iterable[str | QueueShare] = ()
    """Which queues to serve, such as `"webhooks,email=2"`; none: all that the app declares."""
    order: Order = "weighted"
    """Between queues: by weight, or strictly in the order given."""
    concurrency: int = 100
    """Slots: how many jobs run at the same time."""
    prefetch: int | None = None
    """The most jobs to claim ahead of free slots: as many as end while a claim takes place; none if jobs are long.

    Unless it is given, up to 1,000, and none of a queue that has limits (a job that waits in a worker would hold slots
    and tokens) nor where several queues are served (it would take the slots of another).
    """
    lease: Duration = timedelta(seconds=30)
    """For how long a claim is held without a sign of life; renewed every third of it."""
    drain_timeout: Duration = timedelta(seconds=30)
    """How long jobs may go on running after the worker was asked to stop."""
    cancel_grace: Duration = timedelta(seconds=5)
    """How long a cancelled handler may take to clean up before a stopping worker leaves it behind."""
    poll: Duration = timedelta(seconds=30)
    """The last resort, should a wake-up ever be lost."""
    long_run: Duration = timedelta(seconds=30)
    """The least time after which a run is reported as long: that is when it takes more than three times as long as
    95 of the last 100 runs of its task, or longer than its timeout."""
    name: str | None = None
    """For people; `host:pid` unless given."""
    metrics_port: int | None = None
    """Where to answer `/metrics`, `/healthz` and `/readyz`; 0 for any port that is free, none to leave it."""
    metrics_host: str = "127.0.0.1"
    """The address of this machine to answer at; `0.0.0.0` for all of them."""
    metrics_fleet: bool = True
    """Whether this worker also tells of the whole fleet, from the database."""
    metrics_keys: int = 20
    """Of how many keys that tells by name, those with most jobs waiting first; 0 for none."""
    traces: Traces = "linked"
    """Spans of runs: in traces of their own with a link to the enqueue, or inside of the trace of the enqueue."""

    processes: int = 1
    """Processes that run jobs, with `concurrency` slots each, beside the one that claims for all of them; 1: jobs run
    in the worker's own."""
    command: Sequence[str] = ()
    """The command that starts such a process, or one for a single job alone: `fairlane worker` gives its own. Without
    it, a job that may have killed its process waits until nothing else runs here, and what comes after it waits too."""

    def __post_init__(self) -> None:
        for setting, fewest, most in (
            ("concurrency", 1, MOST_SLOTS),
            ("prefetch", 0, MOST_SLOTS),
            ("metrics_port", 0, 65_535),
            ("processes", 1, MOST_PROCESSES),
            ("metrics_keys", 0, 500),
        ):
            if (value := getattr(self, setting)) is not None or setting not in ("prefetch", "metrics_port"):
                _whole(setting, value, fewest, most)
        for setting, kind in (
            ("order", Order),
            ("traces", Traces),
            ("name", str | None),
            ("command", Sequence[str]),
            ("metrics_host", str),
            ("metrics_fleet", bool),
        ):
            check_value("worker", setting, getattr(self, setting), kind)
        object.__setattr__(self, "command", tuple(self.command))
        if self.processes > 1 and not self.command:
            raise ConfigurationError(
                f"processes={self.processes} needs the command that starts one; run `fairlane worker --processes "
                f"{self.processes}`, which has it"
            )
        if not self.metrics_host.strip():
            raise ConfigurationError(f"metrics_host={self.metrics_host!r} is not an address; give one, or leave it out")
        for setting, least, longest in (
            ("lease", "100ms", "1d"),
            ("drain_timeout", "0s", "7d"),
            ("cancel_grace", "0s", "1d"),
            ("poll", "1s", "1d"),
            ("long_run", "1s", "7d"),
        ):
            amount = duration_of(setting, value := getattr(self, setting))
            if not microseconds(least) <= amount <= microseconds(longest):
                raise ConfigurationError(f"{setting}={value!r} does not lie between {least} and {longest}")
            object.__setattr__(self, setting, timedelta(microseconds=amount))
        object.__setattr__(self, "queues", _shares(self.queues))
        _check_slots(self.shares, self.concurrency)

    @property
    def shares(self) -> tuple[QueueShare, ...]:
        return tuple(self.queues)  # type: ignore[arg-type]  # normalized in __post_init__

    @property
    def slots(self) -> int:
        """Of all processes together."""
        return self.concurrency * self.processes

    @property
    def shares_of_all(self) -> tuple[QueueShare, ...]:
        """What each process gives to a queue, added up."""
        many = self.processes
        return tuple(
            replace(each, min_slots=each.min_slots * many, max_slots=each.max_slots and each.max_slots * many)
            for each in self.shares
        )

    def time(self, setting: Literal["lease", "drain_timeout", "cancel_grace", "poll", "long_run"]) -> timedelta:
        """A setting that is a time."""
        value: timedelta = getattr(self, setting)
        return value

    def serving(self, declared: Sequence[str]) -> WorkerOptions:
        """These options, with the queues of an app filled in where none were named."""
        return self if self.shares else replace(self, queues=tuple(QueueShare(name=name) for name in declared))


def _shares(queues: object) -> tuple[QueueShare, ...]:
    if isinstance(queues, str):
        queues = [part for part in queues.split(",") if part.strip()]
    if not isinstance(queues, Iterable) or isinstance(queues, Mapping):
        raise ConfigurationError(f"queues={shown(queues)} is not a list of queues, such as 'webhooks,email=2'")
    shares = tuple(each if isinstance(each, QueueShare) else QueueShare.parse(each) for each in queues)
    names = [share.name for share in shares]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"queues: {name!r} is named twice")
    return shares


def _check_slots(shares: Sequence[QueueShare], concurrency: int) -> None:
    reserved = sum(share.min_slots for share in shares)
    if reserved > concurrency:
        raise ConfigurationError(f"queues: their min_slots add up to {reserved}, more than concurrency={concurrency}")
    for share in shares:
        if share.min_slots == 0 and reserved == concurrency:
            raise ConfigurationError(
                f"queues: the min_slots of the others leave {share.name!r} no slot of concurrency={concurrency}"
            )


def _whole(setting: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(f"{setting}={shown(value)} is not a whole number from {least:,} to {most:,}; give one")
