"""O16: numbers that jobs bring along are shown as those numbers, with where they came from, on both stores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner

from fairlane import App, Concurrency, Fair, Rate, Task
from fairlane.cli.program import program
from fairlane.clock import ManualClock
from fairlane.operations import document_of
from fairlane.policy.gates import Origin
from tests.store.harness import operations_on, serving

PLAN = {"weight": 4, "slots": 8, "rpm": 120, "all": 20}
WHO: dict[str, Any] = {"actor": "ann", "reason": "a test"}


def shop_at(url: str) -> tuple[App, Task[..., None]]:
    app = App(url, clock=ManualClock())
    app.queue(
        "webhooks",
        fair=Fair(by="tenant", weight=lambda context: context["weight"]),
        limits=[
            Concurrency(lambda context: context["slots"], by="tenant"),
            Rate(lambda context: context["rpm"], per="1m", by="endpoint"),
            Concurrency(lambda context: context["all"]),
        ],
    )

    @app.task(queue="webhooks", name="deliver")
    async def deliver(tenant: str, endpoint: str) -> None: ...

    return app, deliver


@pytest.fixture
async def shop(url: str) -> AsyncIterator[tuple[App, Task[..., None]]]:
    app, deliver = shop_at(url)
    async with app:
        yield app, deliver


async def fill(app: App, deliver: Task[..., None]) -> None:
    """Ten jobs of acme come with their plan; as many run as it allows."""
    await deliver.using(context=PLAN).enqueue_many([deliver.call("acme", "api")] * 10)
    assert len(await app.queues["webhooks"].claim(50)) == 8
    await (await app.opened()).add_up("webhooks")


async def test_a_key_shows_the_bound_and_the_weight_that_its_newest_job_brought(
    shop: tuple[App, Task[..., None]],
) -> None:
    app, _ = shop
    await fill(*shop)
    (view,) = (await app.operations.keys.list("webhooks")).keys
    (gauge,) = view.gauges
    assert (gauge.used, gauge.bound, gauge.words) == (8, 8, "Concurrency(8, by='tenant')")
    assert gauge.bound_from is Origin.JOB
    assert (view.weight, view.weight_from, view.boost) == (4, Origin.JOB, 1)
    await app.operations.weights.boost("webhooks", 2, keys={"tenant": "acme"}, **WHO)
    (view,) = (await app.operations.keys.list("webhooks")).keys
    assert (view.weight, view.weight_from, view.boost) == (8, Origin.JOB, 2)
    assert view.weight_words == "4 from its newest job, boosted 2 times"


async def test_what_an_operator_has_set_is_told_from_what_a_job_brought(shop: tuple[App, Task[..., None]]) -> None:
    app, _ = shop
    await fill(*shop)
    await app.operations.limits.set("webhooks", "concurrency:tenant", 9, keys={"tenant": "acme"}, **WHO)
    await app.operations.weights.set("webhooks", 3, keys={"tenant": "acme"}, **WHO)
    view = (await app.operations.keys.show("webhooks", {"tenant": "acme"})).view
    assert [(gauge.bound, gauge.bound_from) for gauge in view.gauges] == [(9, Origin.OVERRIDE)]
    assert (view.weight, view.weight_from) == (3, Origin.OVERRIDE)


async def test_a_key_whose_jobs_have_brought_nothing_says_that_its_number_is_assumed(
    shop: tuple[App, Task[..., None]],
) -> None:
    app, _ = shop
    view = (await app.operations.keys.show("webhooks", {"tenant": "new"})).view
    assert [(gauge.bound, gauge.bound_from) for gauge in view.gauges] == [(1, Origin.DEFAULT)]
    assert (view.weight, view.weight_from) == (1, Origin.DEFAULT)


async def test_a_limit_of_the_whole_queue_shows_the_number_that_a_job_brought(
    shop: tuple[App, Task[..., None]],
) -> None:
    app, _ = shop
    await fill(*shop)
    seen = await app.operations.queues.show("webhooks")
    shown = {limit.limit: limit for limit in seen.limits}
    whole = shown["concurrency:"]
    assert whole.gauge is not None
    assert (whole.words, whole.gauge.bound, whole.gauge.bound_from) == ("Concurrency(20)", 20, Origin.JOB)
    assert shown["concurrency:tenant"].words == "Concurrency(<from the job>, by='tenant')"


async def test_explain_says_which_number_holds_a_job_and_where_it_came_from(shop: tuple[App, Task[..., None]]) -> None:
    app, deliver = shop
    await fill(*shop)
    job = await deliver.using(context=PLAN).enqueue("acme", "api")
    store = await app.opened()
    told = document_of(await operations_on(store).jobs.explain(job.id))
    (hold,) = [each for each in told["reasons"] if each["limit"] == "concurrency:tenant"]
    assert (hold["used"], hold["bound"], hold["bound_from"]) == (8, 8, "job")
    assert "8 of 8, from its newest job" in hold["words"]
    (some,) = [
        hold
        for hold in (await operations_on(store).queues.explain("webhooks")).holds
        if hold.limit == "concurrency:tenant"
    ]
    assert some.words == "3 jobs of tenant=acme are held by Concurrency(8, by='tenant'), from its newest job"


async def test_what_is_left_to_drain_is_reckoned_by_the_number_that_a_job_brought(
    shop: tuple[App, Task[..., None]],
) -> None:
    app, deliver = shop
    await deliver.using(context={**PLAN, "slots": 500, "all": 500}).enqueue_many([deliver.call("acme", "api")] * 360)
    first, *_ = await app.queues["webhooks"].claim(500)
    await app.queues["webhooks"].ack([first], ran="1s")
    store = await app.opened()
    await store.conclude("webhooks")
    await serving(store, app.clock, "webhooks")
    (view,) = (await app.operations.keys.list("webhooks", "endpoint")).keys
    assert (view.waiting, view.held_by) == (240, ["rate/60s:endpoint"])
    assert view.drained_in == pytest.approx(120, rel=0.01), "at 120 a minute, not at 1"
    assert view.drains_at_least, "other limits hold for jobs of single tenants"


def test_the_commands_say_it_too(url: str) -> None:
    async def fill_shop() -> None:
        app, deliver = shop_at(url)
        async with app:
            await fill(app, deliver)

    asyncio.run(fill_shop())
    one = CliRunner().invoke(program, ["keys", "webhooks", "--key", "tenant=acme", "--url", url])
    assert one.exit_code == 0, one.output
    assert "weight 4: from its newest job" in one.output
    assert "8 of 8  Concurrency(8, by='tenant') (from its newest job)" in one.output
    listed = CliRunner().invoke(program, ["keys", "webhooks", "--url", url, "--json"])
    (view,) = json.loads(listed.output)["keys"]
    assert (view["weight"], view["weight_from"], view["gauges"][0]["bound_from"]) == (4, "job", "job")
    queue = CliRunner().invoke(program, ["queues", "webhooks", "--url", url])
    assert "Concurrency(20) (from its newest job)" in queue.output
