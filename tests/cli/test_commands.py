"""The commands, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import asyncpg
import click
import pytest
from click.testing import CliRunner

from fairlane import cli
from fairlane.cli.program import COMMANDS, program
from fairlane.store.postgres import PostgresStore
from tests.cli.conftest import Fairlane

SHOP = """
import os, signal
from fairlane import App, Concurrency, Fair

app = App("sqlite:///shop.db")
app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(5, by="account")])
app.queue("email")

@app.task(queue="webhooks")
async def deliver(account: str) -> int:
    return 1

@app.task(queue="email")
async def stop_worker(of: str) -> None:
    # Whoever runs this is told to stop by the job itself: no test has to wait for a moment to do it.
    os.kill(os.getppid() if of == "parent" else os.getpid(), signal.SIGTERM)
"""


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


def option_names(path: tuple[str, ...]) -> set[str]:
    command: click.Command = program
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return {name for each in command.params for name in (each.name or "", *each.opts)}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with an app."""
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))
    return tmp_path


def python(folder: Path, code: str, fairlane: Fairlane) -> None:
    import subprocess

    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)


@pytest.mark.parametrize("path", list(commands(program)), ids=" ".join)
def test_the_help_of_every_command_has_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(program, [*path, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"fairlane {' '.join(path)}".strip() in result.output.partition("Example")[2]


def test_every_command_takes_an_app_with_the_same_option() -> None:
    takes = {path: option_names(path) for path in commands(program)}
    lacking = [path for path, names in takes.items() if "app" in names and "--app" not in names]
    assert lacking == [("enqueue",)], "what is enqueued is an app's: MODULE:APP TASK"
    assert sum("--app" in names for names in takes.values()) > 30


@pytest.mark.parametrize("named", [["shop:app"], ["--app", "shop:app"], ["shop:app", "--app", "shop:app"]])
def test_an_app_is_named_as_an_argument_or_with_an_option(
    named: list[str], shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop)
    monkeypatch.setattr(sys, "path", [str(shop), *sys.path])
    applied = CliRunner().invoke(program, ["migrate", *named, "--json"], catch_exceptions=False)
    assert json.loads(applied.stdout)["applied"]
    assert (shop / "shop.db").exists()


def test_an_app_that_is_needed_and_not_named_is_told_as_click_tells_it() -> None:
    for command in (["worker"], ["policy", "diff"], ["policy", "apply"]):
        result = CliRunner().invoke(program, command)
        assert result.exit_code == 2
        assert "Missing argument 'MODULE:APP'" in result.stderr


def imported_by(fairlane: Fairlane, folder: Path, *arguments: str) -> set[str]:
    """The modules that there are once a command has ended."""
    (folder / "sitecustomize.py").write_text("import atexit, sys; atexit.register(lambda: print(*sys.modules))")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    result = fairlane(*arguments, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


SLOW = {"asyncpg", "rich", "sqlite3", "fairlane.dashboard", "fairlane.demo", "fairlane.forward"}


def test_the_list_of_commands_imports_none_of_them(fairlane: Fairlane, tmp_path: Path) -> None:
    seen = imported_by(fairlane, tmp_path, "--help")
    assert {name for name in seen if name.startswith("fairlane.cli.")} == {"fairlane.cli.program"}
    assert seen & SLOW == set()


def test_a_command_imports_no_other_that_it_does_not_use(fairlane: Fairlane, tmp_path: Path) -> None:
    commands = {f"fairlane.cli.{place.partition(':')[0]}" for place, _ in COMMANDS.values()}
    assert imported_by(fairlane, tmp_path, "worker", "--help") & commands == {
        "fairlane.cli.program",
        "fairlane.cli.worker",
    }
    assert imported_by(fairlane, tmp_path, "worker", "--help") & SLOW == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_has_the_first_sentence_of_the_help_of_each(name: str) -> None:
    command = program.commands[name]
    assert command.name == name
    first = re.match(r".+?\.(?=\s|$)", " ".join((command.help or "").split()))
    assert first is not None
    assert COMMANDS[name][1] == first[0]


def test_every_command_is_in_the_list() -> None:
    rooms = [import_module(f"fairlane.cli.{each.name}") for each in iter_modules(cli.__path__) if each.name[0] != "_"]
    found = {value for room in rooms for value in vars(room).values() if isinstance(value, click.Command)} - {program}
    nested = {inner for each in found if isinstance(each, click.Group) for inner in each.commands.values()}
    assert {each.name for each in found - nested} == set(COMMANDS)


def test_the_version_is_that_of_the_package(fairlane: Fairlane) -> None:
    from importlib.metadata import version

    assert json.loads(fairlane("version", "--json").stdout)["fairlane"] == version("fairlane")
    assert fairlane("--version").stdout.strip() == version("fairlane")
    assert fairlane("version").stdout.startswith(f"fairlane {version('fairlane')} ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker", "shopp:app"], "did you mean 'shop'?"),
        (["worker", "shop:app", "--queues", "webhook"], "did you mean 'webhooks'?"),
        (["worker", "shop:app", "--slots", "email"], "such as email=1:5"),
        (["worker", "shop:app", "--lease", "soon"], "'soon' is not a duration"),
        (["worker", "shop:app", "--concurrency", "0"], "concurrency=0"),
        (["migrate"], "Give --app module:app or --url"),
        (["status"], "Give --app module:app or --url"),
        (["doctor", "shop:app", "--app", "shop:other"], "which app?"),
        (["worker", "--app", "shopp:app"], "did you mean 'shop'?"),
        (["migrate", "shop:app", "--url", "sqlite:///x.db"], "not both"),
        (["migrate", "--url", "mysql://here"], "not a database URL"),
        (["policy", "show", "shop:app"], "does not exist yet"),
        (["status", "--url", "sqlite:////tmp"], "sqlite:////tmp is a directory; give the file in it"),
        (["policy", "apply", "shop:app", "--queue", "nothing"], "declares no queue 'nothing'"),
        (["demo", "--url", "sqlite:///x.db"], "takes a PostgreSQL"),
        (["demo", "--url", "postgresql://nobody@127.0.0.1:1/none"], "cannot be used"),
        (["demo", "--url", "postgresql://x/y", "--postgres"], "not both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_a_status(arguments: list[str], said: str, shop: Path, fairlane: Fairlane) -> None:
    result = fairlane(*arguments, FAIRLANE_URL="")
    assert result.returncode != 0
    assert said in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_sqlite_file_is_migrated_once(shop: Path, fairlane: Fairlane) -> None:
    first = fairlane("migrate", "shop:app")
    assert (first.returncode, first.stdout.startswith("applied 0001_")) == (0, True)
    assert json.loads(fairlane("migrate", "--url", "sqlite:///shop.db", "--json").stdout) == {"applied": []}
    assert "up to date" in fairlane("migrate", FAIRLANE_URL="sqlite:///shop.db").stdout


async def test_the_printed_script_builds_a_database_that_the_store_accepts(
    fairlane: Fairlane, empty_postgres_url: str
) -> None:
    connection = await asyncpg.connect(empty_postgres_url)
    await connection.execute(fairlane("migrate", "--print", "--to", "1", FAIRLANE_URL="").stdout)
    await connection.close()
    store = PostgresStore(empty_postgres_url)
    await store.open()
    assert await store.migrate() == []
    await store.close()


def test_printing_the_migrations_needs_no_database(fairlane: Fairlane, tmp_path: Path) -> None:
    result = fairlane("migrate", "--print", FAIRLANE_URL="")
    assert result.returncode == 0
    assert "-- migration 0001_" in result.stdout
    assert "create table fairlane.jobs" in result.stdout
    assert "create table" in fairlane("migrate", "--print", "--url", "sqlite:///x.db").stdout
    assert not (tmp_path / "x.db").exists()


def test_only_migrations_that_there_are_can_be_printed(fairlane: Fairlane) -> None:
    for wrong in (("--to", "999"), ("--after", "1", "--to", "1"), ("--after", "-1")):
        refused = fairlane("migrate", "--print", *wrong, FAIRLANE_URL="")
        assert (refused.returncode, refused.stdout) == (1, "")
    refused = fairlane("migrate", "--to", "3", "--url", "sqlite://")
    assert (refused.returncode, "are for --print" in refused.stderr) == (2, True)


def test_policies_are_applied_and_shown(shop: Path, fairlane: Fairlane) -> None:
    fairlane("migrate", "shop:app")
    applied = fairlane("policy", "apply", "shop:app")
    assert applied.stdout.splitlines() == [
        "webhooks: Fair(by='account', charge='time'), Concurrency(5, by='account') is now in force (version 1)",
        "email: no policy (first come, first served) is now in force (version 1)",
    ]
    again = json.loads(fairlane("policy", "apply", "shop:app", "--queue", "email", "--json").stdout)
    assert [(each["queue"], each["changed"]) for each in again] == [("email", False)]
    shown = json.loads(fairlane("policy", "show", "shop:app", "--json").stdout)
    assert [(each["queue"], each["version"], each["declared"]) for each in shown] == [
        ("email", 1, None),
        ("webhooks", 1, None),
    ]


def test_showing_policies_changes_nothing_and_tells_of_drift(shop: Path, fairlane: Fairlane) -> None:
    fairlane("migrate", "shop:app")
    fairlane("policy", "apply", "shop:app")
    source = shop / "shop.py"
    source.write_text(source.read_text().replace("Concurrency(5", "Concurrency(9"))
    for _ in range(2):
        shown = fairlane("policy", "show", "shop:app").stdout
        assert "webhooks: Fair(by='account', charge='time'), Concurrency(5, by='account') (version 1)" in shown
        assert "drift: the app declares Fair(by='account', charge='time'), Concurrency(9, by='account')" in shown
    assert "Concurrency(9, by='account') is now in force (version 2)" in fairlane("policy", "apply", "shop:app").stdout
    assert "drift" not in fairlane("policy", "show", "shop:app").stdout


@pytest.mark.parametrize(("of", "options"), [("worker", []), ("parent", ["--processes", "2"])])
def test_a_worker_runs_jobs_until_it_is_told_to_stop(
    of: str, options: list[str], shop: Path, fairlane: Fairlane
) -> None:
    python(shop, f"import shop; shop.deliver.enqueue_sync('acme'); shop.stop_worker.enqueue_sync('{of}')", fairlane)
    result = fairlane("worker", "shop:app", "--queues", "email,webhooks=2", "--slots", "email=1:1", *options)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    look = (
        "import sqlite3; states = sqlite3.connect('shop.db').execute('select task, state from jobs').fetchall();"
        "assert ('shop.stop_worker', 3) in states, states"
    )
    python(shop, look, fairlane)


def test_the_list_of_commands_has_a_whole_sentence_for_each() -> None:
    """H4. A terminal has 80 columns; what is cut off there ends in an ellipsis."""
    shown = CliRunner().invoke(program, ["--help"], terminal_width=80).output
    listed = shown.partition("\nRun:\n")[2].splitlines()
    named = [line for line in listed if line.startswith("  ")]
    assert [line.split()[0] for line in named] == list(COMMANDS)
    assert [line for line in named if not line.endswith(".") or line.endswith("...")] == []
