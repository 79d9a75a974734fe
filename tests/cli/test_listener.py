"""The socket of a server."""

import asyncio
import socket

from foreword.cli.listener import bind


async def test_connections_send_at_once() -> None:
    """With Nagle's algorithm an answer's body waits for the client to acknowledge its head: 45 ms."""
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=listener):
        _, client = await asyncio.open_connection(*listener.getsockname())
        server = await accepted.get()
        for connection in (client, server):
            option = connection.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert option != 0
            connection.close()
