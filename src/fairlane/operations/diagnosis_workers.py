"""What is wrong with workers, as they have reported it themselves, or have not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fairlane.operations.findings import Finding, Level
from fairlane.operations.views import WorkerView
from fairlane.store.figures import PUBLISHING, unbegun_in

__all__ = ["about_workers"]


def about_workers(workers: Sequence[WorkerView]) -> Iterator[Finding]:
    """Workers that have gone silent, loops that died, what fails around them, clocks that differ."""
    served = {queue for each in workers if not each.is_late for queue in each.queues}
    for each in workers:
        if each.is_late:
            yield _late(each, sorted(set(each.queues) - served))
            continue
        dead = each.dead_loops
        for name, state in dead.items():
            yield Finding(
                check="dead loop",
                queue=None,
                message=f"worker {each.name}: its loop {name} died ({state})",
                remedy="restart it, and look at its log",
            )
        if not each.is_well and not dead:
            yield Finding(
                check="unwell worker",
                queue=None,
                message=f"worker {each.name} says that it is not well",
                remedy="look at its log, and restart it",
            )
        for name, words in each.troubles.items():
            yield _trouble(each, name, words)
        if each.has_uneven_clock:
            yield Finding(
                check="clock skew",
                queue=None,
                message=f"the clock of worker {each.name} differs from the database's by {each.clock_offset:+.1f} s",
                remedy="let both machines keep time (NTP)",
            )


def _trouble(worker: WorkerView, name: str, words: str) -> Finding:
    if name == PUBLISHING:
        return Finding(
            check="broker refuses",
            queue=None,
            message=f"dispatcher {worker.name}: its broker refuses what it publishes ({words}); the jobs of "
            f"{', '.join(worker.queues)} wait in their place",
            remedy="look at the broker; it is tried again until it takes messages",
        )
    if worker.is_dispatcher and name in map(unbegun_in, worker.queues):
        return Finding(
            check="unbegun jobs",
            level=Level.WARNING,
            queue=None,
            message=f"dispatcher {worker.name}: {words}",
            remedy="start a worker of the engine that consumes the queue, or look at those that do",
        )
    return Finding(
        check="troubled worker",
        level=Level.WARNING,
        queue=None,
        message=f"worker {worker.name}: {name} fails ({words}); its jobs go on",
        remedy="look at its log; it tries again by itself",
    )


def _late(worker: WorkerView, alone: list[str]) -> Finding:
    """Where others serve all that it served, it is told and no more: one that has died is listed for a day."""
    lost = f", and nobody else serves {', '.join(alone)}" if alone else ""
    return Finding(
        check="late worker",
        level=Level.FAULT if alone else Level.WARNING,
        queue=None,
        message=f"worker {worker.name} was last heard of at {worker.seen_at:%Y-%m-%d %H:%M:%S} UTC{lost}: it died, or "
        "stands still",
        remedy="restart it; its jobs run again once their leases end",
    )
