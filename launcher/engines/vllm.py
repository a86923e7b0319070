"""vLLM, with ZenTorch where installed: `numactl ... vllm serve ...` and its environment. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from launcher.base.address import UnixAddress
from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.config.engine_arguments import has_flag, json_of, merge, value_of
from launcher.config.schema import Config, EngineKind, Model
from launcher.engines.base import Launch, secret_names
from launcher.engines.numactl import Binding
from launcher.engines.vllm_software import (
    AOT_COMPILE_SINCE,
    KV_CACHE_BYTES_SINCE,
    PROMPT_TOKENS_DETAILS_SINCE,
    SHUTDOWN_TIMEOUT_SINCE,
    Stack,
)
from launcher.models.reader import find_model
from launcher.models.weight_files import read_model_json
from launcher.plan.plan import Slot

MODULE_FORM: Final = "vllm.entrypoints.openai.api_server"
# Whole GiB only; overrides --kv-cache-memory-bytes (vllm/platforms/cpu.py, 0.32).
KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
# Folder of its internal sockets, named by uuids (vllm/utils/network_utils.py); default: /tmp.
RPC_PATH: Final = "VLLM_RPC_BASE_PATH"
# sun_path of unix(7), less its closing zero, a slash and a uuid.
RPC_PATH_BYTES: Final = 107 - 1 - 36
# A comma-separated list of numbers; ranges are not read.
MEMORY_NODES: Final = "CPU_VISIBLE_MEMORY_NODES"
# Part of supervision.stop_timeout_s that vLLM may use for requests after SIGTERM;
# in the rest its processes exit before SIGKILL.
SHUTDOWN_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """vLLM, configured. Implements Engine."""

    stack: Stack
    binding: Binding
    socket_dir: str
    cache_dir: str
    """Compile caches; one folder per stack and slot below it."""
    args: tuple[str, ...] = ()
    user_env: Mapping[str, str] = field(default_factory=dict)
    ld_preload: str | None = None
    hf_token: str | None = None
    local_models: Mapping[str, str] = field(default_factory=dict)
    """`path` of each model that is a directory here, to its absolute path."""
    health_path: str = "/health"
    stop_timeout_s: float = 30.0
    ready_timeout_s: float = 1800.0
    tells_cached_tokens: bool = False
    """Responses say how many prompt tokens were in the prefix cache, for the usage ledger."""

    @property
    def wants_completion_probe(self) -> bool:
        """Pooling models (embeddings, scores) have no completions."""
        return value_of(self.args, "--runner") != "pooling"

    def launch(self, slot: Slot, generation: int) -> Launch:
        # Unique per generation: vLLM exits with EADDRINUSE at a stale socket.
        address = UnixAddress(f"{self.socket_dir}/slot{slot.id}-{generation}.sock")
        scratch = self._scratch(slot)
        env = self._environment(slot) | ({RPC_PATH: scratch} if scratch else {}) | dict(self.user_env)
        prefix = self.binding.prefix(slot.placement)
        argv = (*prefix, *self._serve(slot.model), *self._arguments(slot, address))
        return Launch(
            argv=argv, env=env, secrets=secret_names(env), address=address, scratch=scratch, files=slot.files
        )

    def _scratch(self, slot: Slot) -> str | None:
        """Folder for sockets, which a killed vLLM leaves behind; None if paths are too long, or the operator sets it."""
        folder = f"{self.socket_dir}/slot{slot.id}"
        fits = len(folder.encode()) <= RPC_PATH_BYTES
        return folder if fits and RPC_PATH not in self.user_env else None

    def _serve(self, model: Model) -> tuple[str, ...]:
        path = self.local_models.get(model.path, model.path)
        if MODULE_FORM in self.stack.command:
            return (*self.stack.command, "--model", path)
        serve = () if "serve" in self.stack.command[1:] else ("serve",)
        return (*self.stack.command, *serve, path)

    def _arguments(self, slot: Slot, address: UnixAddress) -> tuple[str, ...]:
        model, its, ranks = slot.model, slot.effective, slot.model.tensor_parallel_size
        takes_kv_bytes = KV_SPACE not in self.user_env and self.stack.has(KV_CACHE_BYTES_SINCE)
        shutdown_s = max(1, int(self.stop_timeout_s * SHUTDOWN_SHARE))
        options: list[tuple[str, ...]] = [
            ("--served-model-name", model.name, *model.aliases),
            ("--uds", address.path),
            ("--dtype", model.dtype),
        ]
        for flag, value in (
            ("--max-model-len", its.max_model_len if its.assumes_length else model.max_model_len),
            ("--max-num-seqs", model.max_num_seqs),
            ("--max-num-batched-tokens", model.max_num_batched_tokens),
            ("--block-size", model.block_size),
            ("--quantization", model.quantization),
            ("--tensor-parallel-size", ranks if ranks > 1 else None),
            ("--kv-cache-memory-bytes", slot.kv_cache_bytes if takes_kv_bytes else None),
            ("--shutdown-timeout", shutdown_s if self.stack.has(SHUTDOWN_TIMEOUT_SINCE) else None),
        ):
            if value is not None:
                options.append((flag, str(value)))
        if self.tells_cached_tokens and self.stack.has(PROMPT_TOKENS_DETAILS_SINCE):
            options.append(("--enable-prompt-tokens-details",))
        if model.trust_remote_code:
            options.append(("--trust-remote-code",))
        return merge(options, self.args)

    def _environment(self, slot: Slot) -> dict[str, str]:
        model, cache = slot.model, f"{self.cache_dir}/{self.stack.fingerprint}/slot{slot.id}"
        omp_cpus = slot.placement.omp_cpus or (slot.placement.cpus,)
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(cpus.format() for cpus in omp_cpus),
            # Instances that share a compile cache corrupt it (vllm#24601, #18851).
            "VLLM_CACHE_ROOT": f"{cache}/vllm",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            # vLLM allows its engine 600 s to load and compile; large models on slow disks need more.
            "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(self.ready_timeout_s))),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # Logs crashes in native code: vLLM often sees no exit code of its dead worker.
            "PYTHONFAULTHANDLER": "1",
        }
        if slot.placement.remote:
            # Without it a worker on a node that it may not take memory of binds to the lowest allowed node, whatever
            # numactl says (vllm/v1/worker/cpu_worker.py, utils/cpu_resource_utils.py, 0.32).
            env[MEMORY_NODES] = ",".join(map(str, slot.placement.membind))
        if not has_flag(self.args, "--enforce-eager"):
            env["TORCHINDUCTOR_FREEZING"] = "1"
            # Freezing and AOT compilation exclude each other: "expected OutputCode, got <class 'function'>"
            # (vLLM 0.32, torch 2.13). Can go when vLLM starts with both.
            if self.stack.has(AOT_COMPILE_SINCE):
                env["VLLM_USE_AOT_COMPILE"] = "0"
            # Frozen scalars become numbers in the code, and the key of Inductor's graph cache does not look at them
            # (torch 2.13, _inductor: GraphLowering.get_attr, FxGraphCachePickler). One of vLLM's is an address: that
            # of oneDNN's packed weights (vllm/_custom_ops.py, create_onednn_mm). So a second start from a warm
            # cache died of SIGSEGV in onednn_mm, on all CPUs without AMX or zentorch. Compiled kernels are
            # cached all the same. Can go when a second start works without it.
            env["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
        if slot.kv_cache_bytes is not None and not self.stack.has(KV_CACHE_BYTES_SINCE):
            env[KV_SPACE] = str(max(1, slot.kv_cache_bytes // GIB))
        if self.ld_preload is not None:
            env["LD_PRELOAD"] = self.ld_preload
        if model.weight_prepack is not None:
            env["VLLM_ZENTORCH_WEIGHT_PREPACK"] = "1" if model.weight_prepack else "0"
        if model.path in self.local_models:
            env["HF_HUB_OFFLINE"] = "1"
        if self.hf_token is not None:
            env["HF_TOKEN"] = self.hf_token
        return env


# --- The start-up phase of an engine, from its log lines. ---

# vLLM 0.32: entrypoints/openai/api_server.py, v1/engine/core.py, model_loader/, cpu_model_runner.py.
_PHASES: Final = (
    ("non-default args:", "importing"),
    ("Initializing a V1 LLM engine", "starting workers"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights loaded"),
    ("Warming up model for the compilation", "compiling"),
    ("for KV cache on node", "allocating KV cache"),
    ("init engine (profile, create kv cache, warmup model) took", "opening the API"),
    ("Application startup complete", "answering a first completion"),
)


def phase_of(line: str) -> str | None:
    """The phase that a log line announces, or None."""
    return next((phase for mark, phase in _PHASES if mark in line), None)


# --- Sampling parameters that a vLLM server applies to requests without them. ---
#
# vLLM 0.32 (config/model.py, get_diff_sampling_param): `--generation-config` names a folder with generation_config.json,
# `auto` (the default) is the model's own, `vllm` none; `--override-generation-config` changes single values. vLLM reads
# config.json where there is no generation_config.json (transformers_utils/config.py, try_get_generation_config).

TAKEN: Final = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p",
    "max_new_tokens",
)  # fmt: skip
"""The parameters that vLLM reads from a generation config."""

MOST_TOKENS: Final = "most_tokens"
"""Name for a limit that no request may exceed (`override_max_tokens` in vLLM's chat_completion/serving.py)."""

_GENERATION: Final = "--generation-config"
_OVERRIDE: Final = "--override-generation-config"


def sampling_defaults(config: Config, model: str) -> dict[str, float]:
    """vLLM's names (`max_tokens` for `max_new_tokens`) and values; MOST_TOKENS where requests are capped.

    Reads the model's folder. A missing or unreadable file counts as empty: vLLM reports it, or refuses to start."""
    if config.engine.kind is not EngineKind.VLLM:
        return {}
    arguments = config.engine.args
    source = value_of(arguments, _GENERATION) or "auto"
    override = json_of(arguments, _OVERRIDE)
    found = {} if source == "vllm" else _read(_folder(config, model, source))
    taken = {name: value for name, value in (found | override).items() if name in TAKEN and _is_number(value)}
    limit = taken.pop("max_new_tokens", None)
    defaults = dict(taken)
    if limit is not None:
        defaults["max_tokens"] = limit
    cap = limit if source not in {"auto", "vllm"} else override.get("max_new_tokens")
    if _is_number(cap):
        defaults[MOST_TOKENS] = cap
    return defaults


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _folder(config: Config, model: str, source: str) -> Path | None:
    if source != "auto":
        path: str | None = source
    else:
        own = next((entry.path for entry in config.models if entry.name == model), None)
        path = value_of(config.engine.args, "--hf-config-path") or own
    try:
        return None if path is None else find_model(path)
    except LauncherError:
        return None


def _read(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    for name in ("generation_config.json", "config.json"):
        try:
            parsed = json.loads(read_model_json(folder / name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}
    return {}
