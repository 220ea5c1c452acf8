"""A router that keeps Fairlane out of a database."""

from __future__ import annotations

from typing import Any


class NoJobsHere:
    def allow_migrate(self, database: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "fairlane" else None
