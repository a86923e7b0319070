"""The obvious reverse proxy in Python: an aiohttp server, an aiohttp client, round robin, on uvloop."""

from __future__ import annotations

import argparse
import asyncio
import itertools

import aiohttp
import uvloop
from aiohttp import web

HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade"})


async def _serve(port: int, upstreams: list[str]) -> None:
    turn = itertools.cycle(upstreams)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
            url = next(turn) + request.path_qs
            async with session.request(request.method, url, data=body or None, headers=headers) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
                out = web.StreamResponse(status=answer.status, headers=kept)
                if answer.content_length is not None:
                    out.content_length = answer.content_length
                await out.prepare(request)
                async for piece in answer.content.iter_any():
                    await out.write(piece)
                await out.write_eof()
                return out

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{rest:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()


def main() -> None:
    """Serve for ever."""
    parser = argparse.ArgumentParser(prog="python -m bench.plain_aiohttp", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("upstreams", nargs="+", help="http://HOST:PORT")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.port, args.upstreams))


if __name__ == "__main__":
    main()
