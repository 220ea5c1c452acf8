"""In a FastAPI app: the app as a dependency, and jobs that commit with the request's own session, or not at all."""

# No `from __future__ import annotations` here: FastAPI would look up what an endpoint's parameters are in this module,
# and these are made within a class.
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import httpx
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session as BlockingSession

from fairlane import App, Backlog, FairlaneError
from fairlane.errors import ConfigurationError, InvalidJob
from fairlane.integrations.fastapi import Enqueuer, FairlaneApp, answer_back_pressure, enqueuer_in, lifespan
from fairlane.testing import enqueued_jobs

DRIVERS = {
    "sqlite": ("sqlite+aiosqlite", "sqlite"),
    "postgresql": ("postgresql+asyncpg", "postgresql+psycopg"),
}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = request.getfixturevalue("postgres_url") if request.param == "postgresql" else ""
    return found or f"sqlite:///{tmp_path}/shop.db"


class Shop:
    """A site with an endpoint that stores an order and a job, and may fail in between; async, and not."""

    def __init__(self, url: str) -> None:
        kind = url.partition(":")[0]
        async_driver, driver = DRIVERS[kind]
        self.app = App(url)
        self.app.queue("orders", limits=[Backlog(2, by="account", when_full="reject")])

        @self.app.task(queue="orders", name="confirm")
        async def confirm(order: int, account: str) -> None: ...

        self.engine = create_async_engine(url.replace(kind, async_driver, 1))
        self.blocking_engine = create_engine(url.replace(kind, driver, 1))
        self.site = FastAPI(lifespan=lifespan(self.app))
        answer_back_pressure(self.site)

        async def open_session() -> AsyncIterator[AsyncSession]:
            async with AsyncSession(self.engine) as session, session.begin():
                yield session

        def open_blocking_session() -> Iterator[BlockingSession]:
            with BlockingSession(self.blocking_engine) as session, session.begin():
                yield session

        Session = Annotated[AsyncSession, Depends(open_session, scope="function")]
        Plain = Annotated[BlockingSession, Depends(open_blocking_session, scope="function")]

        @self.site.post("/orders/{order}", status_code=202)
        async def take(
            order: int, session: Session, jobs: Annotated[Enqueuer, Depends(enqueuer_in(Session))], fails: bool = False
        ) -> dict[str, str]:
            await session.execute(text("insert into orders values (:id)"), {"id": order})
            job = await jobs.enqueue(confirm.call(order, account="acme"))
            if fails:
                raise RuntimeError("changed my mind")
            return {"job": str(job.id)}

        @self.site.post("/bulk", status_code=202)
        async def bulk(jobs: Annotated[Enqueuer, Depends(enqueuer_in(Session))]) -> int:
            assert await jobs.enqueue_many([]) == []
            calls = [confirm.call(number, account=str(number)) for number in range(3)]
            return len((await jobs.enqueue_many(calls)).stored)

        @self.site.post("/plain/{order}", status_code=202)
        def take_plainly(
            order: int, session: Plain, jobs: Annotated[Enqueuer, Depends(enqueuer_in(Plain))], fails: bool = False
        ) -> dict[str, int]:
            session.execute(text("insert into orders values (:id)"), {"id": order})
            jobs.enqueue_sync(confirm.call(order, account="bolt"))
            many = jobs.enqueue_many_sync([confirm.call(order, account="cold")])
            if fails:
                raise RuntimeError("changed my mind")
            return {"stored": len(many.stored)}

        @self.site.get("/tasks")
        async def tasks(app: FairlaneApp) -> list[str]:
            return app.known_tasks()

    async def stored(self) -> tuple[list[int], list[int]]:
        """The orders that there are, and those that have a job."""
        async with AsyncSession(self.engine) as session:
            orders = [row[0] for row in await session.execute(text("select id from orders order by id"))]
        return orders, sorted({each.arguments["order"] for each in await enqueued_jobs(self.app)})


@pytest.fixture
async def shop(url: str) -> AsyncIterator[Shop]:
    shop = Shop(url)
    async with shop.site.router.lifespan_context(shop.site):
        async with shop.engine.begin() as connection:
            await connection.execute(text("create table orders (id integer primary key)"))
        yield shop
    await shop.engine.dispose()
    shop.blocking_engine.dispose()


@pytest.fixture
async def client(shop: Shop) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(shop.site, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
        yield client


@pytest.mark.parametrize("path", ["/orders/{}", "/plain/{}"])
async def test_an_order_and_its_job_are_stored_together_or_not_at_all(
    shop: Shop, client: httpx.AsyncClient, path: str
) -> None:
    assert (await client.post(path.format(1))).status_code == 202
    assert await shop.stored() == ([1], [1])
    assert (await client.post(path.format(2), params={"fails": True})).status_code == 500
    assert (await client.post(path.format(1))).status_code == 500  # the order is there already
    assert await shop.stored() == ([1], [1])


async def test_the_answer_comes_after_the_commit(shop: Shop) -> None:
    seen: list[Any] = []

    async def watched(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(await shop.stored())

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/orders/1",
        "query_string": b"",
        "headers": [],
        "app": None,
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await shop.site(scope, receive, watched)
    assert seen == [([1], [1])]


async def test_a_full_backlog_takes_the_order_back_and_is_answered_with_429(
    shop: Shop, client: httpx.AsyncClient
) -> None:
    answers = [await client.post(f"/orders/{number}") for number in range(3)]
    assert [each.status_code for each in answers] == [202, 202, 429]
    assert answers[2].headers["retry-after"] == "5"
    assert await shop.stored() == ([0, 1], [0, 1])


async def test_many_jobs_go_with_the_session_too(shop: Shop, client: httpx.AsyncClient) -> None:
    assert (await client.post("/bulk")).json() == 3
    assert (await shop.stored())[1] == [0, 1, 2]


async def test_the_app_is_a_dependency(client: httpx.AsyncClient) -> None:
    assert (await client.get("/tasks")).json() == ["confirm"]


def test_what_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    for name in ("fastapi", "starlette", "sqlalchemy", "alembic"):
        with monkeypatch.context() as patched:
            module = f"fairlane.integrations.{name}"
            for loaded in [each for each in sys.modules if each.partition(".")[0] == name or each == module]:
                patched.delitem(sys.modules, loaded)
            patched.setitem(sys.modules, name, None)
            with pytest.raises(FairlaneError, match=rf"pip install 'fairlane\[{name}\]'"):
                importlib.import_module(module)


async def transaction() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("given", [transaction, Depends(transaction), AsyncSession, Annotated[AsyncSession, "mine"]])
def test_a_session_that_is_no_annotation_is_refused_where_it_is_given(given: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"give the annotation .* Session = Annotated\[AsyncSession, Depends\("
    ):
        enqueuer_in(given)


async def test_what_is_no_call_is_refused_in_words() -> None:
    jobs, given = Enqueuer(None), cast(Any, 5)
    for enqueue in (jobs.enqueue(given), jobs.enqueue_many([given])):
        with pytest.raises(InvalidJob, match=r"an Enqueuer takes calls, not a int; write task.call\(…\)"):
            await enqueue
    with pytest.raises(InvalidJob, match="an Enqueuer takes calls"):
        jobs.enqueue_sync(given)


async def test_a_lifespan_that_was_not_called_is_told_so() -> None:
    site = FastAPI(lifespan=cast(Any, lifespan))
    with pytest.raises(ConfigurationError, match=r"call it, .*: FastAPI\(lifespan=lifespan\(app\)\)"):
        async with site.router.lifespan_context(site):
            pass
