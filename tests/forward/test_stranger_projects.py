"""Projects in the form of Celery's own documentation, with the lines of the guide added and nothing else changed.

They run with real processes on a real Redis: the project's own worker and beat, and a dispatcher. What happened is read
from the ledger that the tasks write, and from Celery's results.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.forward.brokers import ThrowawayRedis, dying_with_us
from tests.forward.members import BIN, Member, environment_with, running
from tests.waiting import PATIENCE, until_blocking

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = Path(__file__).parent / "projects"
GUIDE = ROOT / "docs" / "how-to" / "run-on-celery.md"
SHELL = """
import json, os, sys
scope = {}
exec(sys.argv[1], scope)
for line in sys.stdin:
    try:
        told = {"value": eval(line, scope)}
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(told, default=str), flush=True)
"""


def lines_of_the_guide(celery_app: str) -> str:
    """What the guide adds to the module of a Celery app."""
    block = re.search(r"```python\n# proj/celery\.py, at its end\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert block is not None
    lines = block[1].replace("(fairlane, app,", f"(fairlane, {celery_app},")
    assert len([line for line in lines.splitlines() if line]) == 5
    # A killed worker is noticed sooner.
    return lines.replace("routes=", 'lease="8s", republish_after="5s", routes=')


class Raised(Exception):
    """What an expression raised in a process of the project's."""


class Project:
    """A project that runs: its folder, its processes, and a Python prompt in it."""

    def __init__(self, folder: Path, redis: ThrowawayRedis, prelude: str, members: dict[str, list[str]]) -> None:
        self.folder = folder
        self.redis = redis
        told = dict.fromkeys(("CLINIC_BROKER", "CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"), redis.url)
        environment = environment_with(FAIRLANE_URL=f"sqlite:///{folder / 'fairlane.db'}", **told)
        environment["PYTHONPATH"] += f":{folder}"
        self.members = {
            name: Member(name, [str(BIN / command[0]), *command[1:]], environment, folder)
            for name, command in members.items()
        }
        self._shell = subprocess.Popen(
            [*dying_with_us(), sys.executable, "-c", SHELL, prelude],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, expression: str) -> Any:
        """The value of an expression in a process of the project's."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{expression}\n")
        self._shell.stdin.flush()
        told = json.loads(self._shell.stdout.readline())
        if "error" in told:
            raise Raised(told["error"])
        return told["value"]

    def ledger(self, what: str, **facts: Any) -> list[dict[str, Any]]:
        """What tasks have written of this kind."""
        file = self.folder / "ledger.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        told = [json.loads(line) for line in lines]
        return [each for each in told if each["what"] == what and facts.items() <= each.items()]

    def until_written(self, what: str, times: int = 1, **facts: Any) -> list[dict[str, Any]]:
        until_blocking(lambda: len(self.ledger(what, **facts)) >= times or rested())
        return self.ledger(what, **facts)

    def until_state(self, id: str, *wanted: str) -> Any:
        return self.until_answered(f"AsyncResult({id!r}).state", *wanted)

    def until_job(self, id: str, state: str) -> None:
        self.until_answered(f"forwarder.app.job({id!r}).status_sync().name", state)

    def until_answered(self, expression: str, *wanted: Any) -> Any:
        """The value of an expression, once it is one of these."""
        found: list[Any] = []

        def look() -> bool:
            try:
                found[:] = [self.ask(expression)]
            except Raised as error:
                found[:] = [error]  # a connection that a killed broker has left behind
            return found[0] in wanted or rested()

        until_blocking(look)
        return found[0]

    def close(self) -> None:
        self._shell.communicate(timeout=PATIENCE)


def rested() -> bool:
    """False, after a rest: each look is work for two processes, and those that are waited for need the machine."""
    return threading.Event().wait(0.05)


def project(name: str, module: str, celery_app: str, folder: Path) -> Path:
    """A copy of a project with the lines added."""
    shutil.copytree(PROJECTS / name, folder, dirs_exist_ok=True)
    with (folder / module).open("a") as file:
        file.write(lines_of_the_guide(celery_app))
    return folder


CLINIC = """
import django
from clinic.celery import app
django.setup()
from datetime import datetime, timedelta, timezone
from celery import chain, chord, group
from celery.result import AsyncResult
from billing.tasks import *
from visits.tasks import *
from clinic.celery import forwarder
"""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A Django project: tasks of two apps, found by autodiscovery; results, routes to two queues, and beat."""
    folder = project("clinic", "clinic/celery.py", "app", tmp_path_factory.mktemp("clinic"))
    with ThrowawayRedis() as redis:
        beat = ["-B", "-s", str(folder / "beat")]
        worker = ["celery", "-A", "clinic", "worker", "-c", "2", "-Q", "celery,billing", *beat]
        members = {"worker": worker, "dispatcher": ["fairlane", "forward", "clinic.celery:forwarder", "--lease", "3s"]}
        clinic = Project(folder, redis, CLINIC, members)
        with running(list(clinic.members.values())):
            clinic.until_written("sweep")  # worker, beat and dispatcher are there
            yield clinic
        clinic.close()


def test_a_project_that_autodiscovers_its_tasks_runs_them_under_fairlane(clinic: Project) -> None:
    """E1: `fairlane forward` sets the project up; the tasks need Django's models."""
    id = clinic.ask("remind.delay(7).id")
    clinic.until_written("remind", visit=7, model="Visit")
    assert clinic.until_state(id, "SUCCESS") == "SUCCESS"
    assert clinic.ask(f"AsyncResult({id!r}).get(timeout=60)") == 7
    assert clinic.ask(f"forwarder.app.job({id!r}).status_sync().name") == "DONE"


def test_arguments_reach_the_task_as_celery_gives_them(clinic: Project) -> None:
    clinic.ask("remind.delay(8, when=datetime(2030, 1, 1, tzinfo=timezone.utc)).id")
    assert clinic.until_written("remind", visit=8)[0]["when"] == "datetime"


def test_beat_goes_on_with_an_entry_that_expires(clinic: Project) -> None:
    """E2: such an entry stopped without a word."""
    clinic.until_written("sweep", times=3)
    # What beat says of an entry that it cannot send.
    assert "Message Error" not in (clinic.folder / "worker.log").read_text()


def test_a_task_is_retried_as_often_as_it_says(clinic: Project) -> None:
    """E2: `self.retry`, with its own count of three."""
    well = clinic.ask("call_lab.delay(1, failures=2).id")
    worn = clinic.ask("call_lab.delay(2, failures=9).id")
    assert clinic.until_state(well, "SUCCESS", "FAILURE") == "SUCCESS"
    assert clinic.until_state(worn, "SUCCESS", "FAILURE") == "FAILURE"
    assert [each["retries"] for each in clinic.ledger("call_lab", number=1)] == [0, 1, 2]
    assert [each["retries"] for each in clinic.ledger("call_lab", number=2)] == [0, 1, 2, 3]
    clinic.until_job(worn, "DEAD")


def test_a_result_is_no_failure_while_a_retry_is_pending(clinic: Project) -> None:
    id = clinic.ask("fetch_report.delay(1).id")
    assert clinic.until_state(id, "RETRY", "FAILURE") == "RETRY"
    assert clinic.until_state(id, "SUCCESS", "FAILURE") == "FAILURE"
    assert [each["retries"] for each in clinic.ledger("fetch_report", number=1)] == [0, 1]


def test_a_task_that_never_retried_runs_once(clinic: Project) -> None:
    id = clinic.ask("print_label.delay(4711).id")
    assert clinic.until_state(id, "SUCCESS", "FAILURE") == "FAILURE"
    clinic.until_job(id, "DEAD")
    assert [each["number"] for each in clinic.ledger("print_label")] == [4711]


def test_chains_groups_and_chords_run(clinic: Project) -> None:
    chained = clinic.ask("chain(add.s(1, 2), add.s(10), add.s(100)).apply_async().get(timeout=60)")
    grouped = clinic.ask("group(add.s(n, n) for n in range(4)).apply_async().get(timeout=60)")
    in_chord = clinic.ask("chord([add.s(n, 1) for n in range(4)], total.s()).apply_async().get(timeout=60)")
    nested = clinic.ask("chain(group(add.s(1, 1), add.s(2, 2)), total.s(), add.s(4)).apply_async().get(timeout=60)")
    assert (chained, grouped, in_chord, nested) == (113, [0, 2, 4, 6], 10, 10)
    assert sorted(clinic.ledger("total")[0]["numbers"]) == [1, 2, 3, 4]


def test_a_task_that_replaces_itself_and_its_callbacks_run(clinic: Project) -> None:
    assert clinic.ask("split.delay(21).get(timeout=60)") == 42
    clinic.ask("refuse.apply_async(link_error=apologise.s()).id")
    assert clinic.until_written("apologise")[0]["error"] == "no credit"


def test_countdown_and_eta_are_waited_for_in_fairlane(clinic: Project) -> None:
    due = clinic.ask("(datetime.now(timezone.utc) + timedelta(seconds=1)).timestamp()")
    clinic.ask("remind.apply_async((20,), countdown=1).id")
    clinic.ask(f"remind.apply_async((21,), eta=datetime.fromtimestamp({due}, timezone.utc)).id")
    late = clinic.ask("remind.apply_async((22,), countdown=3600).id")
    for visit in (20, 21):
        (told,) = clinic.until_written("remind", visit=visit)
        assert told["at"] >= due
    assert clinic.ask(f"forwarder.app.job({late!r}).status_sync().name") == "SCHEDULED"
    assert not clinic.ledger("remind", visit=22)


def test_options_of_a_call_reach_celery_as_they_were(clinic: Project) -> None:
    options = (
        "task_id='visit-1', shadow='nightly', time_limit=50, soft_time_limit=40, headers={'tenant': 'acme'}, "
        "queue='billing', priority=3, ignore_result=True, expires=60, compression='zlib', serializer='json'"
    )
    assert clinic.ask(f"context_of.apply_async({options}).id") == "visit-1"
    (told,) = clinic.until_written("context_of")
    assert (told["id"], told["queue"], told["shadow"], told["limits"]) == ("visit-1", "billing", "nightly", [50, 40])
    assert told["headers"]["tenant"] == "acme"
    assert clinic.ask("context_of.apply_async(task_id='visit-1').id") == "visit-1"  # an id may come again
    clinic.until_written("context_of", times=2)


def test_a_call_that_has_expired_is_revoked_and_never_runs(clinic: Project) -> None:
    id = clinic.ask("remind.apply_async((30,), countdown=1, expires=0.5).id")
    assert clinic.until_state(id, "REVOKED", "SUCCESS") == "REVOKED"
    clinic.until_job(id, "CANCELLED")
    assert not clinic.ledger("remind", visit=30)


def test_a_call_that_is_revoked_before_it_starts_never_runs(clinic: Project) -> None:
    id = str(uuid4())  # known before: so that the worker has heard of it in time
    clinic.until_answered(f"bool(app.control.revoke({id!r}, reply=True, timeout=10, limit=1))", True)
    clinic.ask(f"remind.apply_async((31,), countdown=1, task_id={id!r}).id")
    assert clinic.until_state(id, "REVOKED", "SUCCESS") == "REVOKED"
    clinic.until_job(id, "CANCELLED")
    assert not clinic.ledger("remind", visit=31)


def test_a_call_that_is_revoked_while_it_runs_ends_and_does_not_come_again(clinic: Project) -> None:
    id = clinic.ask("scan.delay(1).id")
    clinic.until_written("scan", number=1)
    revoke = f"app.control.revoke({id!r}, terminate=True, signal='SIGKILL', reply=True, timeout=10, limit=1)"
    clinic.until_answered(f"bool({revoke})", True)
    assert clinic.until_state(id, "REVOKED", "SUCCESS") == "REVOKED"
    clinic.until_job(id, "CANCELLED")
    assert not clinic.ledger("scanned", number=1)


def test_a_result_says_what_becomes_of_a_call_whose_process_is_killed(clinic: Project) -> None:
    """E2: by itself, it runs again, and was no failure; by its time limit, it has failed, and does not run again."""
    crashed, stalled = clinic.ask("[crash.delay(1).id, stall.delay(1).id]")
    assert clinic.until_state(crashed, "RETRY", "FAILURE") == "RETRY"
    assert clinic.until_state(stalled, "SUCCESS", "FAILURE") == "FAILURE"
    assert clinic.until_state(crashed, "SUCCESS", "FAILURE") == "SUCCESS"
    clinic.until_job(stalled, "CANCELLED")
    assert (len(clinic.ledger("crash")), len(clinic.ledger("stall"))) == (2, 1)


def test_a_worker_and_a_broker_that_are_killed_lose_no_call(clinic: Project) -> None:
    id = clinic.ask("scan.delay(2).id")
    clinic.until_written("scan", number=2)
    clinic.members["worker"].kill()
    for number in range(40, 45):
        clinic.ask(f"remind.delay({number}).id")
    clinic.redis.crash()
    clinic.ask("remind.delay(45).id")
    clinic.members["worker"].start_again()
    clinic.until_written("scanned", number=2)
    assert clinic.until_state(id, "SUCCESS", "FAILURE") == "SUCCESS"
    for number in range(40, 46):
        clinic.until_written("remind", visit=number)


PARCELS = """
from fastapi.testclient import TestClient
from main import app
from worker import forwarder, weigh
client = TestClient(app)
post = lambda path: client.post(path, json={"parcel": 7}).json()["task_id"]
status = lambda id: client.get(f"/tasks/{id}").json()
"""


@pytest.fixture(scope="module")
def parcels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A FastAPI project, whose views call `delay` in the event loop."""
    folder = project("parcels", "worker.py", "celery", tmp_path_factory.mktemp("parcels"))
    with ThrowawayRedis() as redis:
        worker = ["celery", "--app=worker.celery", "worker", "-c", "1"]
        parcels = Project(folder, redis, PARCELS, {"worker": worker, "dispatcher": ["fairlane", "forward", "worker"]})
        with running(list(parcels.members.values())):
            yield parcels
        parcels.close()


def test_views_that_call_delay_in_an_event_loop_go_through_fairlane(parcels: Project) -> None:
    id = parcels.ask("post('/weights')")
    assert parcels.ask(f"forwarder.app.job({id!r}).result_sync('60s')") == {"parcel": 7, "grams": 1.0}
    chained = parcels.ask("post('/parcels')")
    parcels.until_answered(f"status({chained!r})['status']", "SUCCESS")
    assert parcels.ask(f"status({chained!r})")["result"] == "parcel 7: 250 g"
