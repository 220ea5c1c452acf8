"""Limits that queues share by name: whoever names one must mean the same."""

from __future__ import annotations

from collections.abc import Iterable

from fairlane.errors import InvalidPolicy
from fairlane.policy.gates import Limit
from fairlane.policy.policy import Policy, shared_identity

__all__ = ["check_agreement", "check_alike"]


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
