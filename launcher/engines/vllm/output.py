"""vLLM's log: phases of its start, causes of its end, and whether it computes with ZenTorch. Pure.

Lines are those of real vLLM 0.32; tests/engines/vllm/recorded holds them.
"""

from __future__ import annotations

import re
from typing import Final

from launcher.engines.causes import (
    ACCELERATOR,
    AT_START,
    DIED,
    GATED,
    LIBRARY_TOO_OLD,
    MODEL_DAMAGED,
    NO_SPACE,
    UNIMPORTABLE,
    Retry,
    Rule,
    crashes,
    library_missing,
    rule,
)
from launcher.engines.log import Accelerator, EngineLog

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
COMPILED: Final = "opening the API"

# A worker's, the engine core's and any other process's end, as in vllm/v1/executor/multiproc_executor.py,
# v1/engine/utils.py ("Failed core proc(s): {'EngineCore_DP0': -9}") and v1/utils.py.
_DIED: Final = rf"(?:{DIED}|Failed core proc\(s\): \{{.*': )"
_CPU_BUILD: Final = (
    "install vLLM's CPU build and the torch that it was built for (scripts/quickstart, or pip install "
    "'numa-launcher[vllm]'); `numa-launcher doctor` shows both"
)

CAUSES: Final[tuple[Rule, ...]] = (
    rule(
        # v1/worker/cpu_worker.py, 0.32: the node of the cpus, whatever node the worker is bound to.
        "node-without-memory", r"Available memory on node \d+ \(0\.0/0\.0 GiB\) on kv cache allocation",
        "vLLM does not start on the cpus of a node without memory",
        "exclude that node with models.nodes or layout.cpus, or add memory to it", Retry.NEVER,
    ),
    rule(
        "kv-too-large", r"(?<!\(0\.0/0\.0 GiB\)) on kv cache allocation is less than requested memory for kv",
        "the node has less free memory than the KV cache wants",
        "lower memory.kv_cache, or free memory on the node", Retry.BACKOFF,
    ),
    rule(
        "memory-utilization", r"on startup is less than desired CPU memory utilization",
        "the node has less free memory than vLLM's --gpu-memory-utilization wants",
        "free memory on the node, or set memory.kv_cache and no --gpu-memory-utilization in engine.args",
        Retry.BACKOFF,
    ),
    rule(
        "kv-too-small",
        r"(?:KV +cache is needed, which is larger than the available KV cache memory"
        r"|No available memory for the cache blocks)",
        "the KV cache cannot hold one request of max_model_len",
        "raise memory.kv_cache or lower max_model_len", Retry.NEVER,
    ),
    *NO_SPACE,
    rule(
        "freezing-aot-crash", r"expected OutputCode, got <class 'function'>",
        "TORCHINDUCTOR_FREEZING=1 met vLLM's ahead-of-time compile",
        "set VLLM_USE_AOT_COMPILE=0 in engine.env", Retry.NEVER,
    ),
    GATED,
    rule(
        "unsupported-version",
        r"(?:but Transformers does not recognize this architecture|Model architectures \[.*\] are not supported"
        r"|was supported in vLLM until|requires (?:transformers|torch)[ <>=]+[0-9]"
        r"|Unsupported (?:torch|Python) version)",
        "the installed vLLM or Transformers does not know this model",
        "install the vLLM version that the model's card names, or serve another model", Retry.NEVER,
    ),
    rule(
        "model-not-found",
        r"(?:Repo id must be in the form|RepositoryNotFoundError|does not appear to have a file named config\.json"
        r"|Can't load the configuration of|is not a local folder and is not a valid model identifier"
        r"|Invalid repository ID or local directory specified|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|Cannot find any model weights with)",
        "the model was not found",
        "check the model's path and its mount, or download it first", Retry.BACKOFF, starting=True,
    ),
    MODEL_DAMAGED,
    *AT_START,
    *crashes(_DIED),
    rule(
        "wrong-build",
        # vllm/config/device.py and platforms/__init__.py; torch without a device; PyTorch's dispatcher for operators of
        # a library (vllm._C) that did not load.
        r"(?:Failed to infer device type|Device string must not be empty"
        rf"|{UNIMPORTABLE}(?:.*[ /])?{ACCELERATOR}: cannot open shared object file"
        r"|Torch not compiled with (?:CUDA|XPU) enabled|Found no NVIDIA driver|No (?:CUDA|HIP|XPU) GPUs are available"
        r"|no CUDA-capable device is detected|'_OpNamespace' '_(?:moe_)?C\w*' object has no attribute"
        rf"|{UNIMPORTABLE}No module named 'vllm\._\w*C\w*')",
        "the installed vLLM or torch is no CPU build", _CPU_BUILD, Retry.NEVER,
    ),
    rule(
        "wrong-build",
        rf"(?:{UNIMPORTABLE}(?!.*(?:zentorch|inductor)).*: undefined symbol: |operator torchvision::\w+ does not exist)",
        "a library of the engine was built for another torch", _CPU_BUILD, Retry.NEVER,
    ),
    LIBRARY_TOO_OLD,
    library_missing(but="zentorch"),
    rule(
        # vLLM looks at a model's class in a process of its own, which fails for any of the causes above, too.
        "unsupported-version", r"Model architectures \[.*\] failed to be inspected",
        "the installed vLLM or Transformers does not know this model",
        "install the vLLM version that the model's card names, or serve another model", Retry.NEVER,
    ),
    rule(
        "bad-argument", r"pydantic_core\._pydantic_core\.ValidationError|Value error, ",
        "vLLM refuses its configuration",
        "read the log line below it, and correct [[models]] or engine.args", Retry.NEVER,
    ),
    rule(
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
    rule(
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
)  # fmt: skip

VLLM_LOG: Final = EngineLog(
    causes=CAUSES,
    phases=_PHASES,
    compiled=COMPILED,
    # After this line vLLM 0.32 ends; where its worker has swallowed its own exit, it hangs instead.
    start_failed=re.compile(r"EngineCore failed to start|Engine core initialization failed"),
    child_killed=re.compile(rf"{_DIED}-9\b"),
    # vLLM 0.32 then ends in good order, with exit code 0.
    child_died=re.compile(r"died unexpectedly|EngineDeadError|Engine core proc \S+ died"),
    # v1/executor/multiproc_executor.py; the code is often not known yet.
    rank_died=re.compile(
        r"Worker proc VllmWorker-(?P<rank>\d+) died unexpectedly \(exit code: (?P<code>-?\d+|None)\)"
    ),
    # The process, and what its logger writes (vllm/logging_utils/formatter.py); each line of a logged traceback has it.
    prefix=re.compile(
        r"(?P<process>\([\w.-]+ pid=\d+\) )?(?:(?P<level>[A-Z]{4,8}) \d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\] ?)?"
    ),
    # v1/engine, v1/executor, shm_broadcast.py.
    about_others=re.compile(
        r"root cause|Engine core initialization failed|Executor failed|EngineDeadError|RuntimeError: cancelled"
        r"|Worker failed with error|SystemExit"
    ),
    quoted=re.compile(r"Worker failed with error '[^']"),
    fatal=re.compile(r"(?:WorkerProc|EngineCore) (?:failed to start|hit an exception|encountered a fatal error)"),
)  # fmt: skip


# vllm/platforms/__init__.py (0.32) and the older plugin (vLLM 0.11 to 0.15).
_ON: Final = ("AMD Zen CPU detected with zentorch installed", "Loading plugin zentorch")
_OFF: Final = (
    "AMD Zen CPU detected but zentorch not installed",
    "AMD Zen CPU detected but zentorch failed to import",
    "Plugin supports versions",
)

ZENTORCH: Final = Accelerator(library="libzentorch", on=_ON, off=_OFF)
"""Whether an instance computes with ZenTorch."""
