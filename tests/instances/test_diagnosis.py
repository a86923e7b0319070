"""Last words of real engines, and what becomes of them."""

from __future__ import annotations

import pytest

from launcher.engines.containers import OOM_LINE
from launcher.instances.diagnosis import RULES, UNIT_OOM, Retry, diagnose, failed_start, hung, hung_or_dead
from launcher.instances.ports import Exit
from launcher.machine.oom import KernelReport, NodeMemory

FAILED = Exit(code=1, signal=None)

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
        Retry.NEVER,
    ),
    (
        "model-not-found",
        "ValueError: Invalid repository ID or local directory specified: '/srv/none'.",
        Retry.NEVER,
    ),
    (
        "model-not-found",
        "OSError: /srv/m does not appear to have a file named config.json. Checkout 'https://huggingface.co//srv/m/tree/main'",
        Retry.NEVER,
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


@pytest.mark.parametrize(("name", "line", "retry"), [case for case in LINES if case[2] is Retry.NEVER])
def test_an_instance_that_was_ready_may_always_restart(name: str, line: str, retry: Retry) -> None:
    """One client's bad request makes vLLM print "Value error"; its later crash has another reason."""
    assert diagnose(FAILED, [line], served=True).retry is not Retry.NEVER
    assert diagnose(Exit(None, 9), [line, "exit code: -9"], served=True).name == "node-oom"


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
