"""What is wrong and can be seen from outside: with policies, keys, queues, schedules, workers and the database. Looking
changes nothing.

Each check is bounded: it reads counts, policies with their overrides, single rows by their ids, and of the jobs at most
what one page of a listing looks at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fairlane.explaining import is_routed
from fairlane.operations.diagnosis_database import about_database, about_no_database, about_pressure, about_time
from fairlane.operations.diagnosis_keys import about_named_keys, about_tasks, named_keys
from fairlane.operations.diagnosis_policies import about_policies
from fairlane.operations.diagnosis_queues import (
    LONG_OVERDUE,
    about_bells,
    about_figures,
    about_gates,
    about_service,
    about_standstills,
    has_waiting,
)
from fairlane.operations.diagnosis_schedules import about_schedules
from fairlane.operations.diagnosis_workers import about_reported_tasks, about_workers
from fairlane.operations.findings import Finding, by_level
from fairlane.operations.policies import Declarations, show_policies
from fairlane.operations.seeing_workers import list_workers
from fairlane.operations.views import WorkerView
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import forwarded_to_an_engine
from fairlane.store.protocol import QueueCounts, Store
from fairlane.store.stats_values import serves

__all__ = ["about_no_database", "diagnose", "findings_at_a_glance"]

MOST_STANDSTILLS = 5
"""Of each queue and kind."""


async def diagnose(
    store: Store,
    declared: Declarations | None = None,
    tasks: Collection[str] | None = None,
    forwarded: Collection[str] | None = (),
) -> list[Finding]:
    """Look at a database and at every queue in it, at its workers, and at what the code declares; the worst first.
    `tasks` are those that the program at hand knows, if it is one that runs them; `forwarded`, the queues that it
    leaves to an engine, or `None` if there is no program at hand."""
    shown = await show_policies(store, declared, with_partitions=True)
    policies = {each.queue: each.policy for each in shown if each.policy is not None}
    workers = (await list_workers(store)).workers
    alive = [each for each in workers if each.takes_jobs]
    seen = {queue for each in workers if each.is_dispatcher for queue in each.queues}
    unserved: dict[bool | None, dict[str, int]] = {}
    findings = [*about_database(await store.health()), *about_workers(workers), *about_policies(shown)]
    for policy in policies.values():
        counts = await store.counts(policy.queue)
        findings += await _about_one(store, policy, counts)
        if not any(serves(each.queues, [policy.queue]) for each in alive) and await has_waiting(store, policy, counts):
            was_seen = whole_of(policy.queue) in seen
            is_forwarded = forwarded_to_an_engine(policy.queue, forwarded, was_seen=was_seen)
            if is_forwarded is None:
                is_forwarded = await is_routed(store, policy.queue) or None
            stopping = sum(not each.is_late and serves(each.queues, [policy.queue]) for each in workers)
            unserved.setdefault(is_forwarded, {})[whole_of(policy.queue)] = stopping
    findings += about_service(unserved)
    unknown = await _about_tasks(store, policies, alive, tasks)
    findings += [*unknown, *about_reported_tasks(alive, unknown)]
    findings += await _about_all(store, policies)
    time = await store.time()
    findings += [*about_time(time), *about_schedules(await store.schedules(), time, has_worker=bool(alive))]
    return by_level(findings)


async def findings_at_a_glance(store: Store, workers: Sequence[WorkerView]) -> list[Finding]:
    """What workers report and what presses the database: cheap enough for every look at an overview."""
    pressing = about_pressure(await store.health(brief=True))
    return by_level([*about_workers(workers), *about_reported_tasks(workers), *pressing])


async def _about_one(store: Store, policy: Policy, counts: QueueCounts) -> list[Finding]:
    """What jobs and workers have left behind in a queue, or have not."""
    queue, named = policy.queue, list(named_keys(policy))
    flows = [flow for each in named for flow in each.flows]
    gates = [gate for each in named for gate in each.gates]
    traces = await store.traces(queue, flows, gates)
    return [
        *await about_named_keys(store, named, traces.found),
        *about_bells(queue, counts),
        *await about_gates(store, queue),
    ]


async def _about_tasks(
    store: Store, policies: dict[str, Policy], alive: list[WorkerView], tasks: Collection[str] | None
) -> list[Finding]:
    whole: dict[str, list[Policy]] = {}
    for name, policy in policies.items():
        whole.setdefault(whole_of(name), []).append(policy)
    return [finding for parts in whole.values() for finding in await about_tasks(store, parts, alive, tasks)]


async def _about_all(store: Store, policies: dict[str, Policy]) -> list[Finding]:
    names, now = list(policies), await store.now()
    overdue = now - LONG_OVERDUE
    found = await store.standstills(names, overdue, MOST_STANDSTILLS)
    minutes = await store.ask(lambda moment: moment.minutes(names, overdue)) if found else {}
    figures = await store.ask(lambda moment: moment.survey(names))
    return [*about_figures(figures, now), *about_standstills(found, policies, minutes)]
