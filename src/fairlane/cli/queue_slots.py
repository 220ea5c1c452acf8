"""`--queues webhooks,email=2 --slots email=1:5` as the shares of a worker's queues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from fairlane.errors import ConfigurationError, UnknownQueue

if TYPE_CHECKING:
    from fairlane.worker import QueueShare

__all__ = ["queue_shares"]

_SLOTS = re.compile(r"(?P<name>[^=:\s]+)=(?P<min>\d*)[:-](?P<max>\d*)\Z")


def queue_shares(queues: str | None, slots: Sequence[str], declared: Sequence[str]) -> tuple[QueueShare, ...]:
    """The queues that a worker serves (by default all that the app declares), each with its weight and slots."""
    from fairlane.worker import QueueShare

    named = declared if queues is None else [part for part in queues.split(",") if part.strip()]
    if not named and queues is None:
        raise ConfigurationError(
            "the app has no queue for a worker: an engine runs all that it declares (`fairlane forward`); "
            "name those that this worker is to serve as well with --queues"
        )
    if not named:
        raise ConfigurationError("--queues names no queue; leave it out to serve all queues of the app")
    shares = {share.name: share for share in map(QueueShare.parse, named)}
    if len(shares) < len(named):
        raise ConfigurationError(f"--queues {queues}: a queue is named twice")
    _require_known(list(shares), declared)
    for given in slots:
        name, least, most = _parse_slots(given)
        if name not in shares:
            raise ConfigurationError(
                f"--slots {given}: this worker does not serve {name!r}; it serves {', '.join(shares)}"
            )
        shares[name] = replace(shares[name], min_slots=least, max_slots=most)
    return tuple(shares.values())


def _parse_slots(given: str) -> tuple[str, int, int | None]:
    found = _SLOTS.match(given.strip())
    if found is None:
        raise ConfigurationError(f"--slots {given}: write queue=min:max, such as email=1:5, email=1: or email=:5")
    return found["name"], int(found["min"] or 0), int(found["max"]) if found["max"] else None


def _require_known(names: Sequence[str], declared: Sequence[str]) -> None:
    from fairlane.policy.partitions import parse_partition

    for name in names:
        of, _ = parse_partition(name) or (name, 0)
        if of not in declared:
            similar = get_close_matches(name, declared, n=1)
            suggestion = f"did you mean {similar[0]!r}?" if similar else f"it declares {', '.join(declared)}"
            raise UnknownQueue(f"--queues: the app declares no queue {name!r}; {suggestion}")
