"""What the operator asked for: one frozen schema for the file, the environment, flags and docs.

Every field carries its description: docs/configuration.md and the remedies for wrong values are made
from here. Durations end in `_s` (seconds); sizes end in `_bytes`, or are text like "40GiB".
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

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
)

__all__ = [
    "Config", "Control", "Engine", "EngineKind", "Layout", "LogFormat", "Logging", "Memory", "Model", "Overflow", "Policy",
    "Proxy", "Runtime", "Section", "SpawnerKind", "Strategy", "Supervision", "Systemd",
]  # fmt: skip


class Model(Section, frozen=True):
    """One `[[models]]` entry: a model and the part of the machine that serves it."""

    name: Annotated[str, Meta(min_length=1, description="Name that clients send in `model`.")]
    path: Annotated[str, Meta(min_length=1, description="Model directory, or a Hugging Face repository id.")]
    aliases: Annotated[
        tuple[str, ...],
        Meta(description="Other names that clients may send for it; listed in /v1/models too."),
    ] = ()
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="Weight and compute type. AMD Zen computes bfloat16 and float32 only."),
    ] = "bfloat16"
    max_model_len: Annotated[
        PositiveInt | None, Meta(description="Longest prompt + answer, tokens. Default: the model's own.")
    ] = None
    max_num_seqs: Annotated[
        PositiveInt,
        Meta(description="Requests an instance runs at once; also bounds the KV cache it can use."),
    ] = 64
    max_num_batched_tokens: Annotated[
        PositiveInt | None, Meta(description="Tokens in one engine step. Default: vLLM's.")
    ] = None
    block_size: Annotated[
        PositiveInt | None,
        Meta(description="KV block, tokens; a multiple of 32 on CPU. Default: vLLM's 128."),
    ] = None
    quantization: Annotated[
        Literal["awq", "gptq", "compressed-tensors"] | None,
        Meta(description="Quantization of the checkpoint. Default: what its config.json says."),
    ] = None
    tensor_parallel_size: Annotated[
        PositiveInt, Meta(description="Ranks of one instance; its cores are cut into one cpulist per rank.")
    ] = 1
    weight_prepack: Annotated[
        bool | None,
        Meta(
            description="ZenTorch weight prepacking (VLLM_ZENTORCH_WEIGHT_PREPACK). Default: vLLM's, which is true. "
            "False is refused for models with tied embeddings: ZenTorch would overwrite them."
        ),
    ] = None
    trust_remote_code: Annotated[bool, Meta(description="Let the model directory run its own Python.")] = (
        False
    )
    sockets: Annotated[
        tuple[NonNegativeInt, ...] | None, Meta(description="Serve on these CPU sockets only. Default: all.")
    ] = None
    nodes: Annotated[
        tuple[NonNegativeInt, ...] | None, Meta(description="Serve on these NUMA nodes only. Default: all.")
    ] = None


class Layout(Section, frozen=True):
    """`[layout]`: how cores become instances."""

    strategy: Annotated[Strategy, Meta(description="interleaved, contiguous, l3-aligned or per-node.")] = (
        Strategy.INTERLEAVED
    )
    instances_per_socket: Annotated[
        PositiveInt | Literal["auto"], Meta(description='"auto" is one per 64 cores of a node, rounded up.')
    ] = "auto"
    reserve_cores: Annotated[
        NonNegativeInt | Literal["auto"],
        Meta(
            description="Cores of the machine kept for the proxy and the OS, taken from the ends of the nodes in "
            'turn. "auto": 1 per 64 cores, none on machines with fewer than 16.'
        ),
    ] = "auto"
    cpus: Annotated[
        str | None,
        Meta(
            description='Use only these cpus, a list such as "0-63,128-191". Default: all that are allowed.'
        ),
    ] = None
    use_smt: Annotated[bool, Meta(description="Also use the SMT siblings of each core.")] = False
    span_nodes: Annotated[
        bool, Meta(description="Allow an instance to span NUMA nodes of its socket; costs memory bandwidth.")
    ] = False


class Engine(Section, frozen=True):
    """`[engine]`: what an instance runs."""

    kind: Annotated[
        EngineKind, Meta(description='"vllm", or "command" for any OpenAI-compatible server.')
    ] = EngineKind.VLLM
    command: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description='kind = "vllm": how to start vLLM. kind = "command": the whole argv, with {uds} or {port}, '
            "{cpus}, {threads} (how many cpus these are), {slot}, {model}, {name} filled in.",
        ),
    ] = ("vllm",)
    args: Annotated[
        tuple[str, ...], Meta(description="Arguments added to vLLM's; one that is already there is replaced.")
    ] = ()
    env: Annotated[
        dict[str, str],
        Meta(
            description="Environment added to the instances'; wins over ours.", examples=[{"NAME": "value"}]
        ),
    ] = field(default_factory=dict)
    hf_token_file: Annotated[
        str | None,
        Meta(description="File that holds the Hugging Face token; passed as HF_TOKEN, never in argv."),
    ] = None
    numactl: Annotated[
        Literal["auto", "off"], Meta(description='"off" starts without numactl: no memory binding at all.')
    ] = "auto"
    tcmalloc: Annotated[
        str, Meta(description='"auto" finds libtcmalloc_minimal, "off", or the library\'s path.')
    ] = "auto"
    cache_dir: Annotated[
        str | None, Meta(description="Compile caches, one folder per slot. Default: /var/cache or ~/.cache.")
    ] = None
    health_path: Annotated[
        str, Meta(pattern="^/", description="Path that answers 200 when the engine lives.")
    ] = "/health"
    runtime: Annotated[
        Runtime,
        Meta(
            description='"podman" or "docker": each instance in a container of its own (docs/containers.md). "host": not.'
        ),
    ] = Runtime.HOST
    image: Annotated[
        str | None,
        Meta(description="Image of the instances' containers; it is never pulled by itself."),
    ] = None
    runtime_args: Annotated[
        tuple[str, ...],
        Meta(description='Options added to `podman run` or `docker run`, such as "--volume=/srv:/srv:ro".'),
    ] = ()


class Memory(Section, frozen=True):
    """`[memory]`: the ledger of each NUMA node."""

    kv_cache: Annotated[
        str,
        Meta(description='KV cache per instance: "auto" (what the node has left) or a size such as "40GiB".'),
    ] = "auto"
    reserve: Annotated[
        str,
        Meta(
            description='Kept free on each node for the kernel and page cache: a size, or "auto" (5 %, ≤ 8 GiB).'
        ),
    ] = "auto"
    instance_overhead: Annotated[
        str, Meta(description="What one instance needs besides weights and KV (three processes, compiler).")
    ] = "auto"


class Overflow(Section, frozen=True):
    """`[proxy.overflow]`: an external OpenAI-compatible endpoint for what the queue would reject."""

    url: Annotated[
        str,
        Meta(
            pattern="^https?://",
            description="Base URL up to and with /v1; requests may leave this host.",
            examples=["https://host/v1"],
        ),
    ]
    models: Annotated[
        dict[str, str],
        Meta(
            min_length=1,
            description="Models that may go there: our name to the name they have there.",
            examples=[{"our-name": "their-name"}],
        ),
    ]
    api_key_file: Annotated[
        str | None, Meta(description="File that holds the key sent there; the client's own never leaves.")
    ] = None
    max_requests: Annotated[PositiveInt, Meta(description="Requests there at once; more get 429.")] = 64


class Proxy(Section, frozen=True):
    """`[proxy]`: the OpenAI endpoint."""

    listen: Annotated[
        tuple[str, ...], Meta(min_length=1, description='"HOST:PORT", "[V6]:PORT" or "unix:/path".')
    ] = ("127.0.0.1:8000",)
    tls_certificate: Annotated[
        str | None, Meta(description="PEM chain for the TCP listeners; read again when the file changes.")
    ] = None
    tls_key: Annotated[str | None, Meta(description="PEM key; default: in the certificate's file.")] = None
    api_keys_file: Annotated[
        str | None,
        Meta(description="Keys that clients must send (`numa-launcher key add`). Default: no key is needed."),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...], Meta(description='Origins whose pages may call, or "*". Default: none.')
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description='Addresses, networks ("10.0.0.0/8") or "unix": peers whose X-Forwarded-* and Forwarded count. '
            "Others' are dropped."
        ),
    ] = ()
    policy: Annotated[
        Policy,
        Meta(description="prefix-aware, least-tokens, least-requests, round-robin or session."),
    ] = Policy.PREFIX_AWARE
    session_header: Annotated[
        str, Meta(min_length=1, description="Header that names a session; else prompt_cache_key, else user.")
    ] = "X-Session-Id"
    queue_max_requests: Annotated[
        NonNegativeInt, Meta(description="Requests that wait for an instance; more get 429.")
    ] = 4096
    queue_max_bytes: Annotated[NonNegativeInt, Meta(description="Bytes of the bodies that wait.")] = (
        512 * 1024 * 1024
    )
    queue_timeout_s: Annotated[Seconds, Meta(description="Longest wait for an instance; then 429.")] = 600.0
    park_timeout_s: Annotated[
        Seconds,
        Meta(description="Longest wait while no instance of the model is ready but one has been; then 503."),
    ] = 300.0
    max_body_bytes: Annotated[PositiveInt, Meta(description="Larger request bodies get 413.")] = (
        64 * 1024 * 1024
    )
    upload_max_bytes: Annotated[
        PositiveInt,
        Meta(
            description="Memory for request bodies of more than 64 KiB while they are received, all clients together. "
            "At least max_body_bytes."
        ),
    ] = 512 * 1024 * 1024
    upload_wait_s: Annotated[
        Seconds, Meta(description="Longest wait of a body for this memory, unread; then 503.")
    ] = 30.0
    max_connections: Annotated[
        PositiveInt, Meta(description="Clients connected at once; more are closed.")
    ] = 16384
    connect_timeout_s: Annotated[Seconds, Meta(description="To reach an instance.")] = 5.0
    first_token_timeout_s: Annotated[
        Seconds, Meta(description="From the start on an instance to the answer's first byte, for any prompt.")
    ] = 300.0
    first_token_timeout_per_1k_s: Annotated[
        Seconds, Meta(description="Added to it for each 1,000 tokens of the prompt (estimated).")
    ] = 60.0
    answer_timeout_s: Annotated[
        Seconds, Meta(description="To the first byte of an answer that is not streamed: it comes whole.")
    ] = 3600.0
    idle_timeout_s: Annotated[Seconds, Meta(description="Between two reads of an answer.")] = 300.0
    hung_timeout_s: Annotated[
        Seconds,
        Meta(
            description="An instance none of whose streams moves this long, while others' do, is hung. One that nothing "
            "at all comes from this long, though it has requests, is looked at by the supervisor."
        ),
    ] = 60.0
    keepalive_comment_s: Annotated[
        Seconds,
        Meta(description="While a stream waits for its first token, an SSE comment goes out so often."),
    ] = 15.0
    eject_failures: Annotated[
        PositiveInt, Meta(description="Failures in a row that take an instance out of rotation for a while.")
    ] = 3
    eject_s: Annotated[Seconds, Meta(description="How long; then one request tries it.")] = 10.0
    slow_start_s: Annotated[
        Seconds, Meta(description="A fresh instance gets its full share of requests after this time.")
    ] = 20.0
    header_timeout_s: Annotated[
        Seconds, Meta(description="For a client to send its request line and headers.")
    ] = 30.0
    body_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Longest silence while a client sends its body, or time below body_min_bytes_per_s."
        ),
    ] = 60.0
    body_min_bytes_per_s: Annotated[
        PositiveInt,
        Meta(
            description="Fewer bytes of a body a second than this may come for body_timeout_s at most; then 408."
        ),
    ] = 1000
    client_keepalive_s: Annotated[
        Seconds, Meta(description="How long an idle client connection is kept.")
    ] = 75.0
    slow_client_buffer_bytes: Annotated[
        NonNegativeInt,
        Meta(
            description="Kept of answers for clients that take them slowly, so that instances are free; an eighth for one. "
            "Beyond, an instance waits for its client."
        ),
    ] = 256 * 1024 * 1024
    client_min_bytes_per_s: Annotated[
        PositiveInt, Meta(description="What a client that is behind with its answer must take of it.")
    ] = 1000
    client_grace_s: Annotated[
        Seconds,
        Meta(
            description="A client may take less so long while others wait for its instance, or that memory is full."
        ),
    ] = 10.0
    client_stall_timeout_s: Annotated[
        Seconds, Meta(description="A client may take less so long in all other cases; then it has gone.")
    ] = 300.0
    access_log: Annotated[
        Literal["all", "errors", "off"], Meta(description="Requests that get a line in the log.")
    ] = "all"
    log_prompts: Annotated[
        bool, Meta(description="Also log request bodies, at DEBUG. They hold what people wrote.")
    ] = False
    overflow: Annotated[Overflow | None, Meta(description="External endpoint for bursts. Default: none.")] = (
        None
    )


class Control(Section, frozen=True):
    """`[control]`: the operator's socket."""

    socket: Annotated[str, Meta(min_length=1, description="Path of the UNIX socket.")] = (
        "/run/numa-launcher/control.sock"
    )
    group: Annotated[
        str | None, Meta(description="Group that may change things (mode 0660). Default: the daemon's own.")
    ] = None
    read_group: Annotated[
        str | None,
        Meta(
            description="Group that may only read. With it everybody may connect (mode 0666), and the peer's groups decide."
        ),
    ] = None


class Supervision(Section, frozen=True):
    """`[supervision]`: how instances are kept alive. All in seconds."""

    spawner: Annotated[
        SpawnerKind,
        Meta(
            description="systemd: instances are units of their own and outlive the daemon. direct: its children. "
            "auto: systemd where the daemon is a system service; what is lacking for units is an error then."
        ),
    ] = SpawnerKind.AUTO
    ready_timeout_s: Annotated[Seconds, Meta(description="To load, compile and answer one completion.")] = (
        1800.0
    )
    probe_interval_s: Annotated[Seconds, Meta(description="Between health probes of a ready instance.")] = 5.0
    probe_timeout_s: Annotated[Seconds, Meta(description="For one health probe.")] = 10.0
    stall_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Work in flight and no progress for this long: hung. Four times as long while cpus are starved."
        ),
    ] = 120.0
    canary_interval_s: Annotated[
        Seconds, Meta(description="An instance idle this long is asked for one token.")
    ] = 300.0
    verify_interval_s: Annotated[
        Seconds, Meta(description="Between looks where a ready instance's threads and pages are.")
    ] = 300.0
    min_ready: Annotated[
        NonNegativeInt | None,
        Meta(
            description="Ready instances of a model that restart, drain, stop, hold and quarantine leave, without "
            "--force. Default: 1 where the model has two or more, else 0."
        ),
    ] = None
    drain_timeout_s: Annotated[
        Seconds, Meta(description="For requests in flight before a stop or restart.")
    ] = 300.0
    stop_timeout_s: Annotated[Seconds, Meta(description="From SIGTERM to SIGKILL of the whole tree.")] = 30.0
    backoff_initial_s: Annotated[Seconds, Meta(description="Delay after the first crash; doubles.")] = 1.0
    backoff_max_s: Annotated[Seconds, Meta(description="Longest delay between restarts.")] = 60.0
    crash_window_s: Annotated[Seconds, Meta(description="Crashes are counted over this time.")] = 600.0
    crash_limit: Annotated[
        PositiveInt, Meta(description="Crashes within the window that make a slot failed.")
    ] = 5


class Systemd(Section, frozen=True):
    """`[systemd]`: the instances' units, where systemd starts them."""

    user: Annotated[
        str,
        Meta(
            min_length=1,
            description='Runs the instances, with a group of that name; "root": no sandbox either.',
        ),
    ] = "numa-launcher"
    slice: Annotated[str, Meta(pattern=r"^[\w.:-]+\.slice$", description="Slice that the units are in.")] = (
        "numa-launcher.slice"
    )
    allowed_cpus: Annotated[
        bool,
        Meta(
            description="Also confine each unit by its cgroup to its slot's cpus and memory nodes (AllowedCPUs=, "
            "AllowedMemoryNodes=): nothing that it starts can leave them."
        ),
    ] = False
    memory_max: Annotated[
        str | None,
        Meta(
            description='MemoryMax= of each unit, such as "400GiB"; beyond it the unit is ended. Default: none.'
        ),
    ] = None


class Logging(Section, frozen=True):
    """`[logging]`."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe level shown.")
    ] = "info"
    format: Annotated[LogFormat, Meta(description="auto, journal or text.")] = LogFormat.AUTO
    tail_lines: Annotated[PositiveInt, Meta(description="Log lines kept per instance for `logs`.")] = 2000


class Config(Section, frozen=True):
    """The whole file."""

    models: Annotated[tuple[Model, ...], Meta(min_length=1, description="At least one `[[models]]` table.")]
    layout: Layout = Layout()
    engine: Engine = Engine()
    memory: Memory = Memory()
    proxy: Proxy = Proxy()
    control: Control = Control()
    supervision: Supervision = Supervision()
    systemd: Systemd = Systemd()
    logging: Logging = Logging()
