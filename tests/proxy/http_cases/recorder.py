"""An engine that keeps every byte it gets, reads them with a parser that is not ours, and answers 200."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

import h11

from launcher.base.address import UnixAddress

ANSWER = b'{"object":"recorded"}'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
_OWN = ("/metrics", "/v1/models", "/health")  # what the proxy may ask on its own


@dataclass
class Recorded:
    """One request."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = False

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


@dataclass
class Recorder:
    """Listens on a UNIX socket for as long as it is entered."""

    path: Path
    raw: list[bytearray] = field(default_factory=list)  # of each connection
    faults: list[str] = field(default_factory=list)  # what h11 could not read
    connections: list[asyncio.Transport] = field(default_factory=list)
    _requests: list[Recorded] = field(default_factory=list)
    _server: asyncio.Server | None = None

    @property
    def address(self) -> UnixAddress:
        return UnixAddress(str(self.path))

    @property
    def requests(self) -> list[Recorded]:
        """Without those that the proxy sends for itself."""
        return [each for each in self._requests if each.target not in _OWN]

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for transport in self.connections:
            transport.abort()
        await asyncio.sleep(0.001)  # for the transports to close

    def begin(self, event: h11.Request) -> Recorded:
        headers = [(name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in event.headers]
        recorded = Recorded(event.method.decode(), event.target.decode(), headers)
        self._requests.append(recorded)
        return recorded


class _Connection(asyncio.Protocol):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._raw = bytearray()
        self._parser = h11.Connection(h11.SERVER)
        self._request: Recorded | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._recorder.raw.append(self._raw)
        self._recorder.connections.append(self._transport)

    def data_received(self, data: bytes) -> None:
        self._raw += data
        try:
            self._parser.receive_data(data)
            self._take()
        except h11.ProtocolError as error:
            self._recorder.faults.append(f"{error}: {bytes(self._raw[:200])!r}")
            assert self._transport is not None
            self._transport.close()

    def _take(self) -> None:
        assert self._transport is not None
        while True:
            match event := self._parser.next_event():
                case h11.Request():
                    self._request = self._recorder.begin(event)
                case h11.Data() if self._request is not None:
                    self._request.body += event.data
                case h11.EndOfMessage() if self._request is not None:
                    self._request.whole = True
                    self._transport.write(_HEAD + ANSWER)
                    self._parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    self._parser.send(h11.EndOfMessage())
                    if self._parser.our_state is h11.MUST_CLOSE:
                        self._transport.close()
                        return
                    self._parser.start_next_cycle()
                case _:
                    return
