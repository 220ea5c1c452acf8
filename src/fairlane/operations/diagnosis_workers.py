"""What is wrong with workers, as they have reported it themselves, or have not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from shlex import quote

from fairlane.clock import lasting
from fairlane.operations.findings import Finding, Level
from fairlane.operations.views import BlockView, LongRunView, WorkerView
from fairlane.policy.partitions import whole_of
from fairlane.store.stats_values import PUBLISHING, unbegun_in

__all__ = ["about_reported_tasks", "about_workers", "knows", "unknown_tasks"]

NAMED = 3
"""Workers that are named where more may be meant."""


def about_workers(workers: Sequence[WorkerView]) -> Iterator[Finding]:
    """Workers that have gone silent, loops that died or are blocked, long runs, what fails around them, clocks that
    differ."""
    served = {queue for each in workers if each.takes_jobs for queue in each.queues}
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
                remedy="restart it, and check its log",
            )
        if not each.is_well and not dead:
            yield Finding(
                check="unwell worker",
                queue=None,
                message=f"worker {each.name} reports that it is unhealthy",
                remedy="check its log, and restart it",
            )
        for block in each.blocks:
            yield _blocked(each, block)
        if each.lost_runs:
            yield Finding(
                check="lost run",
                level=Level.WARNING,
                queue=None,
                message=f"worker {each.name}: {each.lost_words}",
                remedy="a handler in a thread cannot be stopped: give its task a timeout on what it waits for, and "
                "restart the worker if it does not end",
            )
        for name, words in each.troubles.items():
            yield _trouble(each, name, words)
        if each.has_uneven_clock:
            yield Finding(
                check="clock skew",
                queue=None,
                message=f"the clock of worker {each.name} differs from the database's by {each.clock_offset:+.1f} s",
                remedy="synchronize both clocks (NTP)",
            )
    yield from _long_runs(run for each in workers for run in each.long_runs)


def unknown_tasks(workers: Iterable[WorkerView]) -> dict[tuple[str, str], list[WorkerView]]:
    """By queue and task, those live workers that were given jobs of a task and do not know it."""
    found: dict[tuple[str, str], list[WorkerView]] = {}
    for each in workers:
        for task, queue in each.unknown_tasks.items():
            found.setdefault((whole_of(queue), task), []).append(each)
    return found


def knows(workers: Iterable[WorkerView], queue: str, task: str) -> bool:
    """Whether one of these workers serves a queue and knows a task."""
    return any(task in each.tasks and queue in map(whole_of, each.queues) for each in workers)


def about_reported_tasks(workers: Iterable[WorkerView], told: Collection[Finding] = ()) -> Iterator[Finding]:
    """Tasks that workers say they do not know; without those that findings tell of already."""
    alive = [each for each in workers if each.takes_jobs]
    for (queue, task), ignorant in sorted(unknown_tasks(alive).items(), key=lambda each: each[0]):
        if any(each.queue == queue and f"task {task!r}" in each.message for each in told):
            continue
        is_known = knows(alive, queue, task)
        names = ", ".join(each.name for each in ignorant[:NAMED]) + (", …" if len(ignorant) > NAMED else "")
        who = f"worker {names} does not know it" if is_known else "no worker that serves this queue knows it"
        yield Finding(
            check="unknown task",
            level=Level.WARNING if is_known else Level.FAULT,
            queue=queue,
            message=f"jobs of task {task!r} are given back again and again: {who}",
            remedy="deploy code that registers it, under this name; or "
            f"`fairlane jobs cancel --queue {quote(queue)} --task {quote(task)} --dry-run`",
        )


def _blocked(worker: WorkerView, block: BlockView) -> Finding:
    since = f" since {block.since:%H:%M:%S} UTC" if block.until is None else f" until {block.until:%H:%M:%S} UTC"
    beside = f"; jobs stuck behind it: {', '.join(block.beside)}" if block.beside else ""
    meanwhile = "the leases of the worker are not renewed meanwhile, so what it runs may run twice"
    if block.pid is not None:
        meanwhile = "other processes run what has not started meanwhile"
    return Finding(
        check="blocked event loop",
        level=Level.FAULT if block.until is None else Level.WARNING,
        queue=None,
        message=f"worker {worker.name}: {block.words},{since}{beside}",
        remedy=f"make the task a plain `def`, which runs in a thread, or await what it waits for; {meanwhile}",
    )


def _long_runs(runs: Iterable[LongRunView]) -> Iterator[Finding]:
    """One finding for all that hold a limit of a queue, and for all of a task that hold none: the longest is named."""
    groups: dict[tuple[str, str], list[LongRunView]] = {}
    for run in sorted(runs, key=lambda run: run.since):
        groups.setdefault((whole_of(run.queue), run.limit or run.task), []).append(run)
    return (_long_run(longest, len(others)) for longest, *others in groups.values())


def _long_run(run: LongRunView, others: int) -> Finding:
    usual = "no run of its task has ended in this worker yet"
    if run.usual is not None:
        usual = f"95 of 100 runs of its task take at most {lasting(run.usual)}"
    holds = "" if run.limit is None else f"; it holds {run.limit}, for which others wait"
    more = "1 other" if others == 1 else f"{others:,} others"
    holds += f"; {more} {'of its task' if run.limit is None else 'hold it too'}, none for longer" if others else ""
    return Finding(
        check="long run",
        level=Level.WARNING,
        queue=whole_of(run.queue),
        message=f"job {run.job} ({run.task}) has run for {lasting(run.ran)}, since {run.since:%Y-%m-%d %H:%M:%S} UTC, "
        f"in worker {run.worker}: {usual}{holds}",
        remedy=f"see what it waits for; `fairlane jobs cancel {run.job}` asks it to stop; a timeout on the "
        "task prevents this",
    )


def _trouble(worker: WorkerView, name: str, words: str) -> Finding:
    if name == PUBLISHING:
        return Finding(
            check="broker refuses",
            queue=None,
            message=f"dispatcher {worker.name}: its broker refuses what it publishes ({words}); the jobs of "
            f"{', '.join(worker.queues)} wait in their place",
            remedy="check the broker; publishing is retried until it accepts messages",
        )
    if worker.is_dispatcher and name in map(unbegun_in, worker.queues):
        return Finding(
            check="unbegun jobs",
            level=Level.WARNING,
            queue=None,
            message=f"dispatcher {worker.name}: {words}",
            remedy="start a worker of the engine that consumes the queue, or check those that do",
        )
    return Finding(
        check="troubled worker",
        level=Level.WARNING,
        queue=None,
        message=f"worker {worker.name}: {name} fails ({words}); its jobs go on",
        remedy="check its log; it retries on its own",
    )


def _late(worker: WorkerView, alone: list[str]) -> Finding:
    """Once others serve all that it served, its death is past: it is told for as long as it is listed, and no more."""
    last = f"worker {worker.name} was last heard from at {worker.seen_at:%Y-%m-%d %H:%M:%S} UTC"
    if worker.is_replaced:
        return Finding(
            check="late worker",
            level=Level.NOTE,
            queue=None,
            message=f"{last}: it died, and others have taken its place",
            remedy="check its log if it was not meant to end; what it ran is run again once the leases end",
        )
    lost = f", and nobody else serves {', '.join(alone)}" if alone else ""
    return Finding(
        check="late worker",
        level=Level.FAULT if alone else Level.WARNING,
        queue=None,
        message=f"{last}{lost}: it died or is frozen",
        remedy="restart it; what it ran is run again once the leases end",
    )
