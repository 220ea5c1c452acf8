"""Django's Tasks framework, or the package that brings it to Django 5."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.conf import settings

NAME = "django.tasks" if settings.HAS_DJANGO_TASKS else "django_tasks"
framework: Any = import_module(NAME)
signals: Any = import_module(f"{NAME}.signals")
exceptions: Any = import_module(f"{NAME}.exceptions")
InvalidTask: Any = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError
