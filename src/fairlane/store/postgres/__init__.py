"""The PostgreSQL store: one database for a fleet."""

from fairlane.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
