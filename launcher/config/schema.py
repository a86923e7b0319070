"""The configuration: one frozen schema for the file, the environment, flags and documentation.

Every key carries its description: docs/configuration.md and the remedies for wrong values are generated
from it. Durations end in `_s` (seconds). Sizes end in `_bytes` or are text such as "40GiB".
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import field
from msgspec.structs import force_setattr

from launcher.base.errors import LauncherError
from launcher.base.text import parse_size
from launcher.config.proxy_schema import Overflow, Proxy
from launcher.config.usage_schema import Audit, Cost, Telemetry, Usage
from launcher.config.values import (
    EngineKind,
    LogFormat,
    NonNegativeInt,
    Policy,
    PositiveInt,
    Runtime,
    Seconds,
    Section,
    SpawnerKind,
    Strategy,
    doc,
)

__all__ = [
    "Audit", "Config", "Control", "Cost", "Engine", "EngineKind", "Layout", "LogFormat", "Logging", "Memory", "Model",
    "Overflow", "Policy", "Proxy", "Runtime", "Section", "SpawnerKind", "Strategy", "Supervision",
    "Systemd", "Telemetry", "Usage",
]  # fmt: skip


class Model(Section, frozen=True):
    """One `[[models]]` entry: a model and the part of the machine that serves it."""

    name: Annotated[str, doc("Name that clients send in `model`.", min_length=1)]
    path: Annotated[
        str,
        doc(
            "Model directory, or a Hugging Face repository id; for llama.cpp a GGUF file, or a directory with one model in "
            "GGUF.",
            min_length=1,
        ),
    ]
    aliases: Annotated[
        tuple[str, ...], doc("Other names that clients may send in `model`; /v1/models lists them, too.")
    ] = ()
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        doc("Type of weights and computation. AMD Zen computes in bfloat16 and float32 only."),
    ] = "bfloat16"
    max_model_len: Annotated[
        PositiveInt | None, doc("Longest prompt and response together, in tokens. Default: the model's own.")
    ] = None
    max_num_seqs: Annotated[
        PositiveInt, doc("Requests that an instance runs at once; also limits the KV cache it can use.")
    ] = 64
    max_num_batched_tokens: Annotated[
        PositiveInt | None, doc("Tokens in one engine step. Default: vLLM's.")
    ] = None
    block_size: Annotated[
        PositiveInt | None, doc("Tokens per KV cache block; a multiple of 32 on CPUs. Default: vLLM's, 128.")
    ] = None
    quantization: Annotated[
        Literal["awq", "gptq", "compressed-tensors"] | None,
        doc("Quantization of the checkpoint. Default: as in its config.json."),
    ] = None
    tensor_parallel_size: Annotated[
        PositiveInt | Literal["auto"],
        doc(
            'Ranks of one instance; its cores are divided into one cpu list per rank. "auto": 1 where an instance fits '
            "on a NUMA node, else the fewest with which it fits on as many nodes, each rank on one."
        ),
    ] = "auto"
    weight_prepack: Annotated[
        bool | None,
        doc(
            "ZenTorch weight prepacking (VLLM_ZENTORCH_WEIGHT_PREPACK). Default: vLLM's, true. false is refused for "
            "models with tied embeddings, which ZenTorch would then overwrite."
        ),
    ] = None
    trust_remote_code: Annotated[bool, doc("Run Python code that the model directory contains.")] = False
    sockets: Annotated[
        tuple[NonNegativeInt, ...] | None, doc("Serve on these CPU sockets only. Default: all.")
    ] = None
    nodes: Annotated[
        tuple[NonNegativeInt, ...] | None, doc("Serve on these NUMA nodes only. Default: all.")
    ] = None


class Layout(Section, frozen=True):
    """`[layout]`: how cores are divided among instances."""

    strategy: Annotated[
        Strategy, doc("How cores are divided: interleaved, contiguous, l3-aligned or per-node.")
    ] = Strategy.INTERLEAVED
    instances_per_socket: Annotated[
        PositiveInt | Literal["auto"],
        doc('Instances per socket. "auto": one per 64 cores of a NUMA node, rounded up.'),
    ] = "auto"
    reserve_cores: Annotated[
        NonNegativeInt | Literal["auto"],
        doc(
            "Cores of the whole machine reserved for the proxy and the operating system, taken from the ends of the NUMA "
            'nodes in turn. "auto": 1 per 64 cores; none on machines with fewer than 16.'
        ),
    ] = "auto"
    cpus: Annotated[
        str | None, doc('Use only these cpus: a list such as "0-63,128-191". Default: all allowed cpus.')
    ] = None
    use_smt: Annotated[bool, doc("Also use the SMT siblings of each core.")] = False
    span_nodes: Annotated[
        bool,
        doc(
            "Allow an instance to span several NUMA nodes: the ranks of tensor_parallel_size each get nodes of their own, "
            'and fewer instances_per_socket than nodes are placed. Not needed for tensor_parallel_size = "auto".'
        ),
    ] = False


_PROGRAMS: Final = {
    EngineKind.VLLM: ("vllm",),
    EngineKind.LLAMA_CPP: ("llama-server",),
}


class Engine(Section, frozen=True):
    """`[engine]`: what an instance runs."""

    kind: Annotated[
        EngineKind, doc('"vllm", "llama.cpp", or "command" for any OpenAI-compatible server.')
    ] = EngineKind.VLLM
    command: Annotated[
        tuple[str, ...],
        doc(
            'kind = "vllm" or "llama.cpp": the command that starts the engine; default: "vllm", "llama-server", '
            "or without one the server of the wheel xllamacpp. "
            'kind = "command": the complete command line; {uds} or {port}, '
            "{cpus}, {threads} (number of cpus), {slot}, {model} and {name} are filled in.",
            min_length=1,
        ),
    ] = ()
    args: Annotated[
        tuple[str, ...],
        doc("Arguments added to the engine's command line; they replace arguments of the same name."),
    ] = ()
    env: Annotated[
        dict[str, str],
        doc(
            "Environment variables of the instances; they replace the launcher's own.",
            examples=[{"NAME": "value"}],
        ),
    ] = field(default_factory=dict)
    hf_token_file: Annotated[
        str | None,
        doc("File with the Hugging Face token; passed to instances as HF_TOKEN, never on a command line."),
    ] = None
    numactl: Annotated[
        Literal["auto", "off"], doc('"off" starts instances without numactl, with no memory binding.')
    ] = "auto"
    tcmalloc: Annotated[
        str, doc('Preloaded libtcmalloc_minimal: "auto" (searched for), "off", or the path of the library.')
    ] = "auto"
    cache_dir: Annotated[
        str | None,
        doc(
            "Directory of the compile caches, one subdirectory per slot. Default: in /var/cache or ~/.cache."
        ),
    ] = None
    health_path: Annotated[str, doc("Path that answers 200 while the engine is healthy.", pattern="^/")] = (
        "/health"
    )
    runtime: Annotated[
        Runtime,
        doc(
            '"host", or "podman" or "docker" to run each instance in its own container (docs/containers.md).'
        ),
    ] = Runtime.HOST
    image: Annotated[str | None, doc("Container image of the instances. The launcher never pulls it.")] = None
    runtime_args: Annotated[
        tuple[str, ...],
        doc('Options added to `podman run` or `docker run`, such as "--volume=/srv:/srv:ro".'),
    ] = ()

    def __post_init__(self) -> None:
        if not self.command:
            force_setattr(self, "command", _PROGRAMS.get(self.kind, ()))

    @property
    def host_only(self) -> bool:
        """Its program and models are not found in containers yet."""
        return self.kind is EngineKind.LLAMA_CPP


class Memory(Section, frozen=True):
    """`[memory]`: memory of each NUMA node."""

    kv_cache: Annotated[
        str, doc('KV cache per instance: "auto" (the node\'s remaining memory) or a size such as "40GiB".')
    ] = "auto"
    reserve: Annotated[
        str,
        doc(
            'Memory kept free on each node for the kernel and page cache: a size, or "auto" (5 %, at most 8 GiB).'
        ),
    ] = "auto"
    instance_overhead: Annotated[
        str,
        doc(
            'Memory of one instance besides weights and KV cache (three processes, compiler): a size, or "auto".'
        ),
    ] = "auto"

    def size_of(self, key: str) -> int:
        """Bytes of a size among these. Raises LauncherError."""
        try:
            return parse_size(getattr(self, key))
        except ValueError as error:
            raise LauncherError(
                f"cannot use memory.{key}: {error}", f'set memory.{key} to "auto" or a size'
            ) from None


class Control(Section, frozen=True):
    """`[control]`: the operator's socket."""

    socket: Annotated[str, doc("Path of the UNIX socket.", min_length=1)] = "/run/numa-launcher/control.sock"
    group: Annotated[
        str | None,
        doc(
            "Group that may change state (socket mode 0660). This equals root: a reload accepts any configuration, "
            "commands included. Default: the daemon's own group."
        ),
    ] = None
    read_group: Annotated[
        str | None,
        doc(
            "Group that may only read. When set, any user can connect (socket mode 0666); permissions follow the peer's "
            "groups."
        ),
    ] = None


class Supervision(Section, frozen=True):
    """`[supervision]`: how instances are kept running. Durations are in seconds."""

    spawner: Annotated[
        SpawnerKind,
        doc(
            "systemd: instances are systemd units and keep running when the daemon ends. direct: instances are children "
            "of the daemon. auto: systemd where the daemon is a system service (an error if units cannot be started "
            "there), else direct."
        ),
    ] = SpawnerKind.AUTO
    ready_timeout_s: Annotated[
        Seconds, doc("Longest time for an instance to load, compile and answer one completion.")
    ] = 1800.0
    probe_interval_s: Annotated[Seconds, doc("Time between health probes of a ready instance.")] = 5.0
    probe_timeout_s: Annotated[Seconds, doc("Longest time for one health probe.")] = 10.0
    stall_timeout_s: Annotated[
        Seconds,
        doc(
            "An instance with requests and no progress for this long counts as hung; four times as long while its cpus "
            "are overloaded."
        ),
    ] = 120.0
    canary_interval_s: Annotated[
        Seconds, doc("An instance idle for this long is sent a request for one token.")
    ] = 300.0
    verify_interval_s: Annotated[
        Seconds, doc("Time between checks of where the threads and pages of a ready instance are.")
    ] = 300.0
    min_ready: Annotated[
        NonNegativeInt | None,
        doc(
            "Ready instances of a model that restart, drain, stop, hold and quarantine must leave, unless --force is "
            "given. Default: 1 for a model with two or more instances, else 0."
        ),
    ] = None
    drain_timeout_s: Annotated[
        Seconds, doc("Longest wait for requests in flight before a stop or restart.")
    ] = 300.0
    stop_timeout_s: Annotated[
        Seconds, doc("Time from SIGTERM to SIGKILL of all processes of an instance.")
    ] = 30.0
    backoff_initial_s: Annotated[
        Seconds, doc("Delay before the restart after a first crash; doubles with each further crash.")
    ] = 1.0
    backoff_max_s: Annotated[Seconds, doc("Longest delay before a restart.")] = 60.0
    crash_window_s: Annotated[Seconds, doc("Period over which crashes are counted.")] = 600.0
    crash_limit: Annotated[
        PositiveInt, doc("Crashes within crash_window_s after which a slot is failed.")
    ] = 5


class Systemd(Section, frozen=True):
    """`[systemd]`: the units of the instances, where systemd starts them."""

    user: Annotated[
        str,
        doc(
            'User that runs the instances, with the group of that name. "root" also disables the sandbox.',
            min_length=1,
        ),
    ] = "numa-launcher"
    slice: Annotated[str, doc("Slice of the units.", pattern=r"^[\w.:-]+\.slice$")] = "numa-launcher.slice"
    allowed_cpus: Annotated[
        bool,
        doc(
            "Also confine each unit by its cgroup to the cpus and memory nodes of its slot (AllowedCPUs=, "
            "AllowedMemoryNodes=). Its processes cannot leave them."
        ),
    ] = False
    memory_max: Annotated[
        str | None,
        doc(
            'MemoryMax= of each unit, such as "400GiB"; the kernel kills a unit that exceeds it. Default: no limit.'
        ),
    ] = None


class Logging(Section, frozen=True):
    """`[logging]`."""

    level: Annotated[Literal["debug", "info", "warning", "error"], doc("Lowest level that is logged.")] = (
        "info"
    )
    format: Annotated[LogFormat, doc("auto (journal under systemd, else text), journal or text.")] = (
        LogFormat.AUTO
    )
    tail_lines: Annotated[PositiveInt, doc("Log lines kept per instance for `logs`.")] = 2000


class Config(Section, frozen=True):
    """The whole file."""

    models: Annotated[tuple[Model, ...], doc("At least one `[[models]]` table.", min_length=1)]
    layout: Layout = Layout()
    engine: Engine = Engine()
    memory: Memory = Memory()
    proxy: Proxy = Proxy()
    control: Control = Control()
    supervision: Supervision = Supervision()
    systemd: Systemd = Systemd()
    logging: Logging = Logging()
    usage: Usage = Usage()
    cost: Cost = Cost()
    audit: Audit = Audit()
    telemetry: Telemetry = Telemetry()
