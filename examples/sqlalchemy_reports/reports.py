"""Reports for many accounts: a row and the job that builds it are stored in one transaction; one schema, one tool."""

import os
import sys

from sqlalchemy import create_engine, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fairlane import App, Concurrency, Fair, Job
from fairlane.integrations.sqlalchemy import url_of

engine = create_engine(os.environ.get("DATABASE_URL", "sqlite:///reports.db"))
app = App(url_of(engine))
app.queue("reports", fair=Fair(by="account"), limits=[Concurrency(1, by="account")])


class Base(DeclarativeBase):
    pass


class Report(Base):
    __tablename__ = "reports"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]
    month: Mapped[str]
    text: Mapped[str | None]


@app.task(queue="reports")
def build(report: int, account: str, month: str) -> str:
    text = f"{account} in {month}: all is well"
    with Session(engine) as session, session.begin():
        session.execute(update(Report).where(Report.id == report).values(text=text))
    return text


def request_report(session: Session, account: str, month: str) -> Job[str]:
    """Ask for a report. Nothing has happened until the session commits."""
    report = Report(account=account, month=month)
    session.add(report)
    session.flush()  # now it has an id
    return build.using(tx=session).enqueue_sync(report.id, account=account, month=month)


def main(account: str, month: str) -> None:
    app.open_sync()  # a SQLite file has one writer: open before a transaction begins
    with Session(engine) as session, session.begin():
        job = request_report(session, account, month)
    print(job.result_sync(timeout=60))
    with Session(engine) as session:
        built = session.scalars(select(Report).where(Report.text.is_not(None))).all()
    print(f"{len(built)} built so far")
    app.close_sync()


if __name__ == "__main__":
    main(*sys.argv[1:3])
