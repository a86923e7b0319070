"""Stand-ins for the daemons of a fleet's hosts, one port each, in one process: they tell their load and begin streams.

    python -m bench.fleet_hosts HOSTS INSTANCES

Prints the ports as JSON. From SIGUSR1 on every instance is at its limit, and streams do not begin.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Final

import uvloop

LIMIT: Final = 256
EVENT: Final = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
EVENT_S: Final = 1.0
SHORT: Final = b'"max_tokens":1,'  # such a request gets one event, and ends
BEGIN: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Host:
    """One daemon."""

    def __init__(self, instances: int) -> None:
        self.capacity = asyncio.Event()
        self.capacity.set()
        self._count = instances
        self._running = 0

    def load(self) -> bytes:
        """As a daemon's `GET /load`."""
        each = -(-self._running // self._count) if self.capacity.is_set() else LIMIT
        sums = {
            "running": each * self._count, "waiting": 0, "concurrency_limit": LIMIT * self._count,
            "ready": self._count, "kv_usage": 0.25, "predicted_ttft_s": 0.312,
        }  # fmt: skip
        instances = [
            {
                "slot": slot, "generation": 1, "model": "m", "ready": True, "running": each, "waiting": 0,
                "concurrency_limit": LIMIT, "kv_usage": 0.25, "kv_tokens": 60000,
            }
            for slot in range(self._count)
        ]  # fmt: skip
        names: dict[str, object] = {"aliases": [], "adapters": []}
        models = {"m": sums | names}
        said = json.dumps(sums | {"started": 1.0, "models": models, "instances": instances}).encode()
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(said)
            + said
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(self.load())
                    continue
                length = head.lower().partition(b"content-length:")[2].split(None, 1)[0]
                body = await reader.readexactly(int(length))
                await self._stream(writer, short=SHORT in body)
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, *, short: bool) -> None:
        self._running += 1
        try:
            await self.capacity.wait()
            writer.write(BEGIN)
            if short:
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT))
                return
            while not writer.transport.is_closing():
                writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                await asyncio.sleep(EVENT_S)
        finally:
            self._running -= 1


async def _serve(hosts: int, instances: int) -> None:
    found = [Host(instances) for _ in range(hosts)]
    servers = [await asyncio.start_server(host.serve, "127.0.0.1", 0) for host in found]

    def fill() -> None:
        for host in found:
            host.capacity.clear()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, fill)
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
