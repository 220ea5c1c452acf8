"""Log lines cannot be forged by job data (S5, O19)."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import fairlane
from fairlane import App
from fairlane.cli.program import program
from fairlane.cli.worker import log_to_stderr
from fairlane.redaction import LOGGERS, TextLines, indented, json_text, one_line
from fairlane.testing import run_until_idle
from fairlane.worker.logs import JsonLines

FORGED = "2026-01-01 00:00:00,000 CRITICAL fairlane.worker: forged"
NASTY = [
    f"x\n{FORGED}",
    f"x\r\n{FORGED}",
    f"x\r{FORGED}",
    f"x\u2028{FORGED}",
    f"x\u2029{FORGED}",
    f"x\x85{FORGED}",
    f"x\x0b{FORGED}\x0c",
    "\x1b[2J\x1b[31mred\x1b[0m",
    "\x9b2J",
    "\x1b]8;;http://evil.test\x07click\x1b]8;;\x07",
    "\u202egnp.exe",
    "\u2066isolated\u2069",
    "\x00\x08\x7f",
    "\ufeff\U000e0041",
]
UNSAFE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


@pytest.mark.parametrize("text", NASTY)
def test_a_text_is_one_line_that_no_terminal_obeys(text: str) -> None:
    shown = one_line(text)
    assert len(shown.splitlines()) == 1
    assert UNSAFE.search(shown) is None
    assert one_line(shown) == shown
    assert json.loads(json_text({"a": text})) == {"a": text}, "JSON reads back as it was"
    assert UNSAFE.search(json_text({"a": text})) is None


@pytest.mark.parametrize("text", ["Zürich", "東京", "العربية", "👩‍👩‍👧", "می‌خواهم", "a b", "C:\\new", "'\"<&>"])
def test_names_in_all_languages_are_shown_as_they_are(text: str) -> None:
    assert one_line(text) == text


@contextmanager
def as_in_a_process_of_its_own() -> Iterator[None]:
    """Without the handlers of pytest."""
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = kept
        root.setLevel(level)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("text", NASTY)
async def test_no_job_forges_a_line_of_the_workers_log(
    form: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """S5: neither by what it is called, nor by what its handler raises or logs."""
    app = App("sqlite://")

    @app.task(name="fail", max_attempts=1)
    async def fail(account: str) -> None:
        logging.getLogger("shop").warning("about to fail for %s", account)
        logging.getLogger("shop").warning(f"about to fail for {account}")
        try:
            raise ValueError(account)
        except ValueError:
            logging.getLogger("shop").exception("it failed")
            raise

    with as_in_a_process_of_its_own():
        log_to_stderr("info", form, "w1")
        async with app:
            await fail.enqueue(text)
            await run_until_idle(app)
    lines = capsys.readouterr().err.split("\n")[:-1]
    assert len([line for line in lines if "about to fail" in line]) == 2
    assert any("attempt 1 of 1" in line for line in lines)
    for line in lines:
        assert UNSAFE.search(line) is None, line
        assert not line.lstrip("{").startswith("2026-01-01"), line
        if form == "json":
            assert json.loads(line)["worker"] == "w1"
        else:
            assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ +[\w.]+: |    |$", line), line


@pytest.mark.parametrize("name", LOGGERS)
def test_our_loggers_are_safe_whatever_handler_a_program_sets_up(name: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        logger.error("job %s: %r and %d", f"a\n{FORGED}", "b\x1b", 3)
        logger.error("by name: %(what)s", {"what": f"c\u2028{FORGED}"})
        logger.error(f"100 % of postgresql://u:hunter2@h/x\n{FORGED}")
        logger.error(ConnectionError(f"password=hunter2\n{FORGED}"))
        try:
            raise ConnectionError(f"postgresql://u:hunter2@h/x\n{FORGED}")
        except ConnectionError as error:
            logger.error("it broke: %s", error, exc_info=error)
    finally:
        logger.removeHandler(handler)
    told = stream.getvalue()
    assert "hunter2" not in told
    assert UNSAFE.search(told) is None
    first, second, whole, raised, third, *traceback = told.rstrip("\n").split("\n")
    assert first.startswith("ERROR job a\\n2026")
    assert first.endswith("'b\\x1b' and 3")
    assert second.startswith("ERROR by name: c\\u2028")
    assert whole.startswith("ERROR 100 % of postgresql://u:***@h/x\\n2026")
    assert raised.startswith("ERROR password=***\\n2026")
    assert third.startswith("ERROR it broke: postgresql://u:***@h/x\\n2026")
    assert traceback
    assert all(line.startswith("    ") for line in traceback)


def test_every_logger_of_ours_is_guarded() -> None:
    source = Path(fairlane.__file__).parent
    found = {name for path in source.rglob("*.py") for name in re.findall(r'getLogger\("([^"]+)"\)', path.read_text())}
    assert found == set(LOGGERS)


def test_only_a_traceback_has_several_lines_and_each_is_indented() -> None:
    assert indented("a\nb\x1b\n\nc") == "    a\n    b\\x1b\n\n    c"
    record = logging.makeLogRecord({"msg": "x\ny", "name": "shop", "levelname": "INFO", "stack_info": "Stack\n  f"})
    assert TextLines("%(levelname)s %(message)s").format(record) == "INFO x\\ny\n    Stack\n      f"
    assert json.loads(JsonLines("w").format(record))["message"] == "x\ny"


@pytest.mark.parametrize("text", NASTY)
def test_neither_a_logger_nor_a_level_forges_a_line(text: str) -> None:
    """Programs name loggers after tenants."""
    record = logging.makeLogRecord({"msg": "x", "name": f"shop.{text}", "levelname": text})
    line = TextLines().format(record)
    assert len(line.splitlines()) == 1
    assert UNSAFE.search(line) is None


@pytest.mark.parametrize("text", NASTY)
async def test_no_command_prints_what_a_terminal_obeys(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5: keys, names, reasons and errors come from others, and a terminal obeys what it is sent."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    async with App(url) as app:
        app.queue("q", keys=["account"])

        @app.task(name="fail", queue="q", max_attempts=1)
        async def fail(account: str) -> None:
            raise ValueError(account)

        account = text.replace("\0", "")  # which no key can hold
        dead = await fail.enqueue(account)
        await run_until_idle(app)
        waiting = await fail.enqueue(account)
        await app.operations.queues.pause("q", keys={"account": account}, actor=account, reason=account)
    told = await asyncio.to_thread(_commands, url, str(dead.id), str(waiting.id))
    for command, output in told.items():
        assert UNSAFE.search(output.replace("\n", "")) is None, command
        assert not any(line.startswith("2026-01-01") for line in output.split("\n")), command


def _commands(url: str, dead: str, waiting: str) -> dict[str, str]:
    told = {}
    for words in (
        "jobs list",
        f"jobs show {dead}",
        f"jobs show {dead} --json",
        "jobs export",
        "jobs export --format csv --with-payload",
        "dead list",
        f"explain {waiting}",
        "explain --queue q",
        "audit",
        "overrides",
        "keys q",
        "keys q --json",
        "queues",
        "status",
        "jobs cancel --queue q --dry-run",
        "resume q --dry-run --all",
    ):
        done = CliRunner().invoke(program, [*words.split(), "--url", url])
        assert done.exit_code in (0, 1, 2), done.output
        told[words] = done.output
    return told


def test_a_record_keeps_its_template_for_services_that_group_by_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fairlane.worker"):
        logging.getLogger("fairlane.worker").warning("job %s failed: %s", 7, "postgresql://shop:hunter22@db/shop")
    (record,) = caplog.records
    assert record.msg == "job %s failed: %s"
    assert "hunter22" not in record.getMessage()
    assert "job 7 failed" in record.getMessage()
