"""What Taskiq's workers and the dispatcher import in the chaos."""

from __future__ import annotations

import asyncio
import os

from taskiq_redis import ListQueueBroker

from fairlane import App, Concurrency, context
from fairlane.forward.taskiq import TaskiqForwarder
from tests.forward.chaos import LEASE, LIMIT, LIMIT_OF_TENANT, QUEUE, REPUBLISH_AFTER, busy_for
from tests.forward.ledger import recorded

# By itself redis-py waits for 5 s, and a worker of Taskiq that has had nothing to do for so long would die of that.
broker = ListQueueBroker(os.environ["CHAOS_BROKER"], socket_timeout=None)

app = App()
app.queue(QUEUE, limits=[Concurrency(LIMIT), Concurrency(LIMIT_OF_TENANT, by="tenant")])
forwarder = TaskiqForwarder(app, broker, lease=LEASE, republish_after=REPUBLISH_AFTER)


async def take_time() -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(busy_for(), done.set_result, None)
    await done


@broker.task
async def run(number: int, tenant: str) -> int:
    with recorded(number, tenant, context().id):
        await take_time()
    return number


work = forwarder.task(run, queue=QUEUE, max_attempts=100)
