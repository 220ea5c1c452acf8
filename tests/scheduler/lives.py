"""Random lives of a queue, checked after every claim."""

from __future__ import annotations

from tests.scheduler.invariants import books_are_right, check_order
from tests.scheduler.simulation import Bench
from tests.scheduler.strategies import Step


def take(bench: Bench, step: Step) -> None:
    """One step of a random life; a step that names nothing is skipped."""
    match step:
        case ("enqueue", keys, count, priority):
            bench.enqueue(keys, count, priority)
        case ("claim", want):
            checked_claim(bench, want)
        case ("settle", nth, ran) if bench.claimed:
            bench.settle(_pick(bench, nth), ran)
        case ("reap", nth, ran) if bench.claimed:
            bench.reap(_pick(bench, nth), ran)
        case ("give back", nth) if bench.claimed:
            bench.give_back(_pick(bench, nth))
        case ("withdraw", nth):
            jobs = [(lane, job[0]) for lane, jobs in bench.ledger.waiting.items() for job in jobs]
            if jobs:
                bench.withdraw(*jobs[nth % len(jobs)])
        case ("wait", moment):
            bench.now += moment


def _pick(bench: Bench, nth: int) -> int:
    return sorted(bench.claimed)[nth % len(bench.claimed)]


def checked_claim(bench: Bench, want: int, *, in_order: bool = False) -> int:
    """Claim, and claim again while it is asked for, as a worker with free slots does."""
    started = 0
    for _ in range(50):
        plan = bench.claim(want - started, (lambda lane: check_order(bench, lane)) if in_order else None)
        started += len(plan.starts)
        books_are_right(bench)
        alarm = bench.queue.next_alarm()
        if started == want:
            return started
        if not (plan.more or (alarm is not None and alarm <= bench.now)):
            left = bench.ledger.startable(bench.now)
            assert not left, f"{left} could have started; the next alarm is {alarm}, now is {bench.now}"
            return started
    raise AssertionError("fifty claims at one instant, and still more is asked for")


def drain(bench: Bench) -> None:
    """Let everything run that ever may."""
    for _ in range(10_000):
        for position in sorted(bench.claimed):
            bench.settle(position, 1_000)
        if checked_claim(bench, 7):
            continue
        alarm = bench.queue.next_alarm()
        if alarm is None:
            return
        assert alarm > bench.now, "an alarm that has come was not answered"
        bench.now = alarm
    raise AssertionError("the queue never comes to rest")


def finish(bench: Bench) -> None:
    """Drain the queue and look at what is left of it."""
    drain(bench)
    waiting = [lane for lane, jobs in bench.ledger.waiting.items() if jobs]
    stopped = any(getattr(limit, "max", 1) == 0 for limit in bench.policy.limits)
    assert not waiting or stopped, f"{waiting} never ran"
    assert not bench.ledger.startable(bench.now)
    assert not bench.ledger.running
    assert all(gate.in_flight == 0 for gate in bench.queue.gates.values())
    assert all(lane.in_flight == 0 for lane in bench.queue.lanes.values())
    assert bench.ledger.violations() == []
