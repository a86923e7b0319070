"""HAProxy of an ingress host for tests: the real one, between scripted daemons and a scripted picker."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.ports import free_port

from launcher.fleet import haproxy
from launcher.fleet.config import FleetConfig
from launcher.fleet.haproxy import Servers
from launcher.fleet.members import Member
from launcher.fleet.spoe import Value, serve

WAIT_S = 20.0
CHAT = "/v1/chat/completions"


def program() -> str:
    """NUMA_LAUNCHER_TEST_HAPROXY names another one than the system's."""
    return os.environ.get("NUMA_LAUNCHER_TEST_HAPROXY") or haproxy.binary()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(
    serve: Serve, host: str, port: int, tls: ssl.SSLContext | None, stack: AsyncExitStack
) -> asyncio.Server:
    """A server until the end of the test. HAProxy may connect then: a connection whose task is cancelled before it has begun
    is closed as well, of which uvloop would warn otherwise."""
    tasks: set[asyncio.Task[None]] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(served(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(connected, host, port, ssl=tls)
    stack.callback(server.close)
    return server


@dataclass
class Asked:
    """What a daemon got."""

    daemon: str
    method: str
    target: str
    fields: dict[str, list[str]]
    body: bytes

    def one(self, name: str) -> str | None:
        found = self.fields.get(name, [None])
        assert len(found) == 1
        return found[0]


@dataclass
class Daemon:
    """Answers "ok", or as `script` does."""

    name: str
    tls: ssl.SSLContext | None = None
    asked: list[Asked] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    script: Serve | None = None
    port: int = field(default_factory=free_port)
    """The same one after `start` again."""

    async def start(self, stack: AsyncExitStack) -> None:
        self.server = await listen(self._serve, "127.0.0.1", self.port, self.tls, stack)

    @property
    def member(self) -> Member:
        return Member(host=self.name, address=f"127.0.0.1:{self.port}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields: dict[str, list[str]] = {}
                for line in head[1:-2]:
                    name, _, value = line.partition(":")
                    fields.setdefault(name.lower(), []).append(value.strip())
                body = await reader.readexactly(int(fields.get("content-length", ["0"])[0]))
                method, target, _ = head[0].split()
                self.asked.append(Asked(self.name, method, target, fields, body))
                if self.script:
                    await self.script(reader, writer)
                else:
                    answer = f"from {self.name}".encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))


@dataclass
class Picker:
    """Answers with `answer`."""

    answer: Callable[[Mapping[str, Value]], Awaitable[Mapping[str, str]]]
    seen: list[tuple[str, Mapping[str, Value]]] = field(default_factory=list)
    ends: asyncio.Queue[list[str]] = field(default_factory=asyncio.Queue)
    tls: ssl.SSLContext | None = None

    async def handle(self, name: str, arguments: Mapping[str, Value]) -> Mapping[str, str]:
        self.seen.append((name, arguments))
        return await self.answer(arguments) if name == "pick" else {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer, self.handle)

    async def start(self, host: str, port: int, stack: AsyncExitStack) -> asyncio.Server:
        picker = self

        class Ends(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, addr: object) -> None:
                picker.ends.put_nowait(data.decode().split())

        server = await listen(self.serve, host, port, self.tls, stack)
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Ends, (host, port + 1))
        stack.callback(transport.close)
        return server

    async def end(self) -> list[str]:
        async with asyncio.timeout(WAIT_S):
            return await self.ends.get()


def always(**variables: str) -> Picker:
    async def answer(_: Mapping[str, Value]) -> Mapping[str, str]:
        return variables

    return Picker(answer)


@dataclass
class Response:
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, object]:
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return dict(found)


@dataclass
class Site:
    """One ingress host."""

    config: FleetConfig
    folder: Path
    stack: AsyncExitStack
    tls: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        return int(self.config.ingress.listen.rpartition(":")[2])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = "localhost" if self.tls else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname=name
        )
        self.stack.callback(writer.close)
        return reader, writer

    async def send(
        self, body: bytes = b"{}", fields: str = "", target: str = CHAT, method: str = "POST"
    ) -> Response:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await self.connect()
            writer.write(request(body, fields, target, method))
            status, got = await head(reader)
            found = await reader.readexactly(int(got["content-length"]))
            writer.close()
            return Response(status, got, found)

    async def servers(self, *members: Member) -> Servers:
        found = Servers(self.folder / "admin.sock")
        await found.apply(members)
        return found


def request(body: bytes = b"{}", fields: str = "", target: str = CHAT, method: str = "POST") -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if method == "POST" else ""
    return f"{method} {target} HTTP/1.1\r\nHost: fleet\r\n{fields}{length}\r\n".encode() + (
        body if length else b""
    )


async def head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = (line.partition(":") for line in lines[1:-2])
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await met():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def run(site: Site, *members: Member) -> asyncio.subprocess.Process:
    """`members`: known when it starts."""
    site.folder.mkdir(exist_ok=True)
    known = await haproxy.addresses(members)
    for name, text in haproxy.files(site.config, exporter=haproxy.has_exporter(), members=known).items():
        (site.folder / name).write_text(text)
    log = (site.folder / "log").open("w")
    site.stack.callback(log.close)
    process = await asyncio.create_subprocess_exec(
        program(), "-db", "-f", "haproxy.cfg", cwd=site.folder, stdout=log, stderr=log
    )
    site.stack.push_async_callback(stop, process)

    async def answers() -> bool:
        assert process.returncode is None, (site.folder / "log").read_text()
        try:
            _, writer = await asyncio.open_unix_connection(site.folder / "admin.sock")
        except OSError:
            return False
        writer.close()
        return True

    await until(answers)
    return process


async def stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
