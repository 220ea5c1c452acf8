"""The JSON API: `/api`. Requests are read strictly, carried out by `fairlane.operations`, and answered as described."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, compile_path
from starlette.types import Receive, Scope, Send

from fairlane.dashboard.access import require
from fairlane.dashboard.api_operations import OPERATIONS, Asked, Operation
from fairlane.dashboard.api_reading import check_path, read_body, read_query
from fairlane.dashboard.api_refusing import Refusal, refusal_of, refused
from fairlane.dashboard.api_requests import NoQuery
from fairlane.dashboard.building import dashboard_of
from fairlane.dashboard.doorkeeper import path_of, root_of

__all__ = ["Api", "routes"]

LONGEST_LOOK = 30.0
"""Seconds for a request that changes nothing. An action goes on until it has ended, and says what it did."""


def routes() -> list[BaseRoute]:
    """What is mounted into the dashboard."""
    return [Mount("/api", app=Api(), name="api")]


class Api:
    """Everything below `/api`. Whatever happens, the answer is JSON of the shape that is described."""

    def __init__(self, operations: tuple[Operation, ...] = OPERATIONS) -> None:
        places: dict[str, dict[str, Operation]] = {}
        # Names before variables: /jobs/cancel is not the job "cancel".
        for each in sorted(operations, key=lambda each: each.is_for_one):
            places.setdefault(each.path, {})[each.method] = each
        self._places = [(compile_path(path)[0], by_method) for path, by_method in places.items()]
        self._simulating = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Exception as error:
            response = refused(refusal_of(error))
        if request.method == "HEAD":
            response = _head_of(response)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        by_method, place = self._place(request)
        allowed = ", ".join(_allowed(by_method))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed})
        operation = by_method.get("GET" if request.method == "HEAD" else request.method)
        if operation is None:
            raise Refusal(
                405,
                "method_not_allowed",
                f"{request.method} is not possible here; {allowed} is",
                headers={"Allow": allowed},
            )
        visitor = require(request, operation.role)
        asked = Asked(
            dashboard=dashboard_of(request),
            visitor=visitor,
            root=root_of(request),
            place=place,
            given=await _given(request, operation),
        )
        return Response(msgspec.json.encode(await self._carried_out(operation, asked)), media_type="application/json")

    def _place(self, request: Request) -> tuple[Mapping[str, Operation], dict[str, str]]:
        path = path_of(request)
        for pattern, by_method in self._places:
            if found := pattern.match(path):
                place = found.groupdict()
                check_path(request, place)
                return by_method, place
        raise Refusal(404, "not_found", f"there is nothing at {path}", remedy="/api/openapi.json says what there is")

    async def _carried_out(self, operation: Operation, asked: Asked) -> object:
        if operation.name == "try_policies":
            if self._simulating.locked():
                raise Refusal(429, "busy", "a simulation is under way; one at a time", headers={"Retry-After": "5"})
            # Whoever goes away meanwhile leaves a thread behind that still reckons: the next one waits for it.
            return await asyncio.shield(asyncio.create_task(self._simulate(operation, asked)))
        if operation.method == "POST":
            return await operation.carry_out(asked)
        async with asyncio.timeout(LONGEST_LOOK):
            return await operation.carry_out(asked)

    async def _simulate(self, operation: Operation, asked: Asked) -> object:
        async with self._simulating:
            return await operation.carry_out(asked)


async def _given(request: Request, operation: Operation) -> Any:
    if operation.body is None:
        return read_query(request, operation.query)
    read_query(request, NoQuery)
    # Bounded in size and time by the doorkeeper, which has read it.
    return read_body(request, await request.body(), operation.body)


def _allowed(by_method: Mapping[str, Operation]) -> Iterator[str]:
    for method in by_method:
        yield method
        if method == "GET":
            yield "HEAD"
    yield "OPTIONS"


def _head_of(response: Response) -> Response:
    """The same without its body."""
    return Response(b"", response.status_code, headers=dict(response.headers))
