"""What the database is, TEST_DATABASE says: a URL of PostgreSQL, or the path of a SQLite file."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any
from urllib.parse import urlsplit

SECRET_KEY = "for tests"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "works.urls"
USE_TZ = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # a test need not be hard to guess
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
HAS_DJANGO_TASKS = importlib.util.find_spec("django.tasks") is not None
INSTALLED_APPS = [
    "fairlane.integrations.django",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "works",
    *([] if HAS_DJANGO_TASKS else ["django_tasks"]),
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]


def database_at(place: str) -> dict[str, Any]:
    if not place.startswith("postgres"):
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": place,
            "OPTIONS": {"transaction_mode": os.environ.get("TEST_TRANSACTION_MODE", "IMMEDIATE"), "timeout": 20},
            "TEST": {"NAME": os.environ.get("TEST_FILE")},
        }
    url = urlsplit(place)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.path.strip("/"),
        "HOST": url.hostname,
        "PORT": url.port,
        "USER": url.username,
    }


DATABASES = {"default": database_at(os.environ["TEST_DATABASE"])}
DATABASE_ROUTERS = ["works.routing.NoJobsHere"] if "TEST_NO_JOBS" in os.environ else []
FAIRLANE: dict[str, Any] = {"DASHBOARD_URL": "/fairlane/", **json.loads(os.environ.get("TEST_FAIRLANE", "{}"))}
TASKS = {
    "default": {
        "BACKEND": "fairlane.integrations.django.tasks.FairlaneBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"retry_on": ["works.tasks.Busy"], "max_attempts": 3},
    }
}
