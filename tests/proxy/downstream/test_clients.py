"""The open connections of clients, when the server stops."""

from __future__ import annotations

import asyncio
import socket

from support.proxy_under_test import ProxyUnderTest

REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_a_connection_that_is_accepted_as_the_server_stops_is_served(proxy: ProxyUnderTest) -> None:
    """Its first request comes after the listener's close: the client was slow."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    server = proxy.server
    stopping = asyncio.create_task(server.stop(5.0))
    # As the listener does it: the connection is made in the next turns of the event loop.
    made = asyncio.create_task(loop.connect_accepted_socket(server._clients.make, ours))
    await made
    await asyncio.sleep(0.2)
    await loop.sock_sendall(theirs, REQUEST)
    answer = await asyncio.wait_for(loop.sock_recv(theirs, 4096), 5)
    assert answer.startswith(b"HTTP/1.1 "), answer
    await stopping
    theirs.close()
