"""A shop whose mails Dramatiq sends and Fairlane admits: accounts take turns, none has more than two on their way."""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from fairlane import App, Concurrency, Fair
from fairlane.forward.dramatiq import DramatiqForwarder

broker = RedisBroker(url=os.environ.get("REDIS_URL", "redis://localhost:6379/0"))
dramatiq.set_broker(broker)

app = App(os.environ.get("DATABASE_URL", "sqlite:///shop.db"))
app.queue("mails", fair=Fair(by="account"), limits=[Concurrency(2, by="account"), Concurrency(8)])
forwarder = DramatiqForwarder(app, broker)


@forwarder.route(queue="mails")
@dramatiq.actor
def send_mail(number: int, account: str) -> str:
    return f"mail {number} of {account} is sent"
