"""vLLM, with ZenTorch where installed: `numactl ... vllm serve ...` and its environment."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

from msgspec import Struct, field

from launcher.base.address import UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.config.schema import Model
from launcher.engines.base import CompileCache, Expected, Launch, Traits, Unwanted, preloaded, secret_names
from launcher.engines.log import Accelerator, EngineLog
from launcher.engines.numactl import Binding
from launcher.engines.software import Stack
from launcher.engines.vllm.arguments import has_flag, merge, value_of
from launcher.engines.vllm.output import VLLM_LOG, ZENTORCH
from launcher.engines.vllm.settings import KV_SPACE, WEIGHT_PREPACK
from launcher.engines.vllm.software import (
    AOT_COMPILE_SINCE,
    KV_CACHE_BYTES_SINCE,
    PROMPT_TOKENS_DETAILS_SINCE,
    SHUTDOWN_TIMEOUT_SINCE,
    is_since,
)
from launcher.engines.vllm.traits import lora_adapters, sampling_defaults
from launcher.plan.plan import Slot

MODULE_FORM: Final = "vllm.entrypoints.openai.api_server"
# Folder of its internal sockets, named by uuids (vllm/utils/network_utils.py); default: /tmp.
RPC_PATH: Final = "VLLM_RPC_BASE_PATH"
# sun_path of unix(7), less its closing zero, a slash and a uuid.
RPC_PATH_BYTES: Final = 107 - 1 - 36
# A comma-separated list of numbers; ranges are not read.
MEMORY_NODES: Final = "CPU_VISIBLE_MEMORY_NODES"
BIND: Final = "VLLM_CPU_OMP_THREADS_BIND"
"""One cpu list for each rank, with | between them; or auto, nobind."""
EAGER: Final = "--enforce-eager"
"""Nothing is compiled."""
COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
CACHE_ROOT: Final = "VLLM_CACHE_ROOT"
_PRELOAD: Final = "LD_PRELOAD"
SHUTDOWN: Final = "--shutdown-timeout"
READY: Final = "VLLM_ENGINE_READY_TIMEOUT_S"
# Differ between the slots of a model and do not affect what is compiled.
_OWN: Final = frozenset({CACHE_ROOT, RPC_PATH, COMPILED, BIND, _PRELOAD, READY})
_OPENMP: Final = frozenset({"libgomp", "libiomp5", "libomp"})
UNWANTED: Final = (
    # The plan sets these; inherited ones would silently bind threads elsewhere.
    Unwanted(re.compile("VLLM_CPU_.*")),
    # Kubernetes sets it in each pod beside a service named "vllm" (enableServiceLinks), to tcp://IP:PORT; vLLM 0.32 then
    # ends: "VLLM_PORT appears to be a URI" (vllm/envs.py, get_vllm_port).
    Unwanted(
        re.compile("VLLM_PORT"), re.compile("://"),
        "VLLM_PORT={value} is no port: Kubernetes sets it for a service named 'vllm', and instances do not get it "
        "(enableServiceLinks: false in the pod)",
    ),
)  # fmt: skip
# Part of supervision.stop_timeout_s that vLLM may use for requests after SIGTERM;
# in the rest its processes exit before SIGKILL.
SHUTDOWN_SHARE: Final = 0.5


class VllmEngine(Struct, frozen=True):
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
    models: tuple[Model, ...] = ()
    """All that are configured."""
    local_models: Mapping[str, str] = field(default_factory=dict)
    """`path` of each model that is a directory here, to its absolute path."""
    health_path: str = "/health"
    stop_timeout_s: float = 30.0
    ready_timeout_s: float = 1800.0
    tells_cached_tokens: bool = False
    """Responses say how many prompt tokens were in the prefix cache, for the usage ledger."""

    log: EngineLog = VLLM_LOG
    accelerator: Accelerator | None = ZENTORCH
    unwanted: tuple[Unwanted, ...] = UNWANTED

    @property
    def wants_completion_probe(self) -> bool:
        """Pooling models (embeddings, scores) have no completions."""
        return value_of(self.args, "--runner") != "pooling"

    def launch(self, slot: Slot, generation: int) -> Launch:
        # Unique per generation: vLLM exits with EADDRINUSE at a stale socket.
        address = UnixAddress(f"{self.socket_dir}/slot{slot.id}-{generation}.sock")
        scratch = self._scratch(slot)
        env = self._environment(slot) | ({RPC_PATH: scratch} if scratch else {}) | dict(self.user_env)
        command = (*self._serve(slot.model), *self._arguments(slot, address))
        secrets = secret_names(env)
        return Launch(
            argv=(*self.binding.prefix(slot.placement), *command), env=env, secrets=secrets, address=address,
            scratch=scratch, files=slot.files, cache=cache_of(command, env, secrets),
            expected=expected_of(env, binds_memory=self.binding.is_strict), unwanted=self.unwanted,
            lenient=frozenset({SHUTDOWN, READY}), planned=frozenset({BIND}),
        )  # fmt: skip

    def traits(self, model: Model) -> Traits:
        return Traits(
            token_ids=True, adapters=lora_adapters(self.args, self.models, model),
            sampling_defaults=sampling_defaults(self.args, model),
        )  # fmt: skip

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
        model, its, ranks = slot.model, slot.effective, slot.effective.tensor_parallel_size
        takes_kv_bytes = KV_SPACE not in self.user_env and is_since(self.stack.vllm, KV_CACHE_BYTES_SINCE)
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
            (SHUTDOWN, shutdown_s if is_since(self.stack.vllm, SHUTDOWN_TIMEOUT_SINCE) else None),
        ):
            if value is not None:
                options.append((flag, str(value)))
        if self.tells_cached_tokens and is_since(self.stack.vllm, PROMPT_TOKENS_DETAILS_SINCE):
            options.append(("--enable-prompt-tokens-details",))
        if model.trust_remote_code:
            options.append(("--trust-remote-code",))
        return merge(options, self.args)

    def _environment(self, slot: Slot) -> dict[str, str]:
        model, cache = slot.model, f"{self.cache_dir}/{self.stack.fingerprint}/slot{slot.id}"
        omp_cpus = slot.placement.omp_cpus or (slot.placement.cpus,)
        env = {
            BIND: "|".join(cpus.format() for cpus in omp_cpus),
            # Instances that share a compile cache corrupt it (vllm#24601, #18851).
            CACHE_ROOT: f"{cache}/vllm",
            COMPILED: f"{cache}/inductor",
            # vLLM allows its engine 600 s to load and compile; large models on slow disks need more.
            READY: str(max(1, int(self.ready_timeout_s))),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # Logs crashes in native code: vLLM often sees no exit code of its dead worker.
            "PYTHONFAULTHANDLER": "1",
        }
        if slot.placement.remote:
            # Without it a worker on a node that it may not take memory of binds to the lowest allowed node, whatever
            # numactl says (vllm/v1/worker/cpu_worker.py, utils/cpu_resource_utils.py, 0.32).
            env[MEMORY_NODES] = ",".join(map(str, slot.placement.membind))
        if not has_flag(self.args, EAGER):
            env["TORCHINDUCTOR_FREEZING"] = "1"
            # Freezing and AOT compilation exclude each other: "expected OutputCode, got <class 'function'>"
            # (vLLM 0.32, torch 2.13). Can go when vLLM starts with both.
            if is_since(self.stack.vllm, AOT_COMPILE_SINCE):
                env["VLLM_USE_AOT_COMPILE"] = "0"
            # Frozen scalars become numbers in the code, and the key of Inductor's graph cache does not look at them
            # (torch 2.13, _inductor: GraphLowering.get_attr, FxGraphCachePickler). One of vLLM's is an address: that
            # of oneDNN's packed weights (vllm/_custom_ops.py, create_onednn_mm). So a second start from a warm
            # cache died of SIGSEGV in onednn_mm, on all CPUs without AMX or zentorch. Compiled kernels are
            # cached all the same. Can go when a second start works without it.
            env["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
        if slot.kv_cache_bytes is not None and not is_since(self.stack.vllm, KV_CACHE_BYTES_SINCE):
            env[KV_SPACE] = str(max(1, slot.kv_cache_bytes // GIB))
        if self.ld_preload is not None:
            env[_PRELOAD] = self.ld_preload
        if model.weight_prepack is not None:
            env[WEIGHT_PREPACK] = "1" if model.weight_prepack else "0"
        if model.path in self.local_models:
            env["HF_HUB_OFFLINE"] = "1"
        if self.hf_token is not None:
            env["HF_TOKEN"] = self.hf_token
        return env


def cache_of(
    command: Sequence[str], env: Mapping[str, str], secrets: frozenset[str] = frozenset()
) -> CompileCache | None:
    """The compile cache of a launch; None where its two variables do not point into one slot's folder, as an operator
    may have set them.

    Its kind is made of vLLM's arguments and settings, and of the number of threads of each rank."""
    compiled, root = env.get(COMPILED), env.get(CACHE_ROOT)
    if compiled is None or root is None or PurePath(compiled).parent != PurePath(root).parent:
        return None
    if not PurePath(compiled).parent.name.startswith("slot"):
        return None
    words, given = [], iter(command)
    for word in given:
        if word in {"--uds", SHUTDOWN}:
            next(given, None)
        else:
            words.append(word)
    settings = sorted((k, v) for k, v in env.items() if k not in _OWN and k not in secrets)
    kind = json.dumps([words, settings, [len(cpus) for cpus in omp_lists(env)]])
    return CompileCache(compiled, hashlib.sha256(kind.encode()).hexdigest()[:32], EAGER not in command)


def omp_lists(env: Mapping[str, str]) -> tuple[CpuSet, ...]:
    """The cpus of each rank's OpenMP threads; empty where vLLM chooses them."""
    lists = env.get(BIND, "nobind")
    return () if lists in {"auto", "nobind"} else tuple(CpuSet.parse(cpus) for cpus in lists.split("|"))


def expected_of(env: Mapping[str, str], *, binds_memory: bool) -> Expected:
    omp = omp_lists(env)
    return Expected(binds_memory, omp, (*preloaded(env), *((_OPENMP,) if omp else ())))
