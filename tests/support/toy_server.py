"""A third engine's server: a real process with options, log lines and a metrics page of its own.

    python toy_server.py --listen PATH --as NAME --lanes N [--ink WORDS]

Its completions count: "one two three ", on from where the prompt ends. After --ink words it prints that it is out of ink,
and ends. It tells no token ids. `POST /fault` as fake_engine.py has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

from fake_engine import Call, Engine

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


class Toy(Engine):
    written = 0

    async def respond(self, call: Call) -> None:
        if call.path == "/metrics":
            page = f"# TYPE toy_words counter\ntoy_words {self.written}\n"
            await call.answer(page.encode(), type_="text/plain")
            return
        await super().respond(call)

    async def _answer(self, call: Call, body: dict[str, Any]) -> None:
        said = str(body.get("prompt") or "").split()
        begun = NUMBERS.index(said[-1]) + 1 if said and said[-1] in NUMBERS else 0
        words = NUMBERS[begun : begun + int(body.get("max_tokens") or 16)]
        head = {"id": "toy", "object": "text_completion", "created": 0, "model": self.args.model}
        last = "stop" if not words or words[-1] == NUMBERS[-1] else "length"
        if not body.get("stream"):
            choice = {"index": 0, "text": " ".join(words), "finish_reason": last}
            await call.json({**head, "choices": [choice]})
            return
        await call.begin_stream()
        for number, word in enumerate(words):
            if "cut" in self.faults and number == 2:
                call.writer.transport.abort()
                raise ConnectionAbortedError
            self.written += 1
            if self.args.ink is not None and self.written > self.args.ink:
                print("toy: out of ink: refill cartridge 3", flush=True)
                os._exit(3)
            reason = last if number == len(words) - 1 else None
            choice = {"index": 0, "text": f"{word} ", "finish_reason": reason}
            await call.event(json.dumps({**head, "choices": [choice]}).encode())
            await asyncio.sleep(0.01)
        await call.event(b"[DONE]")
        await call.end_stream()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", dest="uds", required=True)
    parser.add_argument("--as", dest="model", required=True)
    parser.add_argument("--lanes", type=int, required=True)
    parser.add_argument("--ink", type=int)
    args = parser.parse_args()
    args.metrics, args.token_s = None, 0.0
    print(f"toy: sharpening {args.lanes} pencils", flush=True)
    time.sleep(1.0)
    print("toy: paper is in", flush=True)
    asyncio.run(Toy(args).serve())


if __name__ == "__main__":
    main()
