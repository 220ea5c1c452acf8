"""The demo fails when, and only when, one of its promises does not hold."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from fairlane.demo.scenarios import (
    ACTS,
    FAIR,
    FIFO,
    LIMITED,
    RATED_ENDPOINT,
    WHALE,
    Act,
    Delivery,
    Figures,
    Run,
    Workload,
    judge,
    measure,
    verdict,
)

WORK = Workload(whale_jobs=60, small_tenants=4, small_jobs=3, processes=1, slots=4)
STEP = 1_000_000


def played(act: Act, order: list[Delivery], *, at_once: int = 4, spread: int = 0) -> Figures:
    """The figures of an act that ran these jobs in this order, so many at once; `spread` ns between any two starts."""
    runs = []
    for place, job in enumerate(order):
        start = (place // at_once) * STEP + place * spread
        runs.append(Run(job.number, job.tenant, job.endpoint, start, start + STEP, start))
    return measure(act, WORK, runs)


def in_turns(jobs: list[Delivery]) -> list[Delivery]:
    seen: Counter[str] = Counter()
    ranked = []
    for job in jobs:
        seen[job.tenant] += 1
        ranked.append((seen[job.tenant], job.number, job))
    return [job for *_, job in sorted(ranked)]


def all_acts() -> dict[str, Figures]:
    jobs = WORK.deliveries()
    apart = LIMITED.rate_limit.interval * 1_000 if LIMITED.rate_limit else 0
    return {
        FIFO.name: played(FIFO, jobs),
        FAIR.name: played(FAIR, in_turns(jobs)),
        LIMITED.name: played(LIMITED, in_turns(jobs), spread=apart),
    }


def judged(acts: dict[str, Figures]) -> str | None:
    return verdict(judge([acts[act.name] for act in ACTS], WORK.all_slots))


def test_a_good_run_keeps_every_promise() -> None:
    assert judged(all_acts()) is None


def test_turns_put_the_small_tenants_before_the_whale_and_first_come_puts_them_behind() -> None:
    acts = all_acts()
    assert acts["FIFO"].last_small_share == pytest.approx(1.0)
    assert acts["FIFO"].whale_before == acts["FIFO"].whale_admitted_before == WORK.whale_jobs
    assert acts["FIFO"].jain == pytest.approx(1 / 5)
    assert acts["Fair"].last_small_share < 0.25
    assert acts["Fair"].whale_before <= WORK.small_jobs + 1
    assert acts["Fair"].whale_admitted_before <= WORK.small_jobs + 1
    assert acts["Fair"].jain > 0.9  # four slots among five tenants: one is always a job behind


def test_a_job_that_ran_twice_breaks_the_promise() -> None:
    acts = all_acts()
    jobs = WORK.deliveries()
    acts["FIFO"] = played(FIFO, [*jobs, jobs[0]])
    assert "1 twice" in str(judged(acts))


def test_a_job_that_never_ran_breaks_the_promise() -> None:
    acts = all_acts()
    acts["FIFO"] = played(FIFO, WORK.deliveries()[1:])
    assert "1 missing" in str(judged(acts))


def test_small_tenants_that_wait_under_fair_break_the_promise() -> None:
    acts = all_acts()
    acts["Fair"] = msgspec.structs.replace(acts["FIFO"], act="Fair")
    assert "Fair: the last small-tenant job ends within 25%" in str(judged(acts))


def test_fifo_that_is_fair_breaks_the_promise() -> None:
    acts = all_acts()
    acts["FIFO"] = msgspec.structs.replace(acts["Fair"], act="FIFO")
    assert "FIFO: the last small-tenant job ends after 90%" in str(judged(acts))


def test_one_run_too_many_at_once_breaks_the_promise() -> None:
    acts = all_acts()
    acts["Limits"] = msgspec.structs.replace(acts["Limits"], in_flight_small=6)
    assert "at most 5 in flight per tenant (seen: 6)" in str(judged(acts))


def test_a_rate_that_was_exceeded_by_part_of_a_job_breaks_the_promise() -> None:
    acts = all_acts()
    rate = msgspec.structs.replace(acts["Limits"].rate, worst_excess=0.01)
    acts["Limits"] = msgspec.structs.replace(acts["Limits"], rate=rate)
    assert "admitted per endpoint in any time t" in str(judged(acts))


def test_handlers_that_bunch_up_more_than_they_lag_break_the_promise() -> None:
    acts = all_acts()
    rate = msgspec.structs.replace(acts["Limits"].rate, worst_excess_at_start=2.0, start_lag=0.01)
    acts["Limits"] = msgspec.structs.replace(acts["Limits"], rate=rate)
    assert "admitted per endpoint in any time t" in str(judged(acts))


def test_a_slow_machine_is_told_apart_from_a_broken_promise() -> None:
    acts = all_acts()
    acts["Fair"] = msgspec.structs.replace(acts["Fair"], total=acts["FIFO"].total * 1.2)
    said = str(judged(acts))
    assert "longer than it promises" in said
    assert "+20.0%" in said
    assert "other work on this machine" in said


def test_a_rate_that_no_limit_held_back_is_measured_as_exceeded() -> None:
    figures = played(LIMITED, [job for job in Workload().deliveries() if job.endpoint == RATED_ENDPOINT])
    assert figures.rate.worst_excess is not None
    assert figures.rate.worst_excess > 200
    assert figures.rate.most_in_a_second == 120


def test_the_demo_enqueues_what_it_says() -> None:
    jobs = Workload().deliveries()
    assert len(jobs) == 6_000
    assert [job.number for job in jobs] == list(range(6_000))
    assert all(job.tenant == WHALE for job in jobs[:5_000])
    assert Counter(Counter(job.tenant for job in jobs[5_000:]).values()) == {10: 100}
    assert sum(job.endpoint == RATED_ENDPOINT for job in jobs) == 300
