"""What the guides say of moving from other libraries, held against Fairlane and, where it is at hand, the other one.

`tests/test_docs.py` runs the Fairlane side of each guide. Here: every name in the right column of "What maps to what"
is one of Fairlane's, every "before" can be compiled, and those of Celery and Dramatiq, which are development
dependencies, do their work without a broker, as do their tasks that hand over.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_overloads

import pytest

import fairlane
import fairlane.testing
import fairlane_pytest
from fairlane import App, Call, HeldClaim, Job, Queue, Task
from fairlane.worker import JobContext, Worker
from tests.test_docs import DOCS, Block, blocks, check_command, commands
from tests.test_docs_reference import PUBLIC, is_error, members, section

GUIDES = sorted((DOCS / "how-to").glob("migrate-from-*.md"))
SECTIONS = ["What maps to what", "Before", "After", "Move in production", "What differs and may surprise", "Checklist"]


def named(page: Path) -> str:
    return page.stem.removeprefix("migrate-from-")


def guide(name: str) -> str:
    return (DOCS / "how-to" / f"migrate-from-{name}.md").read_text()


def parts(text: str) -> list[str]:
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^## (.+)$", outside, re.MULTILINE)


def python_blocks(text: str, heading: str) -> list[Block]:
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {heading!r}"
    return [block for block in blocks(found[1]) if block.language == "python"]


def file_of(text: str, name: str) -> str:
    [block] = [block for block in blocks(text) if block.file == name]
    return block.text


def test_there_is_a_guide_for_every_library_that_was_promised() -> None:
    assert [named(page) for page in GUIDES] == ["celery", "dramatiq", "pgqueuer", "procrastinate", "rq"]


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_a_guide_has_every_part_and_is_short_enough_to_be_read(page: Path) -> None:
    text = page.read_text()
    assert parts(text) == SECTIONS
    assert "**Do not move**" in text
    assert len(text.splitlines()) <= 250


# The right column.

SUBJECTS: dict[str, Any] = {
    **PUBLIC,
    "app": App("sqlite://"),  # never opened: an app has attributes that its class has not
    "claim": HeldClaim,
    "fairlane": fairlane,
    "job": Job,
    "other": Task,
    "queue": Queue,
    "task": Task,
    "worker": Worker,
}
"""What the names stand for at which an expression of the tables begins."""
MAKES: dict[str, Any] = {
    "call": Call,
    "context": JobContext,
    "enqueue": Job,
    "enqueue_sync": Job,
    "job": Job,
    "queue": Queue,
    "task": Task,
    "using": Task,
}
"""What calling them gives."""


def parameters(kind: Any) -> dict[str, inspect.Parameter]:
    """Those of all its forms, where it has several."""
    function = getattr(kind, "__func__", kind)
    forms = get_overloads(function) if inspect.isfunction(function) else []
    return {name: each for form in forms or [kind] for name, each in inspect.signature(form).parameters.items()}


WORDS = (
    {*PUBLIC, *fairlane.testing.__all__, *parameters(App.task)}
    | {name for name in vars(fairlane_pytest) if name.startswith("fairlane_")}
    | {word for name, each in PUBLIC.items() if not is_error(name) for word in members(each)}
)
"""Every name that may stand by itself: of the package and its fixtures, of its classes, of their parameters."""


def resolve(node: ast.expr) -> Any:
    """What an expression stands for; an error if Fairlane has nothing of this name, or no such parameter."""
    match node:
        case ast.Name(id=name):
            assert name in SUBJECTS or hasattr(builtins, name), f"there is no {name}"
            return SUBJECTS.get(name, getattr(builtins, name, None))
        case ast.Attribute(value=inner, attr=name):
            owner = resolve(inner)
            assert hasattr(owner, name), f"{getattr(owner, '__name__', owner)} has no {name}"
            return getattr(owner, name)
        case ast.Call(func=function, keywords=keywords, args=arguments):
            called = resolve(function)
            known = parameters(called)
            is_open = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
            for keyword in keywords:
                assert is_open or keyword.arg in known, f"{ast.unparse(function)} takes no {keyword.arg}"
            for argument in [*arguments, *(keyword.value for keyword in keywords)]:
                check_values(argument)
            return MAKES.get(called.__name__, called)
    raise AssertionError(f"{ast.unparse(node)} is checked by nobody")


def check_values(node: ast.expr) -> None:
    """In arguments, what is called or looks like a class must be known; the rest stands for the reader's own."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) or (isinstance(each, ast.Name) and each.id[0].isupper()):
            resolve(each)


def check_right(code: str) -> None:
    """Fail unless this piece of the right column is a command, an expression or a name of Fairlane."""
    if code.startswith("fairlane "):
        check_command(shlex.split(code))
        return
    text = code.removeprefix("@").replace("…", "...")
    tree = compile(text, code, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    [statement] = tree.body
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.Expr(value=ast.Name(id=name)):
            assert name in WORDS or hasattr(builtins, name), f"nothing of Fairlane is called {name}"
        case ast.Expr(value=ast.Await(value=inner)) | ast.Expr(value=inner) | ast.Raise(exc=ast.expr() as inner):
            resolve(inner)
        case _:
            raise AssertionError(f"{code} is checked by nobody")


def rows(text: str) -> Iterator[list[str]]:
    for line in section(text, "What maps to what").splitlines()[2:]:
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_the_right_column_names_what_fairlane_has(page: Path) -> None:
    wrong = []
    found = list(rows(page.read_text()))[1:]
    assert len(found) >= 30
    for row in found:
        assert len(row) == 2, f"a bar inside of a cell splits it: {row}"
        for code in re.findall(r"`([^`]+)`", row[1]):
            try:
                check_right(code)
            except (AssertionError, SyntaxError) as error:
                wrong.append(f"{code}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    "code",
    [
        "app.enque_many(calls)",
        "task.using(countdown=5)",
        "@app.task(max_retries=5)",
        "Concurency(5)",
        "Rate(100, every='1m')",
        "fairlane work shop:app",
        "fairlane worker shop:app --slow",
        "countdown=5",
        "raise Abort('why')",
        "task.using(on_dead=Effect())",
    ],
)
def test_a_name_that_fairlane_does_not_have_is_noticed(code: str) -> None:
    with pytest.raises(AssertionError):
        check_right(code)


# The other side.


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_what_is_shown_of_before_and_on_the_way_is_python(page: Path) -> None:
    text = page.read_text()
    found = [python_blocks(text, "Before"), python_blocks(text, "Move in production")]
    assert all(found)
    for block in [*found[0], *found[1]]:
        compile(block.text, str(page), "exec", dont_inherit=True)


def run_program(folder: Path, text: str, **environment: str) -> str:
    """What it prints. A process of its own, because both libraries keep their app or broker for the whole process."""
    (folder / "program.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "FAIRLANE_URL": "sqlite:///jobs.db", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IN_MEMORY = {"CELERY_BROKER_URL": "memory://", "CELERY_RESULT_BACKEND": "cache+memory://"}


def test_the_celery_module_does_its_work_in_memory(tmp_path: Path) -> None:
    [before] = python_blocks(guide("celery"), "Before")
    (tmp_path / "before.py").write_text(before.text)
    printed = run_program(
        tmp_path,
        """
from celery.contrib.testing.worker import start_worker
from before import accept, app, deliver, report

with start_worker(app, perform_ping_check=False, queues=["webhooks", "celery"]):
    accept(41, "acme")
    print(deliver.delay(42, account="acme").get(timeout=30))
    print(report.delay(*app.conf.beat_schedule["daily"]["args"]).get(timeout=30))
""",
        **IN_MEMORY,
    )
    assert printed.splitlines()[-2:] == ["event 42 for acme", "the daily report"]


def test_celery_hands_a_message_over_once(tmp_path: Path) -> None:
    for name in ("shop.py", "handover.py"):
        (tmp_path / name).write_text(file_of(guide("celery"), name))
    printed = run_program(
        tmp_path,
        """
from celery.contrib.testing.worker import start_worker
from handover import old
from shop import app
from fairlane.testing import enqueued_jobs

with start_worker(old, perform_ping_check=False, queues=["webhooks"]):
    for number, task_id in [(1, "one"), (2, "two")]:
        old.send_task("shop.deliver", (number, "acme"), task_id=task_id, queue="webhooks").get(timeout=30)
old.tasks["shop.deliver"].apply((1, "acme"), task_id="one", throw=True)
print([job.arguments for job in app.run_blocking(enqueued_jobs(app))])
app.close_sync()
""",
        **IN_MEMORY,
    )
    assert printed.splitlines()[-1] == "[{'event': 1, 'account': 'acme'}, {'event': 2, 'account': 'acme'}]"


def test_the_settings_of_celery_are_its_own() -> None:
    known = set(importlib.import_module("celery.app.defaults").DEFAULTS)
    spaces = ("beat_", "broker_", "result_", "task_", "worker_")
    text = guide("celery")
    named = {word for word in re.findall(r"`(\w+)(?:=[^`]*)?`", section(text, "What maps to what")) if "_" in word}
    settings = {word for word in named if word.startswith(spaces)}
    signals = {"task_prerun", "task_postrun", "task_success", "task_failure", "task_retry", "task_id"}
    assert settings
    assert settings - signals <= known


def console_commands(text: str, program: str) -> list[list[str]]:
    shown = [words for block in blocks(text) if block.language == "console" for words, _ in commands(block)]
    in_tables = [shlex.split(code) for row in rows(text) for code in re.findall(r"`([^`…]+)`", row[0])]
    return [words[1:] for words in [*shown, *in_tables] if words and words[0] == program]


def test_the_commands_of_celery_are_its_own() -> None:
    celery = importlib.import_module("celery.bin.celery").celery
    found = console_commands(guide("celery"), "celery")
    assert len(found) >= 5
    for words in found:
        # The app is not loaded, so what comes before the subcommand is left out.
        name, *rest = words[2:] if words[0] == "-A" else words
        assert name in celery.commands, words
        options = {option for each in celery.commands[name].params for option in each.opts}
        assert {word for word in rest if word.startswith("-")} <= options, words


def test_the_commands_of_dramatiq_are_its_own() -> None:
    parser = importlib.import_module("dramatiq.cli").make_argument_parser()
    found = console_commands(guide("dramatiq"), "dramatiq")
    assert len(found) == 2
    for words in found:
        assert parser.parse_args(words).queues == ["webhooks"]


STUBBED = """
import dramatiq.brokers.redis, dramatiq.rate_limits.backends
from dramatiq import Worker
from dramatiq.brokers.stub import StubBroker
from dramatiq.rate_limits.backends import StubBackend

broker = StubBroker()
dramatiq.brokers.redis.RedisBroker = lambda url: broker
dramatiq.rate_limits.backends.RedisBackend = lambda url: StubBackend()


def work():
    worker = Worker(broker, worker_timeout=100)
    worker.start()
    broker.join("webhooks", timeout=30_000, fail_fast=True)
    worker.stop()
"""
"""Dramatiq without a server: its own stubs in the place of Redis."""


def test_the_dramatiq_module_does_its_work_with_a_stub(tmp_path: Path) -> None:
    [before] = python_blocks(guide("dramatiq"), "Before")
    (tmp_path / "before.py").write_text(before.text)
    printed = run_program(
        tmp_path,
        f"""{STUBBED}
from before import accept, deliver

deliver.send(42, account="acme")
work()
accept(43, "acme")
print(broker.queues["webhooks"].qsize(), broker.queues["webhooks.DQ"].qsize())
""",
    )
    assert printed.splitlines() == ["event 42 for acme", "1 1"]


def test_dramatiq_hands_a_message_over_once(tmp_path: Path) -> None:
    for name in ("shop.py", "handover.py"):
        (tmp_path / name).write_text(file_of(guide("dramatiq"), name))
    printed = run_program(
        tmp_path,
        f"""{STUBBED}
from handover import hand_over
from shop import app
from fairlane.testing import enqueued_jobs

first, second = hand_over.message(1, account="acme"), hand_over.message(2, account="acme")
for message in (first, second, first.copy()):
    broker.enqueue(message)
work()
print(sorted(job.arguments["event"] for job in app.run_blocking(enqueued_jobs(app))))
app.close_sync()
""",
    )
    assert printed.splitlines() == ["[1, 2]"]
