"""From a call to a job: its keys, its lane, its payload. What is stamped here is, byte for byte, what limits see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from uuid import UUID

from fairlane.codec import encode_value
from fairlane.effects import ABSENT, Effects, checked_key
from fairlane.errors import FairlaneError, InvalidJob, InvalidKey, PayloadTooLarge
from fairlane.job import NewJob, OnDead, StampedEffects, with_trace
from fairlane.parameters import shown
from fairlane.policy.keys import BUILT_IN, KEYS_REMEMBERED, canonical_key, canonical_keys, lane_id
from fairlane.policy.partitions import Partition, partition_name, partition_of
from fairlane.policy.policy import Policy
from fairlane.policy.unique import unique_key
from fairlane.task import Call, Task

Stamp = Callable[[Call[Any]], NewJob]
"""Makes a job of a call, under the policies in force."""


def stamp(
    call: Call[Any],
    job: UUID,
    policy: Policy,
    max_payload: int,
    stamp_follow_up: Stamp | None = None,
    declared: Policy | None = None,
    trace: dict[str, str] | None = None,
) -> NewJob:
    """The job that a call asks for, under the policy in force for its queue.

    `stamp_follow_up` is for what it declares for its death; who has no such calls need not give it. Where the policy
    takes numbers from its jobs, the queue's declaration in this program says how. `trace` is the span it comes from.
    """
    return Stamper(call, policy, max_payload, stamp_follow_up, declared, trace).stamp(call, job)


class Stamper:
    """Stamps calls of one task that have the same options: what holds for all of them is found out once."""

    __slots__ = (
        "_context",
        "_declared",
        "_keyless",
        "_max_attempts",
        "_max_payload",
        "_policy",
        "_priority",
        "_stamp_follow_up",
        "_unique",
        "options",
        "task",
    )

    def __init__(
        self,
        call: Call[Any],
        policy: Policy,
        max_payload: int,
        stamp_follow_up: Stamp | None = None,
        declared: Policy | None = None,
        trace: dict[str, str] | None = None,
    ) -> None:
        self.task = task = call.task
        self.options = options = call.options
        self._policy = policy
        self._max_payload = max_payload
        self._stamp_follow_up = stamp_follow_up
        self._declared = declared
        self._priority = task.options.priority if options.priority is None else options.priority
        self._max_attempts = task.options.max_attempts if options.max_attempts is None else options.max_attempts
        self._unique = task.options.unique if options.unique is None else options.unique
        told = None if options.context is None else task.codec.encode_context(options.context, max_payload)
        # Beyond what a producer may fill: no job is refused because of a trace.
        self._context = with_trace(told, trace)
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
        # Without keys and partitions, all their jobs are of one lane.
        self._keyless: tuple[dict[str, str | None], bytes, dict[str, str | None]] | None = None
        if task.options.keys is None and not policy.stamped_keys and not options.keys and policy.partition is None:
            self._keyless = {}, *_lane(policy.queue, self._priority, task.name, policy.lane_keys)

    def stamp(self, call: Call[Any], job: UUID) -> NewJob:
        """The job that a call asks for."""
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
            None if on_dead is None else _on_dead(task, job, on_dead, self._stamp_follow_up, self._max_payload),
            _numbers(call, job, policy, self._declared, keys, priority) if policy.brought else None,
            self._context,
            options.id is not None,
        )


@lru_cache(maxsize=KEYS_REMEMBERED)
def _lane(
    queue: str, priority: int, task: str, names: tuple[str, ...], *keys: tuple[str, str | None]
) -> tuple[bytes, dict[str, str | None]]:
    """The lane of a job of these keys, and those that tell it apart. Nobody writes to them."""
    held = dict(keys)
    lane_keys = {name: task if name == "task" else held[name] for name in names}
    return lane_id(queue, priority, lane_keys), lane_keys


def _partition(call: Call[Any], job: UUID, policy: Policy, partition: Partition, keys: Mapping[str, str | None]) -> str:
    """The partition that a job goes to: where its keys belong, unless its producer says otherwise."""
    index, key = call.options.partition, call.options.partition_key
    if partition.index:
        chosen = "" if partition.by else f", or with using(queue={partition.of!r}, partition={partition.index})"
        raise InvalidJob(
            f"task {call.task.name!r}: {policy.queue!r} is a partition; {_named(call, partition.of)}, which finds it "
            f"by the job's keys{chosen}"
        )
    if index is None and key is ABSENT:
        home = partition.home_of(keys)
        # Without partition_by any partition will do: ids are as good as dice, and the same job goes the same way.
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
    """How to name a queue where the call names another."""
    return f"declare the task with queue={queue!r}" if call.options.queue is None else f"enqueue to {queue!r}"


def stamped_effects(effects: Effects, stamp: Stamp, max_value: int) -> StampedEffects:
    """Effects as the store takes them; whatever cannot be stored is refused here, before anything is."""
    for call in effects.enqueue:
        if not isinstance(call, Call):
            raise InvalidJob(f"a follow-up is a call, not a {type(call).__name__}; write task.call(…)")
        if call.options.tx is not None:
            raise InvalidJob(f"{call!r} names a transaction; a follow-up lands with its job, and takes none")
    return StampedEffects(
        tuple(stamp(call) for call in effects.enqueue),
        {checked_key(key): encode_value(key, value, max_value) for key, value in effects.put.items()},
        tuple(checked_key(key) for key in effects.delete),
    )


def _on_dead(task: Task[..., Any], job: UUID, effects: Effects, stamp: Stamp | None, max_payload: int) -> bytes | None:
    """What a job declares for its death, as it is stored with it; nothing, if it says nothing."""
    assert stamp is not None, "calls that declare something for their death are stamped by a producer"
    stamped = stamped_effects(effects, stamp, max_payload)
    if not stamped:
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
    encoded = OnDead(stamped, frozenset(taken - {job})).encode()
    if len(encoded) > max_payload:
        raise PayloadTooLarge(
            f"task {task.name!r}: what it declares for its death takes {len(encoded):,} bytes, more than the "
            f"{max_payload:,} allowed; store the data elsewhere and pass its address, or raise App(max_payload=…)"
        )
    return encoded


def _numbers(
    call: Call[Any], job: UUID, policy: Policy, declared: Policy | None, keys: Mapping[str, str | None], priority: int
) -> dict[str, float]:
    """What the policy takes from this job."""
    task = call.task.name
    given = call.options.context or {}
    for name in given.keys() & keys.keys():
        if given[name] != keys[name]:
            raise InvalidJob(
                f"task {task!r}: context: {name!r} is also a key of the job, {keys[name]!r}, which the policy's "
                "functions find under that name; give yours another name"
            )
    told = {**given, **keys, "queue": policy.queue, "task": task, "priority": priority}
    context = MappingProxyType(told)
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
    source, needed, given = task.options.keys, policy.stamped_keys, call.options.keys
    codec, args, kwargs = task.codec, call.args, call.kwargs
    if source is None and not given and codec.parameters.issuperset(needed):  # as a rule; and they are in order
        return {name: canonical_key(name, codec.argument(name, args, kwargs)) for name in needed}
    values: dict[str, object] = {}
    if source is None:
        for name in needed:
            if name in codec.parameters:
                values[name] = codec.argument(name, args, kwargs)
    elif isinstance(source, tuple):
        for name in source:
            if name in codec.parameters:
                values[name] = codec.argument(name, args, kwargs)
            elif name not in (given or ()):
                raise InvalidKey(
                    f"task {task.name!r}: keys= names {name!r}, which is none of its parameters; "
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
            raise InvalidKey(_missing(task, policy, name))
    return canonical_keys(values)


def _own(task: Task[..., Any], given: object) -> Mapping[str, object]:
    """Keys as a user gives them: names, and none of ours."""
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


def _missing(task: Task[..., Any], policy: Policy, name: str) -> str:
    return (
        f"queue {policy.queue!r} needs the key {name!r}, which task {task.name!r} does not carry; give the task a "
        f"parameter {name!r}, name it in keys=, or enqueue with using(keys={{{name!r}: …}})"
    )
