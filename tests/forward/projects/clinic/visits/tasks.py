import os
import signal
import threading

from celery import shared_task
from clinic import ledger

from visits.models import Visit  # which needs a project that is set up


@shared_task
def remind(visit, when=None):
    ledger.write("remind", visit=visit, model=Visit.__name__, when=type(when).__name__)
    return visit


@shared_task
def sweep():
    ledger.write("sweep")


@shared_task(bind=True, max_retries=3)
def call_lab(self, number, failures):
    ledger.write("call_lab", number=number, retries=self.request.retries, id=self.request.id)
    if self.request.retries < failures:
        raise self.retry(exc=ConnectionError("engaged"), countdown=0)
    return self.request.retries


@shared_task(bind=True, autoretry_for=(ConnectionError,), retry_backoff=1, retry_jitter=False, max_retries=1)
def fetch_report(self, number):
    ledger.write("fetch_report", number=number, retries=self.request.retries)
    raise ConnectionError("no answer")


@shared_task
def print_label(number: str):
    """Its callers give a number, whatever the annotation says."""
    ledger.write("print_label", number=number)
    raise ValueError("no paper")


@shared_task(bind=True)
def scan(self, number):
    """Takes until it was begun twice: whoever kills it the first time sees it end."""
    before = [each for each in ledger.read() if each["what"] == "scan" and each["number"] == number]
    ledger.write("scan", number=number)
    if not before:
        threading.Event().wait(120)
    ledger.write("scanned", number=number)


@shared_task
def crash(number):
    """Kills its process the first time."""
    before = [each for each in ledger.read() if each["what"] == "crash" and each["number"] == number]
    ledger.write("crash", number=number)
    if not before:
        os.kill(os.getpid(), signal.SIGKILL)


@shared_task(time_limit=1)
def stall(number):
    ledger.write("stall", number=number)
    threading.Event().wait(120)


@shared_task(bind=True)
def context_of(self):
    request = self.request
    facts = {"shadow": request.shadow, "limits": list(request.timelimit or []), "headers": request.headers}
    ledger.write("context_of", id=request.id, queue=request.delivery_info["routing_key"], **facts)
