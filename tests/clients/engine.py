"""An engine that plays the scene that the prompt names: a real process for `engine.kind = "command"`.

    python engine.py --uds PATH --model NAME --folder FOLDER --held-s S

A prompt with `scene:NAME` gets that scene; after a result of a tool, the answer ends the conversation.

    answer   says WORDS
    held     opens the stream, says nothing for S seconds while its counters rise, then calls the first shell or weather tool
             of the request, as an engine whose parser holds a tool call back
    refused  says nothing for REFUSED_AFTER_S, then answers 400, streamed or not
    killed   says some words, then dies by SIGKILL; the next one who is asked answers, whichever instance it is
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from clients.dialects import DIALECTS, Call, Dialect

WORDS = ("The ", "engine ", "says ", "hello", ".")
AFTER_TOOL = ("The ", "tool ", "has ", "answered", ".")
REFUSAL = "the engine cannot compile the grammar of this request"
REFUSED_AFTER_S = 2.0
_SCENE = re.compile(r"scene:(\w+)")
_RESULTS = ('"type":"function_call_output"', '"type":"tool_result"', '"role":"tool"')


class Engine:
    """One instance."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.generated = 0  # tokens

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.models),
                web.post("/v1/messages/count_tokens", self.count),
                web.post("/v1/completions", self.probe),
                *(web.post(path, self.answer) for path in DIALECTS),
            ]
        )
        return app

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _request: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{self.args.model}"}}'
        values = {"num_requests_running": 1, "generation_tokens_total": self.generated}
        return web.Response(
            text="".join(f"vllm:{name}{labels} {value}.0\n" for name, value in values.items())
        )

    async def models(self, _request: web.Request) -> web.Response:
        entry = {
            "id": self.args.model,
            "object": "model",
            "created": 0,
            "owned_by": "x",
            "max_model_len": 4096,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def count(self, _request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": 11})

    async def probe(self, _request: web.Request) -> web.Response:
        """The daemon's own question, before the instance counts as ready."""
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body: dict[str, Any] = json.loads(text)
        named = _SCENE.findall(text)
        scene = named[-1] if named else "answer"
        if any(sign in text for sign in _RESULTS):
            scene = "ended"
        if scene == "refused":
            await asyncio.sleep(REFUSED_AFTER_S)
            said = {"message": REFUSAL, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": said}, status=400)
        if not body.get("stream"):
            return await self.whole(request)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        await self.play(scene, stream, DIALECTS[request.path](self.args.model), body)
        return stream

    async def whole(self, request: web.Request) -> web.Response:
        """Not streamed: what clients ask on the side."""
        text = "".join(WORDS)
        if request.path == "/v1/messages":
            return web.json_response(
                {
                    "id": "msg_1", "type": "message", "role": "assistant", "model": self.args.model,
                    "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": None,
                    "usage": {"input_tokens": 11, "output_tokens": 7},
                }
            )  # fmt: skip
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]})

    async def play(
        self, scene: str, stream: web.StreamResponse, dialect: Dialect, body: dict[str, Any]
    ) -> None:
        await stream.write(dialect.opening())
        if scene == "held":
            await self.compute(self.args.held_s)
            await stream.write(dialect.call(call_of(body)))
        else:
            for at, piece in enumerate(dialect.words(AFTER_TOOL if scene == "ended" else WORDS)):
                await stream.write(piece)
                await self.compute(0.02)
                if at == 4 and scene == "killed" and self.is_first():
                    os.kill(os.getpid(), signal.SIGKILL)
        await stream.write(dialect.ending())

    async def compute(self, seconds: float) -> None:
        """Tokens that nobody sees yet."""
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(min(0.05, seconds))
            self.generated += 1

    def is_first(self) -> bool:
        """Whether no instance has died yet."""
        try:
            (self.args.folder / "died").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def call_of(body: dict[str, Any]) -> Call:
    """The call of a tool that the request offers."""
    offered = [tool.get("name") or tool.get("function", {}).get("name") for tool in body["tools"]]
    for name, arguments in (
        ("Bash", {"command": "echo from the tool", "description": "Say something"}),
        ("shell", {"command": ["echo", "from the tool"]}),
        ("shell_command", {"command": "echo from the tool"}),
        ("exec_command", {"cmd": "echo from the tool"}),
        ("weather", {"city": "Oslo"}),
    ):
        if name in offered:
            return Call(name, arguments)
    raise AssertionError(f"no tool that this engine knows in {offered}")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--held-s", type=float, required=True)
    args = parser.parse_args()
    web.run_app(Engine(args).app(), path=args.uds, print=None)


if __name__ == "__main__":
    main()
