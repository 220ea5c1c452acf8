"""The judge of the chaos can find everything that it is there to find."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fairlane.job import State
from tests.forward.ledger import PIPE, WHOLE_QUEUE, Kept, Ledger, judge, recorded

LIMITS = {WHOLE_QUEUE: 2, "acme": 1, "bolt": 2}
JOBS = {1: "job-1", 2: "job-2"}
DONE = {"job-1": Kept(State.DONE, 1), "job-2": Kept(State.DONE, 1)}


def ledger_of(*lines: str) -> Ledger:
    """`begin 1 acme 70`: job 1 of acme begins in process 70, of which the group is 7. `kill 7`: that group dies."""
    ledger = Ledger()
    for line in lines:
        what, number, *rest = line.split()
        if what == "kill":
            ledger.killed(int(number))
        else:
            tenant, process = rest
            ledger.take(f"{what} {number} {tenant} job-{number} {int(process) // 10} {process}")
    return ledger


BOTH = ("begin 1 acme 70", "begin 2 bolt 71", "end 1 acme 70", "end 2 bolt 71")


def test_a_good_run_has_no_faults() -> None:
    assert judge(ledger_of(*BOTH), JOBS, DONE, LIMITS) == []


def test_a_job_that_never_ended_is_lost() -> None:
    assert judge(ledger_of(*BOTH[:-1]), JOBS, DONE, LIMITS) == ["job 2 was never run to its end"]


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE])
def test_a_job_that_is_not_done_in_the_store_is_a_fault(state: State) -> None:
    kept = {**DONE, "job-2": Kept(state, 1)}
    assert judge(ledger_of(*BOTH), JOBS, kept, LIMITS) == [f"job 2 is {state} in the store"]


def test_a_job_that_the_store_does_not_know_is_a_fault() -> None:
    assert judge(ledger_of(*BOTH), JOBS, {"job-1": Kept(State.DONE, 1)}, LIMITS) == ["job 2 is not in the store"]


def test_a_job_that_nobody_enqueued_is_a_fault() -> None:
    assert judge(ledger_of(*BOTH), {1: "job-1"}, DONE, LIMITS) == ["job 2 ran and nobody enqueued it"]


def test_a_job_that_runs_again_without_a_kill_is_a_fault() -> None:
    ledger = ledger_of(*BOTH, "begin 2 bolt 80", "end 2 bolt 80")
    kept = {**DONE, "job-2": Kept(State.DONE, 2)}
    assert judge(ledger, JOBS, kept, LIMITS) == [
        "job 2 ran again although 71, in which it ended before, was not killed"
    ]


def test_the_kill_of_another_group_explains_nothing() -> None:
    ledger = ledger_of(*BOTH, "kill 8", "begin 2 bolt 90", "end 2 bolt 90")
    kept = {**DONE, "job-2": Kept(State.DONE, 2)}
    assert judge(ledger, JOBS, kept, LIMITS) == [
        "job 2 ran again although 71, in which it ended before, was not killed"
    ]


def test_a_kill_explains_that_its_jobs_run_again_whether_or_not_they_had_ended() -> None:
    ledger = ledger_of(*BOTH[:-1], "kill 7", "begin 1 acme 80", "begin 2 bolt 81", "end 1 acme 80", "end 2 bolt 81")
    kept = {job: Kept(State.DONE, 2) for job in DONE}
    assert judge(ledger, JOBS, kept, LIMITS, kills=1) == []
    assert len(ledger.duplicates()) == 2


def test_a_run_that_the_store_does_not_know_of_is_a_fault() -> None:
    ledger = ledger_of(*BOTH, "kill 7", "begin 2 bolt 81", "end 2 bolt 81")
    assert judge(ledger, JOBS, DONE, LIMITS) == ["job 2 began 2 times, and the store knows of 1"]


def test_a_job_that_runs_twice_at_once_is_a_fault() -> None:
    ledger = ledger_of("begin 1 acme 70", "begin 2 bolt 71", "end 1 acme 70", "begin 2 bolt 80", "end 2 bolt 71")
    assert "job 2 began in 80 while it ran in 71" in judge(ledger, JOBS, DONE, LIMITS)


def test_more_at_once_than_a_tenant_may_is_a_fault() -> None:
    ledger = ledger_of("begin 1 acme 70", "begin 2 acme 71", "end 1 acme 70", "end 2 acme 71")
    assert judge(ledger, JOBS, DONE, LIMITS) == ["2 ran at once in acme, whose limit is 1"]


def test_more_at_once_than_the_queue_may_is_a_fault() -> None:
    ledger = ledger_of(*BOTH)
    assert judge(ledger, JOBS, DONE, {**LIMITS, WHOLE_QUEUE: 1}) == [
        f"2 ran at once in {WHOLE_QUEUE}, whose limit is 1"
    ]


def test_what_a_kill_ended_is_in_flight_no_longer() -> None:
    ledger = ledger_of("begin 1 acme 70", "kill 7", "begin 1 acme 80", "end 1 acme 80")
    assert ledger.most["acme"] == 1
    assert not ledger.faults


def test_the_end_of_a_broker_explains_that_a_process_of_the_engine_died() -> None:
    ledger = ledger_of(*BOTH[:-1])
    ledger.died(71, of="crash the broker")
    assert 71 not in ledger.processes()
    ledger.take("begin 2 bolt job-2 8 80")
    ledger.take("end 2 bolt job-2 8 80")
    assert judge(ledger, JOBS, {**DONE, "job-2": Kept(State.DONE, 2)}, LIMITS) == []


def test_a_process_that_died_of_nothing_is_a_fault() -> None:
    ledger = ledger_of(*BOTH)
    ledger.died(71, of=None)
    assert judge(ledger, JOBS, DONE, LIMITS) == ["process 71 died by itself"]


def test_a_run_whose_limits_never_bound_proves_nothing() -> None:
    ledger = ledger_of("begin 1 acme 70", "end 1 acme 70", "begin 2 bolt 71", "end 2 bolt 71")
    assert judge(ledger, JOBS, DONE, {**LIMITS, "acme": 2}) == ["no limit was ever reached: this proves nothing"]


def test_kills_that_hit_nothing_prove_nothing() -> None:
    assert judge(ledger_of(*BOTH, "kill 8"), JOBS, DONE, LIMITS, kills=1) == [
        "none of 1 kills hit anything: this proves nothing"
    ]


def test_a_job_that_ran_under_the_id_of_another_is_a_fault() -> None:
    faults = judge(ledger_of(*BOTH), {**JOBS, 2: "job-1"}, DONE, LIMITS)
    assert faults == ["job 2 ran as job-2, which is another"]


def test_an_end_without_a_begin_is_a_fault() -> None:
    assert ledger_of("end 1 acme 70").faults == ["job 1 ended in 70, where it had not begun"]


def test_the_recorder_writes_what_the_ledger_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(PIPE, str(pipe))
    reader = os.open(pipe, os.O_RDWR)
    ledger = Ledger()
    with recorded(1, "acme", "job-1"):
        ledger.take(os.read(reader, 1_000).decode())
        assert not ledger.ended
    ledger.take(os.read(reader, 1_000).decode())
    os.close(reader)
    assert ledger.ended == {1}
    (run,) = ledger.runs[1]
    assert (run.job, run.tenant, run.group, run.process) == ("job-1", "acme", os.getpgrp(), os.getpid())
