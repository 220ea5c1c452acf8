"""A queue's policy as a whole: its fair share, its limits, the keys it declares, and how far priority reaches.

It is stored as a document. People may leave defaults out when they write one, and read it as sentences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, partial
from hashlib import sha256
from itertools import combinations
from typing import Any

import msgspec

from fairlane.clock import SECOND
from fairlane.errors import ConfigurationError, FairlaneError, InvalidPolicy
from fairlane.parameters import shown
from fairlane.policy.fair import Fair, checked_weight
from fairlane.policy.gates import AT_REST, FromJob, Reason
from fairlane.policy.keys import BUILT_IN, NAME, By, Keys, flow_id, gate_id, normalize_by, select, shared_gate_id
from fairlane.policy.limits import KINDS, Limit, Obstacle, is_number, is_whole, read_limit
from fairlane.policy.overrides import (
    NO_OVERRIDES,
    OPEN,
    SHUT,
    Kind,
    Override,
    Overrides,
    pause_name,
    paused_by,
    suspended,
)
from fairlane.policy.partitions import MOVING, Partition, checked_partition, is_crossing
from fairlane.policy.sequence import Sequence

PRIORITY_STEP = 60 * SECOND
LONGEST_STEP = 100 * 366 * 86_400 * SECOND
WEIGHT = "weight"
"""The name under which a job brings its flow's weight along; limits have a colon in theirs."""
_QUEUE_NAME = re.compile(rf"{NAME}\Z")


class Level(IntEnum):
    """What a shut gate stops: the queue's whole batch, a flow, or a lane."""

    QUEUE = 0
    FLOW = 1
    LANE = 2


@dataclass(frozen=True, slots=True)
class BoundLimit:
    """A limit in its place in a policy."""

    name: str
    limit: Limit
    level: Level

    @property
    def named(self) -> Mapping[str, float] | None:
        """The keys that it holds for, if it does not hold for all."""
        return self.limit.named or None

    @property
    def from_job(self) -> FromJob | None:
        """Where its number comes from, if jobs bring it along."""
        return self.limit.from_job

    @property
    def is_shared(self) -> bool:
        return self.limit.name is not None

    @property
    def is_the_same_for_all(self) -> bool:
        """Whether it holds for every key as it is declared."""
        return self.limit.has_one_number and self.limit.is_declared

    @property
    def is_stop(self) -> bool:
        """Whether it lets nothing start, of any key: its number is 0."""
        return self.is_the_same_for_all and self.limit.room_at(AT_REST, 0) <= 0

    def is_stop_with(self, value: float) -> bool:
        """Whether it lets nothing start of a key for which a job brings this number."""
        return self.limit.with_bound(value).room_at(AT_REST, 0) <= 0


Place = tuple[bytes, BoundLimit, tuple[str | None, ...]]
"""A gate by its id, with its limit and the values of its key."""

_MOVING = BoundLimit(MOVING, Obstacle(Reason.MOVING), Level.LANE)


@dataclass(frozen=True)
class Policy:
    """What a queue enforces. It is validated as a whole where it is declared."""

    queue: str
    fair: Fair | None = None
    limits: tuple[Limit, ...] = ()
    keys: By = ()
    priority_step: int = PRIORITY_STEP
    partition: Partition | None = None
    """Its place among the partitions of a queue, if it is one of several."""
    overrides: Overrides = field(default=NO_OVERRIDES, compare=False, repr=False)
    """Changes by operators. They are not part of the declaration."""

    def __post_init__(self) -> None:
        name: object = self.queue
        if not isinstance(name, str) or _QUEUE_NAME.match(name) is None:
            raise InvalidPolicy(
                f"queue {shown(self.queue)}: a queue's name has letters, digits, '_', '.', '-' and at most 120 of them"
            )
        what = f"queue {self.queue!r}"
        # Lists are welcome; what is kept is the one form that `decode` gives back.
        object.__setattr__(self, "limits", checked_limits(what, "limits", self.limits))
        object.__setattr__(self, "keys", normalize_by(what, self.keys, "keys"))
        if self.fair is not None and not isinstance(self.fair, Fair):
            raise InvalidPolicy(f"{what}: fair={shown(self.fair)} is not a fair share; use Fair(by=…)")
        if not isinstance(self.overrides, Overrides):
            raise InvalidPolicy(f"{what}: overrides={shown(self.overrides)} is not a set of overrides; leave it out")
        self._check_sequence(what)
        if self.partition is not None:
            checked_partition(what, self.partition)
        if not is_whole(self.priority_step) or not 0 <= self.priority_step <= LONGEST_STEP:
            raise InvalidPolicy(
                f"{what}: priority_step={shown(self.priority_step)}: the priority step is a time from 0 to a hundred "
                "years; leave it out for 60 s"
            )
        if built_in := sorted(set(self.keys) & set(BUILT_IN)):
            raise InvalidPolicy(f"{what}: every job has a {built_in[0]}; leave it out of keys={self.keys!r}")
        names = [limit.name for limit in self.limits if limit.name is not None]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidPolicy(f"{what}: the limit {twice[0]!r} is declared twice; give the other one another name")
        missing = sorted(set(self._named()) - set(self.keys))
        if self.keys and missing:
            raise InvalidPolicy(
                f"{what}: its policy looks at {', '.join(missing)}, which keys={self.keys!r} leaves out"
            )

    def _check_sequence(self, what: str) -> None:
        sequences = [limit for limit in self.limits if isinstance(limit, Sequence)]
        if not sequences:
            return
        sequence, *more = sequences
        if more:
            raise InvalidPolicy(
                f"{what}: {sequence!r} and {more[0]!r}: a queue has one sequence; name all keys in its by="
            )
        for each in (self.fair, *self.limits):
            outside = [name for name in (each.by if each else ()) if name not in sequence.by]
            if outside and outside[0] == "priority":
                raise InvalidPolicy(f"{what}: {each!r} looks at the priority, which has no part in {sequence!r}")
            if outside:
                by = (*sequence.by, *outside)
                raise InvalidPolicy(
                    f"{what}: {each!r} looks at {outside[0]!r}, by which {sequence!r} does not tell its jobs apart; "
                    f"put it into the sequence: Sequence(by={by!r})"
                )

    def _named(self) -> list[str]:
        scopes = [self.fair_by, *(limit.by for limit in self.limits)]
        scopes.append(self.partition.by if self.partition else ())
        return sorted({name for by in scopes for name in by} - set(BUILT_IN))

    @cached_property
    def keys_of_job(self) -> By:
        """The keys that a job must carry: those declared, else all that the policy looks at."""
        return tuple(sorted(self.keys)) or tuple(self._named())

    @cached_property
    def lane_keys(self) -> By:
        """The keys that distinguish lanes, besides priority. The task is always one, so that it can be paused alone.

        With a sequence, the lane is the sequence's key, and neither task nor priority takes part.
        """
        if self.sequence is not None:
            return tuple(sorted(self.sequence.limit.by))
        return tuple(sorted((*self.keys_of_job, "task")))

    @cached_property
    def scopes(self) -> tuple[By, ...]:
        """What its keys are told apart by, for people: that of its turns first, then those of its limits, then every
        key that it declares and the task, as far as its lanes can tell them apart."""
        known = {*self.lane_keys, "priority"}
        looked_at = [self.fair_by, *(bound.limit.by for bound in self.bound)]
        scopes = [*looked_at, *((name,) for name in self.keys_of_job), ("task",)]
        return tuple(dict.fromkeys(by for by in scopes if by and known.issuperset(by)))

    @cached_property
    def bound(self) -> tuple[BoundLimit, ...]:
        """The limits with their names and levels. Twins (same kind, same scope) are numbered."""
        seen: dict[str, int] = {}
        bound = []
        for limit in self.limits:
            if limit.name is not None:
                name = shared_identity(limit)
            else:
                seen[limit.identity] = nth = seen.get(limit.identity, 0) + 1
                name = limit.identity if nth == 1 else f"{limit.identity}#{nth}"
            bound.append(BoundLimit(name, limit, self._level(limit.by)))
        return tuple(bound)

    def _level(self, by: By) -> Level:
        return Level.QUEUE if not by else Level.FLOW if set(by) <= set(self.fair_by) else Level.LANE

    def is_own(self, bound: BoundLimit) -> bool:
        """Whether each partition keeps this limit for itself, on purpose."""
        own = 0 if self.partition is None else self.partition.own
        return bound in self.bound[len(self.bound) - own :]

    def is_crossing(self, bound: BoundLimit) -> bool:
        """Whether it is shared by the partitions of this queue, and by nobody else."""
        return self.partition is not None and is_crossing(self.partition.of, bound.limit)

    @cached_property
    def sequence(self) -> BoundLimit | None:
        """The limit that lets jobs run one after the other."""
        return next((bound for bound in self.bound if isinstance(bound.limit, Sequence)), None)

    def overridden(self, overrides: Overrides) -> Policy:
        return replace(self, overrides=overrides)

    def without(self, ended: list[Override]) -> Policy:
        """This policy, once these overrides have ended."""
        return self.overridden(self.overrides.without(ended)) if ended else self

    @cached_property
    def _by_name(self) -> dict[str, BoundLimit]:
        return {bound.name: bound for bound in self.bound}

    def bound_named(self, name: str) -> BoundLimit | None:
        """A limit by the name of its gates. A pause has one too, also when nothing is paused any more."""
        found = self._by_name.get(name)
        if name == MOVING:
            return _MOVING
        if found is None and (by := paused_by(name)) is not None:
            return BoundLimit(name, Obstacle(Reason.PAUSED, by), self._level(by))
        return found

    def place_of(self, override: Override) -> tuple[BoundLimit, tuple[str | None, ...]] | None:
        """The limit and the key whose room an override changes; `None`: it changes no room, or has no effect."""
        values = dict(override.scope)
        match override.kind:
            case Kind.PAUSE:
                bound = self.bound_named(pause_name(tuple(values)))
            case Kind.LIMIT:
                bound = self.bound_named(override.limit or "")
            case _:
                return None
        if bound is None or set(bound.limit.by) != set(values):
            return None
        return bound, tuple(values[name] for name in bound.limit.by)

    def limit_at(self, bound: BoundLimit, values: tuple[str | None, ...], value: float | None = None) -> Limit | None:
        """What holds for one key: the limit as it is declared, with the number that a job has brought along, or as an
        operator has changed it. `None`: it does not name this key.
        """
        limit = bound.limit.at(values, value)
        if limit is None:
            return None
        if isinstance(limit, Obstacle):
            if limit.reason is not Reason.PAUSED:
                return limit
            return SHUT if values in self.overrides.pauses.get(limit.by, {}) else OPEN
        if self.overrides.limits:
            scope = tuple(sorted(zip(limit.by, values, strict=True)))
            override = self.overrides.limits.get((bound.name, scope))
            if override is not None and override.value is not None:
                limit = bound.limit.with_bound(override.value)
        return suspended(limit) if self.overrides.suspension and not bound.is_shared else limit

    def is_stopped(self, bound: BoundLimit, values: tuple[str | None, ...], value: float | None = None) -> bool:
        """Whether a limit lets nothing of a key start although nothing of it runs: it is paused, or its number is 0."""
        limit = self.limit_at(bound, values, value)
        return limit is not None and limit.room_at(AT_REST, 0) <= 0

    @cached_property
    def stopped(self) -> tuple[tuple[BoundLimit, tuple[str | None, ...]], ...]:
        """The limits and keys that are stopped, of those that it names or that operators have changed."""
        places: list[tuple[BoundLimit, tuple[str | None, ...]]] = []
        places += [(bound, (key,)) for bound in self.keyed_limits for key in bound.named or ()]
        places += [place for each in self.overrides.all if (place := self.place_of(each)) is not None and place[1]]
        return tuple(place for place in places if self.is_stopped(*place))

    @cached_property
    def queue_gates(self) -> tuple[tuple[bytes, BoundLimit], ...]:
        bounds = [b for b in self.bound if b.level is Level.QUEUE]
        if () in self.overrides.pauses:
            bounds.append(BoundLimit(pause_name(()), SHUT, Level.QUEUE))
        return tuple((self.gate_of(b, ()), b) for b in bounds)

    @cached_property
    def keyed_limits(self) -> tuple[BoundLimit, ...]:
        return tuple(b for b in self.bound if b.level is not Level.QUEUE)

    @cached_property
    def _keyed_pauses(self) -> tuple[tuple[BoundLimit, frozenset[tuple[str | None, ...]]], ...]:
        return tuple(
            (BoundLimit(pause_name(by), Obstacle(Reason.PAUSED, by), self._level(by)), frozenset(values))
            for by, values in self.overrides.pauses.items()
            if by
        )

    @cached_property
    def has_keyed_gates(self) -> bool:
        """Whether a gate may hold back some lanes and not others."""
        return bool(self.keyed_limits or self._keyed_pauses or (self.partition and self.partition.is_guarded))

    @cached_property
    def _holding(self) -> list[BoundLimit]:
        """The limits that can hold jobs back."""
        return [bound for bound in self.bound if not bound.limit.is_of_producers]

    @cached_property
    def paceable(self) -> frozenset[str]:
        """Limits whose next starts may be handed out ahead of their time: what such a job holds meanwhile could only be
        used by jobs that wait for the same gate. Not beside limits that shut by what they learn from jobs that end."""
        counting = self._holding
        if any(bound.is_shared or bound.limit.is_learning for bound in counting):
            return frozenset()
        return frozenset(
            bound.name
            for bound in counting
            if bound.limit.is_of_starts and all(set(bound.limit.by) <= set(other.limit.by) for other in counting)
        )

    @cached_property
    def opens_by_ends(self) -> bool:
        """Whether the end of a job may let another start: not where rates alone hold jobs back."""
        return not self._holding or any(bound.is_shared or not bound.limit.is_of_starts for bound in self._holding)

    @cached_property
    def stops_flows(self) -> bool:
        """Whether anything may hold back a whole flow."""
        return any(b.level is Level.FLOW for b in (*self.keyed_limits, *(b for b, _ in self._keyed_pauses)))

    def gate_of(self, bound: BoundLimit, values: tuple[str | None, ...]) -> bytes:
        return gate_id(self.queue, bound.name, values)

    def gates_of(self, priority: int, keys: Keys) -> list[tuple[bytes, BoundLimit]]:
        """The keyed gates that a lane's jobs pass."""
        gates = [
            (self.gate_of(bound, values), bound)
            for bound in self.keyed_limits
            if (values := select(bound.limit.by, keys, priority)) and (bound.named is None or values[0] in bound.named)
        ]
        for bound, paused in self._keyed_pauses:
            values = select(bound.limit.by, keys, priority)
            if values in paused:
                gates.append((self.gate_of(bound, values), bound))
        if self.partition is not None and self.partition.holds_back(keys):
            gates.append((self.gate_of(_MOVING, ()), _MOVING))
        return gates

    @cached_property
    def brought(self) -> Mapping[str, FromJob]:
        """The numbers that jobs bring along, by the name of their limit; `weight` is the fair share's."""
        numbers = {bound.name: bound.from_job for bound in self.bound if bound.from_job is not None}
        if self.fair is not None and self.fair.from_job is not None:
            numbers[WEIGHT] = self.fair.from_job
        return numbers

    def check_brought(self, name: str, number: Any) -> float:
        """A number as a job brings it along: refused as it would be where it is declared."""
        if not is_number(number):
            raise InvalidPolicy(f"{number!r} is not a number")
        bound = self._by_name.get(name)
        if bound is None:
            return checked_weight("the weight", number)
        bound.limit.with_bound(number)
        return number

    @cached_property
    def shared_limits(self) -> tuple[BoundLimit, ...]:
        """The limits that it shares with other queues, by name."""
        return tuple(sorted((b for b in self.bound if b.is_shared), key=lambda b: b.limit.name or ""))

    @cached_property
    def keyed_shared_limits(self) -> tuple[BoundLimit, ...]:
        return tuple(b for b in self.shared_limits if b.limit.by)

    def shared_gates_of(self, priority: int, keys: Keys) -> list[tuple[bytes, BoundLimit, tuple[str | None, ...]]]:
        """The gates that a lane's jobs pass and that other queues pass too, with their limits and keys."""
        gates = []
        for bound in self.shared_limits:
            key = select(bound.limit.by, keys, priority)
            gates.append((shared_gate_id(bound.name, key), bound, key))
        return gates

    def with_shared(self, in_force: Mapping[str, Limit]) -> Policy:
        """This policy with the shared limits as they are in force, by name, whatever bound it was declared with."""
        limits = tuple(in_force.get(limit.name, limit) if limit.name else limit for limit in self.limits)
        return self if limits == self.limits else replace(self, limits=limits)

    def sequence_gate(self, priority: int, keys: Keys) -> Place | None:
        """Where the jobs of a lane wait for one another, if they run in sequence."""
        return None if self.sequence is None else self._place(self.sequence, priority, keys)

    def _place(self, bound: BoundLimit, priority: int, keys: Keys) -> Place:
        key = select(bound.limit.by, keys, priority)
        return self.gate_of(bound, key), bound, key

    @cached_property
    def backlogs(self) -> tuple[BoundLimit, ...]:
        """The limits that count who waits."""
        return tuple(bound for bound in self.bound if bound.limit.is_of_producers)

    def backlog_gates(self, priority: int, keys: Keys) -> list[Place]:
        """Where the ready jobs of a lane are counted."""
        return [self._place(bound, priority, keys) for bound in self.backlogs]

    @cached_property
    def _woken(self) -> tuple[BoundLimit, ...]:
        return tuple(bound for bound in self.bound if bound.limit.is_woken_by_arrivals)

    def woken_gates(self, priority: int, keys: Keys, *, resumed: bool) -> list[Place]:
        """Gates that jobs change when they become ready, or (`resumed`) keep their place no more."""
        return [self._place(b, priority, keys) for b in self._woken if resumed or b.limit.is_of_producers]

    @cached_property
    def fair_by(self) -> By:
        """What takes turns; nothing where the queue is one flow."""
        return self.fair.by if self.fair else ()

    def flow_key(self, priority: int, keys: Keys) -> tuple[str | None, ...]:
        """The fair key of a lane; empty where the queue is one flow."""
        return select(self.fair.by, keys, priority) if self.fair else ()

    def flow_of(self, priority: int, keys: Keys) -> bytes:
        return self.flow_of_key(self.flow_key(priority, keys))

    def flow_of_key(self, key: Iterable[str | None]) -> bytes:
        return flow_id(self.queue, self.fair_by, tuple(key))

    def is_flow(self, names: Iterable[str]) -> bool:
        """Whether keys of these names are a flow each: what takes turns is told apart by just these."""
        return set(self.fair_by) == set(names)

    def weight_of(self, priority: int, keys: Keys) -> float:
        """The weight of a lane's flow, as it is declared."""
        return self.fair.weight_of(self.flow_key(priority, keys)) if self.fair else 1.0

    def weight_at(self, key: Iterable[str | None], own: float) -> float:
        """The weight that a flow is served by: its own, unless an operator has changed it."""
        if self.fair is None or not (self.overrides.weights or self.overrides.boosts):
            return own
        scope = tuple(sorted(zip(self.fair.by, key, strict=True)))
        return self.overrides.weights.get(scope, own) * self.overrides.boosts.get(scope, 1.0)

    @property
    def charges_time(self) -> bool:
        return self.fair is not None and self.fair.charge == "time"

    def rank(self, ready_at: int, priority: int) -> int:
        """Where a job stands among the lanes of its flow: priority is a head start in time."""
        return ready_at - priority * self.priority_step

    def to_document(self) -> dict[str, Any]:
        """What is stored; `from_document` reads it back."""
        # Left out where there is none: what was stored before queues had partitions reads, and compares, as before.
        partition = {} if self.partition is None else {"partition": msgspec.to_builtins(self.partition)}
        return {
            "queue": self.queue,
            "fair": self.fair.to_document() if self.fair else None,
            "limits": [limit.to_document() for limit in self.limits],
            "keys": list(self.keys),
            "priority_step": self.priority_step,
            **partition,
        }

    @cached_property
    def encoded(self) -> str:
        return msgspec.json.encode(self.to_document(), order="sorted").decode()

    @cached_property
    def digest(self) -> str:
        """Names this policy's content: two declarations that say the same have the same digest."""
        return sha256(self.encoded.encode()).hexdigest()[:16]

    @classmethod
    def decode(cls, text: str | bytes) -> Policy:
        return cls.from_document(msgspec.json.decode(text))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Policy:
        """What is stored, or what people wrote: see `written_policy`."""
        fair = document.get("fair")
        return cls(
            queue=document.get("queue", "simulated"),
            fair=Fair.from_document(fair) if fair else None,
            limits=tuple(read_limit(each) for each in document.get("limits", ())),
            keys=document.get("keys", ()),
            priority_step=document.get("priority_step", PRIORITY_STEP),
            partition=msgspec.convert(document["partition"], Partition) if "partition" in document else None,
        )


def shared_identity(limit: Limit) -> str:
    """Names the state of a shared limit: its kind, its scope and its name. All who share it must agree on these."""
    return f"{limit.to_document()['kind']}:{','.join(limit.by)}@{limit.name}"


def refuse_pointless(what: str, limits: Iterable[Limit]) -> None:
    """Refuse a limit that could never hold anything back, because a tighter one of its kind has the same scope.

    Both must be fixed numbers for all keys, and the queue's own: a rate of another window is another rule, and so is
    one with a higher limit and a smaller burst. Stored policies are not asked; there it does no harm.
    """
    plain = [limit for limit in limits if limit.name is None and limit.has_one_number and limit.counted]
    for one, other in combinations(plain, 2):
        if (one.counted, set(one.by)) != (other.counted, set(other.by)):
            continue
        if one.never_binds(other) and other.never_binds(one):
            raise InvalidPolicy(
                f"{what}: {one!r} and {other!r} are the same limit; leave one of them out, or give it another by="
            )
        for idle, tighter in ((one, other), (other, one)):
            if idle.never_binds(tighter):
                raise InvalidPolicy(
                    f"{what}: {idle!r} would never hold anything back beside {tighter!r}, which has the same scope; "
                    "leave it out, or give it another by="
                )


def checked_limits(what: str, parameter: str, given: object) -> tuple[Limit, ...]:
    """One limit or several; `what` and `parameter` say in errors where they were given."""
    several = given if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping) else (given,)
    limits = tuple(several)
    for limit in limits:
        if not isinstance(limit, Limit) or not limit.is_declared:
            names = ", ".join(f"{kind.__name__}(…)" for kind in dict.fromkeys(KINDS[each] for each in sorted(KINDS)))
            raise InvalidPolicy(f"{what}: {parameter}: {shown(limit)} is not a limit; use one of {names}")
    return limits


def check_agreement(policy: Policy, others: Iterable[Policy]) -> None:
    """Refuse a policy that shares a limit with another one of the same program and gives it other figures."""
    declared = {limit.name: (other.queue, limit) for other in others for limit in other.limits if limit.name}
    for limit in policy.limits:
        if limit.name is None:
            continue
        queue, same = declared.get(limit.name, (policy.queue, limit))
        check_alike(policy.queue, limit, queue, same)
        if limit != same:
            raise InvalidPolicy(
                f"the limit {limit.name!r} is {limit!r} in queue {policy.queue!r} and {same!r} in queue {queue!r}; one "
                "limit has one bound: declare it once and give it to both queues"
            )


def check_alike(queue: str, limit: Limit, other_queue: str, other: Limit) -> None:
    """Refuse two limits of one name that differ in kind or scope."""
    if shared_identity(limit) != shared_identity(other):
        raise InvalidPolicy(
            f"the limit {limit.name!r} is {limit!r} in queue {queue!r} and {other!r} in queue {other_queue!r}; a limit "
            "that queues share has one kind and one scope: give one of them another name"
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One part of a policy: how it is, and how it would be. `None`: it is not there."""

    part: str
    before: str | None
    after: str | None

    def describe(self) -> str:
        """In words."""
        if self.before is None:
            return f"{self.part}: {self.after} is added"
        if self.after is None:
            return f"{self.part}: {self.before} is removed"
        return f"{self.part}: {self.before} becomes {self.after}"


def differences(before: Policy, after: Policy) -> tuple[Difference, ...]:
    """What becomes of each part; empty where both say the same, in whatever order."""
    old, new = _parts(before), _parts(after)
    names = dict.fromkeys([*old, *new])
    found = [Difference(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
    if not found and before.digest != after.digest:
        orders = (", ".join(bound.name for bound in each.bound) for each in (before, after))
        found = [Difference("the order of limits", *orders)]
    return tuple(found)


def _parts(policy: Policy) -> dict[str, str]:
    fair = {"fair": repr(policy.fair)} if policy.fair else {}
    keys = {"keys": ", ".join(policy.keys)} if policy.keys else {}
    limits = {bound.name: repr(bound.limit) for bound in policy.bound}
    return {**fair, **limits, **keys, "priority_step": f"{policy.priority_step / SECOND:g}s"}


POLICY_EXAMPLE = '{"fair": {"by": "account"}, "limits": [{"kind": "concurrency", "max": 5, "by": "account"}]}'
_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def parse_policy(document: dict[str, Any], source: str) -> Policy:
    """Read a policy that people wrote. `source` names it in errors."""
    try:
        policy = Policy.from_document({name: part for name, part in document.items() if name != "partition"})
        _refuse_unknown(document, policy)
        return policy
    except FairlaneError as error:
        raise ConfigurationError(f"{source}: {error}") from None
    except _MISSHAPEN as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"{source}: {reason}; a policy looks like {POLICY_EXAMPLE}") from None


def _refuse_unknown(document: dict[str, Any], policy: Policy) -> None:
    """A field that nobody reads is a mistake: what would be tried is not what was meant."""
    # What `policy show --json` prints besides.
    printed = {"version", "declared", "overrides", "drift"}
    unknown = sorted({*document} - {*policy.to_document()} - printed)
    for given, limit in zip(document.get("limits", []), policy.limits, strict=True):
        unknown += [f"{name} (of {given['kind']})" for name in sorted({*given} - {*limit.to_document(), "burst"})]
    if unknown:
        raise ConfigurationError(f"a policy has no field {unknown[0]}; fields are {', '.join(policy.to_document())}")


def written_policy(policy: Policy) -> dict[str, Any]:
    """Its document without defaults, queue name and partitions."""
    whole = {
        "fair": policy.fair and policy.fair.written(),
        "limits": [each.written() for each in policy.limits],
        "keys": list(policy.keys),
        "priority_step": policy.priority_step if policy.priority_step != PRIORITY_STEP else None,
    }
    return {name: part for name, part in whole.items() if part is not None and part != []}


def policy_text(policy: Policy) -> str:
    """The same as JSON, a line for each limit."""
    parts, as_json = [], partial(json.dumps, ensure_ascii=False)
    for name, value in written_policy(policy).items():
        if name == "limits":
            lines = ",\n".join(f"    {as_json(each)}" for each in value)
            parts.append(f'  "limits": [\n{lines}\n  ]')
        else:
            parts.append(f"  {as_json(name)}: {as_json(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n" if parts else "{}\n"


def policy_words(policy: Policy) -> list[str]:
    """What it does, one sentence for each part, starting with the order of jobs."""
    order = policy.fair.describe() if policy.fair else "First come, first served, higher priorities with a head start"
    words = [order]
    for limit in policy.limits:
        where = f"for each {_and(limit.by)}" if limit.by else "in the whole queue"
        shared = f", shared by all queues that name {limit.name!r}" if limit.name is not None else ""
        words.append(f"{limit.describe(where)}{shared}")
    if (place := policy.partition) is not None and place.width > 1:
        words.append(f"Divided into {place.width} partitions{f' by {_and(place.by)}' if place.by else ''}")
    return [f"{each}." for each in words]


def _and(by: By) -> str:
    return " and ".join(by)
