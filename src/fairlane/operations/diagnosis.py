"""What is wrong with queues and can be seen from outside. Looking changes nothing.

Each check is bounded: it reads counts, policies with their overrides, single rows by their ids, and of the jobs at most
what one page of a listing looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fairlane.job import State
from fairlane.operations.policies import Declarations, PolicyInForce, divided_by, show_policies
from fairlane.policy.keys import flow_id, gate_id
from fairlane.policy.overrides import Scope, pause_name, without_place
from fairlane.policy.partitions import parse_partition, whole_of
from fairlane.policy.policy import Policy
from fairlane.store.finding import find_jobs
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import FOLD_AT_MOST, QueueCounts, Store, Traces

__all__ = ["Finding", "diagnose"]

MANY_BELLS = 10 * FOLD_AT_MOST
"""More than ten claims fold: claims do not keep up, or nobody claims."""
MOST_LOOKS = 20
"""Keys of one queue that are looked for among its jobs, and reported: a look at ten thousand jobs takes a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, and what to do about it."""

    check: str
    queue: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class _Named:
    """Keys that somebody has named one by one, and the ids that a job with these keys leaves behind."""

    queue: str
    what: str
    scope: Scope
    flows: tuple[bytes, ...]
    gates: tuple[bytes, ...]


async def diagnose(store: Store, declared: Declarations | None = None) -> list[Finding]:
    """Look at every queue of a database, and at what the code declares."""
    findings: list[Finding] = []
    shown = {each.queue: each for each in await show_policies(store, declared, with_partitions=True)}
    findings += _unfinished(shown.values())
    for each in shown.values():
        whole = shown.get(whole_of(each.queue))
        findings += _width(each)
        # Of a queue with another width than its stored one that is said, and of its partitions what is not said of it.
        if not (whole is not None and (whole.is_divided_otherwise or (whole is not each and whole.is_drift))):
            findings += _drift(each)
        if each.policy is not None:
            findings += _overrides_without_place(each.policy)
            findings += await _left_behind(store, each.policy)
    return findings


async def _left_behind(store: Store, policy: Policy) -> list[Finding]:
    """What jobs and workers have left behind in a queue, or have not."""
    named = list(_named_keys(policy))
    flows = [flow for each in named for flow in each.flows]
    gates = [gate for each in named for gate in each.gates]
    traces = await store.traces(policy.queue, flows, gates)
    counts = await store.counts(policy.queue)
    findings = [_no_job_carries(each) for each in await _without_jobs(store, named, traces)]
    findings += _bells(policy.queue, counts)
    # A worker whose slots are all in use does not listen; what runs shows that there is one.
    if not (counts.running or traces.listeners or () in policy.overrides.pauses):
        findings += _no_worker(policy.queue, await _has_ready_jobs(store, policy.queue, counts))
    return findings


def _unfinished(shown: Iterable[PolicyInForce]) -> Iterator[Finding]:
    """Queues on their way to another number of partitions. New partitions know of it first, and the first one last."""
    places = [each.policy.partition for each in shown if each.policy is not None]
    for place in {place.of: place for place in places if place is not None and place.was is not None}.values():
        yield Finding(
            check="partitions",
            queue=place.of,
            message=f"it is on its way from {place.was} to {place.width} partitions: keys that move stand still",
            remedy=f"let that end, or go on with it: `fairlane partition {place.of} --to {place.width}`",
        )


def _width(each: PolicyInForce) -> Iterator[Finding]:
    """A queue that is divided otherwise than the code says."""
    if each.policy is None or each.declared is None or not each.is_divided_otherwise or parse_partition(each.queue):
        return
    (has, has_by), (wants, wants_by) = divided_by(each.policy), divided_by(each.declared)
    yield Finding(
        check="partitions",
        queue=each.queue,
        message=f"it has {has} (by {', '.join(has_by) or 'no key'}), and the code declares {wants} (by "
        f"{', '.join(wants_by) or 'no key'}): programs with this code are refused",
        remedy=f"declare partitions={has}, or change the queue: `fairlane partition {each.queue} --to {wants}`",
    )


def _drift(each: PolicyInForce) -> Iterator[Finding]:
    if not each.is_drift:
        return
    if each.policy is None:
        message = "the code declares it, and this database does not know it"
    else:
        changes = "; ".join(difference.describe() for difference in each.drift)
        message = f"the code declares another policy than version {each.version}, which is in force: {changes}"
    remedy = "`fairlane policy apply` puts the declared one in force"
    yield Finding(check="drift", queue=each.queue, message=message, remedy=remedy)


def _overrides_without_place(policy: Policy) -> Iterator[Finding]:
    for override in policy.overrides.all if parse_partition(policy.queue) is None else ():
        reason = without_place(policy, override)
        if reason is not None:
            yield Finding(
                check="override without effect",
                queue=policy.queue,
                message=f"{override.describe()}, which changes nothing: {reason}",
                remedy="clear it with `fairlane resume`, `limit clear` or `weight clear`",
            )


def _named_keys(policy: Policy) -> Iterator[_Named]:
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


def _named(policy: Policy, what: str, scope: Scope) -> _Named:
    keys = dict(scope)
    fair = () if policy.fair is None else policy.fair.by
    limits = [bound for bound in policy.keyed_limits if set(bound.limit.by) == set(keys)]
    return _Named(
        policy.queue,
        what,
        scope,
        flows=(flow_id(policy.queue, fair, tuple(keys[name] for name in fair)),) if set(fair) == set(keys) else (),
        gates=(
            gate_id(policy.queue, pause_name(tuple(keys)), tuple(keys.values())),
            *(policy.gate_of(bound, tuple(keys[name] for name in bound.limit.by)) for bound in limits),
        ),
    )


async def _without_jobs(store: Store, named: list[_Named], traces: Traces) -> list[_Named]:
    """Those that no job is known to carry: not where it waits or runs, and not among the newest jobs of the queue.

    Flows and gates are the cheap look. Idle ones are collected, and jobs that no claim has seen yet have none; so what
    they do not know is looked for among the jobs themselves.
    """
    unseen = [each for each in named if traces.found.isdisjoint((*each.flows, *each.gates))]
    return [each for each in unseen[:MOST_LOOKS] if not (await find_jobs(store, _jobs_with(each), None, 1)).jobs]


def _jobs_with(named: _Named) -> JobFilter:
    keys = dict(named.scope)
    return JobFilter(queue=named.queue, task=keys.pop("task", None), keys=keys)


def _no_job_carries(named: _Named) -> Finding:
    keys = ", ".join(f"{name}={value}" for name, value in named.scope)
    return Finding(
        check="key that no job carries",
        queue=named.queue,
        message=f"{named.what}, and no job with {keys} waits, runs, or is among the newest of the queue",
        remedy=f"compare with what jobs carry: `fairlane jobs list --queue {named.queue}`",
    )


def _bells(queue: str, counts: QueueCounts) -> Iterator[Finding]:
    if counts.bells > MANY_BELLS:
        yield Finding(
            check="bells pile up",
            queue=queue,
            message=f"{counts.bells:,} bells have not been folded: claims do not keep up, or nobody claims",
            remedy="start workers for this queue, or more of them",
        )


async def _has_ready_jobs(store: Store, queue: str, counts: QueueCounts) -> bool:
    """A bell that nobody has folded may tell of a job that came, or of one that ended."""
    if counts.ready or not counts.bells:
        return counts.ready > 0
    return bool((await find_jobs(store, JobFilter(queue=queue, state=State.READY), None, 1)).jobs)


def _no_worker(queue: str, has_ready_jobs: bool) -> Iterator[Finding]:
    if has_ready_jobs:
        yield Finding(
            check="no worker",
            queue=queue,
            message="jobs wait, none runs, and no worker listens",
            remedy=f"start one: `fairlane worker module:app --queues {queue}`",
        )
