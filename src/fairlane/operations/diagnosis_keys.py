"""Keys that somebody has named and no job carries, and tasks that jobs wait for and nobody knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from shlex import quote

from fairlane.operations.findings import Finding, Level
from fairlane.operations.views import WorkerView
from fairlane.policy.keys import flow_id, gate_id
from fairlane.policy.overrides import Scope, pause_name, without_place
from fairlane.policy.policy import Policy
from fairlane.store.finding import find_jobs
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import KeyPage, LanesCounted

__all__ = ["NamedKey", "about_named_keys", "about_tasks", "named_keys"]

MOST_LOOKS = 20
"""Keys of one queue that are looked for among its jobs, and reported: a look at ten thousand jobs takes a while."""
MOST_TASKS = 200
TASK = ("task",)


@dataclass(frozen=True, slots=True)
class NamedKey:
    """Keys that somebody has named one by one, and the ids that a job with these keys leaves behind."""

    queue: str
    what: str
    scope: Scope
    flows: tuple[bytes, ...]
    gates: tuple[bytes, ...]


async def about_named_keys(store: Store, named: Sequence[NamedKey], found: Collection[bytes]) -> list[Finding]:
    """A weight, a limit or an override for a key of which there is no job: a slip of the pen, or a plan for later.
    `found` are the flows and gates that there are."""
    return [_no_job_carries(each) for each in await _without_jobs(store, named, found)]


async def about_tasks(
    store: Store, policies: Sequence[Policy], workers: Sequence[WorkerView], known: Collection[str] | None
) -> list[Finding]:
    """Tasks of waiting jobs of a queue, given by its partitions, that nobody knows: no live worker that serves it, or
    where there is none, not the app at hand. `known` are the tasks of that app."""
    names = [policy.queue for policy in policies]
    # Who reports no task at all says nothing about them.
    serving = [each for each in workers if each.tasks and not each.queues.keys().isdisjoint(names)]
    if not serving and known is None:
        return []
    findings: list[Finding] = []
    for task, jobs in sorted((await _waiting_by_task(store, policies[0], names)).items()):
        ignorant = sum(task not in each.tasks for each in serving)
        if ignorant == len(serving) and serving:
            who = "no worker that serves this queue knows it"
            findings.append(_unknown_task(names[0], task, jobs, who, Level.FAULT))
        elif ignorant:
            who = f"{ignorant} of {len(serving)} workers that serve this queue do not know it"
            findings.append(_unknown_task(names[0], task, jobs, who, Level.WARNING))
        elif not serving and known is not None and task not in known:
            findings.append(_unknown_task(names[0], task, jobs, "this app does not know it", Level.WARNING))
    return findings


async def _waiting_by_task(store: Store, policy: Policy, names: Sequence[str]) -> dict[str, int]:
    """How many jobs wait, by task, with those that are scheduled."""
    counts: dict[str, int] = {}
    if TASK in policy.scopes:
        page, scheduled = await store.ask(lambda moment: _by_task(moment, names))
        counts = {figures.key[0] or "": figures.waiting for _, figures in page.keys if figures.waiting}
        for lane in scheduled.lanes:
            task = lane.keys.get("task") or ""
            counts[task] = counts.get(task, 0) + lane.arrived
    return {task: count for task, count in counts.items() if task and count > 0}


def _by_task(moment: Moment, names: Sequence[str]) -> Looking[tuple[KeyPage, LanesCounted]]:
    page = yield from moment.list_keys(names, TASK, limit=MOST_TASKS)
    return page, (yield from moment.scheduled_by_lane(names))


def _unknown_task(queue: str, task: str, jobs: int, who: str, level: Level) -> Finding:
    waiting = "1 job waits" if jobs == 1 else f"{jobs:,} jobs wait"
    return Finding(
        check="unknown task",
        level=level,
        queue=queue,
        message=f"{waiting} for task {task!r}, and {who}",
        remedy="deploy code that registers it, under this name; or "
        f"`fairlane jobs cancel --queue {quote(queue)} --task {quote(task)} --dry-run`",
    )


def named_keys(policy: Policy) -> Iterator[NamedKey]:
    """Every key that the policy or an override names. All partitions have the same ones: they are named once."""
    if policy.partition is not None and policy.partition.index:
        return
    if policy.fair is not None:
        (name, *_) = policy.fair.by
        for value in policy.fair.weights:
            yield _named(policy, f"Fair gives {name}={value} a weight", ((name, value),))
    for bound in policy.bound:
        for value in bound.named or ():
            (name,) = bound.limit.by
            yield _named(policy, f"{bound.name} names {name}={value}", ((name, value),))
    for override in policy.overrides.all:
        # Any priority is possible, and none of them is a key that jobs are listed by.
        if override.scope and "priority" not in dict(override.scope) and without_place(policy, override) is None:
            yield _named(policy, f"an override says that {override.describe()}", override.scope)


def _named(policy: Policy, what: str, scope: Scope) -> NamedKey:
    keys = dict(scope)
    flow = tuple(keys[name] for name in policy.fair_by) if policy.is_flow(keys) else None
    limits = [bound for bound in policy.keyed_limits if set(bound.limit.by) == set(keys)]
    return NamedKey(
        policy.queue,
        what,
        scope,
        flows=() if flow is None else (flow_id(policy.queue, policy.fair_by, flow),),
        gates=(
            gate_id(policy.queue, pause_name(tuple(keys)), tuple(keys.values())),
            *(policy.gate_of(bound, tuple(keys[name] for name in bound.limit.by)) for bound in limits),
        ),
    )


async def _without_jobs(store: Store, named: Sequence[NamedKey], found: Collection[bytes]) -> list[NamedKey]:
    """Those that no job is known to carry: not where it waits or runs, and not among the newest jobs of the queue.

    Flows and gates are the cheap look. Idle ones are collected, and jobs that no claim has seen yet have none; so what
    they do not know is looked for among the jobs themselves.
    """
    unseen = [each for each in named if not any(id in found for id in (*each.flows, *each.gates))]
    return [each for each in unseen[:MOST_LOOKS] if not (await find_jobs(store, _jobs_with(each), None, 1)).jobs]


def _jobs_with(named: NamedKey) -> JobFilter:
    keys = dict(named.scope)
    return JobFilter(queue=named.queue, task=keys.pop("task", None), keys=keys)


def _no_job_carries(named: NamedKey) -> Finding:
    keys = ", ".join(f"{name}={value}" for name, value in named.scope)
    return Finding(
        check="key that no job carries",
        level=Level.NOTE,
        queue=named.queue,
        message=f"{named.what}, and no job with {keys} waits, runs, or is among the newest of the queue",
        remedy=f"compare with what jobs carry: `fairlane jobs list --queue {named.queue}`",
    )
