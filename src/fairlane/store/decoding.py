"""Policies as they are stored, put together: what is declared, what operators have changed, what queues share."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fairlane.policy.kinds import read_limit
from fairlane.policy.overrides import Override, Overrides
from fairlane.policy.policy import Policy

__all__ = ["decode_policy"]


@lru_cache(maxsize=1_000)
def decode_policy(text: str, overrides: tuple[str, ...], shared: tuple[str, ...]) -> Policy:
    """A policy with its overrides, and with its shared limits as they are in force."""
    policy = Policy.decode(text).overridden(
        Overrides(tuple(msgspec.json.decode(each, type=Override) for each in overrides))
    )
    limits = [read_limit(msgspec.json.decode(each)) for each in shared]
    in_force = {limit.name: limit for limit in limits if limit.name is not None}
    return policy.with_shared(in_force) if in_force else policy
