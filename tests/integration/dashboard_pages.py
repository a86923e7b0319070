"""Open pages of a dashboard, as the browser's script asks: for scripts and tests that measure their cost."""

from __future__ import annotations

import asyncio
import json
import zlib
from dataclasses import dataclass

import aiohttp

POLL_S = 2.0


@dataclass
class Traffic:
    requests: int = 0
    bytes: int = 0
    failed: int = 0


async def pages(link: str, count: int, seconds: float) -> Traffic:
    """What `count` pages asked for in so many seconds, their polls spread evenly."""
    url, _, token = link.partition("#token=")
    traffic = Traffic()
    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip"}
    async with aiohttp.ClientSession(url, headers=headers, auto_decompress=False) as session:

        async def get(path: str) -> dict[str, int]:
            async with session.get(f"/api/{path}") as response:
                body = await response.read()
                traffic.requests += 1
                traffic.bytes += len(body)
                traffic.failed += response.status not in {200, 404}
                found: dict[str, int] = json.loads(
                    zlib.decompress(body, 31) if body[:2] == b"\x1f\x8b" else body
                )
                return found

        async def page(number: int) -> None:
            await asyncio.sleep(number * POLL_S / count)
            event = row = 0
            while True:
                now = await get(f"now?events_after={event}")
                history = await get(f"history?span=1h&after={row}&slots=none")
                event, row = now["newest_event"], history.get("newest", row)
                await asyncio.sleep(POLL_S)

        tasks = [asyncio.create_task(page(number)) for number in range(count)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return traffic
