"""Values by key on SQLite, in a transaction: the caller's, or one of the store's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fairlane.store.sqlite.database import Transaction

__all__ = ["compare_and_set", "delete", "get", "put", "scan", "write"]


def get(tx: Transaction, key: str) -> bytes | None:
    value: bytes | None = tx.value("select_value", key)
    return value


def put(tx: Transaction, key: str, value: bytes) -> None:
    tx.run("put_value", key, value)


def delete(tx: Transaction, key: str) -> bool:
    """Whether it was there."""
    return tx.run("delete_value", key) > 0


def compare_and_set(tx: Transaction, key: str, expected: bytes | None, value: bytes | None) -> bool:
    """Whether the key had the expected value, and has the new one now; `None` stands for no value."""
    # Each is one statement: a caller's transaction may be one that has only read so far.
    match expected, value:
        case None, None:
            return get(tx, key) is None
        case None, _:
            return tx.run("put_value_if_absent", key, value) > 0
        case _, None:
            return tx.run("delete_value_if_equal", key, expected) > 0
        case _:
            return tx.run("replace_value", value, key, expected) > 0


def scan(tx: Transaction, low: str, end: str, limit: int) -> list[tuple[str, bytes]]:
    """What lies from `low` to before `end`, in order."""
    return [(key, value) for key, value in tx.all("scan_values", low, end, limit)]


def write(tx: Transaction, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
    """Put and delete all of these. A key that is both deleted and put has the value that is put."""
    tx.run_many("delete_value", [(key,) for key in deletes])
    tx.run_many("put_value", list(puts.items()))
