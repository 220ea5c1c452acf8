"""Where a process that runs one task finds it: importing this sets Django up first, whatever the task's module imports.

`works.tasks.resize` here is `resize` in the module `works.tasks`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fairlane.integrations.django.project import project_app

project_app()


def __getattr__(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"no task is found by {name!r}: {error}") from error
