"""Values by key on SQLite, in a transaction: the caller's, or one of the store's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fairlane.store.sqlite.database import Transaction


def write(tx: Transaction, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
    """Put and delete all of these. A key that is both deleted and put has the value that is put."""
    tx.run_many("delete_value", [(key,) for key in deletes])
    tx.run_many("put_value", list(puts.items()))
