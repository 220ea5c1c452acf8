"""The reference says what the code says: names, parameters, settings, errors, outcomes, commands.

`python -m tests.test_docs_reference` writes the help of every command into docs/reference/commands.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import chain
from typing import Any, get_args
from uuid import UUID

import click
import pytest
from click.testing import CliRunner

import fairlane
import fairlane.testing
from fairlane import App, Backoff, BoundTask, FairlaneError, Task, errors
from fairlane.cli.program import program
from fairlane.clock import microseconds
from fairlane.job import Claim
from fairlane.operations import Operations
from fairlane.operations.section import Section
from fairlane.policy.limits import KINDS
from fairlane.scheduler import settlement
from fairlane.task import TaskOptions
from fairlane.worker import WorkerOptions
from tests.test_docs import COMMANDS, DOCS, PAGES, ROOT

SECTIONS: dict[str, type[Section]] = {
    noun: type(each) for noun, each in vars(App("sqlite://").operations).items() if isinstance(each, Section)
}
"""The nouns of `app.operations`."""


def section(text: str, heading: str) -> str:
    found = re.search(rf"^(#+) {re.escape(heading)}$(.*?)(?=^#{{1,3}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {heading!r}"
    return found[2]


# Their constructors are the app's business, or the store's.
# fmt: off
NOT_BUILT_BY_USERS = {
    "BoundTask", "Call", "Clock", "HeldClaim", "Job", "JobContext", "Limit", "Outcome", "PayloadCodec", "Policy",
    "Queue", "Reason", "State", "Task", "Worker",
}
# fmt: on


def members(kind: Any) -> set[str]:
    """What a reader of the reference must find about a name: its parameters, and the public things in it."""
    found: set[str] = set()
    callables = [kind]
    if inspect.isclass(kind):
        found |= set(getattr(kind, "__annotations__", {})) | set(vars(kind))
        callables = [value for name, value in vars(kind).items() if not name.startswith("_")]
        if kind.__name__ not in NOT_BUILT_BY_USERS:
            callables.append(kind.__init__)
    for each in callables:
        inner = getattr(each, "__func__", each)
        if inspect.isfunction(inner):
            found |= {name for name in inspect.signature(inner).parameters if name not in ("self", "cls")}
    return {name for name in found if not name.startswith("_")}


def places() -> dict[str, list[str]]:
    """The public names of each module, as the reference lists them."""
    rows = (line.split(" | ") for line in section(API, "API").splitlines() if line.startswith("| `fairlane"))
    return {module.strip("|` "): re.findall(r"`(\w+)`", names) for module, names in rows}


API = (DOCS / "reference" / "api.md").read_text()
PUBLIC: dict[str, Any] = {
    name: getattr(importlib.import_module(module), name) for module, names in places().items() for name in names
}
"""Every name that programs may import, by the reference; not those of `fairlane.testing` and the integrations."""


def is_error(name: str) -> bool:
    kind = PUBLIC[name]
    return inspect.isclass(kind) and issubclass(kind, FairlaneError)


def test_the_top_of_the_package_has_what_programs_write_every_day() -> None:
    assert places()["fairlane"] == fairlane.__all__
    assert len(fairlane.__all__) <= 40


def test_each_public_name_is_in_one_place() -> None:
    assert [name for name, times in Counter(chain(*places().values())).items() if times > 1] == []


def test_every_error_is_public() -> None:
    raised = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, FairlaneError)}
    assert {name for name in PUBLIC if is_error(name)} == raised


def test_the_reference_has_every_public_name() -> None:
    """H6: each exactly once."""
    headings = re.findall(r"^### `(\w+)`$", API, re.MULTILINE)
    assert sorted(headings) == sorted(name for name in PUBLIC if not is_error(name))


def named_in_rows(text: str) -> Counter[str]:
    """In how many rows each name is: in the first cell, at the beginning of a piece of code."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("| `"):
            found.update(set(re.findall(r"`(?:async )?([\w.]+)[^`]*`", line.split(" | ")[0])))
    return found


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^### `([\w.]+)`$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_reference_lists_every_member_once() -> None:
    """H6: four operations were listed twice, with two descriptions."""
    told = sections(API)
    twice = {(name, each) for name, text in told.items() for each, rows in named_in_rows(text).items() if rows > 1}
    assert twice == set()


def test_the_reference_has_every_operation_and_every_name_of_the_testing_module_in_a_row() -> None:
    """H6."""
    told = sections(API)
    kinds = {"": Operations} | {f"{noun}.": kind for noun, kind in SECTIONS.items()}
    operations = {
        f"{noun}{name}"
        for noun, kind in kinds.items()
        for name, each in vars(kind).items()
        if (inspect.isfunction(each) or isinstance(each, property)) and name[0] != "_"
    }
    assert set(named_in_rows(told["Operations"])) == operations
    assert set(fairlane.testing.__all__) - set(re.findall(r"`(?:async )?(\w+)", told["fairlane.testing"])) == set()


@pytest.mark.parametrize("name", [name for name in PUBLIC if not is_error(name)])
def test_the_reference_has_every_parameter_and_member(name: str) -> None:
    told = section(API, f"`{name}`")
    asked = members(PUBLIC[name])
    if PUBLIC[name] in KINDS.values():
        asked -= members(fairlane.Limit) | {
            "document",
            "from_document",
        }  # what every limit has is told once, under `Limit`
    lacking = {each for each in asked if not re.search(rf"\b{each}\b", told)}
    assert lacking == set(), f"docs/reference/api.md says nothing of {name}'s {sorted(lacking)}"


def table(text: str) -> dict[str, list[str]]:
    """The rows of a section's tables by their first cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    return {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0]) or [""]}


def agrees(cell: str, default: object) -> bool:
    said: str = (re.findall(r"`\"?([^`\"]+)\"?`", cell) or [""])[0]
    match default:
        case timedelta():
            return microseconds(said) == microseconds(default)
        case None | () | inspect.Parameter.empty:
            return True
    return said == str(default)


def test_the_settings_of_an_app_are_those_of_its_constructor() -> None:
    rows = table(section((DOCS / "reference" / "settings.md").read_text(), "The app: `App(url, …)`"))
    parameters = inspect.signature(App).parameters
    assert set(rows) - {""} == set(parameters)
    assert {name for name, each in parameters.items() if not agrees(rows[name][0], each.default)} == set()


def test_the_settings_of_a_queue_are_those_of_its_declaration() -> None:
    """H6."""
    rows = table(section((DOCS / "reference" / "settings.md").read_text(), "A queue: `app.queue(name, …)`"))
    parameters = {name: each for name, each in inspect.signature(App.queue).parameters.items() if name != "self"}
    assert set(rows) - {""} == set(parameters)
    assert {name for name, each in parameters.items() if not agrees(rows[name][0], each.default)} == set()


def test_the_settings_of_a_task_are_those_of_its_decorator() -> None:
    """H6."""
    rows = table(section((DOCS / "reference" / "settings.md").read_text(), "A task: `@app.task(…)`"))
    fields = {each.name: each.default for each in dataclasses.fields(TaskOptions)}
    assert set(rows) - {""} == {"queue", "name", *fields}
    plain = {name: default for name, default in fields.items() if isinstance(default, int | str)}
    assert {name for name, default in plain.items() if not agrees(rows[name][0], default)} == set()
    assert rows["backoff"][0] == '`Backoff("1s", factor=2, cap="1h", jitter=0.2)`'
    assert fields["backoff"] == Backoff("1s", factor=2, cap="1h", jitter=0.2)


@pytest.mark.parametrize("kind", [Task, BoundTask])
def test_the_settings_of_a_job_are_those_of_using(kind: type[Any]) -> None:
    """H6."""
    rows = table(section((DOCS / "reference" / "settings.md").read_text(), "A job: `task.using(…)`"))
    assert set(rows) - {""} == set(inspect.signature(kind.using).parameters) - {"self"}


def test_the_settings_of_a_schedule_are_those_of_its_declaration() -> None:
    """H6."""
    rows = table(section((DOCS / "reference" / "settings.md").read_text(), "A schedule: `app.schedule(…)`"))
    parameters = inspect.signature(App.schedule).parameters
    named = {name: each for name, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(rows) - {""} == set(named)
    assert {name for name, each in named.items() if not agrees(rows[name][0], each.default)} == set()


def test_the_extras_are_those_of_the_package_and_pages_install_them_alike() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = section((DOCS / "reference" / "settings.md").read_text(), "What to install")
    assert re.findall(r"^\| `([a-z-]+)` \|", told, re.MULTILINE) == list(extras)
    lines = re.findall(r"^\$ .*pip install (.+)$", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)
    installed = {extra for line in lines for extra in re.findall(r"'\.\[([a-z-]+)\]'", line)}
    assert {"alembic", "celery", "dashboard", "django", "dramatiq", "fastapi", "taskiq"} <= installed <= set(extras)
    assert not [line for line in lines if "fairlane[" in line]


def test_the_settings_of_a_worker_are_those_of_its_options_and_of_its_command() -> None:
    text = section(
        (DOCS / "reference" / "settings.md").read_text(), "A worker: `WorkerOptions(…)` and `fairlane worker`"
    )
    rows = table(text)
    fields = {each.name: each.default for each in dataclasses.fields(WorkerOptions)}
    assert set(rows) - {""} == set(fields)
    assert {name for name, default in fields.items() if not agrees(rows[name][1], default)} == set()
    shown = [each for each in program.commands["worker"].params if not getattr(each, "hidden", False)]
    options = {option for each in shown for option in each.opts if option.startswith("--")}
    assert options == set(re.findall(r"`(--[\w-]+)`", text))


def test_the_tree_of_errors_is_the_one_in_the_code() -> None:
    tree = (errors.__doc__ or "").split("```")[1]
    assert f"```text{tree}```" in (DOCS / "reference" / "errors.md").read_text()


def test_the_outcomes_of_an_attempt_are_those_of_a_settlement() -> None:
    text = section((DOCS / "reference" / "job-states.md").read_text(), "How an attempt ends")
    told = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    claim = Claim(UUID(int=1), UUID(int=2), "q", "t", 0, {}, b"", 1, 5, 0, 0, False)
    values: Mapping[str, Any] = {
        "result": None,
        "error": "",
        "reason": "",
        "backoff": 1,
        "delay": 1,
        "effects": None,
        "suspicion": 1,
        "is_bounded": True,
        "is_spent": False,
    }
    outcomes = [
        kind(**{name: values[name] for name in kind.__struct_fields__}) for kind in get_args(settlement.RunOutcome)
    ]
    assert told == {settlement.settle(claim, outcome, 0).outcome for outcome in outcomes} | {"running"}


# Commands.


def every_command(command: click.Command = program, path: tuple[str, ...] = ("fairlane",)) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from every_command(inner, (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    shown = CliRunner().invoke(program, [*path[1:], "--help"], prog_name="fairlane", terminal_width=100)
    assert shown.exit_code == 0
    return shown.output


def with_help(text: str) -> str:
    """The page of commands, with the help of each as it is now."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}```text\n{help_of(tuple(found[2].split()))}```"

    return re.sub(r"(^## `([^`]+)`$(?:(?!^## ).)*?)```text\n.*?```", fill, text, flags=re.MULTILINE | re.DOTALL)


def test_the_page_of_commands_has_the_help_of_each() -> None:
    text = COMMANDS.read_text()
    assert set(re.findall(r"^## `(.+)`$", text, re.MULTILINE)) == {" ".join(path) for path in every_command()}
    assert text == with_help(text), "a command has changed; run: python -m tests.test_docs_reference"


if __name__ == "__main__":
    COMMANDS.write_text(with_help(COMMANDS.read_text()))
    print(f"wrote {os.path.relpath(COMMANDS)}")
