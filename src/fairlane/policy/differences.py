"""Where two policies of one queue differ, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from fairlane.clock import SECOND
from fairlane.policy.policy import Policy

__all__ = ["Difference", "differences"]


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
        found = [Difference("the order of limits", ", ".join(_limits(before)), ", ".join(_limits(after)))]
    return tuple(found)


def _parts(policy: Policy) -> dict[str, str]:
    fair = {"fair": repr(policy.fair)} if policy.fair else {}
    keys = {"keys": ", ".join(policy.keys)} if policy.keys else {}
    return {**fair, **_limits(policy), **keys, "priority_step": f"{policy.priority_step / SECOND:g}s"}


def _limits(policy: Policy) -> dict[str, str]:
    return {bound.name: repr(bound.limit) for bound in policy.bound}
