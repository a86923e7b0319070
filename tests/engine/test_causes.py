"""Real vLLM is made to fail in many ways; each failure gets its cause. Most fail within ten seconds.

CI starts some of them; tests/instances/test_causes.py has the recorded logs of all."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from support.fakes import a_slot

from launcher.base.address import UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.config.schema import Model, Supervision
from launcher.engines.base import Launch, Traits, Unwanted
from launcher.engines.causes import Cause
from launcher.engines.log import Accelerator, EngineLog
from launcher.engines.vllm.launch import UNWANTED
from launcher.engines.vllm.output import VLLM_LOG, ZENTORCH
from launcher.instances.lifecycle import Limits
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import ProbeSettings, StartRequested, State
from launcher.instances.spawn_direct import DirectSpawner
from launcher.instances.watch import HttpProber
from launcher.plan.plan import Slot

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

# One failure is enough: no slot is restarted.
LIMITS = msgspec.structs.replace(Limits.of(Supervision()), crash_limit=1, stop_timeout_s=5.0)
PROBES = ProbeSettings(probe_interval_s=1.0, tail_lines=2000, stall_timeout_s=5.0)
# Takes twenty seconds on two idle cores.
DEATH_S = 300.0

COMMON = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager")


@dataclass
class RealVllm:
    """vllm serve with the arguments of one test."""

    argv: tuple[str, ...]
    folder: Path
    cache: Path
    env: dict[str, str] = field(default_factory=dict)
    health_path: str = "/health"
    wants_completion_probe: bool = True
    log: EngineLog = VLLM_LOG
    accelerator: Accelerator | None = ZENTORCH
    unwanted: tuple[Unwanted, ...] = UNWANTED
    sockets: str = field(default_factory=lambda: f"{tempfile.gettempdir()}/nl-{os.urandom(4).hex()}")
    """Not in `folder`, whose name is long."""

    @property
    def uds(self) -> str:
        return str(self.folder / "i.sock")

    def traits(self, model: Model) -> Traits:
        return Traits()

    def launch(self, slot: Slot, generation: int) -> Launch:
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self.cache), "HF_HOME": str(self.folder / "hf"),
            "VLLM_RPC_BASE_PATH": self.sockets,
        } | self.env  # fmt: skip
        return Launch(self.argv, env, frozenset(), UnixAddress(self.uds), scratch=self.sockets)


Act = Callable[[SlotController], Awaitable[None]]


async def death_of(engine: RealVllm, act: Act | None = None) -> Cause:
    """Starts an instance, lets `act` break it, and returns the cause."""
    controller = SlotController(
        a_slot(cpus="0", nodes=""), engine=engine, spawner=DirectSpawner(os.environ, CpuSet(os.sched_getaffinity(0))),
        prober=HttpProber("/health"), limits=LIMITS, probing=PROBES,
        announce=lambda _event: None,
    )  # fmt: skip
    owner = asyncio.create_task(controller.run())
    controller.post(StartRequested())
    try:
        async with asyncio.timeout(DEATH_S):
            if act is not None:
                await act(controller)
            await controller.until(lambda slot: slot.state is State.FAILED)
    finally:
        owner.cancel()
        await asyncio.wait({owner})
    assert controller.slot_state.last_cause is not None
    print(controller.slot_state.last_cause)
    return controller.slot_state.last_cause


@dataclass
class Stage:
    """What the tests share."""

    vllm: str
    model: Path
    folder: Path
    cache: Path

    def serve(self, *more: str, model: str | None = None, env: dict[str, str] | None = None) -> RealVllm:
        argv = (self.vllm, "serve", model or str(self.model), "--served-model-name", "m", *COMMON, *more)
        engine = RealVllm(argv, self.folder, self.cache, env or {})
        return replace(engine, argv=(*argv, "--uds", engine.uds) if "--port" not in more else argv)

    def variant(self, **config: object) -> Path:
        """The model with another config.json."""
        folder = self.folder / "variant"
        shutil.copytree(self.model, folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return folder


@pytest.fixture
def stage(vllm: str, model: Path, cache: Path, tmp_path: Path) -> Stage:
    """vLLM's cache of model architectures is kept: without it each start imports vLLM twice."""
    return Stage(vllm, model, tmp_path, cache / "causes")


class Gate(http.server.BaseHTTPRequestHandler):
    """A hub on which every model is gated."""

    def do_HEAD(self) -> None:
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model acme/gated is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815  the name http.server looks for

    def log_message(self, *_words: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_bad_argument(stage: Stage) -> None:
    cause = await death_of(stage.serve("--blok-size", "32"))
    assert cause.name == "bad-argument"
    assert "unrecognized arguments: --blok-size 32" in cause.evidence[-1]


@pytest.mark.release
async def test_model_not_found(stage: Stage) -> None:
    assert (await death_of(stage.serve(model="/srv/models/none"))).name == "model-not-found"


@pytest.mark.release
async def test_gated_model_needs_token(stage: Stage, hub: str) -> None:
    env = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
    assert (await death_of(stage.serve(model="acme/gated", env=env))).name == "gated-model-needs-token"


@pytest.mark.release
async def test_unsupported_version(stage: Stage) -> None:
    folder = stage.variant(model_type="llama9", architectures=["Llama9ForCausalLM"])
    assert (await death_of(stage.serve(model=str(folder)))).name == "unsupported-version"


@pytest.mark.release
async def test_port_in_use(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cause = await death_of(stage.serve("--host", "127.0.0.1", "--port", port))
    assert cause.name == "port-or-socket-in-use"


@pytest.mark.release
async def test_model_damaged(stage: Stage) -> None:
    folder = stage.variant()
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"x" * 1000)
    cause = await death_of(stage.serve("--kv-cache-memory-bytes", str(1 << 28), model=str(folder)))
    assert cause.name == "model-damaged"


async def test_kv_too_large(stage: Stage) -> None:
    cause = await death_of(stage.serve("--kv-cache-memory-bytes", str(900 << 30)))
    assert cause.name == "kv-too-large"
    assert "(900.0 GiB)" in cause.evidence[0]


@pytest.mark.release
async def test_kv_too_small(stage: Stage) -> None:
    assert (await death_of(stage.serve("--kv-cache-memory-bytes", "100000"))).name == "kv-too-small"


async def test_killed_by_operator(stage: Stage) -> None:
    async def kill(controller: SlotController) -> None:
        await controller.until(lambda _slot: controller.instance.process is not None)
        assert controller.instance.process is not None
        async with contextlib.aclosing(controller.log.follow(1)) as lines:
            await anext(lines)  # the process has started
        os.kill(controller.instance.process.pid, signal.SIGKILL)

    cause = await death_of(stage.serve("--kv-cache-memory-bytes", str(1 << 28)), kill)
    assert cause.name == "killed-by-operator"
    assert "signal 9" in cause.message


async def test_hung(stage: Stage) -> None:
    """The worker is stopped in the middle of a request: /health answers 200, without progress."""
    asking: list[asyncio.Task[None]] = []

    async def freeze(controller: SlotController) -> None:
        await controller.until(lambda slot: slot.state is State.READY)
        assert controller.instance.process is not None
        tree = psutil.Process(controller.instance.process.pid).children(recursive=True)
        worker = next(process for process in tree if "VLLM::Worker" in " ".join(process.cmdline()))
        flowing = asyncio.Event()
        asking.append(asyncio.create_task(ask(stage.folder / "i.sock", flowing)))
        await flowing.wait()
        worker.suspend()
        while not await has_work(UnixAddress(str(stage.folder / "i.sock"))):
            worker.resume()  # the events were read late: the stream had ended
            flowing.clear()
            await flowing.wait()
            worker.suspend()

    cause = await death_of(stage.serve("--kv-cache-memory-bytes", str(1 << 28)), freeze)
    asking[0].cancel()
    await asyncio.wait(asking)
    assert cause.name == "hung"
    assert "tokens generated" in cause.evidence[1]
    assert "1 running" in cause.evidence[1]
    assert "cpu pressure" in cause.evidence[-1]


async def has_work(address: UnixAddress) -> bool:
    """Whether a stopped engine was in the middle of a request, once all that it had said before is counted."""
    prober, before = HttpProber("/health"), None
    while (counters := await prober.counters(address, 5.0)) != before or counters is None:
        before = counters
        await asyncio.sleep(0.5)
    return counters.running > 0


async def ask(path: Path, flowing: asyncio.Event) -> None:
    """One long stream after the other, past any proxy. `flowing` is set while one flows."""
    body = {"model": "m", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    url = "http://localhost/v1/completions"
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            while True:
                async with session.post(url, json=body) as response:
                    assert response.status == 200, await response.text()
                    events = 0
                    async for line in response.content:
                        events += line.startswith(b"data:")
                        if events >= 3:
                            flowing.set()


async def test_command_not_found(stage: Stage) -> None:
    engine = stage.serve()
    cause = await death_of(replace(engine, argv=(f"{stage.vllm}-none", *engine.argv[1:])))
    assert cause.name == "command-not-found"
