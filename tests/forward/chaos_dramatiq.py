"""What Dramatiq's workers and the dispatcher import in the chaos."""

from __future__ import annotations

import os
import threading

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from fairlane import App, Concurrency, context
from fairlane.forward.dramatiq import DramatiqForwarder
from tests.forward.chaos import LEASE, LIMIT, LIMIT_OF_TENANT, QUEUE, REPUBLISH_AFTER, busy_for
from tests.forward.ledger import recorded


def connected(url: str) -> dramatiq.Broker:
    if url.startswith("redis"):
        return RedisBroker(url=url)  # type: ignore[no-untyped-call]
    return RabbitmqBroker(url=url, confirm_delivery=True)


broker = connected(os.environ["CHAOS_BROKER"])
dramatiq.set_broker(broker)

app = App()
app.queue(QUEUE, limits=[Concurrency(LIMIT), Concurrency(LIMIT_OF_TENANT, by="tenant")])
forwarder = DramatiqForwarder(app, broker, lease=LEASE, republish_after=REPUBLISH_AFTER)


@dramatiq.actor
def run(number: int, tenant: str) -> int:
    with recorded(number, tenant, context().id):
        threading.Event().wait(busy_for())
    return number


work = forwarder.task(run, queue=QUEUE, max_attempts=100)
