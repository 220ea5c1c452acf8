"""`fairlane jobs`, `fairlane dead` and `fairlane enqueue`, run as an operator runs them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from click.testing import CliRunner, Result

from fairlane.cli.output import ago
from fairlane.cli.program import program
from fairlane.scheduler.settlement import Died, settle
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.sqlite import SqliteStore

SHOP = """
from fairlane import App, Fair

app = App("sqlite:///shop.db")
app.queue("webhooks", fair=Fair(by="account"))

@app.task(queue="webhooks", max_attempts=1)
async def deliver(account: str, number: int = 0) -> int:
    return number

@app.task(queue="webhooks", name="other.refund")
async def refund(account: str) -> None: ...

@app.task(queue="webhooks", name="other.charge", max_attempts=1, unique=lambda account: account)
async def charge(account: str) -> None: ...
"""

Run = Callable[..., Result]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import sys

    (tmp_path / "operators_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRLANE_URL", "sqlite:///shop.db")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("operators_shop", None)


@pytest.fixture
def run(shop: Path) -> Run:
    def invoke(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(program, arguments, **options)

    return invoke


@pytest.fixture
def enqueue(run: Run) -> Callable[..., str]:
    def one(account: str, *options: str) -> str:
        result = run("enqueue", "operators_shop:app", "deliver", "--args", json.dumps([account]), *options)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    return one


@pytest.fixture
def die(shop: Path) -> Callable[[], None]:
    """Let every job that is ready die."""

    async def work() -> None:
        store = SqliteStore("shop.db")
        await store.open()
        from datetime import timedelta

        me = WorkerIdentity(uuid4(), "host:1")
        while claims := (await store.claim("webhooks", lambda: 50, worker=me, lease=timedelta(minutes=1))).claims:
            trace = "ConnectionError: no answer\n\n  File shop.py, line 6, in deliver"
            await store.settle([settle(each, Died(trace), 1) for each in claims])
        await store.close()

    return lambda: asyncio.run(work())


def listed(run: Run, *arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    jobs: list[dict[str, Any]] = json.loads(result.stdout)["jobs"]
    return jobs


def test_a_job_is_enqueued_by_hand(run: Run, enqueue: Callable[..., str]) -> None:
    first = enqueue("acme", "--priority", "5")
    result = run(
        "enqueue",
        "operators_shop:app",
        "other.refund",
        "--kwargs",
        '{"account": "bolt"}',
        "--delay",
        "1h",
        "--keys",
        "plan=gold",
        "--json",
    )
    told = json.loads(result.stdout)
    assert (told["task"], told["keys"]) == ("other.refund", {"account": "bolt", "plan": "gold"})
    second, one = listed(run, "jobs", "list")
    assert (one["id"], one["state"], one["priority"]) == (first, "ready", 5)
    assert (second["id"], second["state"]) == (told["id"], "scheduled")


def test_a_dry_run_of_enqueue_stores_nothing(run: Run, shop: Path) -> None:
    result = run("enqueue", "operators_shop:app", "deliver", "--args", '["acme"]', "--dry-run")
    assert result.stdout == 'would be stored: operators_shop.deliver in webhooks, [["acme"],{}]\n'
    assert not (shop / "shop.db").exists()


def test_a_dry_run_of_enqueue_shows_the_call_before_a_codec_seals_it(run: Run, shop: Path) -> None:
    sealed = SHOP.replace('App("sqlite:///shop.db")', 'App("sqlite:///shop.db", codec=Sealed())')
    codec = "class Sealed:\n    encode = decode = staticmethod(lambda text: bytes(255 - each for each in text))\n"
    (shop / "operators_shop.py").write_text(codec + sealed)
    result = run("enqueue", "operators_shop:app", "deliver", "--args", '["acme"]', "--dry-run")
    assert result.stdout == 'would be stored: operators_shop.deliver in webhooks, [["acme"],{}]\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["enqueue", "operators_shop:app", "delver"], "did you mean 'deliver'?"),
        (["enqueue", "operators_shop:app", "deliver", "--args", "acme"], "--args is not JSON"),
        (["enqueue", "operators_shop:app", "deliver", "--args", "{}"], "give a JSON array"),
        (["enqueue", "operators_shop:app", "deliver", "--args", '["a", "x"]'], "argument 'number'"),
        (["enqueue", "operators_shop:app", "deliver"], "missing a required argument"),
        (["enqueue", "operators_shop:app", "deliver", "--args", '["a"]', "--keys", "x"], "write name=value"),
        (["enqueue", "operators_shop:app", "deliver", "--keys", "account=a", "--keys", "account=b"], "given twice"),
        (["jobs", "list", "--key", "acme"], "write name=value"),
        (["jobs", "list", "--queue", "webhook"], "'webhook' is not known"),
        (["jobs", "list", "--since", "yesterday"], "write a duration (2h) or a time"),
        (["jobs", "list", "--after", "x"], "no place in this listing"),
        (["jobs", "list", "--url", "sqlite:///none.db"], "does not exist yet"),
        (["jobs", "show", "x"], "not the id of a job"),
        (["jobs", "show", str(UUID(int=1))], "there is no job"),
        (["jobs", "cancel"], "which jobs?"),
        (["jobs", "cancel", str(UUID(int=1)), "--queue", "webhooks"], "not both"),
        (["jobs", "cancel", "--all", "--state", "dead"], "dead jobs cannot be cancelled"),
        (["dead", "replay", "--all"], "nobody to ask; give --yes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_a_status(
    arguments: list[str],
    said: str,
    run: Run,
    enqueue: Callable[..., str],
    die: Callable[[], None],
) -> None:
    enqueue("acme")
    die()
    result = run(*arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_jobs_are_listed_by_filter_and_page(run: Run, enqueue: Callable[..., str]) -> None:
    jobs = [enqueue(account) for account in ("acme", "bolt", "acme")]
    assert [each["id"] for each in listed(run, "jobs", "list", "--key", "account=acme")] == [jobs[2], jobs[0]]
    assert listed(run, "jobs", "list", "--state", "dead") == []
    assert listed(run, "jobs", "list", "--until", "1h") == []
    first = json.loads(run("jobs", "list", "--limit", "2", "--json").stdout)
    assert [each["id"] for each in listed(run, "jobs", "list", "--after", first["after"])] == [jobs[0]]
    table = run("jobs", "list", "--limit", "2")
    assert table.stdout.split()[:7] == ["ID", "STATE", "QUEUE", "TASK", "TRIES", "AGE", "KEYS"]
    assert table.stdout.splitlines()[1].startswith(f"{jobs[2]}  ready  webhooks  operators_shop.deliver  0/1")
    assert f"--after {first['after']}" in table.stderr
    assert run("jobs", "list", "--task", "nothing").stdout == "no job fits\n"


def test_a_job_is_shown_with_the_traceback_of_every_attempt(
    run: Run, enqueue: Callable[..., str], die: Callable[[], None]
) -> None:
    job = enqueue("acme")
    die()
    run("dead", "replay", job)
    die()
    shown = run("jobs", "show", job).stdout
    assert "replays          1" in shown
    assert 'call             [["acme"], {}]' in shown
    assert shown.count("attempt 1: dead") == 2
    assert shown.count("File shop.py, line 6, in deliver") == 2
    document = json.loads(run("jobs", "show", job, "--json").stdout)
    assert (document["call"], document["state"], len(document["attempts"])) == ([["acme"], {}], "dead", 2)


def test_dead_jobs_are_listed_replayed_and_purged(
    run: Run, enqueue: Callable[..., str], die: Callable[[], None]
) -> None:
    jobs = [enqueue("acme"), enqueue("bolt"), enqueue("acme")]
    die()
    assert "ConnectionError: no answer" in run("dead", "list").stdout
    seen = run("dead", "replay", "--key", "account=acme", "--dry-run")
    assert seen.stdout.startswith("2 jobs would be replayed\n")
    assert len(listed(run, "dead", "list")) == 3
    assert run("dead", "replay", "--key", "account=acme", "--yes").stdout == "2 jobs replayed\n"
    assert [each["id"] for each in listed(run, "dead", "list")] == [jobs[1]]
    told = json.loads(run("dead", "purge", "--all", "--yes", "--reason", "old", "--json").stdout)
    assert (told["action"], told["jobs"], told["more"]) == ("purged", [jobs[1]], False)
    assert run("dead", "list").stdout == "no job is dead\n"
    assert len(listed(run, "jobs", "list", "--state", "ready")) == 2


def test_named_jobs_that_are_skipped_are_told_and_give_a_status(
    run: Run, enqueue: Callable[..., str], die: Callable[[], None]
) -> None:
    dead = enqueue("acme")
    die()
    ready = enqueue("acme")
    result = run("dead", "replay", dead, ready)
    assert (result.exit_code, result.stdout) == (1, "1 job replayed\n")
    assert result.stderr == f"skipped {ready}: it is ready; only dead and cancelled jobs can be replayed\n"


def test_jobs_whose_unique_key_is_held_are_not_replayed_unless_they_replace_the_holder(
    run: Run, die: Callable[[], None]
) -> None:
    """E10."""

    def charge() -> str:
        return run("enqueue", "operators_shop:app", "other.charge", "--args", '["acme"]').stdout.strip()

    dead = charge()
    die()
    holder = charge()
    held = "1 was not replayed: another job holds the unique key; --on-conflict replace cancels a holder that waits\n"
    for options in (("--dry-run",), ("--yes",)):
        result = run("dead", "replay", "--all", *options)
        assert result.stdout == ("0 jobs would be replayed\n" if options == ("--dry-run",) else "0 jobs replayed\n")
        assert result.stderr == f"skipped {dead}: job {holder} holds its unique key\n{held}"
    told = json.loads(run("dead", "replay", "--all", "--yes", "--json").stdout)
    assert (told["count"], told["held"], told["skipped"][0]["holder"]) == (0, 1, holder)
    replace = ("dead", "replay", dead, "--on-conflict", "replace")
    assert f"1 waiting job with the same unique key would be cancelled: {holder}" in run(*replace, "--dry-run").stdout
    told = f"1 job replayed\n1 waiting job with the same unique key was cancelled: {holder}\n"
    assert run(*replace).stdout == told
    assert f"replaced by job {dead}" in run("jobs", "show", holder).stdout


def test_a_limit_that_is_reached_is_told(run: Run, enqueue: Callable[..., str]) -> None:
    for _ in range(3):
        enqueue("acme", "--delay", "1h")
    result = run("jobs", "retry", "--all", "--limit", "2", "--yes")
    assert result.stdout == "2 jobs made due\n"
    assert "there are more" in result.stderr
    assert run("jobs", "cancel", "--state", "scheduled", "--yes", "--reason", "old").stdout == "3 jobs cancelled\n"


def test_a_bulk_change_asks_on_a_terminal(
    run: Run, enqueue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairlane.cli import changes as acting

    job = enqueue("acme")
    monkeypatch.setattr(acting, "is_interactive", lambda: True)
    refused = run("jobs", "cancel", "--all", input="n\n")
    assert (refused.exit_code, "1 job will be cancelled. Go on?" in refused.stderr) == (1, True)
    assert listed(run, "jobs", "list")[0]["state"] == "ready"
    assert run("jobs", "cancel", "--all", input="y\nthey left\n").stdout.endswith("1 job cancelled\n")
    assert listed(run, "jobs", "list")[0]["id"] == job


@pytest.mark.parametrize(
    ("before", "said"), [(0, "0s"), (119, "119s"), (120, "2m"), (7_200, "2h"), (3 * 86_400, "3d"), (-600, "in 10m")]
)
def test_ages_are_short(before: int, said: str) -> None:
    now = 10**15
    assert ago(now - before * 1_000_000, now) == said


def test_a_table_fits_the_terminal_and_keeps_ids_whole(
    run: Run, enqueue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairlane.cli import output as drawing

    job = enqueue("a-rather-long-name-of-an-account")
    monkeypatch.setattr(drawing, "IN_A_PIPE", 80)
    lines = run("jobs", "list").stdout.splitlines()
    assert job in lines[1]
    assert max(map(len, lines)) <= 80
    assert "…" in lines[1]


def test_a_key_in_a_table_moves_no_cursor(run: Run, enqueue: Callable[..., str]) -> None:
    enqueue("\x1b[2Jacme")
    shown = run("jobs", "list").stdout
    assert "\x1b" not in shown
    assert "account=\\x1b[2Jacme" in shown
