import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "not a secret"
INSTALLED_APPS = ["django.contrib.contenttypes", "visits", "billing"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "db.sqlite3"}}
USE_TZ = True
TIME_ZONE = "Europe/Lisbon"
LEDGER = BASE_DIR / "ledger.jsonl"

CELERY_BROKER_URL = os.environ["CLINIC_BROKER"]
CELERY_RESULT_BACKEND = os.environ["CLINIC_BROKER"]
CELERY_TIMEZONE = TIME_ZONE
CELERY_TASK_TRACK_STARTED = True
CELERY_TASK_ROUTES = {"billing.tasks.*": {"queue": "billing"}}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BEAT_SCHEDULE = {
    "sweep": {"task": "visits.tasks.sweep", "schedule": 1.0, "options": {"expires": 30}},
}
