"""`fairlane explain`, run as an operator runs it, and `explain` as a program asks it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fairlane import App, Concurrency, Fair
from fairlane.cli.program import program
from fairlane.errors import ConfigurationError
from fairlane.policy import Reason

SHOP = """
from fairlane import App, Concurrency, Fair

app = App("sqlite:///shop.db")
app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(0, by="account")])

@app.task(queue="webhooks", name="shop.deliver")
async def deliver(account: str) -> None: ...
"""
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "explained_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRLANE_URL", "sqlite:///shop.db")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda *arguments: CliRunner().invoke(program, arguments)
    sys.modules.pop("explained_shop", None)


def enqueued(run: Run) -> str:
    result = run("enqueue", "explained_shop:app", "shop.deliver", "--args", '["acme"]')
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_a_waiting_job_is_told_with_all_that_holds_it(run: Run) -> None:
    job = enqueued(run)
    result = run("explain", job, "--app", "explained_shop:app")
    assert result.exit_code == 0
    assert "no_worker:" in result.output
    assert "concurrency: account=acme is at its limit Concurrency(0, by='account'): 0 of 0" in result.output
    assert "cannot start until somebody acts" in result.output
    told = json.loads(run("explain", job, "--json").output)
    assert {each["reason"] for each in told["reasons"]} >= {"no_worker", "concurrency"}
    assert told["keys"] == {"account": "acme"}


def test_a_key_and_a_queue_can_be_asked_about(run: Run) -> None:
    enqueued(run)
    told = json.loads(run("explain", "--queue", "webhooks", "--key", "account=acme", "--json").output)
    assert [each["limit"] for each in told["reasons"]] == [None, "concurrency:account"]
    assert "webhooks" in run("explain", "--queue", "webhooks").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "explain what?"),
        (("x", "--queue", "webhooks"), "explain what?"),
        (("0198c0de-0000-7000-8000-000000000000", "--key", "a=b"), "--key belongs to --queue"),
        (("0198c0de-0000-7000-8000-000000000000",), "there is no job"),
        (("--queue", "nope"), "known are webhooks"),
        (("webhooks",), "'webhooks' is a queue, not the id of a job; write --queue webhooks"),
        (("webhook",), "'webhook' is not the id of a job"),
        (("--queue", "webhooks", "--key", "account"), "write name=value"),
        (
            ("--queue", "webhooks", "--key", "acount=acme"),
            "has no key 'acount'; its keys are: account",
        ),
    ],
)
def test_a_question_that_makes_no_sense_says_what_to_ask(run: Run, arguments: tuple[str, ...], said: str) -> None:
    enqueued(run)
    result = run("explain", *arguments)
    assert result.exit_code == 1
    assert said in result.output


def test_a_value_that_no_job_has_is_told_from_one_that_nothing_holds(run: Run) -> None:
    enqueued(run)
    said = "no job with account={} waits or runs"
    assert said.format("acmee") in run("explain", "--queue", "webhooks", "--key", "account=acmee").output
    assert said.format("acme") not in run("explain", "--queue", "webhooks", "--key", "account=acme").output


def test_a_suggested_command_names_the_app_that_was_given(run: Run) -> None:
    enqueued(run)
    command = "fairlane worker {} --queues webhooks"
    for asked in (("explain", "--queue", "webhooks"), ("status",), ("doctor",)):
        assert command.format("module:app") in run(*asked).output
        assert command.format("explained_shop:app") in run(*asked, "--app", "explained_shop:app").output


async def test_a_program_asks_the_job_or_the_queue_itself() -> None:
    async with App("sqlite://") as app:
        queue = app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(0, by="account")])

        @app.task(queue="webhooks")
        async def deliver(account: str) -> None: ...

        job = await deliver.enqueue("acme")
        told = await job.explain()
        assert set(told.reasons) == {Reason.NO_WORKER, Reason.CONCURRENCY}
        assert Reason.CONCURRENCY in (await queue.explain(account="acme")).reasons
        assert Reason.CONCURRENCY not in (await queue.explain(account="bolt")).reasons or told.earliest is None
        with pytest.raises(ConfigurationError, match="has no key 'acount'"):
            await queue.explain(acount="acme")
