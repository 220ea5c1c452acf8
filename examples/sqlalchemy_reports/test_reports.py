import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from reports import Report, app, engine, request_report
from sqlalchemy import select
from sqlalchemy.orm import Session

from fairlane.testing import run_until_idle


@pytest.fixture
def alembic() -> Iterator[Config]:
    config = Config(str(Path(__file__).with_name("alembic.ini")))
    command.upgrade(config, "head")
    app.open_sync()
    yield config
    app.close_sync()
    engine.dispose()


def test_a_report_is_built_once_its_request_is_committed(alembic: Config) -> None:
    with Session(engine) as session:
        request_report(session, "acme", "May")
        session.rollback()
        request_report(session, "acme", "June")
        session.commit()
    app.close_sync()

    asyncio.run(work())
    with Session(engine) as session:
        assert list(session.scalars(select(Report.text))) == ["acme in June: all is well"]


async def work() -> None:
    async with app:
        await run_until_idle(app)


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection")
def test_alembic_has_nothing_to_add_and_nothing_to_drop(alembic: Config) -> None:
    command.check(alembic)
