"""`fairlane forward`: what it says where there is nothing to forward."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from fairlane.cli.program import program

SHOP = """
from fairlane import App, Concurrency
from fairlane.forward import Forwarder

app = App("sqlite://")
app.queue("emails")


class Paper(Forwarder):
    def name_of(self, target):
        return target.__name__

    def function_of(self, target):
        return target

    def install(self, forwarded):
        pass


def send(number: int) -> None: ...


idle = Paper(app)
forwarder = Paper(app)
forwarder.task(send, queue="emails")
app.queue("letters", limits=Concurrency(2))
other = Paper(app)
other.task(send, queue="letters", name="send a letter")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SHOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (" --queues letters", "declares no queue 'letters'"),
        (":app", "is of type App, not Forwarder"),
        (":absent", "has no 'absent'"),
        (":idle", "forwards no task"),
        ("", "queue 'emails' has no limit on what the engine holds at once"),
    ],
)
def test_what_cannot_be_forwarded_is_told_in_a_line(shop: str, place: str, said: str) -> None:
    found = CliRunner().invoke(program, ["forward", *f"{shop}{place}".split()])
    assert found.exit_code == 1
    assert said in found.output
    assert "Traceback" not in found.output


def test_a_worker_of_an_app_whose_queues_are_all_forwarded_says_so(shop: str) -> None:
    found = CliRunner().invoke(program, ["worker", f"{shop}:app"])
    assert found.exit_code == 1
    assert "every queue of this app is forwarded to an engine" in found.output
