from collections.abc import AsyncIterator

import httpx
import pytest
from webhooks import app, site

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(site)
    async with site.router.lifespan_context(site), httpx.AsyncClient(transport=transport, base_url="http://site") as it:
        yield it


async def test_a_webhook_is_stored_once_and_delivered(client: httpx.AsyncClient) -> None:
    taken = await client.post("/webhooks/acme", json={"id": "a-1", "body": "hello"})
    assert taken.status_code == 202
    await app.job(taken.json()["job"]).result(timeout=30)
    assert (await client.get("/webhooks/acme/a-1")).json() == {"is_delivered": True}

    again = await client.post("/webhooks/acme", json={"id": "a-1", "body": "hello"})
    assert again.status_code == 409


async def test_who_sends_too_much_is_told_so_and_nobody_else_waits(client: httpx.AsyncClient) -> None:
    answers = [await client.post("/webhooks/loud", json={"id": f"l-{n}", "body": ""}) for n in range(50)]
    assert {each.status_code for each in answers} == {202, 429}
    last = max(n for n, each in enumerate(answers) if each.status_code == 429)
    assert answers[last].headers["retry-after"] == "10"
    assert (await client.get(f"/webhooks/loud/l-{last}")).status_code == 404  # not stored without its job

    quiet = await client.post("/webhooks/quiet", json={"id": "q-1", "body": "hello"})
    await app.job(quiet.json()["job"]).result(timeout=30)
