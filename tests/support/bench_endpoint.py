"""An endpoint and a load generator for `bench`, scripted."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.measure.bench import workloads
from launcher.measure.bench.load_generator import Command, Job, Target, VllmDriver

# Of the requests of SAMPLE.
WORKLOAD = msgspec.structs.replace(workloads.named("rackspace-128"), output_tokens=8)
SAMPLE = Path(__file__).parents[1] / "measure" / "bench" / "vllm-0.32.0-completions.json"
# Writes a result file as vLLM does, after printing what vLLM prints. ARGS: folder, file, seed, requests, rate, asked.
SCRIPT = """
import json, os, sys, time
folder, name, seed, requests, rate, asked = sys.argv[1:7]
{before}
print("Starting main benchmark run...", flush=True)
for done in range(2):
    print(f"\\r {{done}}/2 [", end="", file=sys.stderr, flush=True)
    time.sleep({pause})
{busy}
result = json.load(open({sample!r}))
if asked != "None":
    result["output_lens"] = [int(asked)] * 4
{change}
json.dump(result, open(os.path.join(folder, name), "w"))
print("============ Serving Benchmark Result ============", flush=True)
time.sleep({stay})
"""


class ScriptedDriver(VllmDriver):
    """Reads files and output as vLLM's driver does; runs a script instead of vLLM."""

    def __init__(
        self, *, before: str = "", change: str = "", busy: str = "", pause: float = 0.05, stay: float = 0.3
    ) -> None:
        """`stay`: seconds after the last line, in which its CPU time is read."""
        super().__init__(("vllm",), "0.32.0")
        self._text = SCRIPT.format(
            before=before, change=change, busy=busy, pause=pause, stay=stay, sample=str(SAMPLE.absolute())
        )
        self.jobs: list[Job] = []

    def prepare(self, job: Job) -> Command:
        self.jobs.append(job)
        words = (
            str(job.folder),
            job.result_file.name,
            str(job.seed),
            str(job.requests),
            str(job.load.rate),
            str(job.workload.exact_output),
        )
        return Command((sys.executable, "-S", "-c", self._text, *words), {})


class Endpoint:
    """/v1/models and /metrics."""

    def __init__(self) -> None:
        self.pages: list[str] = []
        self.models: dict[str, Any] = {"data": [{"id": "demo", "max_model_len": 4096}]}
        self.key: str | None = None
        self.chat: list[bytes] = []
        """Data of the events of each chat; none: 404."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = f"Bearer {endpoint.key}" if endpoint.key else None
                if self.path == "/v1/models" and wanted not in {None, self.headers["Authorization"]}:
                    self._answer(401, "{}")
                elif self.path == "/v1/models":
                    self._answer(200, json.dumps(endpoint.models))
                elif endpoint.pages:
                    self._answer(200, endpoint.pages.pop(0) if len(endpoint.pages) > 1 else endpoint.pages[0])
                else:
                    self._answer(404, "")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                body = "".join(f"data: {data.decode()}\n\n" for data in endpoint.chat)
                self._answer(200 if body else 404, body)

            def _answer(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def target(self) -> Target:
        return Target(url=f"http://127.0.0.1:{self.server.server_address[1]}", model="demo", cores=2)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()
