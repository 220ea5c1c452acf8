"""Work for somebody who may go away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

__all__ = ["unless_gone"]

T = TypeVar("T")
CLIENT_GONE = 499


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work comes to. It is cancelled when the visitor goes away; its body has been read by then."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(CLIENT_GONE, "nobody waits for this any more")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
