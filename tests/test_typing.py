"""A wrong argument to `enqueue` is an error of mypy, not of a night's traffic."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
from datetime import UTC, datetime
from typing import reveal_type
from fairlane import App, Backoff, Call, Effects, Job

app = App("sqlite://")
reports = app.queue("reports")

@app.task(max_attempts=5, backoff=Backoff("1s"), retry_on=OSError, dead_on=(ValueError,), timeout="30s")
async def deliver(event: int, account: str, *, endpoint: str = "") -> float:
    return 1.0

@app.task
def resize(name: str) -> bytes:
    return b""

@app.task(keys=lambda name: {"account": name})
async def bare(name: str) -> None: ...

async def main() -> None:
    await deliver.enqueue(42, account="acme", endpoint="api.acme.com")
    await deliver.using(priority=5, delay="10m", keys={"account": 1}).enqueue(42, "acme")
    await deliver.using(on_dead=Effects(enqueue=[resize.call("a")], put={"b": 1})).enqueue(42, "acme")
    await app.enqueue_many([deliver.call(1, "acme")])
    await deliver.enqueue_many([deliver.call(1, "acme")])
    deliver.enqueue_sync(1, "acme")
    for claim in await reports.claim(5, lease="30s"):
        await claim.ack(1, ran="2s")
"""

MISTAKES = [
    ('await deliver.enqueue("42", account="acme")', "arg-type", '"enqueue" of "BoundTask" has incompatible type "str"'),
    ("await deliver.enqueue(42)", "call-arg", 'Missing positional argument "account"'),
    ('await deliver.enqueue(42, "acme", "api")', "call-arg", "Too many positional arguments"),
    ('await deliver.enqueue(42, "acme", colour="red")', "call-arg", 'Unexpected keyword argument "colour"'),
    ('await deliver.enqueue(42, "acme", priority=5)', "call-arg", 'Unexpected keyword argument "priority"'),
    ('await deliver.using(priority=5).enqueue("42", "acme")', "arg-type", 'incompatible type "str"; expected "int"'),
    ('deliver.call("42", "acme")', "arg-type", '"call" of "BoundTask" has incompatible type "str"'),
    ('deliver.enqueue_sync("42", "acme")', "arg-type", '"enqueue_sync" of "BoundTask" has incompatible type "str"'),
    ("deliver.using(on_dead=resize)", "arg-type", 'expected "Effects | None"'),
    ("await resize.enqueue(5)", "arg-type", 'incompatible type "int"; expected "str"'),
    ('deliver.using(colour="red")', "call-arg", 'Unexpected keyword argument "colour" for "using"'),
    ('text: str = await (await deliver.enqueue(1, "a")).result()', "assignment", 'expression has type "float"'),
    ('await deliver("42", "acme")', "arg-type", 'incompatible type "str"; expected "int"'),
    ("app.task(max_attemps=3)", "call-overload", 'keyword argument "max_attemps"'),
    ("await (await app.job('1').record()).ack()", "attr-defined", '"JobRecord" has no attribute "ack"'),
    ("await app.job('1').ack()", "attr-defined", '"Job[Any]" has no attribute "ack"'),
    ("await (await reports.claim(1))[0].snooze()", "call-arg", 'Missing positional argument "delay"'),
]

REVEALED = [
    ('reveal_type(await deliver.enqueue(1, "a"))', "fairlane.task.Job[float]"),
    ('reveal_type(await (await deliver.enqueue(1, "a")).result())', "float"),
    ('reveal_type(await deliver(1, "a"))', "float"),
    ('reveal_type(resize("a"))', "bytes"),
    ('reveal_type(await (await resize.enqueue("a")).result(timeout="5s"))', "bytes"),
    ('reveal_type(await (await bare.enqueue("a")).result())', "None"),
    ("reveal_type(await reports.claim(5))", "list[fairlane.queue.HeldClaim]"),
    ("reveal_type(await reports.wait())", "bool"),
    ('reveal_type(await app.enqueue_many([resize.call("a")]))', "fairlane.task.Enqueued[bytes]"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy says, by line, of a program that holds every mistake."""
    lines = [*(code for code, _, _ in MISTAKES), *(code for code, _ in REVEALED)]
    program = PROGRAM + textwrap.indent("\n".join(lines) + "\n", "    ")
    folder = tmp_path_factory.mktemp("typing")
    (folder / "shop.py").write_text(program)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file",
            "",
            "--cache-dir",
            str(folder / "cache"),
            "shop.py",
        ],
        cwd=folder,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    said: dict[int, str] = {}
    for line in ran.stdout.splitlines():
        if found := re.match(r"shop\.py:(\d+): (.*)", line):
            # Versions of mypy differ in whether they say `builtins.`.
            said[int(found[1])] = f"{said.get(int(found[1]), '')}\n{found[2].replace('builtins.', '')}"
    assert said, ran.stdout + ran.stderr
    return said


FIRST = PROGRAM.count("\n") + 1


@pytest.mark.parametrize(("place", "code", "message"), [(n, c, m) for n, (_, c, m) in enumerate(MISTAKES)])
def test_a_mistake_is_an_error_of_mypy(told: dict[int, str], place: int, code: str, message: str) -> None:
    said = told.get(FIRST + place, "nothing")
    assert f"[{code}]" in said, MISTAKES[place][0]
    assert message in said


@pytest.mark.parametrize(("place", "kind"), [(n, kind) for n, (_, kind) in enumerate(REVEALED)])
def test_types_go_through_from_the_function_to_the_result(told: dict[int, str], place: int, kind: str) -> None:
    assert f'Revealed type is "{kind}"' in told.get(FIRST + len(MISTAKES) + place, "nothing")


def test_a_program_without_a_mistake_passes_strictly(told: dict[int, str]) -> None:
    assert {line: said for line, said in told.items() if line < FIRST} == {}
