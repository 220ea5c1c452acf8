"""A shop whose mails Taskiq sends and Fairlane admits: accounts take turns, none has more than two on their way."""

import os

from taskiq_redis import ListQueueBroker

from fairlane import App, Concurrency, Fair
from fairlane.forward.taskiq import TaskiqForwarder

# Without a socket timeout: a worker waits for its next message for as long as it takes.
broker = ListQueueBroker(os.environ.get("REDIS_URL", "redis://localhost:6379/0"), socket_timeout=None)

app = App(os.environ.get("DATABASE_URL", "sqlite:///shop.db"))
app.queue("mails", fair=Fair(by="account"), limits=[Concurrency(2, by="account"), Concurrency(8)])
forwarder = TaskiqForwarder(app, broker)


@forwarder.route(queue="mails")
@broker.task
async def send_mail(number: int, account: str) -> str:
    return f"mail {number} of {account} is sent"
