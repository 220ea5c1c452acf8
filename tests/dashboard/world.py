"""A shop with jobs in every state behind the JSON API, and programs whose every answer is held to `openapi.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from uuid import UUID

import httpx
from jsonschema import Draft202012Validator, FormatChecker

from fairlane import App, Concurrency, Fair, Rate
from fairlane.clock import ManualClock
from fairlane.dashboard.api_openapi import describe_api
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site

__all__ = ["API", "NOBODY", "World", "check_answer", "open_world", "operation_at"]

API = f"{ROOT}/api"
NOBODY = UUID(int=7)


@dataclass
class World:
    """A shop with two queues and a schedule, and the names of jobs in every state."""

    app: App
    clock: ManualClock
    site: Site
    jobs: dict[str, UUID] = field(default_factory=dict)

    @property
    def operator(self) -> httpx.AsyncClient:
        return self._program(TOKEN)

    @property
    def viewer(self) -> httpx.AsyncClient:
        return self._program(VIEWER_TOKEN)

    @property
    def stranger(self) -> httpx.AsyncClient:
        return self._checked(self.site.stranger())

    async def person(self, name: str = "ann", token: str = TOKEN) -> httpx.AsyncClient:
        """Somebody who has logged in with a browser."""
        return self._checked(await self.site.visitor(name, token))

    def _program(self, token: str) -> httpx.AsyncClient:
        return self._checked(self.site.program(token))

    def _checked(self, client: httpx.AsyncClient) -> httpx.AsyncClient:
        client.event_hooks = {"response": [check_answer]}
        return client


async def open_world(stack: AsyncExitStack, url: str, clock: ManualClock, **options: Any) -> World:
    app = App(url, clock=clock)
    webhooks = app.queue(
        "webhooks",
        fair=Fair(by="account"),
        limits=[Concurrency(2, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)],
    )
    app.queue("email", partitions=2, partition_by="account", limits=[Concurrency(5, by="account")])

    @app.task(queue="webhooks", name="shop.deliver", max_attempts=2)
    async def deliver(event: object, account: str, endpoint: str) -> object:
        return event

    @app.task(queue="email", name="shop.send")
    async def send(number: int, account: str) -> int:
        return number

    app.schedule("0 9 * * 1-5", send, 1, "acme", timezone="Europe/Berlin", name="nightly")
    await stack.enter_async_context(app)
    await app.fire_schedules()
    options = {"token": TOKEN, "viewer_token": VIEWER_TOKEN, **options}
    site = await stack.enter_async_context(Site.of(app, clock, **options))
    world = World(app, clock, site)
    given = {"account": "acme", "endpoint": "api.acme.com"}
    for state in ("done", "dead", "cancelled"):
        job = await deliver.enqueue({"for": state}, **given)
        (claim,) = await webhooks.claim(1)
        clock.advance("2s")
        if state == "done":
            await claim.ack({"said": "ok"})
        elif state == "dead":
            await claim.dead("the endpoint answered 500")
        else:
            await claim.cancel("no longer wanted")
        world.jobs[state] = job.id
        assert claim.id == job.id
    world.jobs["running"] = (await deliver.enqueue(1, **given)).id
    await webhooks.claim(1)
    world.jobs["ready"] = (await deliver.enqueue(2, **given)).id
    world.jobs["scheduled"] = (await deliver.using(delay="10m").enqueue(3, **given)).id
    for account in ("acme", "blue", "coral"):
        await send.enqueue(1, account=account)
    clock.advance("1s")
    return world


async def check_answer(answer: httpx.Response) -> None:
    """Fail unless an answer of the API is what `openapi.json` says, with no member besides."""
    path = answer.request.url.path
    if not path.startswith(f"{API}/"):
        return
    await answer.aread()
    assert answer.headers["cache-control"] == "no-store"
    if answer.request.method in ("HEAD", "OPTIONS"):
        assert not answer.content
        return
    assert answer.headers["content-type"] == "application/json", answer.text
    operation = operation_at(answer.request.method, path.removeprefix(API))
    if operation is None:
        assert answer.status_code in (400, 401, 403, 404, 405), answer.text
        validator_of("#/components/schemas/ErrorAnswer").validate(answer.json())
        return
    described = operation["responses"].get(str(answer.status_code))
    assert described is not None, f"{answer.status_code} is not described: {answer.text}"
    schema = described["content"]["application/json"]["schema"]
    if "$ref" in schema:
        validator_of(schema["$ref"]).validate(answer.json())


def operation_at(method: str, path: str) -> Mapping[str, Any] | None:
    """What is described of a path."""
    paths = describe_api()["paths"]
    for template in sorted(paths, key=lambda each: "{" in each):
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path):
            found: Mapping[str, Any] | None = paths[template].get(method.lower())
            return found
    return None


@cache
def validator_of(ref: str) -> Draft202012Validator:
    components = _closed(describe_api()["components"])
    return Draft202012Validator({"$ref": ref, "components": components}, format_checker=FormatChecker())


def _closed(schema: Any) -> Any:
    """The same, with nothing allowed that is not described."""
    match schema:
        case {"type": "object", "properties": dict()}:
            return {**{name: _closed(each) for name, each in schema.items()}, "additionalProperties": False}
        case dict():
            return {name: _closed(each) for name, each in schema.items()}
        case list():
            return [_closed(each) for each in schema]
    return schema
