"""Databases that cannot be used: every command says so in our words, with a remedy and a status, never a traceback."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from click.testing import CliRunner

from fairlane import App
from fairlane.cli.program import program

SHOP = """
from fairlane import App

app = App()
app.queue("webhooks")


@app.task(queue="webhooks", name="deliver")
async def deliver(number: int) -> int:
    return number
"""
JOB = "0198c0de-0000-7000-8000-000000000000"
COMMANDS = [
    "audit",
    "boost webhooks --key account=acme --by 4",
    "dashboard --port 0 --token operators-only-0001",
    "dead list",
    "dead replay --queue webhooks --yes",
    "doctor",
    "doctor shop:app",
    "doctor --json",
    "enqueue shop:app deliver --args [1]",
    f"explain {JOB}",
    "explain --queue webhooks --key account=acme",
    "jobs list",
    f"jobs show {JOB}",
    "keys webhooks",
    "limit list webhooks",
    "migrate",
    "overrides",
    "partition webhooks --to 4 --by account --yes",
    "pause webhooks",
    "policy apply shop:app",
    "policy show shop:app",
    "queues",
    "resume webhooks",
    "schedules list",
    "simulate --app shop:app --history webhooks --last 1h",
    "status",
    "suspend webhooks",
    "top --json",
    "unsuspend webhooks",
    "weight set webhooks 3 --key account=acme",
    "worker shop:app",
    "workers",
]
MALFORMED = {
    "a port that is no number": ("postgresql://shop@localhost:port/shop", "database URL"),
    "a port out of range": ("postgresql://shop@localhost:123456/shop", "database URL"),
    "an address with half a bracket": ("postgresql://shop@[::1/shop", "database URL"),
    "an sslmode that there is not": ("postgresql://shop@localhost/shop?sslmode=maybe", "database URL"),
}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def check(command: str, url: str, said: str) -> None:
    """What a command says of a database that it cannot use."""
    result = CliRunner().invoke(program, command.split(), env={"FAIRLANE_URL": url}, prog_name="fairlane")
    assert isinstance(result.exception, SystemExit), f"{command}: {result.exception!r}"
    assert result.exit_code != 0
    assert said in result.output, f"{command}: {result.output}"
    assert "Traceback" not in result.output
    assert "s3cret" not in result.output


# P4
@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_url_is_told_by_every_command(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, said = MALFORMED[kind]
    monkeypatch.setenv("FAIRLANE_URL", url)
    for command in COMMANDS:
        sys.modules.pop("shop", None)
        check(command, url, said)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://shop@localhost/shop",
        "postgresql://shop:p%40ss@[::1]:5432/shop",
        "postgresql://one:5432,two:5433/shop?target_session_attrs=primary",
        "postgresql:///shop?host=/var/run/postgresql",
        "postgresql://%2Fvar%2Frun%2Fpostgresql/shop",
        "postgres://10.0.0.1:/shop",
    ],
)
def test_a_url_that_the_driver_takes_is_taken(url: str) -> None:
    App(url)


@pytest.fixture(
    params=[
        "unknown database",
        "unknown role",
        "no rights",
        "no connections",
        "unreachable",
        "unknown option",
        "no schema",
    ]
)
def broken(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[tuple[str, str]]:
    """The URL of a database that cannot be used, and what is said of it."""
    parts = urlsplit(postgres_url)
    name = parts.path.removeprefix("/")
    at = parts.netloc.partition("@")[2]
    admin = urlunsplit(parts._replace(path="/postgres"))
    match request.param:
        case "unknown database":
            yield urlunsplit(parts._replace(path="/nowhere")), "create the database"
        case "unknown role":
            yield urlunsplit(parts._replace(netloc=f"nobody:s3cret@{at}")), "check the user and the password"
        case "no rights":
            role = f"poor_{name}"
            run(postgres_url, f"create role {role} login")
            yield urlunsplit(parts._replace(netloc=f"{role}@{at}")), "see Roles in docs/how-to/use-postgresql.md"
            run(postgres_url, f"drop role {role}")
        case "no connections":
            run(admin, f"alter database {name} allow_connections false")
            # A superuser is admitted all the same where only the database's limit is in the way, but not here.
            yield postgres_url, "allow_connections true"
            run(admin, f"alter database {name} allow_connections true")
        case "unreachable":
            with socket.socket() as deaf:
                deaf.bind(("127.0.0.1", 0))
                yield f"postgresql://shop:s3cret@127.0.0.1:{deaf.getsockname()[1]}/shop", "check the host, the port"
        case "unknown option":
            yield f"{postgres_url}?nonsense=1", "database URL"
        case "no schema":
            yield urlunsplit(parts._replace(path="/template1")), "fairlane migrate"


def run(url: str, statement: str) -> None:
    async def once() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(statement)
        await connection.close()

    asyncio.run(once())


# P4
@pytest.mark.usefixtures("shop")
def test_a_database_that_cannot_be_used_is_told_by_every_command(
    broken: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, said = broken
    monkeypatch.setenv("FAIRLANE_URL", url)
    for command in COMMANDS:
        sys.modules.pop("shop", None)
        if said != "fairlane migrate" or command != "migrate":  # which helps
            check(command, url, said)
