"""Queues, partitions, limits and jobs, found by the names that operators give."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, microseconds
from fairlane.errors import ConfigurationError, InvalidOverride
from fairlane.job import State
from fairlane.policy.keys import canonical_keys
from fairlane.policy.overrides import Scope
from fairlane.policy.partitions import parse_partition, partition_name
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.store import operators, records
from fairlane.store.operators import Cursor, JobFilter, JobPage
from fairlane.store.protocol import Store
from fairlane.store.rows import Declared, not_among

_PER = re.compile(r"(?P<kind>[^/:]+)/(?P<per>[^:#]+)(?P<rest>.*)\Z")


async def in_force(store: Store, queue: str) -> Declared:
    """The policy of a queue, with what operators have changed; or `UnknownQueue`."""
    found = await store.policy(queue)
    if found is None:
        raise not_among(queue, await store.run(records.queues()))
    return found


async def partitions_of(store: Store, queue: str) -> list[str]:
    """Every partition of a queue that the database knows, in order: also those that it has no more. Of a partition that
    is named by itself, only that one; `UnknownQueue` where there is none."""
    await in_force(store, queue)
    return await known_partitions(store, queue)


def scope_of(keys: Mapping[str, object] | None = None, task: str | None = None) -> Scope:
    """Keys as overrides name them."""
    if keys is not None and not isinstance(keys, Mapping):
        raise ConfigurationError(f"keys={keys!r} are none; give a mapping, such as {{'account': 'acme'}}")
    given = dict(keys or {})
    if task is not None:
        if given.get("task", task) != task:
            raise ConfigurationError(f"the task is given twice: {given['task']!r} and {task!r}")
        given["task"] = task
    return tuple(canonical_keys(given).items())


def find_limit(policy: Policy, text: str, scope: Scope) -> BoundLimit:
    """Find a limit by its name, its kind or its keys; an error if that is ambiguous."""
    wanted = _normalized(text)
    exact = [bound for bound in policy.bound if bound.name == wanted]
    meant = exact or [bound for bound in policy.bound if wanted in _forms(bound)]
    if len(meant) > 1:
        names = {name for name, _ in scope}
        meant = [bound for bound in meant if set(bound.limit.by) == names] or meant
    match meant:
        case [bound]:
            return bound
        case []:
            known = ", ".join(bound.name for bound in policy.bound) or "none"
            raise InvalidOverride(f"queue {policy.queue!r} has no limit {text!r}; its limits: {known}")
        case several:
            names_of = ", ".join(bound.name for bound in several)
            raise InvalidOverride(f"queue {policy.queue!r}: {text!r} may be any of {names_of}; give one of these names")


def _forms(bound: BoundLimit) -> set[str]:
    """`rate/60s:endpoint` answers to `rate`, `rate/60s`, `rate:endpoint` and `endpoint` too."""
    what, _, by = bound.name.partition(":")
    by = by.partition("#")[0].partition("@")[0]
    kind = what.partition("/")[0]
    return {kind, what, f"{kind}:{by}"} | ({by} if by else set())


def _normalized(text: str) -> str:
    """`Rate/1m:endpoint` as `rate/60s:endpoint`."""
    what, separator, by = text.strip().partition(":")
    text = f"{what.lower()}{separator}{by}"
    found = _PER.match(text)
    if found is None:
        return text
    try:
        per = microseconds(found["per"])
    except ConfigurationError:
        return text
    return f"{found['kind']}/{per / SECOND:g}s{found['rest']}"


async def known_partitions(store: Store, queue: str) -> list[str]:
    """A queue and every partition of it that the database knows, in order: also those that it has no more. Of a
    partition that is named by itself, only that one."""
    return partitions_among([] if parse_partition(queue) else await store.run(records.queues()), queue)


def partitions_among(names: Iterable[str], queue: str) -> list[str]:
    """A queue and its partitions among the names of all queues."""
    alone = parse_partition(queue)
    if alone is not None:
        return [partition_name(*alone)]
    places = [parse_partition(name) for name in names]
    return [queue, *(partition_name(*place) for place in sorted(filter(None, places)) if place[0] == queue)]


async def find_jobs(store: Store, wanted: JobFilter, after: str | None = None, limit: int = 100) -> JobPage:
    """A page of the jobs that fit, the newest first; of a queue, those of all its partitions."""
    names = [] if wanted.queue is None else await known_partitions(store, wanted.queue)
    if len(names) <= 1:
        return await store.run(
            operators.find_jobs(msgspec.structs.replace(wanted, queue=next(iter(names), None)), after, limit)
        )
    if wanted.state is State.RUNNING or wanted.is_by_end:
        # Such listings walk the jobs of all queues anyway.
        page = await store.run(operators.find_jobs(msgspec.structs.replace(wanted, queue=None), after, limit))
        return JobPage([job for job in page.jobs if job.queue in names], page.after)
    pages = [
        await store.run(operators.find_jobs(msgspec.structs.replace(wanted, queue=name), after, limit))
        for name in names
    ]
    # Where one of the walks has not come to its end, the others may be ahead of it: what is beyond waits for its page.
    reached = max((UUID(hex=page.after) for page in pages if page.after is not None), default=None)
    jobs = [job for page in pages for job in page.jobs if reached is None or job.id >= reached]
    jobs.sort(key=lambda job: job.id, reverse=True)
    if len(jobs) > limit:
        return JobPage(jobs[:limit], Cursor(jobs[limit - 1].id).encode())
    return JobPage(jobs, None if reached is None else Cursor(reached).encode())
