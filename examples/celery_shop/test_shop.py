from collections.abc import Iterator

import pytest
from shop import app, send_mail

from fairlane import State


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    app.close_sync()


def test_a_mail_that_is_sent_waits_for_its_accounts_turn() -> None:
    sent = send_mail.delay(1, account="acme")
    record = app.run_blocking(app.job(sent.id).record())
    assert (record.queue, record.state, record.keys) == ("mails", State.READY, {"account": "acme"})


def test_the_task_is_a_function_as_ever() -> None:
    assert send_mail(1, account="acme") == "mail 1 of acme is sent"
