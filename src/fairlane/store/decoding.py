"""Policies as they are stored, put together: what is declared, what operators have changed, what queues share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from fairlane.policy.gates import Limit
from fairlane.policy.overrides import Override, Overrides
from fairlane.policy.policy import Policy, read_limit


class Declared(msgspec.Struct, frozen=True):
    """The policy in force for a queue once a declaration has been made."""

    policy: Policy
    version: int
    is_drift: bool
    """The stored policy differs from the declared one and wins; `fairlane policy apply` changes that."""


def decode_limit(document: str) -> Limit:
    """A limit that queues share."""
    return read_limit(msgspec.json.decode(document))


def encode_limit(limit: Limit) -> str:
    """The same limit is always the same text: stores compare them."""
    return msgspec.json.encode(limit.to_document(), order="sorted").decode()


def decode_overrides(documents: Iterable[str]) -> Overrides:
    return Overrides(tuple(msgspec.json.decode(each, type=Override) for each in documents))


@lru_cache(maxsize=1_000)
def decode_policy(text: str, overrides: tuple[str, ...], shared: tuple[str, ...]) -> Policy:
    """A policy with its overrides, and with its shared limits as they are in force."""
    policy = Policy.decode(text).overridden(decode_overrides(overrides))
    limits = map(decode_limit, shared)
    in_force = {limit.name: limit for limit in limits if limit.name is not None}
    return policy.with_shared(in_force) if in_force else policy
