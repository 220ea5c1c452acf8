"""`fairlane simulate`, run as an operator runs it."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fairlane.cli.program import program
from fairlane.cli.simulate import read_policy
from fairlane.errors import ConfigurationError
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.simulation.plots import Series, plot_areas, plot_bars, plot_lines

SHOP = """
import asyncio
from fairlane import App, Concurrency, Fair

app = App("sqlite:///shop.db")
app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(2, by="account")])

@app.task(queue="webhooks")
async def deliver(account: str) -> None: ...
"""
WORKLOAD = """
[[classes]]
name = "hot"
keys = {account = "hot"}
jobs = 200
run_time = "50ms"

[[classes]]
name = "small"
keys = {account = "small-{n}"}
count = 10
jobs = 5
run_time = "50ms"
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FAIRLANE_URL", raising=False)
    (tmp_path / "simulated_shop.py").write_text(SHOP)
    (tmp_path / "monday.toml").write_text(WORKLOAD)
    (tmp_path / "fifo.json").write_text("{}")
    (tmp_path / "fair.json").write_text(
        '{"fair": {"by": "account"}, "limits": [{"kind": "rate", "limit": 100, "per": "1s"}]}'
    )
    yield lambda *arguments: CliRunner().invoke(program, ["simulate", *arguments])
    sys.modules.pop("simulated_shop", None)


def stats(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["simulations"]
    return found


def test_two_policies_are_compared_on_a_declared_workload(run: Run) -> None:
    compared = ("--policy", "fifo.json", "--against", "fair.json", "--workload", "monday.toml", "--slots", "5")
    fifo, fair = stats(run(*compared, "--json"))
    waits = [next(group for group in each["classes"] if group["name"] == "small")["waits"] for each in (fifo, fair)]
    assert waits[1]["p95"] < waits[0]["p95"]
    assert (fifo["runs"], fair["runs"]) == (250, 250)
    assert fifo["by"] == fair["by"] == ["account"]
    assert len(fair["keys"]) == 11
    shown = run(*compared)
    assert shown.exit_code == 0
    for said in ("A: no policy (first come, first served)", "B: Fair(by='account', charge='time')", "SLOWEST ACCOUNT"):
        assert said in shown.stdout
    assert "Rate(100, per='1s', burst=100)" in shown.stdout


def test_the_same_seed_prints_the_same(run: Run, tmp_path: Path) -> None:
    (tmp_path / "random.json").write_text(
        '{"classes": [{"name": "a", "jobs": 50, "poisson": 5, "run_time": {"exponential": "1s"}}]}'
    )
    given = ("--policy", "fair.json", "--workload", "random.json", "--slots", "2", "--json")
    assert run(*given).stdout == run(*given).stdout
    assert run(*given, "--seed", "1").stdout == run(*given, "--seed", "1").stdout
    assert run(*given, "--seed", "1").stdout != run(*given, "--seed", "2").stdout


def test_the_policy_of_an_app_is_tried_without_a_database(run: Run, tmp_path: Path) -> None:
    (found,) = stats(run("--app", "simulated_shop:app", "--workload", "monday.toml", "--json"))
    assert found["policy"] == "Fair(by='account', charge='time'), Concurrency(2, by='account')"
    assert found["limits"][0]["fullest"] == "hot"
    assert not (tmp_path / "shop.db").exists()


def test_a_trace_is_simulated_until_a_time(run: Run, tmp_path: Path) -> None:
    lines = [json.dumps({"at": 0, "run_time": 1, "keys": {"account": str(n)}, "task": "t"}) for n in range(5)]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines))
    (found,) = stats(run("--policy", "fair.json", "--trace", "jobs.jsonl", "--slots", "1", "--until", "2s", "--json"))
    assert (found["runs"], found["left"], found["seconds"]) == (2, 3, 2.0)
    shown = run("--policy", "fair.json", "--trace", "jobs.jsonl", "--slots", "1", "--until", "2s", "--keys", "0")
    assert "2 (+3 left)" in shown.stdout
    assert "SLOWEST" not in shown.stdout


def test_what_a_queue_has_been_through_is_simulated_under_its_own_policy_and_another(run: Run) -> None:
    shop = importlib.import_module("simulated_shop")

    async def live() -> None:
        app = shop.app
        async with app:
            jobs = [await shop.deliver.enqueue(f"a{n % 3}") for n in range(9)]
            worker = await app.worker()
            running = asyncio.create_task(worker.run())
            for job in jobs:
                await job.result(timeout=60)
            worker.stop()
            await running

    asyncio.run(live())
    at = ("--url", "sqlite:///shop.db", "--history", "webhooks")
    own, other = stats(run(*at, "--against", "fifo.json", "--json"))
    assert (own["runs"], other["runs"]) == (9, 9)
    assert own["policy"] == "Fair(by='account', charge='time'), Concurrency(2, by='account')"
    assert sorted(group["name"] for group in own["keys"]) == ["a0", "a1", "a2"]
    assert "there may be more; raise --limit" in run(*at, "--limit", "4").stderr
    for wrong, reason in (
        (("--url", "sqlite:///shop.db", "--history", "mail"), "queue 'mail' is not known to this database"),
        (("--url", "sqlite:///shop.db", "--history", "webhooks", "--last", "1us"), "give --last"),
        (("--history", "webhooks"), "which database?"),
    ):
        refused = run(*wrong)
        assert refused.exit_code == 1
        assert reason in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--policy", "fair.json"), "which jobs? Give one of --workload"),
        (("--workload", "monday.toml", "--trace", "x", "--policy", "fair.json"), "which jobs? Give one of"),
        (("--workload", "monday.toml"), "which policy? Give --policy FILE, or --app"),
        (("--workload", "none.toml", "--policy", "fair.json"), "--workload none.toml: No such file"),
        (("--workload", "monday.toml", "--policy", "monday.toml"), "--policy monday.toml, line 2: this is not JSON"),
        (("--workload", "fifo.json", "--policy", "fair.json"), "--workload fifo.json: Object missing required field"),
        (("--trace", "monday.toml", "--policy", "fair.json"), "--trace monday.toml, line 2: "),
        (("--workload", "monday.toml", "--app", "simulated_shop:app", "--queue", "mail"), "declares no 'mail'"),
        (("--workload", "monday.toml", "--policy", "fair.json", "--plot", "fair.json"), "--plot fair.json: "),
        (("--workload", "monday.toml", "--policy", "fair.json", "--claim-time", "x"), "'x' is not a duration"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(run: Run, arguments: tuple[str, ...], reason: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert reason in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_plots_are_written_as_pictures_that_a_reader_can_search(run: Run, tmp_path: Path) -> None:
    compared = ("--policy", "fifo.json", "--against", "fair.json", "--workload", "monday.toml", "--slots", "5")
    drawn = run(*compared, "--plot", "plots", "--json")
    assert drawn.exit_code == 0
    assert len(stats(drawn)) == 2
    names = {"waits.svg", "slots-a.svg", "slots-b.svg", "waiting-a.svg", "waiting-b.svg"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names
    for name in names:
        text = (tmp_path / "plots" / name).read_text()
        words = " ".join(ElementTree.fromstring(text).itertext())
        assert "small" in words
        assert "prefers-color-scheme: dark" in text
    (found,) = stats(run("--policy", "fair.json", "--workload", "monday.toml", "--plot", "one", "--json"))
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"waits.svg", "slots.svg", "waiting.svg"}
    assert found["runs"] == 250


def test_a_plot_of_nothing_and_of_hostile_names_is_still_a_picture() -> None:
    for text in (
        plot_bars("none", "s", [], []),
        plot_areas("none", "slots", 1.0, []),
        plot_lines("<&>", "jobs", 0.5, [Series('"><script>', [0, 3, 7])]),
        plot_areas("many", "slots", 0.5, [Series(f"a tenant of a long name {n}", [1.0, 2.0]) for n in range(30)]),
    ):
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "<script" not in text


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("{}", Policy("simulated")),
        ('{"fair": {"by": "account"}}', Policy("simulated", Fair(by="account"))),
        (
            '{"queue": "q", "fair": {"by": ["a", "b"], "charge": "count"}, "limits": '
            '[{"kind": "concurrency", "max": 3}, {"kind": "rate", "limit": 5, "per": "1m", "by": "a"}]}',
            Policy("q", Fair(by=("a", "b"), charge="count"), (Concurrency(3), Rate(5, per="1m", by="a"))),
        ),
        (
            json.dumps([Policy("q", Fair(by="a", weight={"x": 3}), (Rate(5, per="1m"),), ("a", "b")).to_document()]),
            Policy("q", Fair(by="a", weight={"x": 3}), (Rate(5, per="1m"),), ("a", "b")),
        ),
    ],
)
def test_a_policy_in_a_file_is_what_show_prints_or_less(tmp_path: Path, text: str, policy: Policy) -> None:
    (tmp_path / "p.json").write_text(text)
    assert read_policy("--policy", str(tmp_path / "p.json")) == policy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "this is not one policy"),
        ("3", "this is not one policy"),
        ('{"limits": [{"max": 3}]}', "'kind' is missing"),
        ('{"limits": [{"kind": "rate", "limit": 3}]}', "'per' is missing"),
        ('{"limits": [{"kind": "concurrency", "max": -3}]}', "from 0 to"),
        ('{"limits": [{"kind": "magic"}]}', "kind 'magic'"),
        ('{"fair": {"charge": "time"}}', "'by' is missing"),
        ('{"fair": 3}', "a policy looks like"),
    ],
)
def test_a_policy_file_that_makes_no_sense_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigurationError, match=rf"--policy .*p\.json, line 1: .*{reason}"):
        read_policy("--policy", str(tmp_path / "p.json"))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ('{"limts": []}', "no field limts"),
        ('{"limits": [{"kind": "rate", "limit": 12, "per": "1s", "rolling": true}]}', "no field rolling"),
        ('{"limits": [{"kind": "concurency", "max": 1}]}', "knows adaptive"),
    ],
)
def test_a_field_of_a_policy_that_nobody_reads_is_refused(tmp_path: Path, document: str, said: str) -> None:
    (tmp_path / "policy.json").write_text(document)
    with pytest.raises(ConfigurationError, match=said):
        read_policy("--policy", str(tmp_path / "policy.json"))
