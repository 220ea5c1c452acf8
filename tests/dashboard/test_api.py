"""The JSON API on both stores: what it shows, what it does, and who may."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fairlane import Unique
from fairlane.dashboard.access import Role
from fairlane.dashboard.api import OPERATIONS, Operation
from tests.dashboard.harness import ROOT, VIEWER_TOKEN, csrf_of
from tests.dashboard.world import API, NOBODY, World

LOOKS = [each for each in OPERATIONS if each.method == "GET"]
ACTIONS = [each for each in OPERATIONS if each.role is Role.OPERATOR]


def address(operation: Operation, world: World) -> str:
    path = operation.path.replace("{queue}", "webhooks").replace("{job}", str(world.jobs["ready"]))
    return f"{API}{path}" + ("?key=account=acme" if operation.name == "show_key" else "")


def body(operation: Operation, world: World) -> dict[str, Any] | None:
    """Something that the operation can carry out."""
    keys = {"account": "acme"}
    given: dict[str, dict[str, Any]] = {
        "set_limit": {"limit": "concurrency:account", "value": 3, "keys": keys},
        "clear_limit": {"limit": "concurrency:account", "keys": keys},
        "set_weight": {"weight": 2, "keys": keys},
        "boost": {"factor": 2, "keys": keys},
        "clear_weight": {"keys": keys},
        "cancel_jobs": {"ids": [str(world.jobs["ready"])]},
        "retry_jobs": {"ids": [str(world.jobs["scheduled"])]},
        "replay_jobs": {"ids": [str(world.jobs["cancelled"])]},
        "purge_jobs": {"ids": [str(world.jobs["dead"])]},
        "force_jobs": {"ids": [str(world.jobs["scheduled"])]},
        "pause_schedule": {"name": "nightly"},
        "resume_schedule": {"name": "nightly"},
        "trigger_schedule": {"name": "nightly"},
        "try_policies": {"policies": ["webhooks"], "workload": {"classes": [{"name": "a", "keys": keys, "jobs": 3}]}},
    }
    return None if operation.method == "GET" else given.get(operation.name, {})


async def test_everything_that_can_be_looked_at_is_shown_as_described(world: World) -> None:
    for operation in LOOKS:
        answer = await world.operator.get(address(operation, world))
        assert answer.status_code == 200, answer.text
        head = await world.viewer.head(address(operation, world))
        assert (head.status_code, int(head.headers["content-length"])) == (200, len(answer.content))


async def test_strangers_are_told_nothing(world: World) -> None:
    strangers = (world.stranger, world.site.stranger(headers={"Authorization": "Bearer wrong-token"}))
    for operation, stranger in itertools.product(OPERATIONS, strangers):
        answer = await stranger.request(operation.method, address(operation, world), json=body(operation, world))
        assert answer.status_code == 401, operation.name
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "unauthorized"


async def test_viewers_change_nothing(world: World) -> None:
    viewers = (world.viewer, await world.person(token=VIEWER_TOKEN))
    for operation, viewer in itertools.product(ACTIONS, viewers):
        answer = await viewer.post(address(operation, world), json=body(operation, world))
        assert answer.status_code == 403, operation.name
    assert (await world.operator.get(f"{API}/audit")).json()["entries"] == []


async def test_every_action_is_seen_first_then_done_and_recorded_with_who_and_why(world: World) -> None:
    """O02: what changes something is recorded with who, when and what; a dry run changes nothing."""
    program = world.operator
    for done_so_far, operation in enumerate(ACTIONS):
        sent = {"reason": f"for {operation.name}", **(body(operation, world) or {})}
        seen = await program.post(address(operation, world), json={**sent, "dry_run": True})
        assert (seen.status_code, seen.json()["dry_run"]) == (200, True), seen.text
        entries = (await program.get(f"{API}/audit")).json()["entries"]
        assert len(entries) == done_so_far, operation.name
        done = await program.post(address(operation, world), json=sent, headers={"X-Fairlane-Actor": "ben"})
        assert (done.status_code, done.json()["dry_run"]) == (200, False), done.text
        newest, *others = (await program.get(f"{API}/audit")).json()["entries"]
        assert (newest["actor"], newest["reason"]) == ("api:ben", f"for {operation.name}")
        assert len(others) == done_so_far


async def test_whoever_acts_with_a_browser_is_recorded_by_their_name(world: World) -> None:
    person = await world.person("ann")
    csrf = csrf_of((await person.get(f"{ROOT}/")).text)
    headers = {"X-CSRF-Token": csrf, "X-Fairlane-Actor": "somebody else"}
    answer = await person.post(f"{API}/queues/webhooks/pause", json={"reason": "a flood"}, headers=headers)
    assert answer.status_code == 200, answer.text
    (entry,) = (await world.viewer.get(f"{API}/audit?queue=webhooks")).json()["entries"]
    assert (entry["actor"], entry["action"], entry["reason"]) == ("ann", "pause", "a flood")


async def test_a_program_without_a_user_of_its_own_is_recorded_as_a_program(world: World) -> None:
    await world.operator.post(f"{API}/queues/webhooks/suspend", json={})
    (entry,) = (await world.viewer.get(f"{API}/audit")).json()["entries"]
    assert entry["actor"] == "api"


async def test_a_paused_key_is_shown_everywhere_and_resumed(world: World) -> None:
    program = world.operator
    pause = {"keys": {"account": "acme"}, "expires_in": "30m", "reason": "they asked"}
    made = (await program.post(f"{API}/queues/webhooks/pause", json=pause)).json()
    assert made["after"][0]["expires_at"] == "2030-01-01T00:30:07+00:00"
    told = (await program.get(f"{API}/jobs/{world.jobs['ready']}/explain")).json()
    assert "paused" in [each["reason"] for each in told["reasons"]]
    told = (await program.get(f"{API}/queues/webhooks/explain", params={"key": "account=acme"})).json()
    assert "paused" in [each["reason"] for each in told["reasons"]]
    policies = (await program.get(f"{API}/policies")).json()["policies"]
    assert [len(each["overrides"]) for each in policies] == [0, 1]
    ended = (await program.post(f"{API}/queues/webhooks/resume", json={"keys": {"account": "acme"}})).json()
    assert [each["kind"] for each in ended["before"]] == ["pause"]


async def test_a_limit_is_set_for_a_key_and_cleared(world: World) -> None:
    program = world.operator
    sent = {"limit": "concurrency", "value": 7, "keys": {"account": "acme"}}
    await program.post(f"{API}/queues/webhooks/limit/set", json=sent)
    limits = (await program.get(f"{API}/queues/webhooks/limits")).json()["limits"]
    (own,) = [each for each in limits if each["keys"] == {"account": "acme"}]
    assert (own["declared"]["max"], own["in_force"]["max"], own["override"]["value"]) == (2, 7, 7.0)
    await program.post(f"{API}/queues/webhooks/limit/clear", json={"limit": "concurrency", "keys": {"account": "acme"}})
    limits = (await program.get(f"{API}/queues/webhooks/limits")).json()["limits"]
    assert [each for each in limits if each["override"]] == []


async def test_jobs_are_listed_by_state_key_task_and_time(world: World) -> None:
    program = world.viewer

    async def found(**query: Any) -> set[str]:
        listed = (await program.get(f"{API}/jobs", params=query)).json()["jobs"]
        return {state for state, job in world.jobs.items() if str(job) in {each["id"] for each in listed}}

    for state in world.jobs:
        assert await found(state=state) == {state}
    assert await found(queue="webhooks", key="account=acme") == {*world.jobs}
    assert await found(key="account=nobody") == set()
    assert await found(task="shop.send") == set()
    assert await found(enqueued_since="2030-01-01T00:00:06Z") == {"running", "ready", "scheduled"}
    assert await found(state="dead", finished_until="2030-01-01T00:00:01Z") == set()


async def test_a_list_of_jobs_is_paged_without_a_gap_and_without_a_repetition(world: World) -> None:
    listed, after = [], None
    while True:
        query = {"limit": 2, **({"after": after} if after else {})}
        page = (await world.viewer.get(f"{API}/jobs", params=query)).json()
        listed += [each["id"] for each in page["jobs"]]
        after = page["after"]
        if after is None:
            break
    assert len(listed) == len(set(listed)) == 9


async def test_the_audit_is_paged(world: World) -> None:
    for paused in ("pause", "resume", "pause"):
        await world.operator.post(f"{API}/queues/webhooks/{paused}", json={})
    first = (await world.viewer.get(f"{API}/audit?limit=2")).json()
    second = (await world.viewer.get(f"{API}/audit?limit=2&after={first['after']}")).json()
    assert [each["action"] for each in first["entries"] + second["entries"]] == ["pause", "resume", "pause"]
    assert second["after"] is None


async def test_a_job_is_shown_with_what_it_carries_and_every_attempt(world: World) -> None:
    shown = (await world.viewer.get(f"{API}/jobs/{world.jobs['done']}")).json()
    assert shown["call"] == [[{"for": "done"}, "acme", "api.acme.com"], {}] or shown["call"][1]["account"] == "acme"
    assert shown["result"] == {"said": "ok"}
    assert [each["outcome"] for each in shown["attempts"]] == ["done"]


async def test_the_dead_are_listed_and_put_back_by_a_filter(world: World) -> None:
    (dead,) = (await world.viewer.get(f"{API}/dead", params={"queue": "webhooks"})).json()["jobs"]
    assert (dead["id"], dead["error"]) == (str(world.jobs["dead"]), "the endpoint answered 500")
    report = (await world.operator.post(f"{API}/jobs/replay", json={"filter": {"queue": "webhooks"}})).json()
    assert (report["count"], report["jobs"], report["more"]) == (1, [dead["id"]], False)
    assert (await world.viewer.get(f"{API}/dead")).json()["jobs"] == []


async def test_a_replay_counts_the_jobs_whose_unique_key_is_held(world: World) -> None:
    """E10."""
    once = world.app.registry["shop.deliver"].using(unique=Unique("a"))
    old = await once.enqueue(1, account="acme", endpoint="api")
    await old.cancel()
    holder = await once.enqueue(1, account="acme", endpoint="api")
    asked: dict[str, object] = {"ids": [str(old.id)]}
    for dry_run in (True, False):
        report = (await world.operator.post(f"{API}/jobs/replay", json={**asked, "dry_run": dry_run})).json()
        assert (report["count"], report["held"], report["skipped"][0]["holder"]) == (0, 1, str(holder.id))
    report = (await world.operator.post(f"{API}/jobs/replay", json={**asked, "on_conflict": "replace"})).json()
    assert (report["count"], report["held"]) == (1, 0)
    wrong = await world.operator.post(f"{API}/jobs/replay", json={**asked, "on_conflict": "return"})
    assert wrong.status_code == 422


async def test_an_action_tells_what_it_left_alone_and_why(world: World) -> None:
    ids = [str(world.jobs["done"]), str(NOBODY), str(world.jobs["ready"])]
    report = (await world.operator.post(f"{API}/jobs/cancel", json={"ids": ids})).json()
    assert report["jobs"] == [str(world.jobs["ready"])]
    assert {each["id"] for each in report["skipped"]} == set(ids[:2])
    assert "only scheduled and ready and running jobs" in report["skipped"][0]["reason"]


async def test_an_action_touches_no_more_than_its_limit(world: World) -> None:
    report = (await world.operator.post(f"{API}/jobs/cancel", json={"filter": {}, "limit": 2})).json()
    assert (report["count"], report["more"]) == (2, True)


async def test_what_a_job_carries_is_redacted_where_the_host_says_so(world: World) -> None:
    object.__setattr__(world.site.dashboard, "redact", lambda value, disclosure: "hidden")
    shown = (await world.viewer.get(f"{API}/jobs/{world.jobs['done']}")).json()
    assert (shown["call"], shown["result"]) == ("hidden", "hidden")


async def test_policies_are_tried_side_by_side_by_viewers(world: World) -> None:
    tight = {"fair": {"by": "account"}, "limits": [{"kind": "concurrency", "max": 1, "by": "account"}]}
    flood = {"name": "flood", "keys": {"account": "a{n}", "endpoint": "e"}, "count": 5, "jobs": 20}
    sent = {"policies": ["webhooks", tight], "workload": {"classes": [flood]}}
    answer = await world.viewer.post(f"{API}/simulate", json=sent)
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["simulations"]
    assert first["runs"] == second["runs"] == 100
    assert second["seconds"] > first["seconds"]
    assert len(answer.json()["timelines"]) == 2


async def test_history_is_tried_too(world: World) -> None:
    answer = await world.viewer.post(f"{API}/simulate", json={"policies": ["webhooks"], "history": "webhooks"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["simulations"][0]["jobs"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"count": 10_000, "jobs": 10_000_000}, "more than"),
        ({"jobs": 60_000}, "60,000 runs"),
        ({"jobs": 1_000, "failures": 1.0, "max_attempts": 90}, "90,000 runs"),
        ({"failures": 1.0, "max_attempts": 1_000_000_000}, "max_attempts"),
        ({"at": 1e300}, "at="),
        ({"jobs": 10, "poisson": 1e-300}, "cannot be reckoned"),
    ],
)
async def test_a_simulation_is_bounded(world: World, more: dict[str, Any], said: str) -> None:
    classes = [{"name": "flood", "keys": {"account": "a", "endpoint": "e"}, **more}]
    answer = await world.viewer.post(
        f"{API}/simulate", json={"policies": ["webhooks"], "workload": {"classes": classes}}
    )
    assert answer.status_code == 422, answer.text[:500]
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/queues/nowhere", "'nowhere' is not known"),
        ("/queues/nowhere/keys", "'nowhere' is not known"),
        ("/queues/nowhere/key?key=account=acme", "'nowhere' is not known"),
        ("/queues/nowhere/explain", "'nowhere' is not known"),
        ("/queues/nowhere/limits", "'nowhere' is not known"),
        (f"/jobs/{NOBODY}", str(NOBODY)),
        (f"/jobs/{NOBODY}/explain", str(NOBODY)),
        ("/nowhere", "nothing at"),
        ("/", "nothing at"),
        ("/queues/", "nothing at"),
    ],
)
async def test_what_is_not_there_is_not_found(world: World, path: str, said: str) -> None:
    answer = await world.viewer.get(f"{API}{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert said in answer.json()["error"]["message"]


async def test_other_methods_are_refused_with_those_that_are_possible(world: World) -> None:
    for method, path, allowed in (
        ("DELETE", "/jobs", "GET, HEAD, OPTIONS"),
        ("PUT", "/queues/webhooks/pause", "POST, OPTIONS"),
        ("GET", "/jobs/cancel", "POST, OPTIONS"),
        ("POST", f"/jobs/{world.jobs['ready']}", "GET, HEAD, OPTIONS"),
    ):
        answer = await world.operator.request(method, f"{API}{path}", json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["error"]["code"] == "method_not_allowed"
        options = await world.operator.options(f"{API}{path}")
        assert (options.status_code, options.headers["allow"]) == (204, allowed)


async def test_a_partitioned_queue_is_one_queue(world: World) -> None:
    made = (await world.operator.post(f"{API}/queues/email/pause", json={})).json()
    assert made["queue"] == "email"
    listed = (await world.viewer.get(f"{API}/jobs?queue=email")).json()["jobs"]
    assert {each["keys"]["account"] for each in listed} == {"acme", "blue", "coral"}
    told = (await world.viewer.get(f"{API}/queues/email/explain")).json()
    assert "paused" in [each["reason"] for each in told["reasons"]]


async def test_the_key_null_is_named_without_a_value(world: World) -> None:
    await world.operator.post(f"{API}/queues/webhooks/pause", json={"keys": {"account": None}})
    told = (await world.viewer.get(f"{API}/queues/webhooks/explain?key=account")).json()
    assert told["keys"] == {"account": None}
    assert "paused" in [each["reason"] for each in told["reasons"]]


async def test_looking_changes_nothing(world: World) -> None:
    """O13."""
    before = [(await world.viewer.get(f"{API}/jobs/{job}")).json() for job in world.jobs.values()]
    for operation in LOOKS:
        await world.viewer.get(address(operation, world))
    assert [(await world.viewer.get(f"{API}/jobs/{job}")).json() for job in world.jobs.values()] == before
    assert (await world.viewer.get(f"{API}/audit")).json()["entries"] == []
