"""The proxy that delays."""

from __future__ import annotations

import asyncio
import socket

from bench.proxy import far_away

SENT = bytes(range(256)) * 4_000


async def test_what_goes_through_the_proxy_arrives_whole_and_in_order_and_later() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(10_000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    with far_away(f"postgresql://postgres@127.0.0.1:{port}/x", 20.0) as url:
        near = int(url.rpartition(":")[2].partition("/")[0])
        assert near != port
        reader, writer = await asyncio.open_connection("127.0.0.1", near)
        began = loop.time()
        writer.write(b"!")
        assert await reader.readexactly(1) == b"!"
        assert loop.time() - began >= 0.02
        writer.write(SENT)
        assert await reader.readexactly(len(SENT)) == SENT
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    server.close()
    await server.wait_closed()


def test_a_connection_that_nobody_accepts_is_closed() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # its port is nobody else's, and it does not listen
        with far_away(f"postgresql://postgres@127.0.0.1:{deaf.getsockname()[1]}/x", 1.0) as url:
            near = int(url.rpartition(":")[2].partition("/")[0])
            with socket.create_connection(("127.0.0.1", near), timeout=30) as connection:
                assert connection.recv(1) == b""
