"""Enqueueing: from calls to stored jobs, under the policies that are in force for their queues.

A job's keys, lane and payload are stamped here: they are, byte for byte, what limits see.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any
from uuid import UUID

from fairlane.clock import SECOND, Clock, Instant
from fairlane.codec import checked_key, encode_value
from fairlane.effects import ABSENT, Effects
from fairlane.errors import FairlaneError, InvalidJob, InvalidKey, PayloadTooLarge, UnknownQueue
from fairlane.job import BuiltEffects, NewJob, OnDead, Outcome, new_job_ids, with_trace
from fairlane.parameters import shown
from fairlane.policy.backlog import Joined, Verdicts, backlogs_of, joined_by, judge
from fairlane.policy.keys import BUILT_IN, KEYS_REMEMBERED, canonical_key, canonical_keys, lane_id
from fairlane.policy.partitions import (
    LEARNED_EVERY,
    Partition,
    differing,
    parse_partition,
    partition_name,
    partition_of,
    sibling,
    way_to,
)
from fairlane.policy.policy import Policy
from fairlane.policy.unique import Conflict, unique_key
from fairlane.store import records
from fairlane.store.protocol import Store
from fairlane.store.rows import Declared
from fairlane.task import Call, Foreseen, Progress, Task
from fairlane.telemetry.telemetry import Telemetry

BuildJob = Callable[[Call[Any]], NewJob]
"""Builds the job of a call, under the policies in force."""


class JobBuilder:
    """Builds jobs from calls of one task with the same options: what they have in common is worked out once.

    `build_follow_up` builds the jobs of `on_dead`, and is needed by calls that have it. If the policy takes numbers
    from jobs, `declared`, the queue's declaration in this program, says how. `trace` is the span of the producer.
    """

    def __init__(
        self,
        call: Call[Any],
        policy: Policy,
        max_payload: int,
        build_follow_up: BuildJob | None = None,
        declared: Policy | None = None,
        trace: dict[str, str] | None = None,
    ) -> None:
        self.task = task = call.task
        self.options = options = call.options
        self._policy = policy
        self._max_payload = max_payload
        self._build_follow_up = build_follow_up
        self._declared = declared
        self._priority = task.options.priority if options.priority is None else options.priority
        self._max_attempts = task.options.max_attempts if options.max_attempts is None else options.max_attempts
        self._unique = task.options.unique if options.unique is None else options.unique
        given = None if options.context is None else task.codec.encode_context(options.context, max_payload)
        # Not counted against the limit: no job is refused because of a trace.
        self._context = with_trace(given, trace)
        if self._priority and policy.sequence is not None:
            raise InvalidJob(
                f"task {task.name!r}: priority={self._priority} has no effect in queue {policy.queue!r}, whose jobs "
                f"run one after the other ({policy.sequence.limit!r}); leave it out"
            )
        if options.partition and policy.partition is None:
            raise InvalidJob(
                f"task {task.name!r}: queue {policy.queue!r} has no partition={options.partition}, it is not divided; "
                f"leave partition= out, or divide it: `fairlane partition {policy.queue} --to …`"
            )
        # Without keys and partitions, all their jobs are in one lane.
        self._keyless: tuple[dict[str, str | None], bytes, dict[str, str | None]] | None = None
        if task.options.keys is None and not policy.keys_of_job and not options.keys and policy.partition is None:
            self._keyless = {}, *_lane(policy.queue, self._priority, task.name, policy.lane_keys)

    def build(self, call: Call[Any], job: UUID) -> NewJob:
        """The job of a call."""
        task, options, policy, args, kwargs = self.task, self.options, self._policy, call.args, call.kwargs
        codec, priority = task.codec, self._priority
        if self._keyless is None:
            keys = _keys(task, policy, call)
            queue = policy.queue if policy.partition is None else _partition(call, job, policy, policy.partition, keys)
            lane, lane_keys = _lane(queue, priority, task.name, policy.lane_keys, *keys.items())
        else:
            queue = policy.queue
            keys, lane, lane_keys = self._keyless
        payload = codec.encode_call(args, kwargs, self._max_payload)
        unique, on_dead = self._unique, options.on_dead
        return NewJob(
            job,
            queue,
            task.name,
            priority,
            lane,
            lane_keys,
            keys,
            payload,
            self._max_attempts,
            options.delay,
            options.run_at,
            None if unique is None else unique_key(unique, task.name, args, kwargs, payload),
            None if on_dead is None else _on_dead(task, job, on_dead, self._build_follow_up, self._max_payload),
            _numbers(call, job, policy, self._declared, keys, priority) if policy.brought else None,
            self._context,
            options.id is not None,
        )


@lru_cache(maxsize=KEYS_REMEMBERED)
def _lane(
    queue: str, priority: int, task: str, names: tuple[str, ...], *keys: tuple[str, str | None]
) -> tuple[bytes, dict[str, str | None]]:
    """The lane of a job with these keys, and the keys that identify the lane. Neither is ever changed."""
    held = dict(keys)
    lane_keys = {name: task if name == "task" else held[name] for name in names}
    return lane_id(queue, priority, lane_keys), lane_keys


def _partition(call: Call[Any], job: UUID, policy: Policy, partition: Partition, keys: Mapping[str, str | None]) -> str:
    """The partition that a job goes to: that of its keys, unless the producer chooses another."""
    index, key = call.options.partition, call.options.partition_key
    if partition.index:
        chosen = "" if partition.by else f", or with using(queue={partition.of!r}, partition={partition.index})"
        raise InvalidJob(
            f"task {call.task.name!r}: {policy.queue!r} is a partition; {_named(call, partition.of)}, which finds it "
            f"by the job's keys{chosen}"
        )
    if index is None and key is ABSENT:
        home = partition.home_of(keys)
        # Without partition_by any partition will do: an id is as good as random, and a job always goes the same way.
        return partition_name(partition.of, partition_of((str(job),), partition.width) if home is None else home)
    what = f"task {call.task.name!r}: queue {partition.of!r}"
    if partition.by:
        raise InvalidJob(
            f"{what} is partitioned by {', '.join(partition.by)}, whose limits do not count a job that is elsewhere; "
            "leave partition= and partition_key= out, or declare the queue without partition_by"
        )
    if index is None:
        values = key if isinstance(key, tuple) else (key,)
        found = tuple(canonical_key("partition_key", value) for value in values)
        return partition_name(partition.of, 0 if key is None else partition_of(found, partition.width))
    if index >= partition.width:
        raise InvalidJob(
            f"{what} has partitions 0 to {partition.width - 1}, not partition={index!r}; give one of these"
        )
    return partition_name(partition.of, index)


def _named(call: Call[Any], queue: str) -> str:
    """How to name this queue instead of the one that the call names."""
    return f"declare the task with queue={queue!r}" if call.options.queue is None else f"enqueue to {queue!r}"


def built_effects(
    enqueue: Sequence[Call[Any]], put: Mapping[str, Any], delete: Sequence[str], build: BuildJob, max_value: int
) -> BuiltEffects:
    """Effects as the store takes them. What cannot be stored is refused here, before anything is written."""
    for call in enqueue:
        if not isinstance(call, Call):
            raise InvalidJob(f"a follow-up is a call, not a {type(call).__name__}; write task.call(…)")
        if call.options.tx is not None:
            raise InvalidJob(f"{call!r} names a transaction; a follow-up lands with its job, and takes none")
    return BuiltEffects(
        tuple(map(build, enqueue)),
        {checked_key(key): encode_value(key, value, max_value) for key, value in put.items()},
        tuple(map(checked_key, delete)),
    )


def _on_dead(
    task: Task[..., Any], job: UUID, effects: Effects, build: BuildJob | None, max_payload: int
) -> bytes | None:
    """The `on_dead` effects of a job, as they are stored with it; `None` if they are empty."""
    assert build is not None, "calls that declare something for their death are stamped by a producer"
    built = built_effects(effects.enqueue, effects.put, effects.delete, build, max_payload)
    if not built:
        return None
    taken = {job}
    for call in effects.enqueue:
        if call.options.id in taken:
            raise InvalidJob(
                f"task {task.name!r}: on_dead: {call!r} has the id {call.options.id} of another job; "
                "give each follow-up an id of its own, or none"
            )
        if call.options.id is not None:
            taken.add(call.options.id)
    encoded = OnDead(built, frozenset(taken - {job})).encode()
    if len(encoded) > max_payload:
        raise PayloadTooLarge(
            f"task {task.name!r}: what it declares for its death takes {len(encoded):,} bytes, more than the "
            f"{max_payload:,} allowed; store the data elsewhere and pass its address, or raise App(max_payload=…)"
        )
    return encoded


def _numbers(
    call: Call[Any], job: UUID, policy: Policy, declared: Policy | None, keys: Mapping[str, str | None], priority: int
) -> dict[str, float]:
    """The numbers that the policy takes from this job."""
    task = call.task.name
    given = call.options.context or {}
    for name in given.keys() & keys.keys():
        if given[name] != keys[name]:
            raise InvalidJob(
                f"task {task!r}: context: {name!r} is also a key of the job, {keys[name]!r}, which the policy's "
                "functions find under that name; give yours another name"
            )
    context = MappingProxyType({**given, **keys, "queue": policy.queue, "task": task, "priority": priority})
    numbers = {}
    for name in policy.brought:
        number = None if declared is None else declared.brought.get(name)
        if number is None or number.source is None:
            raise InvalidJob(
                f"queue {policy.queue!r}: the policy in force takes {name!r} from its jobs, and nothing here says how; "
                f"declare the queue in this program with the function that gives it"
            )
        try:
            numbers[name] = policy.check_brought(name, number.source(context))
        except Exception as error:
            raise InvalidJob(
                f"queue {policy.queue!r}: {name!r} could not be taken from job {job} of task {task!r}: "
                f"{type(error).__name__}: {error}; give what it asks for with using(context={{…}})"
            ) from error
    return numbers


def _keys(task: Task[..., Any], policy: Policy, call: Call[Any]) -> dict[str, str | None]:
    source, needed, given = task.options.keys, policy.keys_of_job, call.options.keys
    codec, args, kwargs = task.codec, call.args, call.kwargs
    if source is None and not given and codec.parameters.issuperset(needed):  # as a rule; and they are in order
        return {name: canonical_key(name, codec.argument(name, args, kwargs)) for name in needed}
    values: dict[str, object] = {}
    if source is None or isinstance(source, tuple):
        for name in needed if source is None else source:
            if name in codec.parameters:
                values[name] = codec.argument(name, args, kwargs)
            elif source is not None and name not in (given or ()):
                raise InvalidKey(
                    f"task {task.name!r}: keys= names {name!r}, which is not one of its parameters; "
                    f"enqueue with using(keys={{{name!r}: …}})"
                )
    else:
        try:
            values.update(_own(task, source(*args, **kwargs)))
        except FairlaneError:
            raise
        except Exception as error:
            raise InvalidKey(
                f"task {task.name!r}: its keys= function failed: {type(error).__name__}: {error}; let it return a "
                "mapping for every call, with None for what a job does not have"
            ) from error
    if given:
        values.update(_own(task, given))
    for name in needed:
        if name not in values:
            raise InvalidKey(
                f"queue {policy.queue!r} needs the key {name!r}, which task {task.name!r} does not carry; give the "
                f"task a parameter {name!r}, name it in keys=, or enqueue with using(keys={{{name!r}: …}})"
            )
    return canonical_keys(values)


def _own(task: Task[..., Any], given: object) -> Mapping[str, object]:
    """Keys as a user gives them, checked: valid names, and none that is built in."""
    if not isinstance(given, Mapping):
        raise InvalidKey(
            f"task {task.name!r}: keys are a mapping of names to values, not a {type(given).__name__}; give one, "
            "such as {'account': 'acme'}"
        )
    for name in given:
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidKey(
                f"task {task.name!r}: keys: {shown(name)} is not a key's name; use letters, digits and underscores"
            )
        if name in BUILT_IN:
            raise InvalidKey(f"task {task.name!r}: the key {name!r} is built in and cannot be given")
    return given


log = logging.getLogger("fairlane.app")

BUILD_AT_ONCE = 250
"""Jobs of a bulk that are built before other coroutines get a turn: another bulk may be on its way to the server."""
POLICIES_LAST = 30 * SECOND
"""Policies in force are read again after this time even if their versions are the same: an operator may have overridden
their limits."""


class Producing:
    """Builds and stores jobs. It remembers the policies in force."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        declared: Callable[[str], Sequence[Policy]],
        max_payload: int,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.policies: dict[str, Policy] = {}
        """In force, by queue; of one that is partitioned, by each partition."""
        self._store = store
        self._clock = clock
        self._declared = declared
        self._max_payload = max_payload
        self._versions: dict[str, int] = {}
        self._looked_at = self._refreshed_at = 0
        self._pacing = Pacing(store, clock)
        self.telemetry = telemetry or Telemetry()

    async def declare(self, partitions: Sequence[Policy]) -> None:
        """Make a queue known, as this program declares its partitions. What is stored counts where it differs in their
        number, or is not replaced by a declaration; then this says so."""
        declared = await self._store.declare(partitions[0])
        self._remember(declared)
        name, place = declared.policy.queue, declared.policy.partition
        if differs := differing(declared.policy, partitions[0]):
            log.warning(
                "queue %r: %s; jobs are sent and served by what is stored; to change that: %s",
                name,
                differs,
                way_to(declared.policy, partitions[0]),
            )
        if declared.is_drift:
            log.warning(
                "queue %r: the policy in force (version %d) differs from the one declared here; "
                "`fairlane policy apply` puts the declared one in force",
                name,
                declared.version,
            )
        for index in range(1, place.width if place is not None else 1):
            # Partition 0 says what holds, and only a program that was stopped here has left others out.
            self._remember(await self._store.declare(sibling(declared.policy, index)))
        self._looked_at = self._refreshed_at = self._clock.monotonic()

    async def stored(
        self, calls: Sequence[Call[Any]], tx: Any = None, progress: Progress | None = None, *, pace: bool = False
    ) -> tuple[list[NewJob], dict[UUID, Conflict], Verdicts]:
        """The jobs of these calls, stored; and the outcome of those that were not."""
        spans = self.telemetry.spans()
        sending: AbstractContextManager[Any] = nullcontext()
        if spans is not None:
            queues = dict.fromkeys(map(_queue_of, calls))
            sending = spans.sending(list(queues), list({call.task.name: None for call in calls}), len(calls))
        with sending as span:
            jobs = await self.built(calls)
            verdicts = await self.judged(jobs, tx, pace=pace)
            stored = [job for job in jobs if job.id not in verdicts.refused] if verdicts.refused else jobs
            report = None if progress is None else _reporting(progress, len(stored))
            conflicts = await self._store.enqueue(stored, tx, report)
            if spans is not None:
                spans.stored(span, stored)
        self.telemetry.enqueued(stored, conflicts, self._clock.now)
        return jobs, conflicts, verdicts

    async def foreseen(self, call: Call[Any]) -> Foreseen:
        """What enqueuing this call would do now."""
        (job,) = await self.built([call])
        if (await self.judged([job])).refused:
            return Foreseen(Outcome.FULL)
        conflict = (await self._store.foresee([job])).get(job.id)
        if conflict is None:
            return Foreseen(Outcome.ENQUEUED)
        return Foreseen(conflict.outcome, conflict.holder, conflict.differs)

    async def built(self, calls: Sequence[Call[Any]]) -> list[NewJob]:
        """The jobs that these calls ask for."""
        await self.look_again()
        ids = new_job_ids(self._clock.now(), len(calls))
        jobs: list[NewJob] = []
        job_builder: JobBuilder | None = None
        for number, (call, job) in enumerate(zip(calls, ids, strict=True), start=1):
            if job_builder is None or call.task is not job_builder.task or call.options is not job_builder.options:
                policy = self.policies.get(_queue_of(call)) or await self._learn(call)
                if call.options.on_dead is not None:
                    await self._learn_all(call.options.on_dead)
                job_builder = self._job_builder(call, policy)
            jobs.append(job_builder.build(call, call.options.id or job))
            if number % BUILD_AT_ONCE == 0:
                await asyncio.sleep(0)
        return jobs

    async def judged(self, jobs: Sequence[NewJob], tx: Any = None, *, pace: bool = False) -> Verdicts:
        """What full backlogs mean for these jobs. With `pace`, wait for room first, and refuse none."""
        if pace:
            await self._pacing.wait_for_jobs(self.policies, jobs)
        verdicts = await self._pacing.judge(self.policies, jobs, tx)
        if pace:
            return Verdicts({**verdicts.told, **verdicts.refused}, {})
        return await self._without_held(verdicts, jobs) if verdicts.refused else verdicts

    async def _without_held(self, verdicts: Verdicts, jobs: Sequence[NewJob]) -> Verdicts:
        """The same, but a job that will not be stored because its unique key is held is not refused: it adds nothing to
        a backlog, and its enqueue says who holds the key."""
        refused, unique = verdicts.refused, [job for job in jobs if job.unique is not None]
        if not any(job.id in refused for job in unique):
            return verdicts
        met = await self._store.foresee(unique)
        held = {job for job, each in met.items() if not each.outcome.is_stored and each.holder not in refused}
        return Verdicts(verdicts.told, {job: full for job, full in refused.items() if job not in held})

    async def admitted(self, calls: Sequence[Call[Any]]) -> list[NewJob]:
        """The jobs of these calls, without those that a full backlog refuses."""
        jobs = await self.built(calls)
        refused = (await self.judged(jobs)).refused
        for job in jobs:
            if job.id in refused:
                log.warning("job %s (%s) was refused: the backlog of its queue is full", job.id, job.task)
        return [job for job in jobs if job.id not in refused]

    async def wait_for_room(self, queue: str, keys: Mapping[str, object], timeout: int | None) -> bool:
        """Return True once no backlog of these keys is full, False after `timeout`."""
        await self.look_again()
        until = None if timeout is None else self._clock.now() + timeout
        policy = self.policies[queue]
        if policy.partition is not None and set(policy.partition.by) <= set(keys):
            policy = self.policies[partition_name(queue, policy.partition.home_of(canonical_keys(keys)) or 0)]
        return await self._pacing.wait_for_keys(policy, keys, until)

    def build(self, call: Call[Any]) -> NewJob:
        """The job of one call, without I/O: for handlers, which may run in a thread."""
        name = _queue_of(call)
        policy = self.policies.get(name) or self._source_of(name)
        if policy is None:
            raise _unknown(call)
        (job,) = new_job_ids(self._clock.now(), 1)
        return self._job_builder(call, policy).build(call, call.options.id or job)

    def _job_builder(self, call: Call[Any], policy: Policy) -> JobBuilder:
        declared = self._source_of(policy.queue) if policy.brought else None
        return JobBuilder(call, policy, self._max_payload, self.build, declared, self.telemetry.carried())

    async def look_again(self) -> None:
        """Look up the policies in force, if that was long ago: often whether there are others, which says where jobs
        go, and now and then what operators have changed."""
        now = self._clock.monotonic()
        if now - self._refreshed_at >= POLICIES_LAST:
            self._looked_at = self._refreshed_at = now
            stale = list(self.policies)
        elif now - self._looked_at >= LEARNED_EVERY:
            self._looked_at = now
            wholes = [name for name in self.policies if parse_partition(name) is None]
            versions = await self._store.run(records.policy_versions(wholes))
            stale = [name for name in wholes if versions.get(name) != self._versions.get(name)]
        else:
            return
        for name in stale:
            if (stored := await self._store.policy(name)) is not None:
                self._remember(stored)

    def _remember(self, declared: Declared) -> None:
        policy = declared.policy
        self.policies[policy.queue] = policy
        self._versions[policy.queue] = declared.version
        if policy.partition is not None:
            # Another program may have declared it, or it has grown meanwhile: one partition is enough to know of all.
            for index, name in enumerate(policy.partition.names):
                self.policies.setdefault(name, sibling(policy, index))

    def _source_of(self, queue: str) -> Policy | None:
        """What this program declares, with the functions that take numbers from jobs."""
        return next(iter(self._declared(queue)), None)

    async def _learn_all(self, effects: Effects) -> None:
        """Learn the policies of follow-ups, and of their own follow-ups."""
        for call in effects.enqueue:
            if isinstance(call, Call):  # else it is refused when it is stamped
                if _queue_of(call) not in self.policies:
                    await self._learn(call)
                if call.options.on_dead is not None:
                    await self._learn_all(call.options.on_dead)

    async def _learn(self, call: Call[Any]) -> Policy:
        """The policy of a queue that was declared after the app was opened, or by another program."""
        name = _queue_of(call)
        if declared := self._declared(name):
            await self.declare(declared)
        elif (stored := await self._store.policy(name)) is not None:
            self._remember(stored)
        else:
            raise _unknown(call)
        return self.policies[name]


def _reporting(progress: Progress, count: int) -> Callable[[int], None]:
    """Reports the progress of a bulk to the program. If that fails, it is logged and not called again."""
    has_failed = False

    def report(done: int) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            progress(done, count)
        except Exception:
            has_failed = True
            log.exception("enqueue_many: progress failed at %d of %d; the bulk goes on without it", done, count)

    return report


def _queue_of(call: Call[Any]) -> str:
    return call.options.queue_of(call.task)


def _unknown(call: Call[Any]) -> UnknownQueue:
    return UnknownQueue(f"task {call.task.name!r}: queue {_queue_of(call)!r} is unknown; declare it with app.queue(…)")


FIRST_LOOK, LAST_LOOK = SECOND // 20, SECOND
"""How long to wait for room before looking again: twice as long each time, up to a second."""
REMEMBERED = 10_000
"""How many full backlogs are remembered, so that each is logged once."""


class Pacing:
    """Counts waiting jobs, for queues with a backlog limit."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._full: set[tuple[str, str, tuple[str | None, ...]]] = set()

    async def judge(self, policies: Mapping[str, Policy], jobs: Sequence[NewJob], tx: Any = None) -> Verdicts:
        """What full backlogs mean for these jobs. Queues without backlogs are not asked about."""
        found = Verdicts({}, {})
        for policy in _bounded(policies, jobs):
            joined = joined_by(policy, jobs)
            if joined:
                ready = await self._store.count_ready(policy, list(dict.fromkeys(chain(*joined.values()))), tx)
                verdicts = judge(policy, joined, ready)
                found.told.update(verdicts.told)
                found.refused.update(verdicts.refused)
                self._log_full(policy, joined.values(), verdicts)
        return found

    async def wait_for_jobs(self, policies: Mapping[str, Policy], jobs: Sequence[NewJob]) -> None:
        """Return once no backlog that these jobs join is full."""
        for policy in _bounded(policies, jobs):
            joined = joined_by(policy, jobs).values()
            await self._wait(policy, {gate: bound for each in joined for gate, bound in each.items()}, None)

    async def wait_for_keys(self, policy: Policy, keys: Mapping[str, object], until: Instant | None) -> bool:
        """Return True once no backlog of these keys is full, False once `until` has come."""
        canonical = canonical_keys(keys)
        for name in sorted({name for bound in policy.backlogs for name in bound.limit.by}):
            if name not in keys:
                raise InvalidKey(f"queue {policy.queue!r} has a backlog by {name!r}; say whose: pace({name}=…)")
        priority = int(canonical.get("priority") or 0)
        return await self._wait(policy, backlogs_of(policy, priority, canonical), until)

    async def _wait(self, policy: Policy, joined: Joined, until: Instant | None) -> bool:
        pause = FIRST_LOOK
        while joined:
            ready = await self._store.count_ready(policy, list(joined))
            if all(ready[gate] < limit.max for gate, (_, limit, _) in joined.items()):
                return True
            now = self._clock.now()
            if until is not None and now >= until:
                return False
            await self._clock.sleep_until(now + pause if until is None else min(until, now + pause))
            pause = min(2 * pause, LAST_LOOK)
        return True

    def _log_full(self, policy: Policy, joined: Iterable[Joined], verdicts: Verdicts) -> None:
        """Log a backlog once when it becomes full, not for every job that finds it full."""
        asked = {(policy.queue, name, values) for each in joined for name, _, values in each.values()}
        met = (*verdicts.told.values(), *verdicts.refused.values())
        full = {(each.queue, each.limit, tuple(each.key.values())): each for each in met}
        for which, each in full.items():
            if which not in self._full:
                log.warning("%s; its producers should slow down", each.describe())
        known = self._full - asked if len(self._full) < REMEMBERED else set()
        self._full = known | full.keys()


def _bounded(policies: Mapping[str, Policy], jobs: Iterable[NewJob]) -> list[Policy]:
    named = dict.fromkeys(job.queue for job in jobs)
    return [policy for name in named if (policy := policies.get(name)) is not None and policy.backlogs]
