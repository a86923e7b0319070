"""Streams, one after the other from each of a few clients, each on a connection of its own; a line per request.

    python3 load.py HOST PORT FILE

It tries nothing again: what an application would see is what is written. Ends at SIGTERM, when the streams that are
open have ended.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

CLIENTS = 6
TOKENS = 6
# A client waits this long for a daemon that restarts under emulation.
REQUEST_S = 240.0


async def ask(host: str, port: int, number: int) -> dict[str, Any]:
    """One stream: when it began, got its first token, ended, and how."""
    seen: dict[str, Any] = {
        "n": number,
        "began": time.time(),
        "first": None,
        "ok": False,
        "why": "",
        "tokens": 0,
    }
    body = json.dumps(
        {
            "model": "fake",
            "stream": True,
            "max_tokens": TOKENS,
            "messages": [{"role": "user", "content": f"n {number}"}],
        }
    )
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(REQUEST_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            text = await follow(reader, seen)
            seen["ok"] = (
                "data: [DONE]" in text and seen["tokens"] == TOKENS and "200" in text.partition("\r\n")[0]
            )
            seen["why"] = "" if seen["ok"] else text[-300:]
    except (OSError, TimeoutError) as error:
        seen["why"] = repr(error)
    finally:
        if writer is not None:
            writer.close()
    seen["ended"] = time.time()
    return seen


async def follow(reader: asyncio.StreamReader, seen: dict[str, Any]) -> str:
    text = b""
    while chunk := await reader.read(65536):
        text += chunk
        seen["tokens"] = text.count(b'"content"')
        if seen["tokens"] and seen["first"] is None:
            seen["first"] = time.time()
    return text.decode(errors="replace")


async def client(host: str, port: int, which: int, out: TextIO, ending: asyncio.Event) -> None:
    number = which
    while not ending.is_set():
        out.write(json.dumps(await ask(host, port, number)) + "\n")
        out.flush()
        number += CLIENTS


async def main() -> None:
    host, port, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    with path.open("w") as out:  # noqa: ASYNC230  a few lines a second
        async with asyncio.TaskGroup() as group:
            for which in range(CLIENTS):
                group.create_task(client(host, port, which, out, ending), name=f"client {which}")


if __name__ == "__main__":
    asyncio.run(main())
