"""An OpenAI-compatible API over TLS that charges by the token, as a process of its own, with faults on demand.

    python cloud_endpoint.py --certificate PEM --key PEM [--port N]

It prints its port. The field `cloud` of a request's body says what becomes of it; others are ignored, as any API does:

    {"say": N}             so many words are its response, but for max_tokens
    {"wait_s": S}          it begins after so long
    {"fault": KIND}        refuse: 429      refuse_for: 429 with Retry-After: 30     fail: 500      unauthorized: 401
                           stall: no byte   cut: breaks in the middle                garbage: no HTTP
    {"usage": KIND}        none, negative, text, huge, float, more (more output than was asked for): what it says it took

`GET /bill` says what it charges for: the tokens that it took in and made, whatever it says of them. `POST /bill` begins
another bill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web


@dataclass
class Bill:
    prompt: int = 0
    output: int = 0
    requests: int = 0
    streams_with_usage: int = 0


class Cloud:
    def __init__(self) -> None:
        self.bill = Bill()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.complete),
                web.post("/v1/completions", self.complete),
                web.post("/v1/embeddings", self.complete),
                web.get("/bill", self.tell),
                web.post("/bill", self.begin),
            ]
        )
        return app

    async def tell(self, _request: web.Request) -> web.Response:
        return web.json_response(asdict(self.bill))

    async def begin(self, _request: web.Request) -> web.Response:
        """Another bill; requests under way count for the one before."""
        self.bill = Bill()
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        wanted = body.get("cloud") or {}
        bill = self.bill
        bill.requests += 1
        fault = wanted.get("fault")
        refused = {"refuse": 429, "refuse_for": 429, "fail": 500, "unauthorized": 401}
        if fault in refused:
            headers = {"Retry-After": "30"} if fault == "refuse_for" else {}
            error = {"message": "no", "type": "x", "param": None, "code": None}
            return web.json_response({"error": error}, status=refused[fault], headers=headers)
        if fault == "garbage":
            assert request.transport is not None
            request.transport.write(b"this is no HTTP\r\n\r\n")
            request.transport.close()
            return web.Response()
        # A token of its tokenizer is one to four bytes.
        prompt = max(1, len(json.dumps(body.get("messages") or body.get("prompt") or body.get("input"))) // 2)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16384
        output = 0 if request.path == "/v1/embeddings" else min(wanted.get("say", 5), limit)
        bill.prompt += prompt
        if fault == "stall":
            bill.output += output
            await asyncio.sleep(3600)
        usage = _usage(prompt, output, wanted.get("usage"))
        await asyncio.sleep(wanted.get("wait_s", 0))
        if body.get("stream"):
            return await self._stream(request, body, bill, output, usage, cut=fault == "cut")
        bill.output += output
        message = {"role": "assistant", "content": "word " * output}
        answer: dict[str, Any] = {
            "id": "there", "object": "chat.completion", "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }  # fmt: skip
        if usage is not None:
            answer["usage"] = usage
        text = json.dumps(answer)
        if fault == "cut":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.content_length = len(text)
            await response.prepare(request)
            await response.write(text[: len(text) // 2].encode())
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(text=text, content_type="application/json")

    async def _stream(
        self, request: web.Request, body: dict[str, Any], bill: Bill, output: int, usage: Any, *, cut: bool
    ) -> web.StreamResponse:
        asked = bool((body.get("stream_options") or {}).get("include_usage"))
        bill.streams_with_usage += asked
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = {"id": "there", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        extra = {"usage": None} if asked else {}
        for number in range(output):
            delta = {"content": f"word{number} "}
            chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **extra}
            bill.output += 1
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if cut and number == output // 2:
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(0)
        last = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **extra}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        if asked and usage is not None:
            chunk = {**head, "choices": [], "usage": usage}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def _usage(prompt: int, output: int, kind: str | None) -> Any:
    if kind == "none":
        return None
    odd: dict[str | None, dict[str, Any]] = {
        "negative": {"completion_tokens": -output - 1},
        "text": {"prompt_tokens": str(prompt)},
        "huge": {"completion_tokens": 10**15},
        "float": {"completion_tokens": output + 0.5},
        "more": {"completion_tokens": output * 3 + 100_000},
    }
    honest = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return honest | odd.get(kind, {})


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--certificate", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(args.certificate, args.key)
    runner = web.AppRunner(Cloud().app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", args.port, ssl_context=context)
    await site.start()
    assert site._server is not None
    print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[attr-defined]
    # Its parent keeps the other end of this pipe: without one it ends.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
