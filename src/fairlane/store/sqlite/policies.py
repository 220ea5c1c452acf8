"""Policies on SQLite, all at once."""

from __future__ import annotations

import msgspec

from fairlane.store.decoding import decode_policy
from fairlane.store.protocol import Declared
from fairlane.store.sqlite.database import Transaction

__all__ = ["all_in_force"]

_documents = msgspec.json.Decoder(tuple[str, ...])


def all_in_force(tx: Transaction) -> dict[str, Declared]:
    """Every queue's policy, in one statement."""
    return {
        name: Declared(
            decode_policy(text, _documents.decode(overrides), _documents.decode(shared)), version, is_drift=False
        )
        for name, text, version, overrides, shared in tx.all("select_policies")
    }
