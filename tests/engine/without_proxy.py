"""An instance as clients find it without the proxy, and what a conformance suite says of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from support.daemon_process import DaemonProcess

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from outside_clients import Endpoint, Tried


@contextlib.contextmanager
def direct(daemon: DaemonProcess, slot: int, through: Endpoint) -> Iterator[Endpoint]:
    """An instance without the proxy: a loopback port that copies bytes to its socket."""
    path = daemon.slot(slot)["address"].removeprefix("unix:")

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(path)

        async def pour(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while piece := await source.read(65536):
                    to.write(piece)
                    await to.drain()
            to.close()

        await asyncio.gather(pour(reader, engine_writer), pour(engine_reader, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(join, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield replace(through, url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        loop.call_soon_threadsafe(server.close)

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def findings(tried: Tried) -> dict[str, tuple[str, list[str]]]:
    """The verdict on each case and its reasons, without what differs between two answers to one question."""
    return {
        result["id"]: (
            result["status"],
            [
                re.sub(r"\b(msg|resp|chatcmpl|call|fc|rs)([-_])[-\w]+", r"\1\2*", text)
                for text in result.get("errors", ())
            ],
        )
        for result in tried.said["results"]
    }
