"""`/metrics` of the dashboard: the whole fleet in numbers, for a scraper that has a token."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from fairlane.app import App
from fairlane.telemetry.fleet import Fleet
from fairlane.telemetry.prometheus import CONTENT_TYPE

__all__ = ["scrape_routes"]

NAMED_KEYS = 20


def scrape_routes(app: App) -> list[BaseRoute]:
    """However many scrape, the database is asked at most every ten seconds."""
    fleet = Fleet(app.operations.fleet_figures, app.telemetry.failures, NAMED_KEYS)

    async def tell_metrics(request: Request) -> Response:
        return PlainTextResponse(await fleet.text(), headers={"Content-Type": CONTENT_TYPE})

    return [Route("/metrics", tell_metrics, methods=["GET"])]
