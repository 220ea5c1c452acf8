"""Declared workloads and traces: the jobs they stand for, and what is refused with which words."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

import pytest

from fairlane import Concurrency, Fair, Policy
from fairlane.clock import SECOND
from fairlane.errors import ConfigurationError
from fairlane.simulation import JobClass, RunTimes, Workload, simulate
from fairlane.simulation.workload import read_trace

MONDAY = """
seed = 7

[[classes]]
name = "hot"
keys = {account = "acme"}
jobs = 3
run_time = "50ms"

[[classes]]
name = "small"
keys = {account = "small-{n}", region = "eu"}
count = 2
jobs = 2
every = "1s"
run_time = {uniform = ["10ms", "90ms"]}
priority = 5
task = "deliver"
"""


def times(**settings: Any) -> list[float]:
    made = Workload(classes=(JobClass(name="a", **settings),)).simulated()
    return [job.at / SECOND for job in made]


def run_times(run_time: str | RunTimes, jobs: int = 4_000) -> list[float]:
    made = Workload(classes=(JobClass(name="a", jobs=jobs, run_time=run_time),)).simulated()
    return [job.run_time / SECOND for job in made]


def test_a_document_in_toml_stands_for_these_jobs() -> None:
    jobs = Workload.parse(MONDAY).simulated()
    assert [(job.kind.label, job.at / SECOND, job.kind.keys["account"]) for job in jobs] == [
        ("hot", 0.0, "acme"),
        ("hot", 0.0, "acme"),
        ("hot", 0.0, "acme"),
        ("small", 0.0, "small-0"),
        ("small", 0.0, "small-1"),
        ("small", 1.0, "small-0"),
        ("small", 1.0, "small-1"),
    ]
    assert jobs[0].run_time == 50_000
    assert all(10_000 <= job.run_time <= 90_000 for job in jobs[3:])
    assert (jobs[3].kind.priority, jobs[3].kind.keys) == (
        5,
        {"account": "small-0", "region": "eu", "task": "deliver"},
    )


def test_json_says_the_same() -> None:
    text = '{"classes": [{"name": "a", "keys": {"account": 42}, "run_time": 0.5, "at": "1m"}]}'
    (job,) = Workload.parse(text).simulated()
    assert (job.at, job.run_time, job.kind.keys["account"]) == (60 * SECOND, 500_000, "42")


def test_arrivals_at_once_at_a_pace_in_bursts_and_at_random() -> None:
    assert times(jobs=3, at="2s") == [2.0, 2.0, 2.0]
    assert times(jobs=3, every="500ms") == [0.0, 0.5, 1.0]
    assert times(jobs=5, every="10s", burst=2) == [0.0, 0.0, 10.0, 10.0, 20.0]
    random = times(jobs=5_000, poisson=10)
    assert random == sorted(random)
    assert random[-1] == pytest.approx(500.0, rel=0.1)


def test_run_times_have_the_shape_that_was_asked_for() -> None:
    assert set(run_times("50ms")) == {0.05}
    assert mean(run_times(RunTimes(exponential="50ms"))) == pytest.approx(0.05, rel=0.1)
    assert median(run_times(RunTimes(lognormal="50ms", sigma=1.5))) == pytest.approx(0.05, rel=0.15)
    assert mean(run_times(RunTimes(uniform=("0s", "100ms")))) == pytest.approx(0.05, rel=0.1)


def test_a_share_of_runs_fails_backs_off_and_dies_after_its_last_attempt() -> None:
    made = Workload(classes=(JobClass(name="a", jobs=2_000, failures=0.5, max_attempts=3, backoff="10s"),)).simulated()
    runs = sum(1 + len(job.retries) for job in made)
    failed = sum(len(job.retries) + job.dies for job in made)
    assert failed / runs == pytest.approx(0.5, abs=0.03)
    assert max(len(job.retries) for job in made) == 2
    assert all(10 * SECOND <= job.retries[0] <= 12 * SECOND for job in made if job.retries)
    assert all(20 * SECOND <= job.retries[1] <= 24 * SECOND for job in made if len(job.retries) > 1)
    assert all(len(job.retries) == 2 for job in made if job.dies)


def test_a_seed_decides_everything_and_classes_do_not_disturb_each_other() -> None:
    one = JobClass(name="one", jobs=20, poisson=1, run_time=RunTimes(exponential="1s"), failures=0.3)
    two = JobClass(name="two", jobs=20, poisson=1, run_time=RunTimes(exponential="1s"))

    def drawn(workload: Workload, seed: int | None = None) -> list[tuple[Any, ...]]:
        return [(job.at, job.run_time, job.retries) for job in workload.simulated(seed) if job.kind.label == "one"]

    assert drawn(Workload(classes=(one,))) == drawn(Workload(classes=(two, one)))
    assert drawn(Workload(classes=(one,), seed=3)) == drawn(Workload(classes=(one,)), 3)
    assert drawn(Workload(classes=(one,))) != drawn(Workload(classes=(one,)), 1)


def test_simulate_runs_a_workload_and_two_calls_are_equal() -> None:
    workload = Workload.parse(MONDAY)
    policy = Policy("webhooks", Fair(by="account"), (Concurrency(1, by="account"),))
    one, other = (simulate(policy, workload, slots=2, claim_time=0, settle_time=0) for _ in range(2))
    assert one == other
    assert (one.jobs, one.runs, one.left) == (7, 7, 0)
    assert [group.name for group in one.keys] == ["acme", "small-0", "small-1"]
    assert simulate(policy, workload, slots=2, by="region").keys[1].name == "eu"


@pytest.mark.parametrize("settings", [{"slots": 0}, {"claim_time": "-1s"}, {"settle_time": -1}, {"by": "no name!"}])
def test_a_simulation_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        simulate(Policy("q"), Workload.parse(MONDAY), **settings)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("classes = []", "at least one class"),
        ('{"classes": [{"name": "a", "jobz": 1}]}', "unknown field `jobz`"),
        ('{"classes": [{"jobs": 1}]}', "missing required field `name`"),
        ('{"classes": [{"name": "a"}, {"name": "a"}]}', "two classes named 'a'"),
        ('{"classes": [{"name": "a", "run_time": "fast"}]}', "class 'a': 'fast' is not a duration"),
        ('{"classes": [{"name": "a", "run_time": {}}]}', "one of uniform, exponential and lognormal"),
        ('{"classes": [{"name": "a", "run_time": {"lognormal": "1s", "sigma": 99}}]}', "sigma=99"),
        ('{"classes": [{"name": "a", "every": "1s", "poisson": 1}]}', "`every` or `poisson`, not both"),
        ('{"classes": [{"name": "a", "poisson": 0}]}', "above 0"),
        ('{"classes": [{"name": "a", "failures": 2}]}', "between 0 and 1"),
        ('{"classes": [{"name": "a", "jobs": -1}]}', "jobs at least 0"),
        ('{"classes": [{"name": "a", "jobs": 90000000}]}', "more than 50,000,000"),
        ('{"classes": [{"name": "a", "at": -1}]}', "below 0"),
        ("[[classes", "\\]\\]"),
        ("{", "truncated"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"monday\.toml: .*{reason}"):
        Workload.parse(text, "monday.toml")


def test_a_trace_is_read_in_any_order_with_times_or_seconds() -> None:
    lines = [
        '{"at": 2.5, "keys": {"account": "b"}, "run_time": "50ms", "task": "deliver", "priority": 3}',
        "",
        '{"at": 0, "keys": {"account": "a"}, "run_time": 0.1, "class": "big"}',
    ]
    jobs = read_trace(lines)
    assert [(job.at, job.run_time, job.kind.label, job.kind.priority) for job in jobs] == [
        (0, 100_000, "big", 0),
        (2_500_000, 50_000, "deliver", 3),
    ]
    (job,) = read_trace(['{"at": "1970-01-01T00:00:01Z", "run_time": 1}'])
    assert (job.at, job.kind.label) == (SECOND, "all jobs")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "malformed"),
        ('{"run_time": 1}', "missing required field `at`"),
        ('{"at": 0, "run_time": -1}', "below 0"),
        ('{"at": 0, "run_time": "soon"}', "not a duration"),
        ('{"at": 0, "run_time": 1, "keys": {"a": 1.5}}', "Expected"),
        ('{"at": "2030-01-01T00:00:00", "run_time": 1}', "timezone"),
    ],
)
def test_a_line_of_a_trace_that_makes_no_sense_is_refused_by_its_number(line: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"jobs\.jsonl, line 2: .*{reason}.*a line looks like"):
        read_trace(['{"at": 0, "run_time": 1}', line], "jobs.jsonl")


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no job in it"):
        read_trace([""])


def test_o16_classes_and_traces_say_which_numbers_their_jobs_bring() -> None:
    (job,) = Workload.parse('[[classes]]\nname = "a"\nnumbers = { weight = 4 }').simulated()
    assert job.numbers == {"weight": 4}
    (job,) = read_trace(['{"at": 0, "run_time": 1, "numbers": {"weight": 4}}'])
    assert job.numbers == {"weight": 4}
