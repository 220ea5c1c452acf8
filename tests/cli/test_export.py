"""`fairlane jobs export`, run as an operator runs it."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fairlane import App, Fair
from fairlane.cli.program import program
from fairlane.errors import StoreUnavailable
from fairlane.operations import exported_columns
from fairlane.operations import jobs as operations_on_jobs
from fairlane.redaction import one_line
from fairlane.store.operators import JobPage
from fairlane.store.sqlite import SqliteStore

Run = Callable[..., Result]
ACCOUNTS = ["acme", "=cmd|' /C calc'!A0", 'say "hi", then\nstop', "-5", "@sum", "+1", "ünïcode"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRLANE_URL", "sqlite:///shop.db")
    return lambda *arguments: CliRunner().invoke(program, ["jobs", "export", *arguments])


@pytest.fixture
def jobs(run: Run) -> list[str]:
    """The ids of a job for each account, the newest first."""

    async def enqueue() -> list[str]:
        async with App("sqlite:///shop.db") as app:
            app.queue("webhooks", fair=Fair(by="account"))

            @app.task(queue="webhooks", name="deliver")
            async def deliver(account: str, secret: str) -> None: ...

            return [str((await deliver.enqueue(account, "hush")).id) for account in ACCOUNTS][::-1]

    return asyncio.run(enqueue())


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_job_is_a_line_of_json_without_what_it_carries(run: Run, jobs: list[str]) -> None:
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    told = lines(result.stdout)
    assert [each["id"] for each in told] == jobs
    assert [each["keys"]["account"] for each in told] == ACCOUNTS[::-1]
    assert "hush" not in result.stdout
    assert lines(run("--with-payload").stdout)[-1]["call"] == [["acme", "hush"], {}]


def test_what_is_told_of_a_job_are_the_columns(run: Run, jobs: list[str]) -> None:
    for options, with_payload in (((), False), (("--with-payload",), True)):
        assert tuple(lines(run(*options).stdout)[0]) == exported_columns(with_payload=with_payload)


def test_csv_can_be_read_back_and_holds_no_formula(run: Run, jobs: list[str]) -> None:
    result = run("--format", "csv", "--with-payload")
    text = result.stdout_bytes.decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["id"] for row in rows] == jobs
    assert [json.loads(row["keys"])["account"] for row in rows] == ACCOUNTS[::-1]
    assert tuple(rows[0]) == exported_columns(with_payload=True)
    assert (rows[0]["priority"], rows[0]["cancel_requested"], rows[0]["worker"]) == ("0", "false", "")
    assert text.count("\r\n") == len(rows) + 1


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1", "\n=1"])
def test_a_cell_that_begins_like_a_formula_is_text(text: str) -> None:
    from fairlane.cli.jobs import _cell

    shown = one_line(text)
    assert _cell(text) == f"'{shown}"
    assert _cell(f"a{text}") == f"a{shown}"
    assert (_cell(-1), _cell(-1.5), _cell({"a": "=1"})) == (-1, -1.5, '{"a": "=1"}'), "numbers of ours are numbers"


def test_an_export_goes_on_where_it_has_ended(run: Run, jobs: list[str], tmp_path: Path) -> None:
    for form in ("jsonl", "csv"):
        whole = run("--format", form).stdout_bytes
        output = ("--format", form, "--output", f"jobs.{form}", "--limit", "3")
        place: tuple[str, ...] = ()
        for _ in range(2):
            result = run(*output, *place)
            assert result.exit_code == 0, result.output
            place = ("--after", result.stderr.split()[-1])
        assert "written to" in run(*output, *place).stderr
        assert (tmp_path / f"jobs.{form}").read_bytes() == whole


def test_a_file_is_not_written_over(run: Run, jobs: list[str], tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("precious")
    result = run("--output", "jobs.jsonl")
    assert result.exit_code == 1
    assert "is there already; remove it" in result.stderr
    assert (tmp_path / "jobs.jsonl").read_text() == "precious"
    assert "cannot be written" in run("--output", "nowhere/jobs.jsonl").stderr


def test_filters_and_limits_hold(run: Run, jobs: list[str]) -> None:
    assert [each["id"] for each in lines(run("--key", "account=acme").stdout)] == jobs[-1:]
    limited = run("--limit", "2", "--json")
    assert [each["id"] for each in lines(limited.stdout)] == jobs[:2]
    assert "2 jobs written; go on with --after" in limited.stderr
    assert run("--state", "dead").stdout == ""
    assert run("--state", "dead", "--format", "csv").stdout.strip() == ",".join(exported_columns())
    assert "not both" in run("--json", "--format", "csv").stderr


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of two jobs; and how many jobs each look brought."""
    monkeypatch.setattr(operations_on_jobs, "EXPORTED_AT_ONCE", 2)
    brought: list[int] = []
    find = SqliteStore.run

    async def watched(self: SqliteStore, *arguments: Any) -> Any:
        found = await find(self, *arguments)
        if isinstance(found, JobPage):
            brought.append(len(found.jobs))
        return found

    monkeypatch.setattr(SqliteStore, "run", watched)
    return brought


def test_no_more_than_a_page_is_in_memory(run: Run, jobs: list[str], small_pages: list[int]) -> None:
    assert [each["id"] for each in lines(run().stdout)] == jobs
    assert small_pages == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("trouble", "status", "said"),
    [(StoreUnavailable("the disk is gone"), 1, "broken off"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_an_export_that_breaks_off_says_how_to_go_on(
    run: Run,
    jobs: list[str],
    small_pages: list[int],
    monkeypatch: pytest.MonkeyPatch,
    trouble: BaseException,
    status: int,
    said: str,
) -> None:
    find = SqliteStore.run
    looks = iter([False, False, True])

    async def failing(self: SqliteStore, *arguments: Any) -> Any:
        found = await find(self, *arguments)
        if isinstance(found, JobPage) and next(looks, False):
            raise trouble
        return found

    monkeypatch.setattr(SqliteStore, "run", failing)
    result = run()
    assert result.exit_code == status
    assert f"{said}: 4 jobs written; go on with --after" in result.stderr
    place = next(line for line in result.stderr.splitlines() if said in line).split()[-1]
    assert [each["id"] for each in lines(result.stdout + run("--after", place).stdout)] == jobs
