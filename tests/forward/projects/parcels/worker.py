import os

from celery import Celery

celery = Celery(__name__)
celery.conf.broker_url = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379")
celery.conf.result_backend = os.environ.get("CELERY_RESULT_BACKEND", "redis://localhost:6379")
celery.conf.broker_connection_retry_on_startup = True


@celery.task(name="weigh")
def weigh(parcel: int, grams: float = 1.0):
    return {"parcel": parcel, "grams": grams}


@celery.task(name="label")
def label(weighed):
    return f"parcel {weighed['parcel']}: {weighed['grams']:g} g"
