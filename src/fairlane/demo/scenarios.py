"""The scenarios: the same jobs under three policies, what is counted of them, and what they promise. Pure.

All figures are counted from the runs that the handlers wrote down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from fairlane.clock import SECOND
from fairlane.policy.fair import Fair
from fairlane.policy.limits import Concurrency, Rate
from fairlane.simulation.measures import jain_index, most_at_once, most_within


class Act(msgspec.Struct, frozen=True):
    """One queue, and what its policy is."""

    name: str
    queue: str
    title: str
    fair: Fair | None = None
    in_flight_limit: Concurrency | None = None
    rate_limit: Rate | None = None

    @property
    def limits(self) -> list[Concurrency | Rate]:
        return [limit for limit in (self.in_flight_limit, self.rate_limit) if limit is not None]


FIFO = Act("FIFO", "demo-fifo", "no policy: first come, first served")
FAIR = Act("Fair", "demo-fair", 'Fair(by="tenant")', Fair(by="tenant"))
LIMITED = Act(
    "Limits",
    "demo-limits",
    "Fair, 5 in flight per tenant, 100/s (burst 20) per endpoint",
    Fair(by="tenant"),
    Concurrency(5, by="tenant"),
    Rate(100, per="1s", burst=20, by="endpoint"),
)
ACTS = (FIFO, FAIR, LIMITED)


WHALE = "whale"
RATED_ENDPOINT = "partner.example"
WHALE_ENDPOINTS = 50
"""The whale sends to many endpoints of its own: fifty lanes, and still one turn."""
WHALE_TO_RATED = 25
"""One in so many jobs of the whale goes to the endpoint that everybody uses."""


class Delivery(msgspec.Struct, frozen=True):
    """The arguments of one job. `number` identifies it in the ledger, whatever the queue says of it."""

    number: int
    tenant: str
    endpoint: str


class Workload(msgspec.Struct, frozen=True):
    """How much is enqueued, and how much may run at once."""

    whale_jobs: int = 5_000
    small_tenants: int = 100
    small_jobs: int = 10
    processes: int = 2
    slots: int = 10
    """In each process."""

    @property
    def small_total(self) -> int:
        return self.small_tenants * self.small_jobs

    @property
    def total(self) -> int:
        return self.whale_jobs + self.small_total

    @property
    def all_slots(self) -> int:
        return self.processes * self.slots

    def scaled(self, scale: float) -> Workload:
        """The same shape with fewer jobs; as many of each small tenant as before."""
        return msgspec.structs.replace(
            self,
            whale_jobs=max(200, round(self.whale_jobs * scale)),
            small_tenants=max(4, round(self.small_tenants * scale)),
        )

    def deliveries(self) -> list[Delivery]:
        """All jobs in the order in which they are enqueued: the whale's come first."""
        whale = [
            (WHALE, f"{WHALE}-{nth % WHALE_ENDPOINTS:02}.example" if nth % WHALE_TO_RATED else RATED_ENDPOINT)
            for nth in range(self.whale_jobs)
        ]
        # Each small tenant enqueues all of its jobs at once; one of them goes to the endpoint that everybody uses.
        small = [
            (tenant, f"{tenant}.example" if nth else RATED_ENDPOINT)
            for tenant in (f"tenant-{nth:03}" for nth in range(1, self.small_tenants + 1))
            for nth in range(self.small_jobs)
        ]
        return [Delivery(number, tenant, endpoint) for number, (tenant, endpoint) in enumerate(whale + small)]


def class_of(tenant: str) -> str:
    """`whale` or `small`: the two classes that the demo compares."""
    return WHALE if tenant == WHALE else "small"


MICROSECOND, NANOSECONDS = 1_000, 1_000_000_000
"""The ledger's clock counts nanoseconds."""


class RateFigures(msgspec.Struct, frozen=True):
    """The starts at the endpoint that everybody uses, against its rate (of the acts without one, too)."""

    starts: int
    busiest_second: int
    """The most starts in any one second."""
    most_in_a_second: int | None
    """What the rate allows: `burst` and one second's worth. `None` in an act without a rate."""
    worst_excess: float | None
    """By how many jobs the worst window of any length, over all endpoints, went over `burst + rate·t`, by the moment at
    which the store admitted each job. `None` in an act without a rate."""
    worst_excess_at_start: float | None
    """The same by the moment at which the handlers began, which come a little later, and not all equally late."""
    start_lag: float
    """The spread, in seconds, between the fastest and the slowest way from admission to the handler."""


class Figures(msgspec.Struct, frozen=True):
    """One act. Time counts from the first start of a handler to the last end."""

    act: str
    queue: str
    jobs: int
    jobs_run: int
    ran_twice: int
    total: float
    """Seconds."""
    last_small: float
    """Seconds until the last job of a small tenant had ended."""
    last_small_share: float
    """The same as a fraction of the total."""
    whale_before: int
    """Jobs of the whale that had ended when the last job of a small tenant had."""
    whale_admitted_before: int
    """Those that had been admitted when the last job of a small tenant was: the order of the policy alone, also where a
    process stands still with what it was given."""
    jain: float
    """Jain index of the worker-seconds that each tenant got while every tenant still had work waiting, which is until
    the first of them starts its last job. 1.0: all had the same. 1/tenants: one had everything."""
    in_flight_whale: int
    in_flight_small: int
    """The most that any one small tenant had at an instant."""
    in_flight_all: int
    in_flight_limit: int | None
    rate: RateFigures


def measure(act: Act, workload: Workload, runs: Sequence[Run]) -> Figures:
    """What the runs of an act say."""
    began = min(run.started_at for run in runs)
    ended = max(run.ended_at for run in runs)
    small = [run for run in runs if class_of(run.tenant) == "small"]
    whale = [run for run in runs if run.tenant == WHALE]
    small_ended = max((run.ended_at for run in small), default=began)
    small_admitted = max((run.admitted_at for run in small), default=0)
    times = Counter(run.number for run in runs)
    limit = act.in_flight_limit
    return Figures(
        act=act.name,
        queue=act.queue,
        jobs=workload.total,
        jobs_run=len(times),
        ran_twice=sum(count > 1 for count in times.values()),
        total=(ended - began) / NANOSECONDS,
        last_small=(small_ended - began) / NANOSECONDS,
        last_small_share=(small_ended - began) / (ended - began),
        whale_before=sum(run.ended_at <= small_ended for run in whale),
        whale_admitted_before=sum(run.admitted_at <= small_admitted for run in whale),
        jain=jain_index(worker_time(runs, backlogged_until(runs)).values()),
        in_flight_whale=most_in_flight(whale),
        in_flight_small=max(map(most_in_flight, _grouped(small, lambda run: run.tenant).values()), default=0),
        in_flight_all=most_in_flight(runs),
        in_flight_limit=limit.max if limit else None,
        rate=_rate_figures(act, runs),
    )


def _rate_figures(act: Act, runs: Sequence[Run]) -> RateFigures:
    rated = [run.started_at for run in runs if run.endpoint == RATED_ENDPOINT]
    lags = [run.started_at - run.admitted_at for run in runs]
    allowed = excess = excess_at_start = None
    if act.rate_limit is not None:
        burst, interval = act.rate_limit.burst, act.rate_limit.interval * MICROSECOND
        allowed = burst + NANOSECONDS // interval
        of_each = _grouped(runs, lambda run: run.endpoint).values()

        def worst(moment: Callable[[Run], int]) -> float:
            return max(rate_excess(list(map(moment, each)), burst=burst, interval=interval) for each in of_each)

        excess, excess_at_start = worst(lambda run: run.admitted_at), worst(lambda run: run.started_at)
    return RateFigures(
        starts=len(rated),
        busiest_second=most_within(rated, NANOSECONDS)[0],
        most_in_a_second=allowed,
        worst_excess=excess,
        worst_excess_at_start=excess_at_start,
        start_lag=(max(lags) - min(lags)) / NANOSECONDS,
    )


class Run(msgspec.Struct, frozen=True):
    """One run of a handler, as the handler itself wrote it down. Times are nanoseconds of the monotonic clock."""

    number: int
    tenant: str
    endpoint: str
    started_at: int
    ended_at: int
    admitted_at: int
    """When the store let the job start (its own clock, in nanoseconds): rates are kept at this moment."""


def backlogged_until(runs: Iterable[Run]) -> int:
    """The moment at which the first tenant starts its last job: until then every tenant has work waiting."""
    last_starts: dict[str, int] = defaultdict(int)
    for run in runs:
        last_starts[run.tenant] = max(last_starts[run.tenant], run.started_at)
    return min(last_starts.values())


def worker_time(runs: Iterable[Run], until: int) -> dict[str, int]:
    """The nanoseconds for which each tenant held a slot before `until`; a tenant that held none has 0."""
    held: dict[str, int] = defaultdict(int)
    for run in runs:
        held[run.tenant] += max(0, min(run.ended_at, until) - run.started_at)
    return dict(held)


def most_in_flight(runs: Iterable[Run]) -> int:
    """The most runs that overlapped at any instant."""
    return most_at_once((run.started_at, run.ended_at) for run in runs)[0]


def _grouped(runs: Iterable[Run], by: Callable[[Run], str]) -> Mapping[str, list[Run]]:
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[by(run)].append(run)
    return groups


def rate_excess(starts: Sequence[int], *, burst: int, interval: float) -> float:
    """By how many jobs the worst window of any length t went over `burst + t / interval`; 0 or less: the rate held."""
    worst = -float(burst)
    lowest = float("inf")
    # With a(k) = k - s(k)/interval, a window from i to j holds a(j) - a(i) + 1 more starts than its length allows.
    first = min(starts, default=0)
    for position, start in enumerate(sorted(starts)):
        level = position - (start - first) / interval
        lowest = min(lowest, level)
        worst = max(worst, level - lowest + 1 - burst)
    return worst


def shares_over_time(runs: Sequence[Run], columns: int) -> list[Mapping[str, float]]:
    """For each of `columns` equal stretches of time, how many slots each class held on average."""
    since, until = min(run.started_at for run in runs), max(run.ended_at for run in runs)
    width = max(1.0, (until - since) / columns)
    held: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for run in runs:
        first, last = (min(columns - 1, int((at - since) / width)) for at in (run.started_at, run.ended_at))
        edges = [run.started_at, *(since + width * column for column in range(first + 1, last + 1)), run.ended_at]
        for column, (start, end) in enumerate(pairwise(edges), first):
            held[column][class_of(run.tenant)] += (end - start) / width
    return [dict(column) for column in held]


FIFO_AT_LEAST = 0.90
FAIR_AT_MOST = 0.25
SLOWER_AT_MOST = 0.10


class Promise(msgspec.Struct, frozen=True):
    """A sentence that could be false, and whether it is true of this run."""

    sentence: str
    kept: bool
    seen: str
    depends_on_the_machine: bool = False
    """A busy machine can break it although nothing is wrong."""


def judge(stats: Sequence[Figures], slots: int) -> list[Promise]:
    """Every promise, in the order of the acts."""
    acts = {each.act: each for each in stats}
    fifo, fair, limited, rate = acts[FIFO.name], acts[FAIR.name], acts[LIMITED.name], LIMITED.rate_limit
    excess, excess_at_start = limited.rate.worst_excess, limited.rate.worst_excess_at_start
    assert rate is not None
    assert limited.in_flight_limit is not None
    assert excess is not None
    assert excess_at_start is not None
    missing = sum(each.jobs - each.jobs_run for each in stats)
    twice = sum(each.ran_twice for each in stats)
    slower = fair.total / fifo.total - 1
    most_of_one = max(limited.in_flight_whale, limited.in_flight_small)
    most = max(each.in_flight_all for each in stats)
    # Handlers begin a moment after their jobs were admitted, and not all equally late: that much they may bunch up.
    bunching = limited.rate.start_lag * SECOND / rate.interval
    return [
        Promise(
            f"{sum(each.jobs for each in stats):,} jobs ran, each exactly once",
            not missing and not twice,
            f"{missing} missing, {twice} twice",
        ),
        Promise(
            f"FIFO: the last small-tenant job ends after {FIFO_AT_LEAST:.0%} of the time",
            fifo.last_small_share >= FIFO_AT_LEAST,
            f"{fifo.last_small_share:.0%}",
        ),
        Promise(
            f"Fair: the last small-tenant job ends within {FAIR_AT_MOST:.0%} of the time",
            fair.last_small_share <= FAIR_AT_MOST,
            f"{fair.last_small_share:.0%}",
        ),
        Promise(
            f"Fair takes at most {SLOWER_AT_MOST:.0%} longer than FIFO",
            slower <= SLOWER_AT_MOST,
            f"{slower:+.1%}",
            depends_on_the_machine=True,
        ),
        Promise(
            f"Limits: at most {limited.in_flight_limit} in flight per tenant",
            most_of_one <= limited.in_flight_limit,
            f"{most_of_one}",
        ),
        Promise(
            "Limits: at most burst + rate·t jobs admitted per endpoint in any time t",
            excess <= 0 and excess_at_start <= bunching,
            f"room for {0.0 - excess:.2f} left; by the handlers' own starts {0.0 - excess_at_start:.2f}",
        ),
        Promise(f"at most {slots} jobs at once", most <= slots, f"{most}"),
    ]


def verdict(promises: Sequence[Promise]) -> str | None:
    """The error to report if promises were broken; `None` if all were kept."""
    broken = [promise for promise in promises if not promise.kept]
    if not broken:
        return None
    said = "; ".join(f"{promise.sentence} (seen: {promise.seen})" for promise in broken)
    if all(promise.depends_on_the_machine for promise in broken):
        return (
            f"the demo took longer than it promises: {said}; other work on this machine can cause that, so run it again"
        )
    return f"the demo does not keep its promises: {said}"
