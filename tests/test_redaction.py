"""What may be seen of what jobs carry: no message shows a secret that an exception carried (S4, O19)."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fairlane import App, Dead, Retry, Snooze
from fairlane.cli.program import program
from fairlane.events import Event, JobEnded
from fairlane.operations import Disclosure
from fairlane.redaction import MASK, Part, Surface, without_secrets
from fairlane.testing import run_until_idle
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site
from tests.waiting import until
from tests.worker.harness import working

SECRETS = [
    ("postgresql://shop:hunter2@db:5432/x refused", "postgresql://shop:***@db:5432/x refused"),
    ("amqp://u:p@ss/hunter2@host/vh", "amqp://u:***@host/vh"),
    ("redis://:hunter2@h:6379/0", "redis://:***@h:6379/0"),
    ("GET https://u:hunter2@api.example.com/x?mail=a@b.c", "GET https://***@api.example.com/x?mail=a@b.c"),
    ("git clone https://hunter2@github.com/x", "git clone https://***@github.com/x"),
    ("password=hunter2 host=db", "password=*** host=db"),
    ("password='hunter2 or so', user='bob'", "password='***', user='bob'"),
    ('{"db_password": "hunt\\"er2", "user": "bob"}', '{"db_password": "***", "user": "bob"}'),
    ("{'api_key': b'hunter2', 'tokens': 1200}", "{'api_key': b'***', 'tokens': 1200}"),
    ("PGPASSWORD=hunter2 psql", "PGPASSWORD=*** psql"),
    ("/callback?access_token=hunter2", "/callback?access_token=***"),
    ("aws_secret_access_key = hunter2/K7MDENG", "aws_secret_access_key = ***"),
    ("Server=x;Pwd=hunter2", "Server=x;Pwd=***"),
    ("alter role shop password 'hunter2'", "alter role shop password '***'"),
    ("run --api-token hunter2 x", "run --api-token *** x"),
    ("password='hunter2", "password=***"),
    ("Authorization: Bearer hunter2", "Authorization: ***"),
    ("{'Authorization': 'Basic hunter2', 'x': 1}", "{'Authorization': '***', 'x': 1}"),
    ("Cookie: session=hunter2; other=1\nnext", "Cookie: ***\nnext"),
    ("sent Bearer hunter2.x to it", "sent Bearer *** to it"),
    ("key AKIAIOSFODNN7EXAMPLE is gone", "key *** is gone"),
    ('{"body": "{\\"password\\": \\"hunter2\\", \\"a\\": 1}"}', '{"body": "{\\"password\\": \\"***\\", \\"a\\": 1}"}'),
    ('password: str = "hunter2"', 'password: *** = "***"'),
    ("[(b'authorization', b'Basic hunter2'), (b'a', b'b')]", "[(b'authorization', b'***'), (b'a', b'b')]"),
    ("('db_password', 'hunter2')", "('db_password', '***')"),
    ("<ns:password>hunter2</ns:password>", "<ns:password>***</ns:password>"),
    ("DB_PASS=hunter2 SECRET_KEY_BASE=hunter2", "DB_PASS=*** SECRET_KEY_BASE=***"),
    ("AccountName=x;AccountKey=hunter2==", "AccountName=x;AccountKey=***"),
    ("GET /k?X-Amz-Signature=hunter2&part=1", "GET /k?X-Amz-Signature=***&part=1"),
    ("/c?sv=1&sig=hunter2", "/c?sv=1&sig=***"),
    ("https://hooks.slack.com/services/T0/B0/hunter2: 404", "https://hooks.slack.com/services/*** 404"),
    ("Incorrect API key provided: sk-proj-hunter2hunter2hunter2.", "Incorrect API key provided: ***."),
    ("sk_live_hunter2hunter2 ghp_hunter2hunter2hunter2", "*** ***"),
    ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.hunter2", "***"),
    (
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
    ),
    # URLs: a user name may be a mail address, and a password may hold anything but a space, and be long.
    ("smtp://u@d.com:hunter2@smtp.d.com", "smtp://u@d.com:***@smtp.d.com"),
    ("postgresql://u@h:hunter2@h", "postgresql://u@h:***@h"),
    ("postgresql://u:a'hunter2@h refused", "postgresql://u:***@h refused"),
    ("'amqp://u:a\"hunter2@h'", "'amqp://u:***@h'"),
    (f"redis://:{'hunter2' * 1_000}@h", "redis://:***@h"),
    ("https://u:a/hunter2@h/x", "https://***@h/x"),
    ("https:\\/\\/u:hunter2@h", "https:\\/\\/***@h"),
    # Names: by their last word.
    ("pass=hunter2, user=bob", "pass=*** user=bob"),
    ("{'pass': 'hunter2', 'a': 1}", "{'pass': '***', 'a': 1}"),
    ("{'pass': 12345}", "{'pass': ***"),
    ("pw=hunter2 password2=hunter2", "pw=*** password2=***"),
    ("encryption_key=hunter2 hmac-key: hunter2", "encryption_key=*** hmac-key: ***"),
    ("signing_key='hunter2 and more' apiKey: hunter2", "signing_key='***' apiKey: ***"),
    ("session_id=hunter2 PHPSESSID=hunter2", "session_id=*** PHPSESSID=***"),
    ("GET /x?key=hunter2&part=1", "GET /x?key=***&part=1"),
    ("GET /x?part=1&auth=hunter2", "GET /x?part=1&auth=***"),
    ("API key: hunter2", "API key: ***"),
    ("Key (token)=(hunter2) already exists.", "Key (token)=(***) already exists."),
    ("%22password%22%3A%22hunter2%22", "%22password%22%3A***"),
    # Values: a quoted text, all within brackets, or a word.
    ("auth=('u', 'hunter2'), timeout=3", "auth=(***), timeout=3"),
    ("tokens=['a', 'hunter2'], n=1", "tokens=[***], n=1"),
    ('{"password": {"value": "a}hunter2"}, "a": 1}', '{"password": {***}, "a": 1}'),
    ('"api_keys": {\n  "a": ["hunter2"]\n}\nnext', '"api_keys": {***}\nnext'),
    ("tokens = [\nnext line, [1]", "tokens = ***\nnext line, [1]"),
    ("cookies={'id': 'hunter2'}", "cookies={***}"),
    ("run --api-key 'a hunter2' x", "run --api-key '***' x"),
    ('token="""a hunter2""", a=1', 'token="""***""", a=1'),
    ("password='it''s hunter2', a=1", "password='***', a=1"),
    ("identified by 'hunter2'", "identified by '***'"),
    # Logins and vendors.
    ("sent Basic dTpodW50ZXIy to it", "sent Basic *** to it"),
    ("Basic dXNlcjpodW50ZXIyMg==", "Basic ***"),
    ("https://api.telegram.org/bot123456:hunter2/getMe", "https://api.telegram.org/bot123456:***/getMe"),
    ("https://discord.com/api/webhooks/123/hunter2 is gone", "https://discord.com/api/webhooks/123/*** is gone"),
    (
        "https://discordapp.com/api/v10/webhooks/123/hunter2?wait=1",
        "https://discordapp.com/api/v10/webhooks/123/***?wait=1",
    ),
    ("https://hooks.slack.com/workflows/T0/hunter2", "https://hooks.slack.com/workflows/***"),
    ("POST https://x.example/hooks/0hunter2hunter2hunter2hunter2", "POST https://x.example/hooks/***"),
    ("whsec_hunter2hunter2 hvs.hunter2hunter2 shpat_hunter2hunter2", "*** *** ***"),
    ("pypi-AgEIcHlwaS5vcmhunter2 xapp-1-A0-hunter2hunter2", "*** ***"),
]
PLAIN = [
    "postgresql://shop@db/x: connection refused",
    "http://host:8080/path?mail=x@y.com answered 500",
    "Rate(100): it takes tokens=1200 of 5 tokens",
    "the job's token was lost",
    "KeyError: 'account'",
    "the function's signature=(a, b) of task-01234567890123456789",
    "('account', 'acme') may pass: 3 of 5",
    "TypeError: deliver() missing 1 required positional argument: 'key'",
    "the key is missing",
    "pass 3 of 5, pass: done",
    "key=acme {'key': 'acme'} keys={'account': 'acme'}",
    "unique_key=order-1 partition_key: acme primary-key=1",
    "auth: failed, auth=None, require_auth=True, http://auth:8080/",
    "bypass=yes max_tokens=1200, secrets: none",
    "Basic authentication is a basic subscription",
    "Unexpected token '<' at 3",
    "https://shop.example/webhooks/orders-of-our-best-customers and http://host/@me:x",
    "pypi-attestations-of-something",
]


@pytest.mark.parametrize(("text", "shown"), SECRETS)
def test_what_is_obviously_secret_is_taken_out_and_the_rest_is_kept(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown, "applied twice, it changes nothing more"


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_is_left_as_it_is(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("://", "x://a:", "x://a:@", "http://a:", "http://@", "@", "a.b+c-", "a-", "'", "\\", "<a ", "   "),
        *("password='", "token='\\", "token='''", "token=\\\\'", "secret=>", "token: a ", "token: a=", "('token', '"),
        *("<token>", "<token ", 'token\\": \\"', "token=[", "token=[\n", "token=['", "token={'a", 'token="[('),
        *("authorization: ", "Basic aaaa", "basic ", "--token ", "--a ", "&sig=", "?key=", "/hooks/", "/bot1:"),
        *("eyJ", "eyJaaaaaaaa.", "sk-", "pypi-", "SG.a", "12345678:AA", "-----BEGIN PRIVATE KEY-----"),
    ],
)
def test_no_text_takes_long_to_redact(text: str) -> None:
    """A rule that looks at the rest of the text again for each of its beginnings would take minutes for this."""
    hostile = text * (100_000 // len(text))
    assert "hunter2" not in without_secrets(f"{hostile}\npassword=hunter2")


URL = "postgresql://shop:hunter2@db/x"


def a_failing_app(url: str, **options: Any) -> App:
    app = App(url, **options)

    @app.task(name="fail", max_attempts=1)
    async def fail(how: str) -> str:
        match how:
            case "raise":
                secret = "hunter2"
                raise ConnectionError(f"{URL} refused, password={secret}")
            case "chain":
                try:
                    raise ConnectionError(URL)
                except ConnectionError as error:
                    error.add_note(f"while at {URL}")
                    raise
            case "dead":
                raise Dead(URL)
            case "retry":
                raise Retry("1h", reason=URL)
            case "snooze":
                raise Snooze("1h", reason=URL)
        return how

    return app


HOWS = ("raise", "chain", "dead", "retry", "snooze")


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


async def test_no_surface_shows_a_secret_that_an_exception_carried(
    database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: stored, logged, in events and spans, on the dashboard, in the API and on the command line."""
    caplog.set_level(logging.DEBUG)
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    events: list[Event] = []
    app = a_failing_app(database_url)
    app.on_event(events.append)
    seen: dict[str, str] = {}
    async with app:
        jobs = [await app.registry["fail"].enqueue(how) for how in HOWS]
        async with working(app):
            await until(lambda: [type(each) for each in events].count(JobEnded) == len(HOWS))
        async with Site.of(app, app.clock, token=TOKEN, viewer_token=VIEWER_TOKEN) as site:  # type: ignore[arg-type]
            visitor, client = await site.visitor(), site.program()
            for job in jobs:
                assert (await job.record()).error, "it failed, and says why"
                seen[f"page {job.id}"] = (await visitor.get(f"{ROOT}/jobs/{job.id}")).text
                seen[f"api {job.id}"] = (await client.get(f"{ROOT}/api/jobs/{job.id}")).text
            for path in ("/", "/dead", "/jobs", "/api/jobs", "/metrics"):
                seen[path] = (await client.get(f"{ROOT}{path}")).text
        seen["records"] = repr([await job.record() for job in jobs])
        seen["attempts"] = repr([(await app.operations.jobs.show(job.id)).attempts for job in jobs])
    monkeypatch.setenv("FAIRLANE_URL", database_url)
    seen["log"] = caplog.text
    seen["events"] = repr(events)
    seen["spans"] = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "exception.stacktrace" in seen["spans"]
    assert [name for name, text in seen.items() if "hunter2" in text] == []
    assert MASK in seen["log"]
    seen["tables"] = await _everything_stored(database_url)
    assert "ConnectionError" in seen["tables"]
    assert "hunter2" not in seen["tables"]


async def _everything_stored(url: str) -> str:
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
            tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
            return "".join(str(database.execute(f"select * from {name}").fetchall()) for name in tables)
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetch("select tablename from pg_tables where schemaname = 'fairlane'")
        return "".join([str(await connection.fetch(f"select * from fairlane.{name}")) for (name,) in found])
    finally:
        await connection.close()


def test_the_command_line_shows_no_password_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRLANE_URL", raising=False)
    run = CliRunner().invoke
    for url in ("postgresql://shop:hunter2@127.0.0.1:1/x", "postgresql://shop:hunter2@@127.0.0.1:nonsense/x"):
        for command in (["status"], ["jobs", "list"], ["doctor"], ["audit"], ["migrate"]):
            told = run(program, [*command, "--url", url])
            assert told.exit_code != 0
            assert "hunter2" not in f"{told.output}{told.exception}", command


async def test_the_app_is_told_what_is_seen_by_whom_and_where(database_url: str) -> None:
    """S4: `redact` may show more to an operator than to a viewer, and what it hides is not stored either."""
    asked: list[Disclosure] = []

    def redact(value: Any, disclosure: Disclosure) -> Any:
        asked.append(disclosure)
        if disclosure.part is Part.ERROR:
            value = value.replace("4111", "…")
        if disclosure.surface in (Surface.DASHBOARD, Surface.API):
            return f"for {disclosure.viewer}, {disclosure.role}: {value}"
        return value

    app = App(database_url, redact=redact)

    @app.task(name="pay", max_attempts=1)
    async def pay(card: str) -> None:
        raise ValueError(f"{card} is refused")

    async with app:
        job = await pay.enqueue("4111")
        await run_until_idle(app)
        assert "4111 is" not in await _everything_stored(database_url)
        [first] = [each for each in asked if each.surface is Surface.WORKER]
        assert (first.part, first.viewer, first.job.id, first.job.task) == (Part.ERROR, None, job.id, "pay")
        async with Site.of(app, app.clock, token=TOKEN, viewer_token=VIEWER_TOKEN) as site:  # type: ignore[arg-type]
            operator, viewer = await site.visitor("ann"), await site.visitor("vic", VIEWER_TOKEN)
            assert "for ann, operator" in (await operator.get(f"{ROOT}/jobs/{job.id}")).text
            assert "for vic, viewer" in (await viewer.get(f"{ROOT}/jobs/{job.id}")).text
            shown = (await site.program(VIEWER_TOKEN).get(f"{ROOT}/api/jobs/{job.id}")).json()
            assert shown["call"].startswith("for api, viewer")
            assert shown["error"].startswith("for api, viewer: ValueError: … is refused")
            assert shown["attempts"][0]["error"].startswith("for api, viewer")
        details = await app.operations.jobs.show(job.id)
        assert (details.call, asked[-1].surface) == ([["4111"], {}], Surface.PROGRAM)


async def test_a_rule_that_fails_hides_the_error_and_does_not_log_what_it_failed_on(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def redact(value: Any, disclosure: Disclosure) -> Any:
        raise LookupError(str(value))

    app = App(database_url, redact=redact)

    @app.task(name="pay", max_attempts=1)
    async def pay(card: str) -> None:
        raise ValueError(card)

    async with app:
        job = await pay.enqueue("4111")
        await run_until_idle(app)
        assert "redact failed" in str((await job.record()).error)
    assert "LookupError" in caplog.text
    assert "4111" not in caplog.text
