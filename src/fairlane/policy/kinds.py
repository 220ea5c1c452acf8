"""The kinds of limit there are, by the names under which they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairlane.errors import InvalidPolicy
from fairlane.policy.adaptive import AdaptiveConcurrency
from fairlane.policy.backlog import Backlog
from fairlane.policy.breaker import Breaker
from fairlane.policy.gates import Limit
from fairlane.policy.limits import Concurrency, Rate
from fairlane.policy.sequence import Sequence

__all__ = ["KINDS", "read_limit"]

KINDS: Mapping[str, type[Any]] = {
    "adaptive": AdaptiveConcurrency,
    "backlog": Backlog,
    "breaker": Breaker,
    "concurrency": Concurrency,
    "rate": Rate,
    "rolling_rate": Rate,
    "sequence": Sequence,
}


def read_limit(document: dict[str, Any]) -> Limit:
    """The limit that `to_document` wrote."""
    kind = KINDS.get(document["kind"])
    if kind is None:
        raise InvalidPolicy(
            f"a limit of kind {document['kind']!r} is not known to this version, which knows {', '.join(KINDS)}; "
            "if the policy is stored so, upgrade fairlane here, or apply a policy without it"
        )
    limit: Limit = kind.from_document(document)
    return limit
