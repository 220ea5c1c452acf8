"""Takes webhooks for many accounts: each is stored and its delivery enqueued in one transaction, or neither is.

Accounts take turns, none is delivered to faster than it can bear, and one that sends too much is told so.
"""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fairlane import App, Backlog, Fair, Rate
from fairlane.integrations.fastapi import Enqueuer, answer_back_pressure, enqueuer_in, lifespan
from fairlane.integrations.sqlalchemy import url_of

log = logging.getLogger("uvicorn.error")

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///webhooks.db"))
sessions = async_sessionmaker(engine, expire_on_commit=False)
app = App(url_of(engine))

app.queue(
    "deliveries",
    fair=Fair(by="account"),
    limits=[Rate(10, per="1m", by="account"), Backlog(20, by="account", when_full="reject")],
)


class Base(DeclarativeBase):
    pass


class Event(Base):
    __tablename__ = "events"

    id: Mapped[str] = mapped_column(primary_key=True)
    account: Mapped[str]
    body: Mapped[str]
    is_delivered: Mapped[bool] = mapped_column(default=False)


@app.task(queue="deliveries", max_attempts=5)
async def deliver(event: str, account: str) -> None:
    async with sessions.begin() as session:
        await session.execute(update(Event).where(Event.id == event).values(is_delivered=True))
    log.info("delivered %s to %s", event, account)  # where you would call their endpoint


@asynccontextmanager
async def with_tables(site: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


# A worker beside the site, for a small deployment. Otherwise: worker=False, and `fairlane worker webhooks:app`.
site = FastAPI(title="Webhooks", lifespan=lifespan(app, inner=with_tables, worker=True))
answer_back_pressure(site, retry_after="10s")


async def transaction() -> AsyncIterator[AsyncSession]:
    async with sessions.begin() as session:
        yield session


# "function": committed before the answer is sent, not after it.
Session = Annotated[AsyncSession, Depends(transaction, scope="function")]
Jobs = Annotated[Enqueuer, Depends(enqueuer_in(Session))]


class Webhook(BaseModel):
    id: str
    body: str


@site.post("/webhooks/{account}", status_code=202)
async def take(account: str, webhook: Webhook, session: Session, jobs: Jobs) -> dict[str, str]:
    session.add(Event(id=webhook.id, account=account, body=webhook.body))
    try:
        await session.flush()
    except IntegrityError as error:
        raise HTTPException(409, "this webhook was taken already") from error
    job = await jobs.enqueue(deliver.call(webhook.id, account=account))
    return {"job": str(job.id)}


@site.get("/webhooks/{account}/{event}")
async def show(account: str, event: str, session: Session) -> dict[str, bool]:
    found = await session.get(Event, event)
    if found is None or found.account != account:
        raise HTTPException(404, "there is no such webhook")
    return {"is_delivered": found.is_delivered}
