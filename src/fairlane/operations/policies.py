"""Policies as operators see them: what is in force, what the code declares instead, and putting that in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError, InvalidPolicy, UnknownQueue
from fairlane.operations.overrides import OverrideInForce, overrides_of
from fairlane.operations.requests import in_force
from fairlane.operations.section import ChangeOptions, Intent, Section
from fairlane.parameters import checked_methods
from fairlane.policy.overrides import everyone_in, without_place
from fairlane.policy.partitions import as_divided, division, parse_partition, partition_name, sibling, way_to, whole_of
from fairlane.policy.policy import Difference, Policy, differences
from fairlane.store import policies, records
from fairlane.store.audit import AuditEntry
from fairlane.store.protocol import Store
from fairlane.store.rows import Declared
from fairlane.store.stats import Moment

Declarations = Mapping[str, Policy]
"""What a program declares, by queue."""
APPLY = "policy apply"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInForce:
    """A queue's policy as it is stored, and what the program at hand declares."""

    queue: str
    policy: Policy | None
    """`None`: no program has opened this database and declared the queue yet."""
    version: int
    declared: Policy | None
    """`None`: the program at hand does not declare this queue."""
    drift: tuple[Difference, ...]
    """What applying the declaration would change: all but the number of partitions and their keys."""
    overrides: tuple[OverrideInForce, ...]

    @property
    def is_drift(self) -> bool:
        return self.declared is not None and (self.policy is None or bool(self.drift) or self.is_divided_otherwise)

    @property
    def is_divided_otherwise(self) -> bool:
        """The code declares another number of partitions, or other keys to divide by."""
        if self.policy is None or self.declared is None:
            return False
        return division(self.policy) != division(self.declared)

    @property
    def remedy(self) -> str:
        """What puts the declared policy in force."""
        apply = "`fairlane policy apply` puts that in force"
        if self.declared is None or not self.is_divided_otherwise:
            return apply
        divide = f"{way_to(self.policy or self.declared, self.declared)} divides it so"
        return f"{divide}, and {apply.replace('that', 'the rest')}" if self.drift else divide


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """What applying a policy changed, or would change."""

    queue: str
    is_dry_run: bool
    before: Policy | None
    after: Policy
    version: int
    """Of what is in force now; of a dry run, as it was."""
    is_changed: bool
    changes: tuple[Difference, ...]
    new_keys: tuple[str, ...]
    """Keys that jobs enqueued under the policy before need not carry. Applying is refused while such jobs wait, unless
    that is accepted."""
    without_place: tuple[OverrideInForce, ...]
    """Overrides that have a place before and none afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Some of what operators did, the newest first."""

    entries: tuple[AuditEntry, ...]
    before: int | None
    """Where to go on; `None`: this was the end."""


@checked_methods
class Policies(Section):
    """`app.operations.policies`: what is in force, where the code declares something else, and applying that."""

    async def show(self, queues: Sequence[str] = ()) -> list[PolicyInForce]:
        """The policy in force for these queues or for all, and where this app declares another one.

        The first partition of a queue stands for all of them, unless they are asked for.
        """
        return await shown_policies(await self._store(), self._source.declared_policies, queues)

    async def diff(self, queues: Sequence[str] = ()) -> list[PolicyInForce]:
        """What applying the policies that this app declares would change, for these queues or for all declared."""
        declared = self._source.declared_policies
        require_declared(declared, queues)
        wholes = [name for name in declared if parse_partition(name) is None]
        return await shown_policies(await self._store(), declared, queues or wholes)

    async def apply(
        self, queues: Sequence[str] = (), *, accept_missing_keys: bool = False, **options: Unpack[ChangeOptions]
    ) -> list[PolicyChange]:
        """Put what this app declares in force, a transaction for each queue. Overrides stay as they are, and so does
        the number of partitions: `partitions.change` changes that."""
        intent, declared = self._intent(**options), self._source.declared_policies
        require_declared(declared, queues)
        store = await self._store()
        asked = {whole_of(name) for name in queues or declared}
        wholes = [name for name in declared if parse_partition(name) is None and name in asked]
        wanted = [policy for whole in wholes for policy in await _declared_for(store, whole, declared)]
        return [
            await _apply(store, policy, intent, accept_missing_keys)
            for policy in wanted
            if not queues or whole_of(policy.queue) in queues or policy.queue in queues
        ]


def require_declared(declared: Declarations, queues: Sequence[str]) -> None:
    """Refuse to go on with a queue that the code does not declare."""
    wholes = {whole_of(name) for name in declared}
    if unknown := sorted(name for name in set(queues) - set(declared) if whole_of(name) not in wholes):
        raise UnknownQueue(f"the app declares no queue {unknown[0]!r}; it declares {', '.join(declared) or 'none'}")
    if not declared:
        raise ConfigurationError("the app declares no queue, so it has no policy; declare one with app.queue(…)")


@checked_methods
class Audit(Section):
    """`app.operations.audit`: what operators did."""

    # Last: below it, `list` in an annotation would be this method.
    async def list(self, queue: str | None = None, *, before: int | None = None, limit: int = 100) -> AuditPage:
        """What operators did, the newest first."""
        if limit < 1:
            raise ConfigurationError(f"limit={limit} leaves nothing to show; give a number above 0")
        # One more than asked for: it says whether there is another page.
        found = await (await self._store()).run(records.audit(queue, before, limit + 1))
        entries = tuple(found[:limit])
        return AuditPage(entries=entries, before=entries[-1].id if len(found) > limit else None)


async def shown_policies(
    store: Store, declared: Declarations, queues: Sequence[str] = (), *, with_partitions: bool = False
) -> list[PolicyInForce]:
    """The policy in force for these queues or for all, beside what is declared."""
    queues = [name if (place := parse_partition(name)) is None else partition_name(*place) for name in queues]
    now = await store.now()
    known = await store.ask(Moment.policies)
    if absent := next((name for name in queues if name not in known and name not in declared), None):
        await in_force(store, absent)  # which says what it may have been
    wholes = [name for name in declared if parse_partition(name) is None]
    names = [name for name in sorted({*wholes, *known}) if with_partitions or parse_partition(name) is None]
    return [
        _in_force(name, known.get(name), declared.get(whole_of(name) if name in known else name), now)
        for name in queues or names
    ]


def _in_force(queue: str, stored: Declared | None, declared: Policy | None, now: Instant) -> PolicyInForce:
    if stored is None:
        return PolicyInForce(queue=queue, policy=None, version=0, declared=declared, drift=(), overrides=())
    policy, place, drift = stored.policy, stored.policy.partition, tuple[Difference, ...]()
    if place is not None and place.index >= place.width:
        declared = None  # it is no more
    if declared is not None:
        try:
            drift = differences(policy, as_divided(policy, declared))
        except InvalidPolicy:
            drift = differences(policy, declared)
    return PolicyInForce(
        queue=queue,
        policy=policy,
        version=stored.version,
        declared=declared,
        drift=drift,
        overrides=tuple(overrides_of(policy, now)),
    )


async def _declared_for(store: Store, whole: str, declared: Declarations) -> list[Policy]:
    """What the code declares for each partition that a queue has; for all that it declares, if it is not known."""
    found = await store.policy(whole)
    if found is None:
        return [policy for name, policy in declared.items() if whole_of(name) == whole]
    first = as_divided(found.policy, declared[whole])
    place = first.partition
    if place is None:
        return [first]
    return [sibling(first, index) for index in range(max(place.width, place.was or 0))]


async def _apply(store: Store, policy: Policy, intent: Intent, accept_missing_keys: bool) -> PolicyChange:
    found = await store.policy(policy.queue)
    before = None if found is None else found.policy
    policy = policy if before is None else as_divided(before, policy)
    version = 0 if found is None else found.version
    is_changed = before is None or before.digest != policy.digest
    if intent.dry_run and is_changed and found is not None and not accept_missing_keys:
        await store.run(policies.check_waiting(policy))
    if not intent.dry_run:
        applied = await store.apply(policy, intent.note(APPLY), accept_missing_keys=accept_missing_keys)
        # Somebody else may have been faster since the look.
        is_changed, version = applied.version != version, applied.version
    known = before or policy
    return PolicyChange(
        queue=policy.queue,
        is_dry_run=intent.dry_run,
        before=before,
        after=policy,
        version=version,
        is_changed=is_changed,
        changes=differences(known, policy),
        new_keys=tuple(sorted({*policy.keys_of_job} - {*known.keys_of_job})),
        without_place=tuple(
            OverrideInForce(
                queue=policy.queue, override=each, no_effect=reason, everyone=everyone_in(known, each.limit)
            )
            for each in known.overrides.all
            if (reason := without_place(policy, each)) is not None and without_place(known, each) is None
        ),
    )
