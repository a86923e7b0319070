"""A client's connection by itself; its requests and answers are tested through the proxy."""

from __future__ import annotations

import asyncio
from typing import Any

from launcher.proxy.downstream.connection import DownstreamConnection


class Owner:
    header_timeout_s = 30.0

    def opened(self, _client: DownstreamConnection) -> bool:
        return True


class ClosedTransport(asyncio.Transport):
    """uvloop's, under TLS, between the end of the connection and `connection_lost`."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del high, low

    def get_write_buffer_size(self) -> int:
        return 7

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    def write(self, _data: bytes | bytearray | memoryview[Any]) -> None:
        raise AssertionError


async def test_of_a_connection_without_its_socket_the_transport_tells_what_is_unsent() -> None:
    connection = DownstreamConnection(Owner())  # type: ignore[arg-type]
    connection.connection_made(ClosedTransport())
    assert connection.unsent == 7
