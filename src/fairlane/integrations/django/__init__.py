"""Fairlane as a Django app: `INSTALLED_APPS += ["fairlane.integrations.django"]`.

`app` is the project's one app. It is made of the setting FAIRLANE when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairlane.integrations.django.project import DjangoApp

__all__ = ["app"]

app: DjangoApp


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairlane.integrations.django.project import project_app

    return project_app()
