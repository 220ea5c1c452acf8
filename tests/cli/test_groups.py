"""Groups of commands: each lists by itself, as `fairlane queues` and `fairlane workers` do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fairlane.cli.program import program

SHOP = """
from fairlane import App, Concurrency, Fair

app = App("sqlite:///shop.db")
app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(5, by="account")])
app.queue("mail", limits=[Concurrency(2)])

@app.task(queue="webhooks")
async def deliver(account: str) -> None: ...

@app.task(queue="mail")
async def send(to: str) -> None: ...

app.schedule("0 9 * * *", send, "ada", name="daily")
"""

GROUPS = {"jobs": "list", "dead": "list", "schedules": "list", "limit": "list", "policy": "show"}
"""What a group does when no command is named."""
WITHOUT_A_LIST = {"weight"}

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "groups_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FAIRLANE_URL", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(program, arguments, prog_name="fairlane")

    for account in ("acme", "globex"):
        stored = invoke("enqueue", "groups_shop:app", "deliver", "--kwargs", json.dumps({"account": account}))
        assert stored.exit_code == 0, stored.output
    yield invoke
    sys.modules.pop("groups_shop", None)


def test_every_group_is_either_listed_by_itself_or_known_to_have_no_list() -> None:
    """H4."""
    groups = {name for name, command in program.commands.items() if isinstance(command, click.Group)}
    assert groups == {*GROUPS, *WITHOUT_A_LIST}


@pytest.mark.parametrize(("group", "command"), GROUPS.items())
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_group_without_a_command_does_what_its_list_does(run: Run, group: str, command: str, form: list[str]) -> None:
    """H4."""
    options = ["--app", "groups_shop:app", *form]
    by_itself, listed = run(group, *options), run(group, command, *options)
    assert (by_itself.exit_code, by_itself.output) == (0, listed.output)


@pytest.mark.parametrize("group", ["jobs", "dead", "schedules", "limit", "policy", "queues", "workers"])
def test_a_list_needs_nothing_but_to_know_the_database(run: Run, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """H4."""
    asked = run(group)
    assert (asked.exit_code, "which database?" in asked.output) == (1, True)
    monkeypatch.setenv("FAIRLANE_URL", "sqlite:///shop.db")
    assert run(group).exit_code == 0


def test_jobs_are_listed_newest_first_with_the_options_of_the_list(run: Run) -> None:
    """H4."""
    listed = json.loads(run("jobs", "--app", "groups_shop:app", "--json").stdout)["jobs"]
    assert [each["keys"]["account"] for each in listed] == ["globex", "acme"]
    one = json.loads(run("jobs", "--key", "account=acme", "--app", "groups_shop:app", "--json").stdout)["jobs"]
    assert [each["id"] for each in one] == [listed[1]["id"]]


def test_an_id_alone_shows_its_job(run: Run) -> None:
    """H4."""
    (newest, _) = json.loads(run("jobs", "--app", "groups_shop:app", "--json").stdout)["jobs"]
    shown = run("jobs", newest["id"], "--app", "groups_shop:app")
    assert shown.output == run("jobs", "show", newest["id"], "--app", "groups_shop:app").output
    assert newest["id"] in shown.output


def test_the_limits_of_all_queues_are_listed_where_none_is_named(run: Run) -> None:
    """H4."""
    assert run("policy", "apply", "groups_shop:app").exit_code == 0
    listed = json.loads(run("limit", "--app", "groups_shop:app", "--json").stdout)
    named = [(each["queue"], each["limit"]) for each in listed]
    assert named == [("mail", "concurrency:"), ("webhooks", "concurrency:account")]
    table = run("limit", "--app", "groups_shop:app").stdout.splitlines()
    assert [line.split()[0] for line in table] == ["QUEUE", "mail", "webhooks"]


@pytest.mark.parametrize("group", GROUPS)
def test_help_and_misspelt_commands_are_still_about_the_group(run: Run, group: str) -> None:
    """H4."""
    helped = run(group, "--help")
    assert helped.exit_code == 0
    assert f"Usage: fairlane {group} [OPTIONS] [COMMAND] [ARGS]..." in helped.output
    assert "Without a command" in helped.output
    wrong = run(group, "lsit")
    assert (wrong.exit_code, "No such command 'lsit'" in wrong.output) == (2, True)
