"""Causes of an instance's end as data: each with its log lines, its remedy, and whether to restart.

Here are those that any server has. An engine's own table (`engines.log.EngineLog.causes`) puts them between its own:
the first rule whose pattern is found in the log tail wins, so root causes stand before what follows from them.
Rules that forbid a restart speak of the configuration: they apply only to an instance that was never ready.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.redaction import Redactor


class Retry(StrEnum):
    NOW = "now"
    """At once, the first time; after that as `BACKOFF`."""
    SOON = "soon"
    """After a fixed pause, and counted as no crash: the daemon itself lacked what a start takes, or the model's files are
    away."""
    BACKOFF = "back-off"
    NEVER = "never until changed"


class Cause(Struct, frozen=True):
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


class Rule(Struct, frozen=True):
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


def rule(
    name: str, pattern: str | None, message: str, remedy: str, retry: Retry, *, starting: bool = False
) -> Rule:
    """A rule for lines that contain `pattern`, a regular expression."""
    compiled = re.compile(pattern) if pattern else None
    return Rule(name, compiled, message, remedy, retry, starting or retry is Retry.NEVER)


DIED: Final = r"exit code:? "
"""Before the number in a line about the end of a process below the main one."""
# Messages of Python's own exceptions; a logged warning quotes them as ImportError('...').
UNIMPORTABLE: Final = r"(?:Import|ModuleNotFound|OS|Attribute|Runtime)Error: "
# Libraries of accelerators (CUDA, ROCm, oneAPI), and torch's own that link to them.
ACCELERATOR: Final = (
    r"lib(?:cu(?:da|dart|blas|blasLt|dnn|fft|file|pti|rand|solver|sparse|sparseLt)|nccl|nvrtc|nvJitLink|nvToolsExt|nvshmem"
    r"|nvidia-ml|amdhip64|hip(?:blas|blaslt|fft|rand|solver|sparse)|roc(?:blas|fft|rand|solver|sparse|m_smi64)|rccl|MIOpen"
    r"|hsa-runtime64|roctx64|amd_smi|ze_loader|sycl|ur_loader|OpenCL|(?:torch|c10)_(?:cuda|hip|xpu))\b[\w.+-]*"
)

_NODE_MISSING: Final = "numactl does not know the cpus or node of this slot"
_NODE_MISSING_REMEDY: Final = "run `numa-launcher topology`; restart the daemon if the machine has changed"

NO_SPACE: Final[tuple[Rule, ...]] = (
    rule(
        "no-space",
        # Python's multiprocessing (psm_, mp-, sem.) and torch (torch_PID_N) name their segments so; shm_open(3).
        r"(?:(?:No space left on device|\[Errno 28\]).*(?:['\"]/(?:psm_|mp-|sem\.|torch_)|/dev/shm)"
        r"|</?(?:dev/shm/)?torch_\w+>.*No space left on device|/dev/shm\b.*(?:No space left on device|\[Errno 28\]))",
        "shared memory (/dev/shm) is full",
        "enlarge it: mount -o remount,size=16G /dev/shm, or --shm-size of the container; delete what dead processes left",
        Retry.BACKOFF,
    ),
    rule(
        "no-space", r"(?:No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|\bENOSPC\b)",
        "a file system or its quota is full",
        "free space where the line below says: engine.cache_dir (compile caches), /tmp, or the folder of the model",
        Retry.BACKOFF,
    ),
)  # fmt: skip

GATED: Final = rule(
    "gated-model-needs-token",
    r"(?:GatedRepoError|You are trying to access a gated repo|401 Client Error: Unauthorized)",
    "the model is gated on the hub",
    "put a token that may read it into engine.hf_token_file",
    Retry.NEVER,
)

UNSUPPORTED: Final = rule(
    "unsupported-version",
    r"(?:but Transformers does not recognize this architecture|requires (?:transformers|torch)[ <>=]+[0-9])",
    "the installed Transformers or engine does not know this model",
    "install the version that the model's card names, or serve another model", Retry.NEVER,
)  # fmt: skip

MODEL_NOT_FOUND: Final = rule(
    "model-not-found",
    r"(?:Repo id must be in the form|RepositoryNotFoundError|does not appear to have a file named config\.json"
    r"|Can't load the configuration of|is not a local folder and is not a valid model identifier"
    r"|LocalEntryNotFoundError|OfflineModeIsEnabled)",
    "the model was not found",
    "check the model's path and its mount, or download it first", Retry.BACKOFF, starting=True,
)  # fmt: skip

MODEL_DAMAGED: Final = rule(
    "model-damaged",
    r"(?:SafetensorError|PytorchStreamReader failed)",
    "the model's files are damaged",
    "download the model again, and compare its checksums",
    Retry.NEVER,
)

AT_START: Final[tuple[Rule, ...]] = (
    rule(
        "bad-argument",
        r"(?:error: unrecognized arguments:|error: argument .*: (?:invalid|expected)|error: the following arguments)",
        "the engine does not know one of its arguments",
        "correct engine.args; `numa-launcher plan --shell` prints the whole line", Retry.NEVER,
    ),
    rule(
        # libnuma.c: "is" for the first number of an item, none for the end of a range; the rest of the list may follow.
        "node-missing", r"(?:node|cpu) argument \S+ (?:is )?out of range",
        _NODE_MISSING, _NODE_MISSING_REMEDY, Retry.NEVER,
    ),
    rule(
        "node-missing",
        # numactl where libnuma's line is lost; taskset and numactl at a cpu outside the cpuset; docker's daemon.
        r"(?:^<[\d,+!-]+> is invalid$|failed to set pid \d+'s affinity: Invalid argument"
        r"|sched_setaffinity: Invalid argument|Requested (?:CPUs|memory nodes) are not available)",
        _NODE_MISSING, _NODE_MISSING_REMEDY, Retry.NEVER,
    ),
    rule(
        "port-or-socket-in-use", r"(?:\[Errno 98\]|[Aa]ddress already in use)",
        "the instance's socket or port is in use",
        "find who holds it (ss -lxp); the next start uses a new one", Retry.BACKOFF,
    ),
    rule(
        "not-permitted", r"\[Errno 13\]",
        "the instance may not use its socket, port or files",
        "check owner and mode of the run and cache folders", Retry.NEVER,
    ),
    rule(
        "image-missing",
        # podman, then docker, with --pull=never.
        r"(?:^Error: .*: image not known|No such image: |Unable to find image ')",
        "the container's image is not on this host",
        "pull it, or correct engine.image",
        Retry.NEVER,
    ),
    rule(
        # A path, as every command of the host is: what it lies on may be a mount that is away. A container's init has none.
        "command-not-found",
        r"(?:execution of|failed to execute|cannot execute) .*/.*: No such file or directory",
        "the engine's command is not there",
        "mount what it lies on, or correct engine.command", Retry.BACKOFF, starting=True,
    ),
    rule(
        "command-not-found",
        # numactl, taskset, and our own shim (shim.py); a container's init: podman's, then docker's; the client's code.
        r"(?:(?:execution of|failed to execute|cannot execute|failed to exec) .*: "
        r"(?:No such file or directory|Permission denied)"
        r"|FATAL tini .* exec .* failed|^numa-launcher: \w+ ended with 12[67]:)",
        "the engine's command can't be executed",
        "correct engine.command",
        Retry.NEVER,
    ),
    rule(
        "container-not-started", r"^numa-launcher: \w+ ended with 125:",
        "podman or docker could not start the container",
        "read its line in `numa-launcher logs SLOT`; `numa-launcher plan --shell` prints the command to try",
        Retry.BACKOFF,
    ),
)  # fmt: skip
"""Causes of a start that ends before the engine has looked at its model: arguments, numactl, addresses, containers."""


def crashes(died: str = DIED) -> tuple[Rule, ...]:
    """Faults of the hardware's or memory's kind. `died`: the words before an exit code, as `DIED`."""
    return (
        rule(
            "missing-instruction-set",
            # The second is Python's faulthandler's: vLLM itself often sees no exit code ("exit code: None").
            rf"(?:{died}-4\b|Fatal Python error: Illegal instruction|Illegal instruction|SIGILL)",
            "the engine used an instruction this CPU does not have",
            'use a build for this CPU (llama.cpp: scripts/build-llama-server) or, with vLLM, dtype = "float32"',
            Retry.NEVER,
        ),
        rule(
            "native-crash",
            # Last torch's own handler (c10/util/signal_handler): it speaks before Python's, and then alone.
            rf"(?:{died}-(?:6|7|8|11)\b|Fatal Python error: (?:Segmentation fault|Bus error|Aborted|Floating)"
            r"|!!!!!!! Segfault encountered !!!!!!!)",
            "the engine crashed in native code",
            "read the stack: `numa-launcher logs SLOT` or `coredumpctl info`; a bus error in a container: more /dev/shm",
            Retry.BACKOFF,
        ),
        rule(
            "node-oom",
            r"(?:Cannot allocate memory|MemoryError|DefaultCPUAllocator: can't allocate memory|std::bad_alloc)",
            "the node ran out of memory",
            "lower memory.kv_cache or the number of instances", Retry.BACKOFF,
        ),
    )  # fmt: skip


CRASHES: Final = crashes()

NO_CPU_BUILD: Final = rule(
    "wrong-build",
    # torch without a device.
    rf"(?:{UNIMPORTABLE}(?:.*[ /])?{ACCELERATOR}: cannot open shared object file"
    r"|Torch not compiled with (?:CUDA|XPU) enabled|Found no NVIDIA driver|No (?:CUDA|HIP|XPU) GPUs are available"
    r"|no CUDA-capable device is detected)",
    "the installed torch or engine is no CPU build", "install a build for CPUs", Retry.NEVER,
)  # fmt: skip

LIBRARY_TOO_OLD: Final = rule(
    "library-too-old",
    r"version `(?:GLIBC|GLIBCXX|CXXABI|GCC|GOMP)_[\d.]+' not found",
    "a library of this system is older than the engine's build needs",
    "build vLLM on this system, run it in a container (engine.image), or update the distribution; conda's libstdc++ "
    "serves for GLIBCXX and CXXABI",
    Retry.NEVER,
)


def library_missing(but: str = r"(?!)") -> Rule:
    """`but`: libraries without which the engine runs, as a regular expression."""
    return rule(
        "library-missing",
        rf"(?:{UNIMPORTABLE}(?!.*{but})|error while loading shared libraries: ).*: cannot open shared object file",
        "a shared library of the engine is missing",
        "install the package with that library, or correct LD_LIBRARY_PATH in engine.env", Retry.NEVER,
    )  # fmt: skip


PLAIN: Final[tuple[Rule, ...]] = (
    *NO_SPACE, GATED, UNSUPPORTED, MODEL_NOT_FOUND, MODEL_DAMAGED, *AT_START, *CRASHES, NO_CPU_BUILD, LIBRARY_TOO_OLD,
    library_missing(),
)  # fmt: skip
"""The table of an engine that is not known."""
