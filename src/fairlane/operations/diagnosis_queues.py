"""What is wrong with queues: nobody serves one, somebody does not keep up, something stands still."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from shlex import quote

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.job import State
from fairlane.operations.charting import MINUTE
from fairlane.operations.findings import Finding, Level
from fairlane.policy.keys import key_words
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import no_service, start_command
from fairlane.stats.keys import Minute
from fairlane.store.finding import find_jobs
from fairlane.store.health import Standstill
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import FOLD_AT_MOST, QueueCounts, Store
from fairlane.store.stats_values import QueueFigures

__all__ = [
    "LONG_OVERDUE",
    "about_bells",
    "about_figures",
    "about_gates",
    "about_service",
    "about_standstills",
    "has_waiting",
]

MANY_BELLS = 10 * FOLD_AT_MOST
"""More than ten claims fold: claims do not keep up, or nobody claims."""
MANY_TALLIES = 1_000
FIGURES_LATE = 5 * MINUTE
GATES_AT_ONCE, MOST_STRETCHES = 1_000, 20
"""Gates that are held against the running jobs: of a queue with more, the next look goes on."""
LONG_OVERDUE = 10 * MINUTE
"""After which a gate that has not woken its lanes is told."""


async def has_waiting(store: Store, policy: Policy, counts: QueueCounts) -> bool:
    """Whether jobs of a queue wait for somebody to run them. A bell that nobody has folded may tell of a job that came,
    or of one that ended."""
    if () in policy.overrides.pauses:
        return False
    if counts.ready or not counts.bells:
        return counts.ready > 0
    return bool((await find_jobs(store, JobFilter(queue=policy.queue, state=State.READY), None, 1)).jobs)


def about_service(unserved: Mapping[bool | None, Mapping[str, int]]) -> Iterator[Finding]:
    """Jobs wait, and nobody is there to run them: by whether an engine does, the queues, each with how many workers of
    it are stopping. One command starts all of them."""
    for is_forwarded, queues in unserved.items():
        (first, *others), who = queues, "dispatcher" if is_forwarded else "worker"
        service = no_service(queues[first], is_forwarded=is_forwarded)
        message = f"no {who} serves {', '.join(queues)}, where jobs wait" if others else f"jobs wait, and {service}"
        yield Finding(
            check=f"no {who}",
            queue=None if others else first,
            message=message,
            remedy=f"start one: {start_command(*queues, is_forwarded=is_forwarded)}",
        )


async def about_gates(store: Store, queue: str) -> list[Finding]:
    """Gates that count jobs which do not run, or do not count jobs that do."""
    for _ in range(MOST_STRETCHES):
        counted = await store.count_gates(queue, GATES_AT_ONCE)
        if counted.found:
            others = f" (and {len(counted.found) - 1} more)" if len(counted.found) > 1 else ""
            return [
                Finding(
                    check="a gate is miscounted",
                    queue=queue,
                    message=f"{counted.found[0].words}{others}: its slots are not what its limit allows",
                    remedy="a worker of the queue corrects it within two minutes and records it (`fairlane audit`); if "
                    "it comes back, please report it with that entry",
                )
            ]
        if not counted.more:
            break
    return []


def about_bells(queue: str, counts: QueueCounts) -> Iterator[Finding]:
    if counts.bells > MANY_BELLS:
        yield Finding(
            check="bells pile up",
            queue=queue,
            message=f"{counts.bells:,} bells have not been folded: claims do not keep up, or nobody claims",
            remedy="start workers for this queue, or more of them",
        )


def about_figures(figures: Iterable[QueueFigures], now: Instant) -> Iterator[Finding]:
    """Stats that nobody adds up: every look has to, and takes longer and longer."""
    for each in figures:
        is_old = each.counted_at is not None and now - each.counted_at > FIGURES_LATE
        if each.uncounted >= MANY_TALLIES or (each.uncounted and is_old):
            known = (
                "none is" if each.counted_at is None else f"the last one that is was made at {_time(each.counted_at)}"
            )
            yield Finding(
                check="stats are behind",
                level=Level.WARNING,
                queue=each.queue,
                message=f"{each.uncounted:,} claims are not in the stored stats ({known}): what you see is right, but "
                "every look has to add them up",
                remedy="workers add them up, beside their jobs; start one for this queue, or look at the log of one",
            )


def about_standstills(
    found: Sequence[Standstill], policies: dict[str, Policy], minutes: dict[str, list[Minute]]
) -> Iterator[Finding]:
    """Jobs whose turn does not come, though their queue starts others."""
    for each in found:
        policy = policies[each.queue]
        if () in policy.overrides.pauses:
            continue
        queue = quote(each.queue)
        remedy = (
            f"keep what `fairlane explain --queue {queue}` says and report it; then let the queue be put in order "
            f"anew, with its limits in force throughout: fairlane pause {queue}; fairlane suspend {queue}; "
            f"fairlane unsuspend {queue}; fairlane resume {queue}"
        )
        if each.limit is None:
            who = key_words(dict(zip(policy.fair_by, each.key, strict=True))) or "the queue's only flow"
            message = f"{who} has jobs that could start, and no claim looks where it stands"
            yield Finding(check="stuck lane", queue=each.queue, message=message, remedy=remedy)
        elif each.since is not None and _has_started_since(minutes.get(each.queue, []), each.since):
            bound = policy.bound_named(each.limit)
            who = f" for {key_words(dict(zip(bound.limit.by, each.key, strict=True)))}" if bound and each.key else ""
            message = (
                f"{each.limit}{who} was to let {each.lanes:,} lanes go on at {_time(each.since)} and has not, while "
                "other jobs have started"
            )
            yield Finding(check="stuck lane", queue=each.queue, message=message, remedy=remedy)


def _has_started_since(minutes: Iterable[Minute], at: Instant) -> bool:
    """Whether claims have started something, well after that: where all slots are in use, nobody looks at any gate."""
    return any(each.started and each.minute * MINUTE > at + LONG_OVERDUE for each in minutes)


def _time(at: Instant) -> str:
    return f"{as_datetime(at - at % SECOND):%Y-%m-%d %H:%M:%S} UTC"
