"""The SQLite store."""

from fairlane.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
