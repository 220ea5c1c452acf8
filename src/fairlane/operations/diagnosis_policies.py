"""What is wrong with policies: those in force, and those that the code declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fairlane.operations.findings import Finding, Level
from fairlane.operations.policies import PolicyInForce, divided_by
from fairlane.policy.overrides import without_place
from fairlane.policy.partitions import parse_partition, whole_of
from fairlane.policy.policy import Policy

__all__ = ["about_policies"]


def about_policies(shown: Iterable[PolicyInForce]) -> Iterator[Finding]:
    """Drift, wrong widths, changes that were broken off, overrides without effect."""
    by_queue = {each.queue: each for each in shown}
    yield from _unfinished(by_queue.values())
    for each in by_queue.values():
        whole = by_queue.get(whole_of(each.queue))
        yield from _width(each)
        # Of a queue with another width than its stored one that is said, and of its partitions what is not said of it.
        if not (whole is not None and (whole.is_divided_otherwise or (whole is not each and whole.is_drift))):
            yield from _drift(each)
        if each.policy is not None:
            yield from _overrides_without_place(each.policy)


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
                level=Level.WARNING,
                queue=policy.queue,
                message=f"{override.describe()}, which changes nothing: {reason}",
                remedy="clear it with `fairlane resume`, `limit clear` or `weight clear`",
            )
