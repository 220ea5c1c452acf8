"""What is wrong with policies: those in force, and those that the code declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fairlane.operations.findings import Finding, Level
from fairlane.operations.policies import PolicyInForce
from fairlane.policy.division import division, way_to
from fairlane.policy.overrides import without_place
from fairlane.policy.partitions import parse_partition, whole_of
from fairlane.policy.policy import Policy
from fairlane.policy.repartition import Phase, phase_of, widths

__all__ = ["about_policies"]


def about_policies(shown: Iterable[PolicyInForce]) -> Iterator[Finding]:
    """Drift, wrong widths, changes that were broken off, overrides without effect."""
    by_queue = {each.queue: each for each in shown}
    yield from _unfinished(by_queue.values())
    for each in by_queue.values():
        whole = by_queue.get(whole_of(each.queue))
        yield from _width(each)
        # Of partitions, what is not said of their queue.
        if whole is each or whole is None or not whole.is_drift:
            yield from _drift(each)
        if each.policy is not None:
            yield from _overrides_without_place(each.policy)


def _unfinished(shown: Iterable[PolicyInForce]) -> Iterator[Finding]:
    """Queues on their way to another number of partitions, as the first partition says."""
    for each in shown:
        if each.policy is None or parse_partition(each.queue) or phase_of(each.policy) is Phase.RESTING:
            continue
        (before, to), place = widths(each.policy), each.policy.partition
        go_on = f"let that end: workers go on with it, and so does `fairlane partition {each.queue} --to {to}`"
        give_up = f"; to give it up: `fairlane partition {each.queue} --to {before} --abandon`"
        back = place is not None and place.is_abandoned
        yield Finding(
            check="partitions",
            queue=each.queue,
            message=f"it is on its way {'back ' if back else ''}from {before} to {to} partitions: keys that move stand "
            "still",
            remedy=go_on if back else go_on + give_up,
        )


def _width(each: PolicyInForce) -> Iterator[Finding]:
    """A queue that is divided otherwise than the code says."""
    if each.policy is None or each.declared is None or not each.is_divided_otherwise or parse_partition(each.queue):
        return
    (has, has_by), (wants, wants_by) = division(each.policy), division(each.declared)
    yield Finding(
        check="partitions",
        level=Level.WARNING,
        queue=each.queue,
        message=f"it has {has} (by {', '.join(has_by) or 'no key'}), and the code declares {wants} (by "
        f"{', '.join(wants_by) or 'no key'}): programs with this code send and serve jobs by the stored number",
        remedy=f"declare it as it is, or change the queue: {way_to(each.policy, each.declared)}",
    )


def _drift(each: PolicyInForce) -> Iterator[Finding]:
    if each.declared is None or (each.policy is not None and not each.drift):
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
