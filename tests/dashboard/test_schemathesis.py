"""The whole API against made-up requests, on both stores: nothing breaks it, and every answer is as described."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from tests.dashboard.harness import TOKEN
from tests.dashboard.world import API, World

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the test run's


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The app behind a real server, in the loop in which its database is open."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def test_no_made_up_request_breaks_the_api_or_is_answered_otherwise_than_described(
    world: World, tmp_path: Path
) -> None:
    async with served(world.site.host) as origin:
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION), "run"),
            f"{origin}{API}/openapi.json",
            *("--header", f"Authorization: Bearer {TOKEN}", "--warnings", "off"),
            cwd=tmp_path,
            env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path), "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await run.communicate()
    (tmp_path / "said.txt").write_bytes(said)
    assert run.returncode == 0, said.decode()
