#!/opt/venv/bin/python
"""Started in vLLM's place, `vllm serve MODEL --uds PATH --tensor-parallel-size N ...`: its processes, and where they run.

An API server (fake_engine) starts an engine core, and that a worker for each rank. Workers are bound as vLLM 0.32 binds
them: OpenMP's threads by GOMP_CPU_AFFINITY (utils/ompmultiprocessing.py), memory by libnuma to the node of the lowest
cpu of the main thread (v1/worker/cpu_worker.py; csrc/cpu/utils.cpp, init_cpu_memory_env). They end as vLLM's do: a dead
worker takes engine core and workers along, and the API server ends a while later with exit code 0.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, "/srv")

WEIGHTS_MIB = 24
# The end of a pipe into which each worker writes a byte when it is ready.
READY = "READY_FD"
API_SERVER_LIVES_S = 2.0


def node_of(cpu: int) -> int:
    (link,) = Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return int(link.name.removeprefix("node"))


def bind_memory() -> None:
    """The mask of this task to one node, and the pages it has to there."""
    numa = ctypes.CDLL("libnuma.so.1", use_errno=True)
    numa.numa_parse_nodestring_all.restype = ctypes.c_void_p
    node = node_of(min(os.sched_getaffinity(0)))
    own = ctypes.c_void_p(numa.numa_parse_nodestring_all(str(node).encode()))
    every = ctypes.c_void_p(numa.numa_parse_nodestring_all(b"all"))
    if numa.numa_migrate_pages(os.getpid(), every, own) < 0:
        print(f"numa_migrate_pages: {os.strerror(ctypes.get_errno())}", flush=True)
    numa.numa_set_membind(own)
    numa.numa_set_strict(1)


def start_threads(gomp: ctypes.CDLL) -> None:
    """A parallel region, after which OpenMP keeps its threads."""
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _data: None)
    gomp.GOMP_parallel(region, None, len(os.environ["GOMP_CPU_AFFINITY"].split()), 0)


def work() -> None:
    gomp = ctypes.CDLL("libgomp.so.1")  # binds the main thread to the first cpu of GOMP_CPU_AFFINITY
    bind_memory()
    start_threads(gomp)
    weights = bytearray(b"\1") * (WEIGHTS_MIB << 20)
    os.write(int(os.environ[READY]), b"1")
    while os.getppid() != 1:
        time.sleep(1)
    del weights


def expanded(cpus: str) -> str:
    numbers: list[int] = []
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return " ".join(map(str, numbers))


def run_core() -> None:
    tell = int(os.environ[READY])
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "worker"],
            env=os.environ | {"GOMP_CPU_AFFINITY": expanded(cpus)}, pass_fds=(tell,),
        )
        for cpus in os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    ]  # fmt: skip
    os.close(tell)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while all(worker.poll() is None for worker in workers):
            time.sleep(0.2)
        rank, worker = next((i, worker) for i, worker in enumerate(workers) if worker.returncode is not None)
        print(
            f"(EngineCore pid={os.getpid()}) ERROR 11-28 00:00:00 [multiproc_executor.py:315] Worker proc VllmWorker-{rank} "
            f"died unexpectedly (exit code: {worker.returncode}), shutting down executor.",
            flush=True,
        )
        sys.exit(1)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def follow(core: subprocess.Popen[bytes]) -> None:
    core.wait()
    time.sleep(API_SERVER_LIVES_S)
    os._exit(0)


def main() -> None:
    import fake_engine  # noqa: PLC0415  the workers do without it

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args, _ = parser.parse_known_args(sys.argv[3:])
    lists = os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    assert len(lists) == args.tensor_parallel_size, "does not match local world size"
    ready, tell = os.pipe()
    core = subprocess.Popen(
        [sys.executable, __file__, "core"], env=os.environ | {READY: str(tell)}, pass_fds=(tell,)
    )
    os.close(tell)
    for _ in lists:
        if not os.read(ready, 1):
            sys.exit("a worker did not start")
    threading.Thread(target=follow, args=(core,), daemon=True).start()
    sys.argv = ["fake_engine", "--uds", args.uds, "--model", args.served_model_name, "--token-s", "0.2"]
    fake_engine.main()
    core.terminate()
    core.wait()


if __name__ == "__main__":
    {"worker": work, "core": run_core}.get(sys.argv[1], main)()
