"""Last words of real engines, and what becomes of them."""

from __future__ import annotations

from functools import partial

import pytest
from support import reported_hosts as reported

from launcher.engines.causes import Retry
from launcher.engines.containers import OOM_LINE
from launcher.engines.vllm.output import VLLM_LOG
from launcher.instances import diagnosis
from launcher.instances.diagnosis import OBSERVED, UNIT_OOM, hung, hung_or_dead
from launcher.instances.ports import Exit
from launcher.machine.oom import KernelReport, NodeMemory

FAILED = Exit(code=1, signal=None)
RULES = (*VLLM_LOG.causes, *OBSERVED)
diagnose = partial(diagnosis.diagnose, log=VLLM_LOG)
failed_start = partial(diagnosis.failed_start, log=VLLM_LOG)

# What vLLM 0.32 (vllm/v1/worker/cpu_worker.py, v1/core/kv_cache_utils.py, v1/engine/utils.py, v1/executor/
# multiproc_executor.py, v1/utils.py, transformers_utils/config.py), Transformers, huggingface_hub, numactl 2.0,
# taskset (util-linux 2.38), uvicorn and our own shim really print.
LINES: list[tuple[str, str, Retry]] = [
    (
        "kv-too-large",
        (
            "(EngineCore pid=71) ValueError: Available memory on node 0 (6.99/9.84 GiB) on kv cache allocation is less than "
            "requested memory for kv (20.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU "
            "memory used by other processes."
        ),
        Retry.BACKOFF,
    ),
    (
        "node-without-memory",
        (
            "(Worker pid=24250) ERROR 11-27 11:49:54 [multiproc_executor.py:1063] ValueError: Available memory on node 0 "
            "(0.0/0.0 GiB) on kv cache allocation is less than requested memory for kv (0.06 GiB). Decrease "
            "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
        ),
        Retry.NEVER,
    ),
    (
        "memory-utilization",
        (
            "ValueError: Available memory on node 0 (3.2/9.84 GiB) on startup is less than desired CPU memory utilization "
            "(0.92, 9.05 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory"
        ),
        Retry.BACKOFF,
    ),
    (
        "kv-too-small",
        (
            "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (4.0 GiB). Based on the available memory, the estimated "
            "maximum model length is 32768."
        ),
        Retry.NEVER,
    ),
    (
        "kv-too-small",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing",
        Retry.NEVER,
    ),
    ("freezing-aot-crash", "AssertionError: expected OutputCode, got <class 'function'>", Retry.NEVER),
    ("gated-model-needs-token", "OSError: You are trying to access a gated repo.", Retry.NEVER),
    (
        "gated-model-needs-token",
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-6)",
        Retry.NEVER,
    ),
    (
        "model-not-found",
        (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
            "'/srv/models/none'. Use `repo_type` argument if needed."
        ),
        Retry.BACKOFF,
    ),
    (
        "model-not-found",
        "ValueError: Invalid repository ID or local directory specified: '/srv/none'.",
        Retry.BACKOFF,
    ),
    (
        "model-not-found",
        "OSError: /srv/m does not appear to have a file named config.json. Checkout 'https://huggingface.co//srv/m/tree/main'",
        Retry.BACKOFF,
    ),
    ("bad-argument", "vllm: error: unrecognized arguments: --blok-size 32", Retry.NEVER),
    ("bad-argument", "vllm serve: error: argument --max-num-seqs: invalid int value: 'many'", Retry.NEVER),
    (
        "unsupported-version",
        "  Value error, Model architectures ['NewForCausalLM'] are not supported for now. Supported architectures:",
        Retry.NEVER,
    ),
    (
        "unsupported-version",
        "ImportError: This modeling file requires transformers>=6.0 but found 5.1.0",
        Retry.NEVER,
    ),
    (
        "zentorch-mismatch",
        "WARNING [__init__.py:184] AMD Zen CPU detected but zentorch failed to import: libzentorch.so: undefined symbol",
        Retry.NEVER,
    ),
    (
        "zentorch-mismatch",
        "RuntimeError: Unsupported vLLM version: 0.32.0. Plugin supports versions: 0.11.0, 0.12.0",
        Retry.NEVER,
    ),
    (
        "zentorch-mismatch",
        "ImportError: /opt/venv/lib/zentorch/libzentorch.so: undefined symbol: _ZN3c106SymIntC1El",
        Retry.NEVER,
    ),
    (
        "model-damaged",
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        Retry.NEVER,
    ),
    ("native-crash", "Fatal Python error: Segmentation fault", Retry.BACKOFF),
    (
        "native-crash",
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -7), shutting down",
        Retry.BACKOFF,
    ),
    ("missing-instruction-set", "Fatal Python error: Illegal instruction", Retry.NEVER),
    (
        "compile-cache-corrupt",
        "[rank0]:W1120 torch/_inductor/codecache.py:1716] [0/0] _pickle.UnpicklingError: invalid load key, '\\x00'.",
        Retry.NOW,
    ),
    ("compile-cache-corrupt", "OSError: /var/cache/x/cz7q.so: file too short", Retry.NOW),
    ("node-missing", "libnuma: Warning: node argument 7 is out of range", Retry.NEVER),
    ("node-missing", "libnuma: Warning: cpu argument 99 is out of range", Retry.NEVER),
    ("node-missing", "libnuma: Warning: cpu argument 5 out of range", Retry.NEVER),
    ("node-missing", "libnuma: Warning: cpu argument 3,8-11 out of range", Retry.NEVER),
    ("node-missing", "libnuma: Warning: node argument 3 out of range", Retry.NEVER),
    ("node-missing", "<0-5> is invalid", Retry.NEVER),
    ("node-missing", "<0,3-5> is invalid", Retry.NEVER),
    ("node-missing", "taskset: failed to set pid 0's affinity: Invalid argument", Retry.NEVER),
    (
        "node-missing",
        "docker: Error response from daemon: Requested CPUs are not available - requested 0-5, available: 0-1",
        Retry.NEVER,
    ),
    (
        "wrong-build",
        "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`",
        Retry.NEVER,
    ),
    ("wrong-build", "RuntimeError: Device string must not be empty", Retry.NEVER),
    (
        "wrong-build",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        Retry.NEVER,
    ),
    ("wrong-build", "ImportError: libcuda.so.1: cannot open shared object file: No such file", Retry.NEVER),
    ("wrong-build", "ImportError: libtorch_cuda.so: cannot open shared object file: No such", Retry.NEVER),
    ("wrong-build", "ImportError: libamdhip64.so.6: cannot open shared object file: No such", Retry.NEVER),
    ("wrong-build", "OSError: libze_loader.so.1: cannot open shared object file: No such", Retry.NEVER),
    ("wrong-build", "RuntimeError: Found no NVIDIA driver on your system.", Retry.NEVER),
    (
        "wrong-build",
        "ImportError: /opt/venv/lib/python3.12/site-packages/vllm/_C.abi3.so: undefined symbol: _ZN3c108ListTypeE",
        Retry.NEVER,
    ),
    (
        "wrong-build",
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_threads_env'",
        Retry.NEVER,
    ),
    ("wrong-build", "ModuleNotFoundError: No module named 'vllm._C'", Retry.NEVER),
    ("wrong-build", "RuntimeError: operator torchvision::nms does not exist", Retry.NEVER),
    (
        "library-too-old",
        "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /v/_C.abi3.so)",
        Retry.NEVER,
    ),
    (
        "library-too-old",
        "vllm: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by vllm)",
        Retry.NEVER,
    ),
    (
        "library-missing",
        "ImportError: libnuma.so.1: cannot open shared object file: No such file",
        Retry.NEVER,
    ),
    (
        "library-missing",
        "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file",
        Retry.NEVER,
    ),
    ("no-space", "OSError: [Errno 28] No space left on device: '/psm_3fa9c2'", Retry.BACKOFF),
    (
        "no-space",
        "RuntimeError: unable to write to file </torch_12_34_0>: No space left on device (28)",
        Retry.BACKOFF,
    ),
    ("no-space", "OSError: [Errno 28] No space left on device", Retry.BACKOFF),
    (
        "no-space",
        "/tmp/cc8x.s: fatal error: error writing to /tmp/cc8x.s: No space left on device",
        Retry.BACKOFF,
    ),
    ("no-space", "OSError: [Errno 122] Disk quota exceeded: '/home/u/.cache/vllm'", Retry.BACKOFF),
    (
        "unsupported-version",
        "  Value error, Model architectures ['LlamaForCausalLM'] failed to be inspected. Please check the logs",
        Retry.NEVER,
    ),
    (
        "port-or-socket-in-use",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 9000): address already in use",
        Retry.BACKOFF,
    ),
    ("not-permitted", "PermissionError: [Errno 13] Permission denied: '/run/x.sock'", Retry.NEVER),
    ("command-not-found", "numactl: execution of `vlm': No such file or directory", Retry.NEVER),
    ("command-not-found", "taskset: failed to execute vlm: No such file or directory", Retry.NEVER),
    ("command-not-found", "numa-launcher: cannot execute vlm: No such file or directory", Retry.NEVER),
    ("command-not-found", "numa-launcher: cannot execute /srv/model: Permission denied", Retry.NEVER),
    (
        "command-not-found",
        "numa-launcher: cannot execute /nfs/venv/bin/vllm: No such file or directory",
        Retry.BACKOFF,
    ),
    (
        "command-not-found",
        "numactl: execution of `/nfs/venv/bin/vllm': No such file or directory",
        Retry.BACKOFF,
    ),
    (
        "missing-instruction-set",
        (
            "ERROR multiproc_executor.py:316] Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down "
            "executor."
        ),
        Retry.NEVER,
    ),
    (
        "node-oom",
        (
            "ERROR multiproc_executor.py:316] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down "
            "executor."
        ),
        Retry.BACKOFF,
    ),
    (
        "node-oom",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}",
        Retry.BACKOFF,
    ),
    ("node-oom", "RuntimeError: Process ApiServer_0 (PID: 12) died with exit code -9", Retry.BACKOFF),
    (
        "node-oom",
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
        ),
        Retry.BACKOFF,
    ),
    ("image-missing", "Error: localhost/none:1: image not known", Retry.NEVER),
    ("image-missing", "docker: Error response from daemon: No such image: none:1", Retry.NEVER),
    (
        "command-not-found",
        "ERROR (catatonit:5): failed to exec pid1: No such file or directory",
        Retry.NEVER,
    ),
    (
        "command-not-found",
        "numa-launcher: docker ended with 127: the image has no such command",
        Retry.NEVER,
    ),
    (
        "container-not-started",
        "numa-launcher: podman ended with 125: it did not start the container",
        Retry.BACKOFF,
    ),
    (
        "bad-argument",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        Retry.NEVER,
    ),
]


@pytest.mark.parametrize(
    ("name", "line", "retry"), LINES, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(LINES)]
)
def test_last_lines(name: str, line: str, retry: Retry) -> None:
    tail = ["INFO loading", line, "", "Traceback (most recent call last):"]
    cause = diagnose(FAILED, tail)
    assert (cause.name, cause.retry) == (name, retry)
    assert cause.evidence[0] == line
    assert cause.remedy
    assert "(exit code 1)" in cause.message


def test_a_container_at_its_memory_limit() -> None:
    cause = diagnose(Exit(code=None, signal=9), ["INFO loading", OOM_LINE])
    assert (cause.name, cause.evidence) == ("cgroup-oom", (OOM_LINE,))


def test_every_rule_has_a_line() -> None:
    assert {name for name, *_ in LINES} == {rule.name for rule in RULES if rule.pattern is not None}


def test_the_root_cause_wins_over_what_follows_from_it() -> None:
    tail = [
        "ValueError: Available memory on node 0 (6.99/9.84 GiB) on kv cache allocation is less than requested memory for kv",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    ]
    assert diagnose(FAILED, tail).name == "kv-too-large"


@pytest.mark.parametrize(
    "line", ["Failed core proc(s): {}", "Failed core proc(s): {'EngineCore': 1}", "exit code 0"]
)
def test_an_end_of_its_own_is_no_signal(line: str) -> None:
    assert diagnose(FAILED, [line]).name == "unknown"


def test_an_instance_that_was_ready_may_always_restart() -> None:
    """One client's bad request makes vLLM print "Value error"; its later crash has another reason."""
    lines = [line for _, line, retry in LINES if retry is Retry.NEVER]
    never = [line for line in lines if diagnose(FAILED, [line], served=True).retry is Retry.NEVER]
    killed = {line: diagnose(Exit(None, 9), [line, "exit code: -9"], served=True).name for line in lines}
    assert never == []
    assert killed == dict.fromkeys(lines, "node-oom")


def test_only_the_last_three_lines_are_evidence() -> None:
    tail = [f"vllm: error: unrecognized arguments: {n}" for n in range(9)]
    assert diagnose(FAILED, tail).evidence == tuple(tail[-3:])


@pytest.mark.parametrize(
    ("ended", "name", "message"),
    [
        (Exit(0, None), "unknown", "ended by itself with exit code 0"),
        (Exit(3, None), "unknown", "ended by itself with exit code 3"),
        (Exit(None, 9), "killed-by-operator", "a user or process sent it a signal (signal 9)"),
        (Exit(None, 6), "native-crash", "the engine crashed in native code (signal 6)"),
        (Exit(None, 7), "native-crash", "the engine crashed in native code (signal 7)"),
        (Exit(None, 11), "native-crash", "the engine crashed in native code (signal 11)"),
        (Exit(None, 30), "unknown", "ended by signal 30"),
    ],
)
def test_without_a_known_line(ended: Exit, name: str, message: str) -> None:
    cause = diagnose(ended, ["a", "", "b", "  ", "c", "d"])
    retry = Retry.NOW if name == "killed-by-operator" else Retry.BACKOFF
    assert (cause.name, cause.message, cause.retry) == (name, message, retry)
    assert cause.evidence == ("b", "c", "d")


@pytest.mark.parametrize(("served", "retry"), [(False, Retry.NEVER), (True, Retry.BACKOFF)])
def test_sigill_of_the_main_process(served: bool, retry: Retry) -> None:
    cause = diagnose(Exit(None, 4), [], served=served)
    assert (cause.name, cause.retry, cause.evidence) == ("missing-instruction-set", retry, ())


def test_hung_or_dead() -> None:
    assert hung_or_dead("no answer").retry is Retry.BACKOFF


# --- the kernel's word ------------------------------------------------------------------------------

DEATH = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
KILLED = Exit(code=None, signal=9)
# mm/oom_kill.c of Linux 6.x.
MEMCG = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/x,task_memcg=/x,"
    "task=VLLM::Worker,pid=123,uid=0"
)
NODE = (
    "oom-kill:constraint=CONSTRAINT_MEMORY_POLICY,nodemask=1,cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/x,"
    "task=VLLM::Worker,pid=123,uid=0"
)
ROOMY, SHORT = NodeMemory(0, 50 << 30, 96 << 30), NodeMemory(1, 1 << 30, 96 << 30)


@pytest.mark.parametrize(
    ("kernel", "name", "said"),
    [
        (KernelReport(), "node-oom", DEATH),
        (KernelReport(readable=True), "killed-by-operator", DEATH),
        (
            KernelReport(readable=True, nodes=(ROOMY,)),
            "killed-by-operator",
            "node 0 had 50.00 of 96.00 GiB free",
        ),
        (KernelReport(readable=True, nodes=(ROOMY, SHORT)), "node-oom", "node 1 had 1.00 of 96.00 GiB free"),
        (KernelReport(readable=True, oom_lines=(NODE,)), "node-oom", NODE),
        (KernelReport(readable=True, oom_lines=(MEMCG,)), "cgroup-oom", MEMCG),
        (
            KernelReport(cgroup_kills=2, cgroup_file="/sys/fs/cgroup/x/memory.events"),
            "cgroup-oom",
            "/sys/fs/cgroup/x/memory.events: oom_kill rose by 2",
        ),
    ],
)
@pytest.mark.parametrize(("how", "tail"), [(Exit(0, None), ["INFO", DEATH]), (KILLED, [DEATH])])
def test_who_killed_it(kernel: KernelReport, name: str, said: str, how: Exit, tail: list[str]) -> None:
    cause = diagnose(how, tail, served=True, kernel=kernel)
    assert cause.name == name
    assert any(said in line for line in cause.evidence)


def test_a_kill_of_the_main_process_alone() -> None:
    assert diagnose(KILLED, [], kernel=KernelReport(nodes=(SHORT,))).name == "node-oom"
    assert (
        diagnose(KILLED, [], kernel=KernelReport(readable=True, nodes=(ROOMY,))).name == "killed-by-operator"
    )


def test_a_sibling_that_was_killed_for_memory_explains_no_other_end() -> None:
    assert diagnose(FAILED, ["Boom"], kernel=KernelReport(cgroup_kills=1)).name == "unknown"
    assert diagnose(FAILED, ["Boom"], kernel=KernelReport(oom_lines=(MEMCG,))).name == "cgroup-oom"


def test_an_asked_for_end_that_the_daemon_did_not_ask_for() -> None:
    farewell = ["INFO: Shutting down", "INFO: Application shutdown complete."]
    assert diagnose(Exit(0, None), farewell).name == "killed-by-operator"
    assert (
        diagnose(Exit(0, None), ["Worker proc died unexpectedly (exit code: None)", *farewell]).name
        == "unknown"
    )
    assert diagnose(Exit(None, 15), []).name == "killed-by-operator"


def a_dead_rank(code: str) -> list[str]:
    """As vLLM 0.32 logs it; it then ends in good order."""
    died = f"Worker proc VllmWorker-1 died unexpectedly (exit code: {code}), shutting down executor."
    return [
        f"(EngineCore pid=9) ERROR 11-28 02:17:46 [multiproc_executor.py:315] {died}",
        "INFO:     Shutting down",
    ]


@pytest.mark.parametrize("lost_rank", [True, False])
@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("None", "unknown", "the process of rank 1 ended, and the engine saw no exit code"),
        (
            "-9",
            "killed-by-operator",
            "a user or process sent it a signal (signal 9); the process of rank 1 ended first",
        ),
        (
            "-11",
            "native-crash",
            "the engine crashed in native code (signal 11); the process of rank 1 ended first",
        ),
        ("1", "unknown", "ended by itself with exit code 1; the process of rank 1 ended first"),
    ],
)
def test_a_rank_that_ended_first_is_named(code: str, name: str, message: str, lost_rank: bool) -> None:
    """Also where the instance was killed meanwhile: its own signal tells nothing."""
    ended = KILLED if lost_rank else Exit(code=0, signal=None)
    kernel = KernelReport(readable=True, nodes=(ROOMY,))
    cause = diagnose(ended, a_dead_rank(code), served=True, ranks=2, lost_rank=lost_rank, kernel=kernel)
    assert (cause.name, cause.message) == (name, message)
    assert "VllmWorker-1" in cause.evidence[0]


@pytest.mark.parametrize("lost_rank", [True, False])
@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (KernelReport(readable=False, cgroup_kills=1, cgroup_file="memory.events"), "cgroup-oom"),
        (KernelReport(readable=False, nodes=(NodeMemory(0, 0, 64 << 30),)), "node-oom"),
        (KernelReport(readable=False, nodes=(ROOMY,)), "unknown"),
    ],
)
def test_memory_may_have_ended_a_rank_whose_exit_nobody_saw(
    kernel: KernelReport, name: str, lost_rank: bool
) -> None:
    ended = KILLED if lost_rank else Exit(code=0, signal=None)
    cause = diagnose(ended, a_dead_rank("None"), served=True, ranks=2, lost_rank=lost_rank, kernel=kernel)
    assert cause.name == name
    assert "the process of rank 1 ended" in cause.message


def test_the_worker_of_one_rank_is_the_instance_s_only_one() -> None:
    alone = diagnose(KILLED, a_dead_rank("None"), served=True, lost_rank=True)
    assert alone.message == "its worker process ended, and the engine saw no exit code"
    assert (
        "rank" not in diagnose(Exit(0, None), a_dead_rank("-9"), kernel=KernelReport(readable=True)).message
    )


def test_a_start_that_failed_is_not_blamed_on_the_rank_s_end() -> None:
    line = next(line for name, line, _ in LINES if name == "kv-too-large")
    cause = diagnose(FAILED, [line, *a_dead_rank("0")], ranks=2)
    assert cause.name == "kv-too-large"
    assert "rank" not in cause.message


def test_the_telling_lines_of_an_unknown_end() -> None:
    tail = [
        "ERROR first",
        "INFO a",
        "RuntimeError: Executor failed.",
        "INFO b",
        "INFO c",
        "warnings.warn('leaked')",
    ]
    assert diagnose(FAILED, tail).evidence == ("ERROR first", "RuntimeError: Executor failed.")


def test_a_start_that_failed_and_does_not_end() -> None:
    cause = failed_start(["AssertionError: expected OutputCode, got <class 'function'>"], 15.0)
    assert (cause.name, cause.retry) == ("freezing-aot-crash", Retry.NEVER)
    assert "had not exited 15 s later" in cause.message
    assert failed_start(["EngineCore failed to start."], 15.0).name == "unknown"


def test_hung() -> None:
    assert hung(("nothing moved",)).evidence == ("nothing moved",)
    assert hung(()).retry is Retry.NOW


def test_a_unit_that_its_own_limit_ended_says_so() -> None:
    """systemd's word: the cgroup with its counter is gone when the unit is over."""
    tail = ["ERROR something else", f"{UNIT_OOM}"]
    cause = diagnose(Exit(None, 9), tail, served=True)
    assert cause.name == "cgroup-oom"
    assert cause.evidence == (UNIT_OOM,)


def test_a_remedy_can_be_typed_as_it_stands() -> None:
    assert any("logs SLOT" in known.remedy for known in RULES)
    for known in RULES:
        remedy = known.cause("", ()).of_slot(3).remedy
        assert "SLOT" not in remedy
        assert ("logs 3" in remedy) == ("logs SLOT" in known.remedy)


USAGE = [
    "usage: numactl [options] command",
    *(f"   option {n}" for n in range(40)),
    "the last line of the usage text",
]


@pytest.mark.parametrize("said", ["cpu argument 5 out of range", "node argument 3-5 is out of range"])
def test_the_line_of_libnuma_is_the_evidence_and_no_usage_text(said: str) -> None:
    line = f"libnuma: Warning: {said}"
    cause = diagnose(FAILED, [line, "", *USAGE, "<0-5> is invalid"])
    assert (cause.name, cause.evidence, cause.retry) == ("node-missing", (line,), Retry.NEVER)


def test_full_memory_for_sharing_is_told_from_a_full_disk() -> None:
    shared = diagnose(FAILED, ["OSError: [Errno 28] No space left on device: '/psm_3fa9c2'"])
    disk = diagnose(FAILED, ["OSError: [Errno 28] No space left on device: '/var/cache/x/inductor/a.so'"])
    assert "/dev/shm" in shared.message
    assert "/dev/shm" not in disk.message
    assert "engine.cache_dir" in disk.remedy


def test_a_library_that_explains_a_failed_look_at_the_model_is_the_cause() -> None:
    tail = [
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "  Value error, Model architectures ['LlamaForCausalLM'] failed to be inspected. Please check the logs",
    ]
    assert diagnose(FAILED, tail).name == "wrong-build"


@pytest.mark.parametrize(
    "line",
    [
        "ERROR: ld.so: object '/usr/lib/libtcmalloc_minimal.so.4' from LD_PRELOAD cannot be preloaded: ignored.",
        "WARNING [_custom_ops.py:20] Failed to import from vllm._C with ImportError('libcudart.so.12: cannot open shared')",
    ],
)
def test_a_library_that_was_not_needed_is_no_cause(line: str) -> None:
    tail = [line, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: Error code 12"]
    assert diagnose(FAILED, tail).name == "node-oom"
    assert diagnose(FAILED, [line]).name == "unknown"


def logged(process: str, *lines: str) -> list[str]:
    return [f"({process}) ERROR 11-20 22:58:29 [core.py:1510] {line}" for line in lines]


FRAMES = ('  File "SITE/vllm/x.py", line 9, in f', "    raise ValueError(")
WORKER = "ValueError: The checkpoint has 3 experts, but the model wants 4."
LAST = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
TRACEBACK = "Traceback (most recent call last):"
# In the order of vLLM 0.32: the worker's own traceback, the engine core's about it (twice), the API server's.
CHAIN = [
    *(f"(APIServer pid=1) INFO 11-20 22:58:20 [model.py:7] line {n}" for n in range(20)),
    "(APIServer pid=1) WARNING 11-20 22:58:21 [system_utils.py:255] it failed with OSError: [Errno 24] harmless",
    *logged("Worker pid=3", "WorkerProc failed to start.", TRACEBACK, *FRAMES, WORKER),
    *logged("EngineCore pid=2", "EngineCore failed to start.", TRACEBACK, *FRAMES, "    raise e from None"),
    *logged("EngineCore pid=2", "Exception: WorkerProc initialization failed. See stack trace for root cause."),
    "Process EngineCore:", TRACEBACK, *FRAMES, "Exception: WorkerProc failed. See stack trace for root cause.",
    TRACEBACK, *FRAMES, "    raise RuntimeError(", LAST,
]  # fmt: skip


def test_the_first_exception_is_the_evidence_and_the_remedy_says_where_it_is() -> None:
    cause = diagnose(FAILED, CHAIN)
    assert cause.name == "unknown"
    assert cause.evidence == (CHAIN[25],)
    assert cause.evidence[0].endswith(WORKER)
    assert cause.of_slot(3).remedy.endswith(f"`numa-launcher why 3 --lines {len(CHAIN) - 22}`")
    assert CHAIN[22].endswith(TRACEBACK)
    assert failed_start(CHAIN, 15.0).evidence == cause.evidence


def test_a_chain_of_exceptions_shows_its_cause_and_what_it_became() -> None:
    tail = [
        TRACEBACK, *FRAMES, "KeyError: 'gpt_x'", "",
        "During handling of the above exception, another exception occurred:", "",
        TRACEBACK, *FRAMES, "ValueError: unknown model type", "",
    ]  # fmt: skip
    assert diagnose(FAILED, tail).evidence == ("KeyError: 'gpt_x'", "ValueError: unknown model type")


def test_an_exception_without_words_shows_what_raised_it() -> None:
    tail = [TRACEBACK, *FRAMES[:1], "    assert heads % ranks == 0", "           ^^^^^^", "AssertionError"]
    assert diagnose(FAILED, tail).evidence == (FRAMES[0], tail[2], "AssertionError")


def test_a_message_of_two_lines_is_whole() -> None:
    tail = [
        TRACEBACK,
        *FRAMES,
        "RuntimeError: Error(s) in loading state_dict:",
        "\tsize mismatch for x",
        LAST,
    ]
    assert diagnose(FAILED, tail).evidence == tuple(tail[3:5])


def test_an_exception_of_any_name_ends_a_traceback() -> None:
    tail = [TRACEBACK, *FRAMES, "torch._dynamo.exc.Unsupported: call to f", LAST]
    assert diagnose(FAILED, tail).evidence == ("torch._dynamo.exc.Unsupported: call to f",)


def test_where_the_log_of_the_worker_is_lost_the_executor_quotes_it() -> None:
    quote = "RuntimeError: Worker failed with error 'bad shape', please check the stack trace above for the root cause"
    tail = [*logged("EngineCore pid=2", *FRAMES, quote), TRACEBACK, *FRAMES, quote, TRACEBACK, *FRAMES, LAST]
    assert diagnose(FAILED, tail).evidence == (tail[2],)


def test_what_a_client_caused_long_before_the_end_is_no_evidence() -> None:
    old = logged("APIServer pid=1", TRACEBACK, *FRAMES, "ValueError: a client's mistake")
    end = logged(
        "EngineCore pid=2", "EngineCore encountered a fatal error.", TRACEBACK, *FRAMES, "TypeError: ours"
    )
    assert diagnose(FAILED, [*old, *end], served=True).evidence == (end[-1],)
    late = [TRACEBACK, *FRAMES, "IndexError: at the end"]
    assert diagnose(FAILED, [*old, *late], served=True).evidence == ("IndexError: at the end",)


# --- Whole logs of public reports: the cause, whether it is tried again, and the telling line. ---


@pytest.mark.parametrize("name", reported.NUMACTL_SAYS)
def test_numactls_usage_text_hides_no_line_of_libnuma(name: str) -> None:
    """numactl/numactl#259: a usage text of 30 lines follows, then the set that was asked for."""
    lines = reported.numactl_log(name)
    cause = diagnose(FAILED, lines)
    assert (cause.name, cause.retry) == ("node-missing", Retry.NEVER)
    assert cause.evidence == (lines[0],)
    assert diagnose(FAILED, lines[-20:]).name == "node-missing", "libnuma's line is out of the window"


@pytest.mark.parametrize(
    ("name", "cause", "retry", "evidence"),
    [
        ("device", "wrong-build", Retry.NEVER, "Failed to infer device type"),
        ("cuda", "wrong-build", Retry.NEVER, "libcudart.so.12"),
        ("glibcxx", "library-too-old", Retry.NEVER, "GLIBCXX_3.4.32"),
        ("no-space", "no-space", Retry.BACKOFF, "/psm_3fa9c2"),
        ("preload", "node-oom", Retry.BACKOFF, "DefaultCPUAllocator"),
    ],
)
def test_starts_that_end_have_a_cause_and_a_remedy(
    name: str, cause: str, retry: Retry, evidence: str
) -> None:
    found = diagnose(FAILED, reported.START_LOGS[name].splitlines())
    assert (found.name, found.retry) == (cause, retry)
    assert len(found.evidence) == 1
    assert evidence in found.evidence[0]
    assert "read numa-launcher logs" not in found.remedy
