import pytest
from shop import app, send_mail

from fairlane import State

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_mail_that_is_sent_waits_for_its_accounts_turn() -> None:
    async with app:
        sent = await send_mail.kiq(1, account="acme")
        record = await app.job(sent.task_id).record()
        assert (record.queue, record.state, record.keys) == ("mails", State.READY, {"account": "acme"})


async def test_the_task_is_a_function_as_ever() -> None:
    assert await send_mail(1, account="acme") == "mail 1 of acme is sent"
