"""What operators change while a policy is in force: pauses, other bounds and weights for single keys, suspension.

Overrides belong to a queue, not to its policy: a deploy that applies another policy leaves them as they are. One that
the policy in force has no place for has no effect, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import msgspec

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError, InvalidOverride
from fairlane.policy.fair import is_weight
from fairlane.policy.gates import GateState, Reason
from fairlane.policy.keys import BUILT_IN, By, key_words
from fairlane.policy.limits import UNBOUNDED, Limit, Obstacle, is_number

if TYPE_CHECKING:
    from fairlane.policy.policy import Policy


MOST_OVERRIDES = 10_000
"""Of one queue: every claimer knows them all."""

_PAUSE = "pause:"
EVERYONE = "the whole queue"
"""What an override without keys is about, unless a partition is."""

Values = tuple[str | None, ...]
Scope = tuple[tuple[str, str | None], ...]
"""Keys by name, sorted; empty for the whole queue."""


class Kind(StrEnum):
    """What an override changes."""

    PAUSE = "pause"
    """Nothing in its scope starts. What runs goes on."""
    LIMIT = "limit"
    """One limit has another bound for one key."""
    WEIGHT = "weight"
    """One flow has another weight."""
    BOOST = "boost"
    """One flow's weight is multiplied."""
    SUSPEND = "suspend"
    """No limit of the queue holds anything back; all go on counting."""


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """One change of what a queue's policy says. There is one of a kind, limit and scope."""

    kind: Kind
    scope: Scope = ()
    limit: str | None = None
    """The name of the limit whose bound it changes."""
    value: float | None = None
    expires_at: Instant | None = None
    set_at: Instant = 0
    set_by: str = ""
    reason: str = ""

    @property
    def id(self) -> str:
        """Names what it changes: setting it again replaces it."""
        scope = msgspec.json.encode(self.scope).decode()
        return f"{self.kind}/{self.limit or ''}/{scope}"

    def describe(self, everyone: str = EVERYONE, *, has_ended: bool = False) -> str:
        """In words, without who and why; `everyone` is what one without keys is about."""
        where = key_words(dict(self.scope)) or everyone
        is_ = "is no longer" if has_ended else "is"
        match self.kind:
            case Kind.PAUSE:
                return f"{where} {is_} paused"
            case Kind.LIMIT:
                return f"{(self.limit or '').removesuffix(':')} {is_} {self.value:.15g} for {where}"
            case Kind.WEIGHT:
                return f"the weight of {where} {is_} {self.value:.15g}"
            case Kind.BOOST:
                return f"{where} {is_} boosted {self.value:.15g} times"
            case Kind.SUSPEND:
                return f"every limit {is_} suspended"


SHUT, OPEN = (Obstacle(Reason.PAUSED, is_shut=is_shut) for is_shut in (True, False))
"""Where paused lanes wait, or have waited."""


class Suspended:
    """A limit that counts and holds nobody back. For the rest it is the limit."""

    is_foreseen = False
    paced = None

    def __init__(self, limit: Limit) -> None:
        self._limit = limit

    def __repr__(self) -> str:
        return f"Suspended({self._limit!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._limit, name)

    def room_at(self, gate: GateState, now: Instant) -> int:
        return UNBOUNDED

    def nth_at(self, gate: GateState, now: Instant, nth: int, turn: int) -> Instant:
        return now

    def round_of(self, gate: GateState, now: Instant, nth: int, turn: int) -> tuple[int, int]:
        return nth, 0


def suspended(limit: Limit) -> Limit:
    """The same limit, suspended."""
    return cast(Limit, Suspended(limit))


def pause_name(by: By) -> str:
    """The name of the gates at which lanes wait that are paused by these keys."""
    return f"{_PAUSE}{','.join(by)}"


def paused_by(name: str) -> By | None:
    """The keys of the pause whose gates have this name; `None`: it is no pause's."""
    if not name.startswith(_PAUSE):
        return None
    return tuple(part for part in name.removeprefix(_PAUSE).split(",") if part)


@dataclass(frozen=True)
class Overrides:
    """All overrides of one queue, ready to be looked up."""

    all: tuple[Override, ...] = ()

    @cached_property
    def pauses(self) -> dict[By, dict[Values, Override]]:
        """Paused keys, by the names of their keys."""
        found: dict[By, dict[Values, Override]] = {}
        for each in self.all:
            if each.kind is Kind.PAUSE:
                names, values = _split(each.scope)
                found.setdefault(names, {})[values] = each
        return found

    @cached_property
    def weights(self) -> dict[Scope, float]:
        return {each.scope: each.value or 1.0 for each in self.all if each.kind is Kind.WEIGHT}

    @cached_property
    def boosts(self) -> dict[Scope, float]:
        return {each.scope: each.value or 1.0 for each in self.all if each.kind is Kind.BOOST}

    @cached_property
    def suspension(self) -> Override | None:
        return next((each for each in self.all if each.kind is Kind.SUSPEND), None)

    @cached_property
    def limits(self) -> dict[tuple[str, Scope], Override]:
        """By limit and scope."""
        return {(each.limit or "", each.scope): each for each in self.all if each.kind is Kind.LIMIT}

    @cached_property
    def expires_at(self) -> Instant | None:
        """When the first of them ends."""
        return min((each.expires_at for each in self.all if each.expires_at is not None), default=None)

    def expired(self, now: Instant) -> list[Override]:
        return [each for each in self.all if each.expires_at is not None and each.expires_at <= now]

    def without(self, gone: Iterable[Override]) -> Overrides:
        names = {each.id for each in gone}
        return Overrides(tuple(each for each in self.all if each.id not in names))

    def get(self, override_id: str) -> Override | None:
        return next((each for each in self.all if each.id == override_id), None)


NO_OVERRIDES = Overrides()


def _split(scope: Scope) -> tuple[By, Values]:
    return tuple(name for name, _ in scope), tuple(value for _, value in scope)


class OverrideChange(msgspec.Struct, frozen=True):
    """What setting or removing overrides comes to."""

    overrides: Overrides
    before: tuple[Override, ...]
    """Those that were replaced or removed."""
    after: tuple[Override, ...]
    """Those that were set."""
    wakes: tuple[bytes, ...]
    """Gates that may have room now: whoever waits there must be looked at."""
    rebuilds: bool
    """Every lane may start now, wherever it waits."""

    @property
    def changes(self) -> bool:
        """Whether there is anything to write: removing what is not there is nothing."""
        return bool(self.before or self.after)


def change_overrides(policy: Policy, put: Iterable[Override], remove: Iterable[str] = ()) -> OverrideChange:
    """Set and remove overrides of a queue, or `InvalidOverride` with the reason."""
    given = {each.id: each for each in put}
    for each in given.values():
        check_override(policy, each)
    known = {each.id: each for each in policy.overrides.all}
    gone = dict.fromkeys([*remove, *given])
    before = tuple(known[each] for each in gone if each in known)
    after = {**{name: each for name, each in known.items() if name not in gone}, **given}
    if len(after) > MOST_OVERRIDES:
        raise InvalidOverride(
            f"queue {policy.queue!r} would have {len(after):,} overrides; at most {MOST_OVERRIDES:,} are kept. "
            "Let the number come with the jobs instead: Concurrency(lambda job: …, by=…)"
        )
    touched = [*before, *given.values()]
    places = (place for each in touched if (place := policy.place_of(each)) is not None)
    wakes = tuple(dict.fromkeys(policy.gate_of(*place) for place in places))
    rebuilds = any(each.kind is Kind.SUSPEND for each in touched)
    return OverrideChange(Overrides(tuple(after.values())), before, tuple(given.values()), wakes, rebuilds)


def check_override(policy: Policy, override: Override) -> None:
    """Refuse what would have no effect, or makes no sense."""
    what = f"queue {policy.queue!r}"
    names, _ = _split(override.scope)
    match override.kind:
        case Kind.PAUSE:
            built_in = BUILT_IN if policy.sequence is None else ()
            unknown = [name for name in names if name not in policy.lane_keys and name not in built_in]
            if unknown and policy.sequence is not None:
                raise InvalidOverride(
                    f"{what} runs its jobs in sequence, by {', '.join(policy.lane_keys)}, whatever their "
                    f"{unknown[0]}: one that is held back would hold back all behind it. Pause by "
                    f"{', '.join(policy.lane_keys)}, or the whole queue"
                )
            if unknown:
                known = ", ".join(dict.fromkeys([*policy.lane_keys, *BUILT_IN]))
                raise InvalidOverride(
                    f"{what} has no key {unknown[0]!r}; it can pause by: {known}. "
                    f"Declare the key first: app.queue({policy.queue!r}, keys=({unknown[0]!r}, …))"
                )
        case Kind.LIMIT:
            _check_limit(policy, what, override, names)
        case Kind.WEIGHT | Kind.BOOST:
            if policy.fair is None:
                raise InvalidOverride(f"{what} has no fair share, so nothing in it has a weight; give it Fair(by=…)")
            if set(names) != set(policy.fair.by):
                raise InvalidOverride(
                    f"{what}: weights belong to {', '.join(policy.fair.by)}; give "
                    + ", ".join(f"{name}=…" for name in policy.fair.by)
                )
            if override.value is None or not is_weight(override.value):
                raise InvalidOverride(
                    f"{what}: a weight lies between 0.000001 and 1,000,000, not {override.value!r}; a pause stops a key"
                )
        case Kind.SUSPEND:
            if names:
                raise InvalidOverride(f"{what}: a policy is suspended as a whole; `limit set` changes a single limit")


def _check_limit(policy: Policy, what: str, override: Override, names: By) -> None:
    bound = policy.bound_named(override.limit or "")
    if bound is None or not bound.limit.is_declared:
        known = ", ".join(each.name for each in policy.bound) or "none"
        raise InvalidOverride(f"{what} has no limit named {override.limit!r}; its limits: {known}")
    if set(names) != set(bound.limit.by):
        needed = ", ".join(f"{name}=…" for name in bound.limit.by) or "no key"
        raise InvalidOverride(
            f"{what}: {bound.name} is kept by {', '.join(bound.limit.by) or 'the whole queue'}; give {needed}. "
            "To change it for every key, apply another policy"
        )
    # Partitions are given it all together. Tokens that they have spent would be measured by the old number.
    if bound.is_shared and not (policy.is_crossing(bound) and bound.limit.counts_in_flight):
        raise InvalidOverride(
            f"{what}: {bound.name} is shared by several queues, and one of them cannot have a number of its own; "
            "change it where it is declared, and apply that policy"
        )
    if not is_number(override.value):
        raise InvalidOverride(f"{what}: an override of {bound.name} needs a number, not {override.value!r}")
    if bound.named is not None and override.scope[0][1] not in bound.named:
        raise InvalidOverride(
            f"{what}: {bound.name} holds only for {', '.join(sorted(bound.named))}; "
            "to name another key, apply another policy"
        )
    assert override.value is not None
    bound.limit.with_bound(override.value)


def without_effect(policy: Policy, override: Override, now: Instant) -> str | None:
    """Why an override changes nothing under a policy; `None`: it does."""
    if override.expires_at is not None and override.expires_at <= now:
        return "its time has come; the next claim ends it"
    if override.kind is Kind.LIMIT and policy.overrides.suspension is not None:
        return "every limit of the queue is suspended"
    return without_place(policy, override)


def without_place(policy: Policy, override: Override) -> str | None:
    """Why a policy has no place for an override; `None`: it has one."""
    try:
        check_override(policy, override)
    except ConfigurationError as error:
        return str(error)
    return None


def everyone_in(policy: Policy, limit: str | None = None) -> str:
    """What an override without keys is about, in words: of this limit, or of everything."""
    bound = None if limit is None else policy.bound_named(limit)
    if policy.partition is None or (policy.partition.index == 0 and (bound is None or not policy.is_own(bound))):
        return EVERYONE
    return "the partition" if policy.partition.index else "each partition"
