"""What operators change about queues from the command line, and what is recorded of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fairlane.cli.program import program

SHOP = """
from fairlane import App, Concurrency, Fair, Rate

app = App("sqlite:///shop.db")
app.queue(
    "webhooks",
    fair=Fair(by="account"),
    limits=[Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)],
)

@app.task(queue="webhooks")
async def deliver(account: str, endpoint: str = "x") -> None: ...
"""

Run = Callable[..., Result]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "overrides_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRLANE_URL", "sqlite:///shop.db")
    monkeypatch.setenv("FAIRLANE_ACTOR", "ada")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("overrides_shop", None)


@pytest.fixture
def run(shop: Path) -> Run:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(program, arguments)

    invoke("migrate")
    assert invoke("policy", "apply", "overrides_shop:app").exit_code == 0
    return invoke


def told(run: Run, *arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def lines(run: Run, *arguments: str) -> list[str]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def declare(shop: Path, old: str, new: str) -> None:
    """Another version of the code."""
    source = shop / "overrides_shop.py"
    source.write_text(source.read_text().replace(old, new))
    sys.modules.pop("overrides_shop", None)


def test_a_key_is_paused_and_resumed(run: Run) -> None:
    assert lines(run, "pause", "webhooks", "--key", "account=acme", "--reason", "the vendor is down") == [
        "webhooks: set: account=acme is paused (ada: the vendor is down)"
    ]
    run("pause", "webhooks", "--task", "shop.deliver", "--as", "bob")
    listed = told(run, "overrides", "webhooks")
    assert {(each["says"], each["set_by"], each["no_effect"]) for each in listed} == {
        ("account=acme is paused", "ada", None),
        ("task=shop.deliver is paused", "bob", None),
    }
    first, second = lines(run, "resume", "webhooks", "--key", "account=acme")
    assert first.startswith("webhooks: ended: account=acme is no longer paused (set by ada, ")
    assert second.startswith("webhooks: still in force: task=shop.deliver is paused (bob, ")
    assert "nothing to change" in lines(run, "resume", "webhooks", "--key", "account=acme")[0]


def test_a_pause_can_have_an_end(run: Run) -> None:
    change = told(run, "pause", "webhooks", "--until", "2099-01-31T08:00")
    assert change["after"][0]["expires_at"] == "2099-01-31T08:00:00+00:00"
    (line, instead) = lines(run, "pause", "webhooks", "--for", "1h")
    assert line.startswith("webhooks: set: the whole queue is paused until ")
    assert "instead of: the whole queue is paused until 2099-01-31 08:00:00 UTC" in instead


def test_a_dry_run_says_how_many_jobs_it_is_about_and_the_change_does_not(run: Run) -> None:
    """S6: only `--json` did."""
    for account in ("acme", "acme", "blue"):
        assert run("enqueue", "overrides_shop:app", "deliver", "--args", f'["{account}"]').exit_code == 0
    acme = ("--key", "account=acme")
    for arguments, said in (
        (("pause", "webhooks"), "  3 jobs wait and 0 run there now"),
        (("pause", "webhooks", *acme), "  2 jobs wait and 0 run there now"),
        (("limit", "set", "webhooks", "account", "7", *acme), "  2 jobs wait and 0 run there now"),
        (("suspend", "webhooks"), "  3 jobs wait and 0 run there now"),
    ):
        assert lines(run, *arguments, "--dry-run")[1:] == [said]
        assert len(lines(run, *arguments)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("pause", "webhooks"),
        ("limit", "set", "webhooks", "account", "7", "--key", "account=acme"),
        ("weight", "set", "webhooks", "3", "--key", "account=acme"),
        ("boost", "webhooks", "--key", "account=acme", "--by", "4", "--for", "30m"),
        ("suspend", "webhooks", "--for", "10m"),
    ],
    ids=lambda value: value[0],
)
def test_o13_a_dry_run_of_a_command_changes_nothing(run: Run, arguments: tuple[str, ...]) -> None:
    before = told(run, "audit"), told(run, "overrides"), told(run, "policy", "show")
    assert ": would be set: " in lines(run, *arguments, "--dry-run")[0]
    would = told(run, *arguments, "--dry-run")
    assert (would["dry_run"], len(would["after"])) == (True, 1)
    assert would["affected"] == {"waiting": 0, "running": 0, "more": False}
    assert lines(run, *arguments, "--dry-run")[-1] == "  0 jobs wait and 0 run there now"
    assert (told(run, "audit"), told(run, "overrides"), told(run, "policy", "show")) == before
    assert told(run, *arguments)["dry_run"] is False
    assert len(told(run, "overrides")) == 1


def test_limits_are_set_listed_and_cleared(run: Run) -> None:
    run("limit", "set", "webhooks", "concurrency:account", "7", "--key", "account=acme", "--reason", "a larger plan")
    run("limit", "set", "webhooks", "rate/1m", "10", "--key", "endpoint=x", "--for", "2h")
    run("limit", "set", "webhooks", "concurrency", "40")
    rows = {(each["limit"], *each["keys"].items()): each for each in told(run, "limit", "list", "webhooks")}
    acme = rows["concurrency:account", ("account", "acme")]
    assert (acme["declared"]["max"], acme["in_force"]["max"], acme["override"]["set_by"]) == (5, 7, "ada")
    assert rows["rate/60s:endpoint", ("endpoint", "x")]["in_force"]["limit"] == 10
    assert rows[("concurrency:",)]["in_force"]["max"] == 40
    table = lines(run, "limit", "list", "webhooks")
    assert table[0].split() == ["LIMIT", "KEY", "DECLARED", "IN", "FORCE", "SET", "BY", "ENDS", "REASON"]
    assert any("account=acme" in line and "a larger plan" in line for line in table)
    (cleared,) = lines(run, "limit", "clear", "webhooks", "account", "--key", "account=acme")
    assert "ended: concurrency:account is no longer 7 for account=acme" in cleared


def test_weights_and_boosts_are_cleared_together(run: Run) -> None:
    run("weight", "set", "webhooks", "3", "--key", "account=acme")
    run("boost", "webhooks", "--key", "account=acme", "--by", "4")
    ended = told(run, "weight", "clear", "webhooks", "--key", "account=acme")
    assert {each["says"] for each in ended["before"]} == {
        "the weight of account=acme is 3",
        "account=acme is boosted 4 times",
    }
    assert lines(run, "overrides") == ["nothing is overridden"]


def test_a_suspension_shows_in_the_list_of_limits_and_ends(run: Run) -> None:
    run("suspend", "webhooks", "--reason", "drain")
    assert all(each["suspended"] for each in told(run, "limit", "list", "webhooks"))
    assert "suspended" in lines(run, "limit", "list", "webhooks")[1]
    assert lines(run, "unsuspend", "webhooks")[0].startswith(
        "webhooks: ended: every limit is no longer suspended (set by ada, "
    )


def test_jobs_are_forced_and_every_action_is_in_the_audit(run: Run) -> None:
    job = run("enqueue", "overrides_shop:app", "deliver", "--args", '["acme"]').stdout.strip()
    assert lines(run, "jobs", "force", job, "--dry-run")[0] == "1 job would be forced to start"
    assert lines(run, "jobs", "force", job, "--reason", "the customer waits") == ["1 job forced to start"]
    run("jobs", "cancel", job, "--as", "bob", "--reason", "no more")
    assert run("jobs", "force", job).exit_code == 1
    run("pause", "webhooks")
    page = told(run, "audit", "--limit", "2")
    assert [(each["actor"], each["action"]) for each in page["entries"]] == [("ada", "pause"), ("bob", "cancel")]
    assert page["entries"][1]["before"] == {job: "ready"}
    forced, first = told(run, "audit", "--before", str(page["before"]))["entries"]
    assert (forced["action"], forced["reason"], first["target"]) == ("force", "the customer waits", "version 1")
    of_queue = [each["action"] for each in told(run, "audit", "--queue", "webhooks")["entries"]]
    assert of_queue == ["pause", "cancel", "force", "policy apply"]
    shown = run("audit", "--limit", "1")
    assert shown.stdout.splitlines()[0].split() == ["WHEN", "(UTC)", "WHO", "ACTION", "QUEUE", "WHAT", "WHY"]
    assert f"--before {page['entries'][0]['id']}" in shown.stderr


def test_a_policy_is_compared_and_applied_with_a_reason(run: Run, shop: Path) -> None:
    same = run("policy", "diff", "overrides_shop:app")
    assert (same.exit_code, same.stdout) == (0, "webhooks: no difference (version 1)\n")
    run("limit", "set", "webhooks", "rate", "10", "--key", "endpoint=x")
    declare(shop, 'Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint")', 'Concurrency(9, by="account")')
    differs = run("policy", "diff", "overrides_shop:app")
    assert differs.exit_code == 1
    assert differs.stdout.splitlines() == [
        "webhooks: the app declares another policy than version 1, which is in force",
        "  concurrency:account: Concurrency(5, by='account') becomes Concurrency(9, by='account')",
        "  rate/60s:endpoint: Rate(100, per='60s', burst=100, by='endpoint') is removed",
    ]
    (document,) = json.loads(run("policy", "diff", "overrides_shop:app", "--json").stdout)
    assert [each["part"] for each in document["drift"]] == ["concurrency:account", "rate/60s:endpoint"]
    before = told(run, "audit"), told(run, "policy", "show")
    dry = lines(run, "policy", "apply", "overrides_shop:app", "--dry-run")
    assert "would be in force (version 1)" in dry[0]
    assert (told(run, "audit"), told(run, "policy", "show")) == before
    done = lines(run, "policy", "apply", "overrides_shop:app", "--reason", "more room")
    assert "is now in force (version 2)" in done[0]
    assert any("no effect any more: rate/60s:endpoint is 10 for endpoint=x" in line for line in done)
    (entry,) = told(run, "audit", "--limit", "1")["entries"]
    assert (entry["action"], entry["reason"], entry["actor"]) == ("policy apply", "more room", "ada")
    shown = lines(run, "policy", "show")
    assert shown[1].startswith("  override: rate/60s:endpoint is 10 for endpoint=x (ada, ")
    assert shown[2].startswith("    no effect: queue 'webhooks' has no limit named")


def test_a_policy_for_which_waiting_jobs_lack_a_key_needs_consent(run: Run, shop: Path) -> None:
    run("enqueue", "overrides_shop:app", "deliver", "--args", '["acme"]')
    declare(shop, "Concurrency(50)", 'Concurrency(50, by="region")')
    declare(shop, 'endpoint: str = "x"', 'endpoint: str = "x", region: str = "eu"')
    refused = run("policy", "apply", "overrides_shop:app")
    assert refused.exit_code == 1
    assert "a waiting job does not carry the key 'region'" in refused.stderr
    assert (
        "jobs that were enqueued before need not carry: region"
        in run("policy", "apply", "overrides_shop:app", "--accept-missing-keys").stdout
    )


def test_the_doctor_says_what_is_wrong_and_what_to_do(run: Run, shop: Path) -> None:
    healthy = run("doctor", "overrides_shop:app")
    assert (healthy.exit_code, healthy.stdout) == (0, "nothing is wrong\n")
    run("pause", "webhooks", "--key", "account=nobody")
    run("enqueue", "overrides_shop:app", "deliver", "--args", '["acme"]')
    declare(shop, "Concurrency(5", "Concurrency(9")
    before = told(run, "audit"), told(run, "policy", "show")
    ill = run("doctor", "overrides_shop:app")
    assert ill.exit_code == 1
    findings = json.loads(run("doctor", "overrides_shop:app", "--json").stdout)
    assert [(each["level"], each["check"]) for each in findings] == [
        ("fault", "drift"),
        ("fault", "no worker"),
        ("note", "key that no job carries"),
    ]
    assert all(each["message"] in ill.stdout and each["remedy"] in ill.stdout for each in findings)
    assert (told(run, "audit"), told(run, "policy", "show")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pause", "webhook"], "did you mean 'webhooks'?"),
        (["pause", "webhooks", "--key", "acme"], "write name=value"),
        (["pause", "webhooks", "--key", "account=a", "--key", "account=b"], "given twice"),
        (["pause", "webhooks", "--key", "region=eu"], "has no key 'region'"),
        (["pause", "webhooks", "--for", "soon"], "'soon' is not a duration"),
        (["pause", "webhooks", "--for", "1h", "--until", "2099-01-01"], "not both"),
        (["pause", "webhooks", "--until", "soon"], "or --for 2h"),
        (["pause", "webhooks", "--until", "2000-01-01"], "ended already"),
        (["limit", "set", "webhooks", "breaker", "3"], "its limits: concurrency:account, rate/60s:endpoint"),
        (["limit", "set", "webhooks", "account", "3"], "give account=…"),
        (["limit", "set", "webhooks", "account", "1.5", "--key", "account=acme"], "whole number"),
        (
            ["limit", "set", "webhooks", "account", "nan", "--key", "account=acme"],
            "value=nan cannot be used",
        ),
        (
            ["limit", "set", "webhooks", "account", "inf", "--key", "account=acme"],
            "value=inf cannot be used",
        ),
        (["weight", "set", "webhooks", "nan", "--key", "account=acme"], "weight=nan cannot be used"),
        (["limit", "clear", "webhooks", "breaker"], "has no limit 'breaker'"),
        (["limit", "list", "webhook"], "did you mean 'webhooks'?"),
        (["weight", "set", "webhooks", "0", "--key", "account=acme"], "between 0.000001"),
        (["boost", "webhooks", "--by", "4"], "weights belong to account"),
        (["overrides", "webhook"], "did you mean 'webhooks'?"),
        (["policy", "diff", "overrides_shop:app", "--queue", "email"], "declares no queue 'email'"),
        (["audit", "--url", "sqlite:///none.db"], "does not exist yet"),
        (["jobs", "force", "x"], "not the id of a job"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_names_the_thing_and_the_remedy(arguments: list[str], said: str, run: Run) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stdout == ""
    assert [each["action"] for each in told(run, "audit")["entries"]] == ["policy apply"]
