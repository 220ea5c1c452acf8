"""`fairlane dashboard`: the pages and the JSON API, served by themselves."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from fairlane.app import without_password
from fairlane.cli.database import app_of, operations_on
from fairlane.cli.options import app_or_url_options
from fairlane.redaction import Surface

if TYPE_CHECKING:  # an extra
    from starlette.applications import Starlette


@click.command()
@app_or_url_options
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8080, help="0 picks a free port.")
@click.option("--token", envvar="FAIRLANE_DASHBOARD_TOKEN", help="Operator token.  [default: generated and printed]")
@click.option("--viewer-token", envvar="FAIRLANE_DASHBOARD_VIEWER_TOKEN", help="Viewer token: may look, not act.")
def dashboard(
    app: str | None, url: str | None, host: str, port: int, token: str | None, viewer_token: str | None
) -> None:
    """Serve the dashboard. It shows whether work flows, who waits and why, what is failing, and what can be done.

    It is closed: people log in with the token, programs send it as Authorization: Bearer. Both can also be set with
    FAIRLANE_DASHBOARD_TOKEN and FAIRLANE_DASHBOARD_VIEWER_TOKEN, so that no list of processes shows them.

    \b
    Example:
      fairlane dashboard shop:app
      fairlane dashboard --url postgresql://shop@localhost/shop --port 9000
    """
    _require_packages()
    loaded = app_of(app, url)
    chosen = token or secrets.token_urlsafe(24)
    _refuse_weak_tokens(host, {"--token": chosen, "--viewer-token": viewer_token})
    is_serving = False

    def leave(*_: object) -> None:
        # The server takes signals for itself, and hands them on once it has stopped: by then nothing is left to do.
        if not is_serving:
            raise SystemExit(0)

    async def run() -> None:
        from fairlane.dashboard import create_dashboard  # an extra

        nonlocal is_serving
        async with operations_on(loaded, Surface.PROGRAM) as operations:
            built = create_dashboard(loaded, token=chosen, viewer_token=viewer_token, operations=operations)
            with _listening(host, port) as listening:
                place = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
                click.echo(f"dashboard of {without_password(loaded.url)} at {place}")
                if not token:
                    click.echo(f"log in: {place}login#token={chosen}")
                is_serving = True
                await _serve(built, listening)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    asyncio.run(run())


def _require_packages() -> None:
    missing = [name for name in ("starlette", "uvicorn", "jinja2") if find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the dashboard needs {', '.join(missing)}, not installed: pip install 'fairlane[dashboard]'"
        )


def _refuse_weak_tokens(host: str, tokens: Mapping[str, str | None]) -> None:
    """Where strangers can reach the login, directly or through a proxy, they can guess."""
    from fairlane.dashboard.access import weakness_of  # an extra

    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if is_local and "FORWARDED_ALLOW_IPS" not in os.environ:
        return
    for option, token in tokens.items():
        if token is not None and (weakness := weakness_of(token)) is not None:
            raise click.ClickException(
                f"{option} is too weak for {host}, which strangers may reach: {weakness}. Leave --token out, and one "
                "is generated; or make one: python -c 'import secrets; print(secrets.token_urlsafe(24))'"
            )


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen at {host} port {port}: {error.strerror or error}; give another --port, or 0 for any"
        ) from error


async def _serve(built: Starlette, listening: socket.socket) -> None:
    import uvicorn  # an extra

    from fairlane.dashboard.server import bounded  # an extra

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Streams to open pages end by themselves, and nobody has to be cut off.
            built.state.dashboard.live.stopped.set()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        built,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
        # Believed of a proxy only where somebody says which: whoever may say where they come from may guess at will.
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
    )
    config.load()
    # Behind a proxy every connection comes from its address, and it has bounds of its own.
    config.http_protocol_class = bounded(config.http_protocol_class, per_peer=not config.proxy_headers)
    await Server(config).serve(sockets=[listening])
