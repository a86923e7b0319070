"""Why instances end: the causes as data, each with its log lines, its remedy, and whether to restart.

The first rule whose pattern is found in the log tail wins, so root causes stand before what follows from them.
Lines are those of real vLLM 0.32 (tests/instances/recorded holds them) and of numactl 2.0. Rules that forbid
a restart speak of the configuration: they apply only to an instance that was never ready.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from launcher.base.redaction import Redactor

# Stands for the cause while processes of the instance still end: freeing hundreds of GiB takes seconds.
EXITED: Final = "exited"


class Retry(StrEnum):
    NOW = "now"
    """At once, the first time; after that as `BACKOFF`."""
    SOON = "soon"
    """After a fixed pause, and counted as no crash: the daemon itself lacked what a start takes, or the model's files are
    away."""
    BACKOFF = "back-off"
    NEVER = "never until changed"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an instance ended unrequested."""

    name: str
    message: str
    remedy: str
    retry: Retry
    evidence: tuple[str, ...] = ()
    """Lines that prove it: from its log or the kernel's, or measured."""

    def of_slot(self, slot: int) -> Cause:
        """With a remedy that can be typed as it stands."""
        return replace(self, remedy=self.remedy.replace(" SLOT", f" {slot}"))

    def masked(self, redactor: Redactor) -> Cause:
        """Without the secrets that an instance printed, or that an error quotes: it is shown to all who may read."""
        text = redactor.text
        return replace(self, message=text(self.message), evidence=tuple(map(text, self.evidence)))


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause and how to know it by a log line."""

    name: str
    pattern: re.Pattern[str] | None
    """None: not found in the log, but by the kernel or the probes."""
    message: str
    remedy: str
    retry: Retry
    starting: bool = False
    """It concerns the start: an instance that was ready did not end for it."""

    def cause(self, detail: str, evidence: tuple[str, ...]) -> Cause:
        """This cause with its evidence. `detail` goes into brackets behind the message."""
        message = f"{self.message} ({detail})" if detail else self.message
        return Cause(self.name, message, self.remedy, self.retry, evidence)


def _rule(
    name: str, pattern: str | None, message: str, remedy: str, retry: Retry, *, starting: bool = False
) -> Rule:
    compiled = re.compile(pattern) if pattern else None
    return Rule(name, compiled, message, remedy, retry, starting or retry is Retry.NEVER)


# A worker's, the engine core's and any other process's end, as in vllm/v1/executor/multiproc_executor.py,
# v1/engine/utils.py ("Failed core proc(s): {'EngineCore_DP0': -9}") and v1/utils.py.
_DIED: Final = r"(?:exit code:? |Failed core proc\(s\): \{.*': )"
KILLED_CHILD: Final = re.compile(rf"{_DIED}-9\b")
"""A process below the main one ended by SIGKILL: by the kernel's out-of-memory killer, or by a user."""

# Messages of Python's own exceptions; a logged warning quotes them as ImportError('...').
_UNIMPORTABLE: Final = r"(?:Import|ModuleNotFound|OS|Attribute|Runtime)Error: "
# Libraries of accelerators (CUDA, ROCm, oneAPI), and torch's own that link to them.
_ACCELERATOR: Final = (
    r"lib(?:cu(?:da|dart|blas|blasLt|dnn|fft|file|pti|rand|solver|sparse|sparseLt)|nccl|nvrtc|nvJitLink|nvToolsExt|nvshmem"
    r"|nvidia-ml|amdhip64|hip(?:blas|blaslt|fft|rand|solver|sparse)|roc(?:blas|fft|rand|solver|sparse|m_smi64)|rccl|MIOpen"
    r"|hsa-runtime64|roctx64|amd_smi|ze_loader|sycl|ur_loader|OpenCL|(?:torch|c10)_(?:cuda|hip|xpu))\b[\w.+-]*"
)

START_FAILED: Final = re.compile(r"EngineCore failed to start|Engine core initialization failed")
"""After this line vLLM 0.32 ends; where its worker has swallowed its own exit, it hangs instead."""

ENGINE_DIED: Final = re.compile(r"died unexpectedly|EngineDeadError|Engine core proc \S+ died")
"""A process below the main one ended by itself. vLLM 0.32 then ends in good order, with exit code 0."""

_NODE_MISSING: Final = "numactl does not know the cpus or node of this slot"
_NODE_MISSING_REMEDY: Final = "run `numa-launcher topology`; restart the daemon if the machine has changed"
_CPU_BUILD: Final = (
    "install vLLM's CPU build and the torch that it was built for (scripts/quickstart, or pip install "
    "'numa-launcher[vllm]'); `numa-launcher doctor` shows both"
)

RULES: Final[tuple[Rule, ...]] = (
    _rule(
        "kv-too-large", r"on kv cache allocation is less than requested memory for kv",
        "the node has less free memory than the KV cache wants",
        "lower memory.kv_cache, or free memory on the node", Retry.BACKOFF,
    ),
    _rule(
        "memory-utilization", r"on startup is less than desired CPU memory utilization",
        "the node has less free memory than vLLM's --gpu-memory-utilization wants",
        "free memory on the node, or set memory.kv_cache and no --gpu-memory-utilization in engine.args",
        Retry.BACKOFF,
    ),
    _rule(
        "kv-too-small",
        r"(?:KV +cache is needed, which is larger than the available KV cache memory"
        r"|No available memory for the cache blocks)",
        "the KV cache cannot hold one request of max_model_len",
        "raise memory.kv_cache or lower max_model_len", Retry.NEVER,
    ),
    _rule(
        "no-space",
        # Python's multiprocessing (psm_, mp-, sem.) and torch (torch_PID_N) name their segments so; shm_open(3).
        r"(?:(?:No space left on device|\[Errno 28\]).*(?:['\"]/(?:psm_|mp-|sem\.|torch_)|/dev/shm)"
        r"|</?(?:dev/shm/)?torch_\w+>.*No space left on device|/dev/shm\b.*(?:No space left on device|\[Errno 28\]))",
        "shared memory (/dev/shm) is full",
        "enlarge it: mount -o remount,size=16G /dev/shm, or --shm-size of the container; delete what dead processes left",
        Retry.BACKOFF,
    ),
    _rule(
        "no-space", r"(?:No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|\bENOSPC\b)",
        "a file system or its quota is full",
        "free space where the line below says: engine.cache_dir (compile caches), /tmp, or the folder of the model",
        Retry.BACKOFF,
    ),
    _rule(
        "freezing-aot-crash", r"expected OutputCode, got <class 'function'>",
        "TORCHINDUCTOR_FREEZING=1 met vLLM's ahead-of-time compile",
        "set VLLM_USE_AOT_COMPILE=0 in engine.env", Retry.NEVER,
    ),
    _rule(
        "gated-model-needs-token",
        r"(?:GatedRepoError|You are trying to access a gated repo|401 Client Error: Unauthorized)",
        "the model is gated on the hub",
        "put a token that may read it into engine.hf_token_file", Retry.NEVER,
    ),
    _rule(
        "unsupported-version",
        r"(?:but Transformers does not recognize this architecture|Model architectures \[.*\] are not supported"
        r"|was supported in vLLM until|requires (?:transformers|torch)[ <>=]+[0-9]"
        r"|Unsupported (?:torch|Python) version)",
        "the installed vLLM or Transformers does not know this model",
        "install the vLLM version that the model's card names, or serve another model", Retry.NEVER,
    ),
    _rule(
        "model-not-found",
        r"(?:Repo id must be in the form|RepositoryNotFoundError|does not appear to have a file named config\.json"
        r"|Can't load the configuration of|is not a local folder and is not a valid model identifier"
        r"|Invalid repository ID or local directory specified|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|Cannot find any model weights with)",
        "the model was not found",
        "check the model's path and its mount, or download it first", Retry.BACKOFF, starting=True,
    ),
    _rule(
        "model-damaged", r"(?:SafetensorError|PytorchStreamReader failed)",
        "the model's files are damaged",
        "download the model again, and compare its checksums", Retry.NEVER,
    ),
    _rule(
        "bad-argument",
        r"(?:error: unrecognized arguments:|error: argument .*: (?:invalid|expected)|error: the following arguments)",
        "the engine does not know one of its arguments",
        "correct engine.args; `numa-launcher plan --shell` prints the whole line", Retry.NEVER,
    ),
    _rule(
        # libnuma.c: "is" for the first number of an item, none for the end of a range; the rest of the list may follow.
        "node-missing", r"(?:node|cpu) argument \S+ (?:is )?out of range",
        _NODE_MISSING, _NODE_MISSING_REMEDY, Retry.NEVER,
    ),
    _rule(
        "node-missing",
        # numactl where libnuma's line is lost; taskset and numactl at a cpu outside the cpuset; docker's daemon.
        r"(?:^<[\d,+!-]+> is invalid$|failed to set pid \d+'s affinity: Invalid argument"
        r"|sched_setaffinity: Invalid argument|Requested (?:CPUs|memory nodes) are not available)",
        _NODE_MISSING, _NODE_MISSING_REMEDY, Retry.NEVER,
    ),
    _rule(
        "port-or-socket-in-use", r"(?:\[Errno 98\]|[Aa]ddress already in use)",
        "the instance's socket or port is in use",
        "find who holds it (ss -lxp); the next start uses a new one", Retry.BACKOFF,
    ),
    _rule(
        "not-permitted", r"\[Errno 13\]",
        "the instance may not use its socket, port or files",
        "check owner and mode of the run and cache folders", Retry.NEVER,
    ),
    _rule(
        "image-missing",
        # podman, then docker, with --pull=never.
        r"(?:^Error: .*: image not known|No such image: |Unable to find image ')",
        "the container's image is not on this host",
        "pull it, or correct engine.image",
        Retry.NEVER,
    ),
    _rule(
        "command-not-found",
        # numactl, taskset, and our own shim (shim.py); a container's init: podman's, then docker's; the client's code.
        r"(?:(?:execution of|failed to execute|cannot execute|failed to exec) .*: "
        r"(?:No such file or directory|Permission denied)"
        r"|FATAL tini .* exec .* failed|^numa-launcher: \w+ ended with 12[67]:)",
        "the engine's command can't be executed",
        "correct engine.command",
        Retry.NEVER,
    ),
    _rule(
        "container-not-started", r"^numa-launcher: \w+ ended with 125:",
        "podman or docker could not start the container",
        "read its line in `numa-launcher logs SLOT`; `numa-launcher plan --shell` prints the command to try",
        Retry.BACKOFF,
    ),
    _rule(
        "missing-instruction-set",
        # The second is Python's faulthandler's: vLLM itself often sees no exit code ("exit code: None").
        rf"(?:{_DIED}-4\b|Fatal Python error: Illegal instruction|Illegal instruction|SIGILL)",
        "the engine used an instruction this CPU does not have",
        'use a build for this CPU, or dtype = "float32"',
        Retry.NEVER,
    ),
    _rule(
        "native-crash",
        # Last torch's own handler (c10/util/signal_handler): it speaks before Python's, and then alone.
        rf"(?:{_DIED}-(?:6|7|8|11)\b|Fatal Python error: (?:Segmentation fault|Bus error|Aborted|Floating)"
        r"|!!!!!!! Segfault encountered !!!!!!!)",
        "the engine crashed in native code",
        "read the stack: `numa-launcher logs SLOT` or `coredumpctl info`; a bus error in a container: more /dev/shm",
        Retry.BACKOFF,
    ),
    _rule(
        "node-oom",
        r"(?:Cannot allocate memory|MemoryError|DefaultCPUAllocator: can't allocate memory|std::bad_alloc)",
        "the node ran out of memory",
        "lower memory.kv_cache or the number of instances", Retry.BACKOFF,
    ),
    _rule(
        "wrong-build",
        # vllm/config/device.py and platforms/__init__.py; torch without a device; PyTorch's dispatcher for operators of
        # a library (vllm._C) that did not load.
        r"(?:Failed to infer device type|Device string must not be empty"
        rf"|{_UNIMPORTABLE}(?:.*[ /])?{_ACCELERATOR}: cannot open shared object file"
        r"|Torch not compiled with (?:CUDA|XPU) enabled|Found no NVIDIA driver|No (?:CUDA|HIP|XPU) GPUs are available"
        r"|no CUDA-capable device is detected|'_OpNamespace' '_(?:moe_)?C\w*' object has no attribute"
        rf"|{_UNIMPORTABLE}No module named 'vllm\._\w*C\w*')",
        "the installed vLLM or torch is no CPU build", _CPU_BUILD, Retry.NEVER,
    ),
    _rule(
        "wrong-build",
        rf"(?:{_UNIMPORTABLE}(?!.*(?:zentorch|inductor)).*: undefined symbol: |operator torchvision::\w+ does not exist)",
        "a library of the engine was built for another torch", _CPU_BUILD, Retry.NEVER,
    ),
    _rule(
        "library-too-old", r"version `(?:GLIBC|GLIBCXX|CXXABI|GCC|GOMP)_[\d.]+' not found",
        "a library of this system is older than the engine's build needs",
        "build vLLM on this system, run it in a container (engine.image), or update the distribution; conda's libstdc++ "
        "serves for GLIBCXX and CXXABI", Retry.NEVER,
    ),
    _rule(
        "library-missing",
        rf"(?:{_UNIMPORTABLE}(?!.*zentorch)|error while loading shared libraries: ).*: cannot open shared object file",
        "a shared library of the engine is missing",
        "install the package with that library, or correct LD_LIBRARY_PATH in engine.env", Retry.NEVER,
    ),
    _rule(
        # vLLM looks at a model's class in a process of its own, which fails for any of the causes above, too.
        "unsupported-version", r"Model architectures \[.*\] failed to be inspected",
        "the installed vLLM or Transformers does not know this model",
        "install the vLLM version that the model's card names, or serve another model", Retry.NEVER,
    ),
    _rule(
        "bad-argument", r"pydantic_core\._pydantic_core\.ValidationError|Value error, ",
        "vLLM refuses its configuration",
        "read the log line below it, and correct [[models]] or engine.args", Retry.NEVER,
    ),
    _rule(
        "zentorch-mismatch",
        # Checked last: vLLM 0.32 only warns and continues without it.
        # Messages of vLLM, of the older plugin, and of Python for a zentorch built for another torch.
        r"(?:zentorch failed to import|Unsupported vLLM version: .*Plugin supports versions"
        r"|ImportError: .*zentorch.*(?:undefined symbol|cannot open shared object)"
        r"|(?:zentorch|ZenTorch)\b.*(?:requires|built for|compiled (?:for|with|against)) .*torch)",
        "zentorch does not fit this torch or vLLM",
        "install the zentorch that is named after the torch here (`numa-launcher doctor` shows both)",
        Retry.NEVER,
    ),
    _rule(
        "compile-cache-corrupt",
        # torch/_inductor/codecache.py, vllm/compilation/compiler_interface.py. vLLM 0.32 itself compiles again where
        # it finds a damaged file, so this is checked only where nothing else explains the exit.
        r"(?:torch/_inductor/codecache\.py.*(?:UnpicklingError|EOFError|Error)|vllm_compile_cache\.py.*Error"
        r"|torch_compile_cache.*Error|\.so: (?:file too short|invalid ELF header)"
        r"|failed, leading to a corrupted compilation artifact)",
        "the slot's compile cache is damaged",
        "none needed: the slot's cache is emptied before the next start, which compiles again",
        Retry.NOW,
        starting=True,
    ),
    _rule(
        "cgroup-oom", None,
        "the memory limit of its cgroup was reached, and the kernel ended it",
        "raise the unit's or container's memory limit, or lower memory.kv_cache", Retry.BACKOFF,
    ),
    _rule(
        "killed-by-operator", None,
        "a user or process sent it a signal",
        "none needed: it starts again; `numa-launcher hold SLOT` keeps a slot stopped", Retry.NOW,
    ),
    _rule(
        "hung", None,
        "it had work and made no progress",
        "read the evidence; `numa-launcher quarantine SLOT` keeps one running for inspection (py-spy dump --pid PID)",
        Retry.NOW,
    ),
    _rule(
        "unhealthy", None,
        "its health path no longer answers 200",
        "read `numa-launcher logs SLOT`; it is being restarted", Retry.BACKOFF,
    ),
    _rule("unknown", None, "ended by itself", "read `numa-launcher logs SLOT`", Retry.BACKOFF),
)  # fmt: skip


CAUSES: Final = tuple(dict.fromkeys([*(each.name for each in RULES), "not-ready-in-time", "cannot-start"]))
"""Every name that a cause may have."""


def rule(name: str) -> Rule:
    """The last rule of a name: where a cause has several, the general one."""
    return next(found for found in reversed(RULES) if found.name == name)
