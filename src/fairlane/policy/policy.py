"""A queue's policy as a whole: its fair share, its limits, the keys it declares, and how far priority reaches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from hashlib import sha256
from typing import Any

import msgspec

from fairlane.clock import SECOND
from fairlane.errors import InvalidPolicy
from fairlane.policy.by import By, normalize_by
from fairlane.policy.fair import Fair, checked_weight
from fairlane.policy.gates import Limit
from fairlane.policy.keys import BUILT_IN, Keys, flow_id, gate_id, select
from fairlane.policy.kinds import KINDS, read_limit
from fairlane.policy.limits import Concurrency, Rate
from fairlane.policy.numbers import FromJob

__all__ = ["WEIGHT", "BoundLimit", "Level", "Policy"]

PRIORITY_STEP = 60 * SECOND
WEIGHT = "weight"
"""The name under which a job brings its flow's weight along; limits have a colon in theirs."""
_QUEUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}\Z")


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
    named: Mapping[str, float] | None = field(default=None, hash=False)
    """The keys that it holds for, if it does not hold for all."""
    from_job: FromJob | None = None
    """Where its number comes from, if jobs bring it along."""


@dataclass(frozen=True)
class Policy:
    """What a queue enforces. Checked whole, where it is declared."""

    queue: str
    fair: Fair | None = None
    limits: tuple[Limit, ...] = ()
    keys: By = ()
    priority_step: int = PRIORITY_STEP

    def __post_init__(self) -> None:
        what = f"queue {self.queue!r}"
        if not _is_queue_name(self.queue):
            raise InvalidPolicy(f"{what}: a queue's name has letters, digits, '_', '.', '-' and at most 120 of them")
        # Lists are welcome; what is kept is the one form that `decode` gives back.
        object.__setattr__(self, "limits", tuple(self.limits))
        object.__setattr__(self, "keys", normalize_by(what, self.keys))
        for limit in self.limits:
            if not isinstance(limit, tuple(KINDS.values())):
                raise InvalidPolicy(f"{what}: {limit!r} is not a limit; use Concurrency(…) or Rate(…)")
        if self.fair is not None and not isinstance(self.fair, Fair):
            raise InvalidPolicy(f"{what}: fair={self.fair!r} is not a fair share; use Fair(by=…)")
        if self.priority_step < 0:
            raise InvalidPolicy(f"{what}: the priority step is a time of at least 0")
        if built_in := sorted(set(self.keys) & set(BUILT_IN)):
            raise InvalidPolicy(f"{what}: every job has a {built_in[0]}; leave it out of keys={self.keys!r}")
        missing = sorted(set(self._named()) - set(self.keys))
        if self.keys and missing:
            raise InvalidPolicy(
                f"{what}: its policy looks at {', '.join(missing)}, which keys={self.keys!r} leaves out"
            )

    def _named(self) -> list[str]:
        scopes = [self.fair.by if self.fair else (), *(limit.by for limit in self.limits)]
        return sorted({name for by in scopes for name in by} - set(BUILT_IN))

    @cached_property
    def stamped_keys(self) -> By:
        """The keys that a job must carry: those declared, else all that the policy looks at."""
        return tuple(sorted(self.keys)) or tuple(self._named())

    @cached_property
    def lane_keys(self) -> By:
        """What tells lanes apart, priority aside: the keys, and always the task, so that it can be held back alone."""
        return tuple(sorted((*self.stamped_keys, "task")))

    @cached_property
    def bound(self) -> tuple[BoundLimit, ...]:
        """The limits with their names and levels. Twins (same kind, same scope) are numbered."""
        fair_by = set(self.fair.by) if self.fair else set()
        seen: dict[str, int] = {}
        bound = []
        for limit in self.limits:
            seen[limit.identity] = nth = seen.get(limit.identity, 0) + 1
            name = limit.identity if nth == 1 else f"{limit.identity}#{nth}"
            level = Level.QUEUE if not limit.by else Level.FLOW if set(limit.by) <= fair_by else Level.LANE
            if isinstance(limit, Concurrency | Rate):
                bound.append(BoundLimit(name, limit, level, limit.named or None, limit.from_job))
            else:
                bound.append(BoundLimit(name, limit, level))
        return tuple(bound)

    @cached_property
    def queue_gates(self) -> tuple[tuple[bytes, BoundLimit], ...]:
        """The gates of the whole queue."""
        return tuple((gate_id(self.queue, b.name, ()), b) for b in self.bound if b.level is Level.QUEUE)

    @cached_property
    def keyed_limits(self) -> tuple[BoundLimit, ...]:
        """The limits that look at a key."""
        return tuple(b for b in self.bound if b.level is not Level.QUEUE)

    def gates_of(self, priority: int, keys: Keys) -> list[tuple[bytes, BoundLimit]]:
        """The keyed gates that a lane's jobs pass."""
        return [
            (gate_id(self.queue, bound.name, values), bound)
            for bound in self.keyed_limits
            if (values := select(bound.limit.by, keys, priority)) and (bound.named is None or values[0] in bound.named)
        ]

    def limit_at(self, bound: BoundLimit, values: Sequence[str | None], value: float | None) -> Limit | None:
        """The limit that holds at one key, with `value` in place of the declared number if there is one.

        `None`: this key is not named, and has no gate.
        """
        if value is None and bound.named is None and bound.from_job is None:
            return bound.limit
        return bound.limit.at(values, value) if isinstance(bound.limit, Concurrency | Rate) else bound.limit

    @cached_property
    def brought(self) -> Mapping[str, FromJob]:
        """The numbers that jobs bring along, by the name of their limit; `weight` is the fair share's."""
        numbers = {bound.name: bound.from_job for bound in self.bound if bound.from_job is not None}
        if self.fair is not None and self.fair.from_job is not None:
            numbers[WEIGHT] = self.fair.from_job
        return numbers

    def brought_for(self, name: str, priority: int, keys: Keys) -> tuple[str | None, ...]:
        """The key for which a number of this name holds."""
        limit = self._limits_by_name.get(name)
        return self.flow_key(priority, keys) if limit is None else select(limit.by, keys, priority)

    def check_brought(self, name: str, number: Any) -> float:
        """A number as a job brings it along: refused as it would be where it is declared."""
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidPolicy(f"{number!r} is not a number")
        match self._limits_by_name.get(name):
            case None:
                checked_weight("the weight", number)
            case Concurrency() as limit:
                limit.with_number(number)  # type: ignore[arg-type]  # a fraction is refused
            case Rate() as limit:
                limit.with_number(number)
        return number

    @cached_property
    def _limits_by_name(self) -> Mapping[str, Limit]:
        return {bound.name: bound.limit for bound in self.bound}

    def flow_key(self, priority: int, keys: Keys) -> tuple[str | None, ...]:
        """The fair key of a lane; empty where the queue is one flow."""
        return select(self.fair.by, keys, priority) if self.fair else ()

    def flow_of(self, priority: int, keys: Keys) -> bytes:
        """The flow that a lane belongs to."""
        by = self.fair.by if self.fair else ()
        return flow_id(self.queue, by, self.flow_key(priority, keys))

    def weight_of(self, priority: int, keys: Keys) -> float:
        return self.fair.weight_of(self.flow_key(priority, keys)) if self.fair else 1.0

    @property
    def charges_time(self) -> bool:
        return self.fair is not None and self.fair.charge == "time"

    def rank(self, ready_at: int, priority: int) -> int:
        """Where a job stands among the lanes of its flow: priority is a head start in time."""
        return ready_at - priority * self.priority_step

    def to_document(self) -> dict[str, Any]:
        """What is stored; `from_document` reads it back."""
        return {
            "queue": self.queue,
            "fair": self.fair.to_document() if self.fair else None,
            "limits": [limit.to_document() for limit in self.limits],
            "keys": list(self.keys),
            "priority_step": self.priority_step,
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
    def from_document(cls, document: dict[str, Any]) -> Policy:
        fair = document["fair"]
        return cls(
            queue=document["queue"],
            fair=_fair(fair) if fair else None,
            limits=tuple(read_limit(each) for each in document["limits"]),
            keys=tuple(document["keys"]),
            priority_step=document["priority_step"],
        )


def _is_queue_name(name: object) -> bool:
    return isinstance(name, str) and _QUEUE_NAME.match(name) is not None


def _fair(document: dict[str, Any]) -> Fair:
    return Fair(
        by=tuple(document["by"]),
        weight=document["weights"] or document["weight"],
        charge=document["charge"],
    )
