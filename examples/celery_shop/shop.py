"""A shop whose mails Celery sends and Fairlane admits: accounts take turns, and none has more than two on their way."""

import os

from celery import Celery

from fairlane import App, Concurrency, Fair
from fairlane.forward.celery import CeleryForwarder

celery = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"))

app = App(os.environ.get("DATABASE_URL", "sqlite:///shop.db"))
app.queue("mails", fair=Fair(by="account"), limits=[Concurrency(2, by="account"), Concurrency(8)])
forwarder = CeleryForwarder(app, celery)


@forwarder.route(queue="mails")
@celery.task(name="send_mail")
def send_mail(number: int, account: str) -> str:
    return f"mail {number} of {account} is sent"
