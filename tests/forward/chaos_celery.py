"""What Celery's workers and the dispatcher import in the chaos."""

from __future__ import annotations

import os
import threading

from celery import Celery

from fairlane import App, Concurrency, context
from fairlane.forward.celery import CeleryForwarder
from tests.forward.chaos import LEASE, LIMIT, LIMIT_OF_TENANT, QUEUE, REPUBLISH_AFTER, busy_for
from tests.forward.ledger import recorded

celery = Celery("chaos", broker=os.environ["CHAOS_BROKER"])
celery.conf.broker_connection_retry_on_startup = True
if os.environ["CHAOS_BROKER"].startswith("amqp"):
    celery.conf.broker_transport_options = {"confirm_publish": True}

app = App()
app.queue(QUEUE, limits=[Concurrency(LIMIT), Concurrency(LIMIT_OF_TENANT, by="tenant")])
forwarder = CeleryForwarder(app, celery, lease=LEASE, republish_after=REPUBLISH_AFTER)


@celery.task(name="run")  # type: ignore[untyped-decorator]  # Celery has no types
def run(number: int, tenant: str) -> int:
    with recorded(number, tenant, context().id):
        threading.Event().wait(5 * busy_for())  # longer than Celery needs to fetch the next
    return number


work = forwarder.task(run, queue=QUEUE, max_attempts=100)
