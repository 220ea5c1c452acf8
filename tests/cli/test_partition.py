"""`fairlane partition`, and the commands that mean all partitions of a queue."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fairlane.cli.program import program

SHOP = """
from fairlane import App, Concurrency, Fair

app = App("sqlite:///shop.db")
app.queue("email", fair=Fair(by="account"), limits=[Concurrency(5, by="account"), Concurrency(50)])

@app.task(queue="email")
async def send(account: str) -> None: ...
"""

pytestmark = pytest.mark.usefixtures("producers_know_at_once")

Run = Callable[..., Result]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "partition_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRLANE_URL", "sqlite:///shop.db")
    monkeypatch.setenv("FAIRLANE_ACTOR", "ada")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("partition_shop", None)


@pytest.fixture
def run(shop: Path) -> Run:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(program, arguments)

    for n in range(20):
        stored = invoke("enqueue", "partition_shop:app", "partition_shop.send", "--args", f'["account-{n}"]')
        assert stored.exit_code == 0, stored.output
    return invoke


def declare(shop: Path, partitions: int) -> None:
    source = shop / "partition_shop.py"
    source.write_text(SHOP.replace('"email",', f'"email", partitions={partitions}, partition_by="account",'))
    sys.modules.pop("partition_shop", None)


def told(run: Run, *arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def queues(run: Run) -> Counter[str]:
    return Counter(job["queue"] for job in told(run, "jobs", "list", "--queue", "email", "--limit", "100")["jobs"])


def test_a_queue_is_divided_and_made_whole_again(run: Run, shop: Path) -> None:
    planned = told(run, "partition", "email", "--to", "4", "--by", "account", "--dry-run")
    assert (planned["before"], planned["after"], planned["moved"], planned["dry_run"]) == (1, 4, 0, True)
    assert set(queues(run)) == {"email"}
    done = told(run, "partition", "email", "--to", "4", "--by", "account", "--yes")
    assert done["moved"] == planned["waiting"] > 0
    assert set(queues(run)) == {"email", "email__p1", "email__p2", "email__p3"}
    assert queues(run).total() == 20
    assert told(run, "partition", "email", "--to", "1", "--yes")["after"] == 1
    assert queues(run) == {"email": 20}
    assert run("policy", "diff", "partition_shop:app").exit_code == 0, "it is what it was"
    assert {each["action"] for each in told(run, "audit")["entries"]} == {"partition"}


def test_code_with_another_width_goes_by_the_stored_one_and_the_doctor_tells(run: Run, shop: Path) -> None:
    """P5."""
    assert run("partition", "email", "--to", "2", "--by", "account", "--yes").exit_code == 0
    assert run("enqueue", "partition_shop:app", "partition_shop.send", "--args", '["acme"]').exit_code == 0
    assert set(queues(run)) == {"email", "email__p1"}
    found = run("doctor", "partition_shop:app").output
    assert "it has 2 (by account), and the code declares 1" in found
    assert "programs with this code send and serve jobs by the stored number" in found
    shown = run("policy", "show", "partition_shop:app").output
    assert "`fairlane partition email --to 1` divides it so" in shown
    assert "policy apply" not in shown
    declare(shop, 2)
    assert run("enqueue", "partition_shop:app", "partition_shop.send", "--args", '["acme"]').exit_code == 0
    assert "the code declares" not in run("doctor", "partition_shop:app").output


def test_the_app_that_declares_it_says_by_which_key(run: Run, shop: Path) -> None:
    assert "say by which key" in run("partition", "email", "--to", "4", "--yes").output
    declare(shop, 4)
    compared = run("policy", "diff", "partition_shop:app").output
    assert "`fairlane partition email --to 4 --by account` divides it so" in compared
    done = told(run, "partition", "email", "--to", "4", "--app", "partition_shop:app", "--yes")
    assert done["by"] == ["account"]


def test_nobody_is_asked_in_a_script(run: Run) -> None:
    refused = run("partition", "email", "--to", "4", "--by", "account")
    assert refused.exit_code == 1
    assert "there is nobody to ask; give --yes" in refused.output
    assert set(queues(run)) == {"email"}


def test_an_interrupted_change_says_how_to_go_on_and_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fairlane.store.policies.move_misrouted", interrupt)
        stopped = run("partition", "email", "--to", "4", "--by", "account", "--yes")
    assert stopped.exit_code == 1
    assert "keys that move stand still until it is over: workers go on with it" in stopped.output
    assert "it is on its way from 1 to 4 partitions" in run("doctor").output
    refused = run("partition", "email", "--to", "3", "--yes")
    assert refused.exit_code == 1
    assert "on its way from 1 to 4 partitions" in refused.output
    assert "`fairlane partition email --to 1 --abandon`" in refused.output
    assert run("partition", "email", "--to", "4", "--by", "account", "--yes").exit_code == 0
    assert "on its way" not in run("doctor").output
    assert set(queues(run)) == {"email", "email__p1", "email__p2", "email__p3"}


def test_a_change_that_is_under_way_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """F13."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fairlane.store.policies.move_misrouted", interrupt)
        run("partition", "email", "--to", "4", "--by", "account", "--yes")
    planned = run("partition", "email", "--to", "1", "--abandon", "--dry-run").output
    assert "email: the change to 4 is given up; 1 → 1 partition" in planned
    assert "on its way" in run("doctor").output
    given_up = told(run, "partition", "email", "--to", "1", "--abandon", "--yes")
    assert (given_up["after"], given_up["gives_up"]) == (1, 4)
    assert "on its way" not in run("doctor").output
    assert queues(run) == {"email": 20}
    assert told(run, "partition", "email", "--to", "2", "--by", "account", "--abandon", "--yes")["gives_up"] is None


def test_one_is_not_told_as_many(shop: Path) -> None:
    def invoke(*arguments: str) -> str:
        return CliRunner().invoke(program, arguments).output

    # Of two partitions this account is in the second, so that it moves both times.
    invoke("enqueue", "partition_shop:app", "partition_shop.send", "--args", '["acme"]')
    assert "email: 1 → 2 partitions, 1 job moved" in invoke(
        "partition", "email", "--to", "2", "--by", "account", "--yes"
    )
    planned = invoke("partition", "email", "--to", "1", "--dry-run")
    assert "2 → 1 partition by account; 1 waiting job of keys that move goes to another partition." in planned
    assert "email: 2 → 1 partition, 1 job moved" in invoke("partition", "email", "--to", "1", "--yes")


def test_what_is_so_already_is_said(run: Run) -> None:
    assert "nothing to change" in run("partition", "email", "--to", "1", "--yes").output


def test_a_pause_covers_all_partitions(run: Run) -> None:
    assert run("partition", "email", "--to", "4", "--by", "account", "--yes").exit_code == 0
    assert told(run, "pause", "email")["queue"] == "email"
    assert [each["queue"] for each in told(run, "overrides")] == ["email"]
    reasons = [each["reason"] for each in told(run, "explain", "--queue", "email")["reasons"]]
    assert (reasons.count("paused"), reasons.count("no_worker")) == (1, 1)
    assert "--queues email" in run("explain", "--queue", "email").output
    assert [each["queue"] for each in told(run, "policy", "show")] == ["email"]


def test_what_one_partition_has_of_its_own_is_shown_and_told(run: Run) -> None:
    assert run("partition", "email", "--to", "4", "--by", "account", "--yes").exit_code == 0
    assert "email__p1: set: the partition is paused" in run("pause", "email__p1").output
    for asked in (["overrides"], ["overrides", "email"]):
        (found,) = told(run, *asked)
        assert (found["queue"], found["says"]) == ("email__p1", "the partition is paused")
    for ended, more in (
        ("would end: the partition is paused", ["--dry-run"]),
        ("ended: the partition is no longer", []),
    ):
        said = run("resume", "email", *more).output
        assert f"email__p1: {ended}" in said
        assert "nothing to change" not in said
    assert "nothing to change" in run("resume", "email").output
    assert told(run, "overrides") == []


def test_a_limit_of_each_partition_is_called_that(run: Run, shop: Path) -> None:
    assert run("partition", "email", "--to", "4", "--by", "account", "--yes").exit_code == 0
    declare(shop, 4)
    source = shop / "partition_shop.py"
    source.write_text(source.read_text().replace("(50)]", "(50)], per_partition=[Concurrency(9)]"))
    assert run("policy", "apply", "partition_shop:app").exit_code == 0
    listed = {each["limit"]: each["per_partition"] for each in told(run, "limit", "list", "email")}
    assert listed == {"concurrency:account": False, "concurrency:@email__concurrency": False, "concurrency:": True}
    assert "each partition" in run("limit", "list", "email").output
    assert "concurrency is 7 for each partition" in run("limit", "set", "email", "concurrency:", "7").output


def test_a_key_that_no_task_provides_divides_nothing(run: Run) -> None:
    refused = run("partition", "email", "--to", "4", "--by", "acount", "--app", "partition_shop:app", "--dry-run")
    assert refused.exit_code == 1
    assert "cannot be divided by 'acount'" in refused.output
    assert "they can provide account" in refused.output


def test_the_first_partition_can_be_looked_at_alone(run: Run) -> None:
    assert run("partition", "email", "--to", "4", "--by", "account", "--yes").exit_code == 0
    alone = told(run, "jobs", "list", "--queue", "email__p0", "--limit", "100")["jobs"]
    assert {each["queue"] for each in alone} == {"email"}
    assert len(alone) == queues(run)["email"] < 20
    told_alone = told(run, "explain", "--queue", "email__p0")
    assert (told_alone["queue"], set(told_alone["next_up"])) == ("email", {each["id"] for each in alone})
    assert [each["queue"] for each in told(run, "policy", "show", "--queue", "email__p0")] == ["email"]
    assert "first partition of 'email'" in run("pause", "email__p0").output
