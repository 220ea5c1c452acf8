"""Why a request is refused: one mapping of errors for pages and the JSON API, with stable codes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fairlane.errors import (
    ConfigurationError,
    FairlaneError,
    InvalidJob,
    InvalidValue,
    JobNotFound,
    SchemaError,
    StoreUnavailable,
    UnknownQueue,
    UnknownSchedule,
    UnknownTask,
)

log = logging.getLogger("fairlane.dashboard")

CODES = {
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    409: "conflict",
    413: "too_large",
    414: "too_long",
    415: "unsupported_media_type",
    422: "invalid",
    429: "busy",
    500: "fault",
    503: "unavailable",
}
"""The usual code of each status."""


@dataclass(eq=False)
class Refusal(Exception):
    """Why a request is not carried out."""

    status: int
    code: str
    message: str
    _: KW_ONLY
    remedy: str | None = None
    field: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message


def refusal_of(error: Exception) -> Refusal:
    """The refusal for an error. An unexpected one shows only an id; the log has the details under it."""
    match error:
        case Refusal():
            return error
        case HTTPException(status_code=status, detail=detail):
            return Refusal(status, CODES.get(status, "refused"), detail, headers=error.headers)
        case JobNotFound() | UnknownQueue() | UnknownSchedule() | UnknownTask():
            return Refusal(404, "not_found", str(error))
        case SchemaError() | StoreUnavailable() | TimeoutError():
            return Refusal(503, "unavailable", str(error) or "it took too long", headers={"Retry-After": "5"})
        case ConfigurationError() | InvalidJob() | InvalidValue():
            return Refusal(422, "invalid", str(error))
        case FairlaneError():
            return Refusal(409, "conflict", str(error))
    incident = secrets.token_hex(8)
    log.error("incident %s", incident, exc_info=error)
    return Refusal(
        500, "fault", f"something went wrong here: incident {incident}", remedy="the log of the dashboard says what"
    )


def as_json(refusal: Refusal) -> Response:
    """A refusal as the JSON API answers it."""
    error: dict[str, Any] = {"code": refusal.code, "message": refusal.message}
    error |= {name: value for name in ("remedy", "field") if (value := getattr(refusal, name)) is not None}
    body = msgspec.json.encode({"error": error})
    return Response(body, refusal.status, media_type="application/json", headers=refusal.headers)
