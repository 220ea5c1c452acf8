"""A small shop. Its database is a SQLite file, or the PostgreSQL that DATABASE_URL names."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = os.environ.get("SECRET_KEY", "only for this example")
DEBUG = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
ASGI_APPLICATION = "shop.asgi.application"
USE_TZ = True
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "fairlane.integrations.django",  # before the admin, whose index shows a link to the dashboard
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "orders",
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

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", BASE_DIR / "shop.sqlite3"),
        # A transaction that reads first and writes later would otherwise fail where another one wrote in between.
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
if "DATABASE_URL" in os.environ:
    place = urlsplit(os.environ["DATABASE_URL"])
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": place.path.strip("/"),
        "HOST": place.hostname,
        "PORT": place.port,
        "USER": place.username,
        "PASSWORD": unquote(place.password or ""),
    }

FAIRLANE = {"DASHBOARD_URL": "/fairlane/"}
