"""Asks vLLM what a model needs: ``python -I -c TEXT``, in vLLM's own Python, one question in JSON on standard input.

vLLM itself makes its configuration of the model's folder and the arguments, builds the model's class on torch's "meta"
device (shapes, no memory), and tells the KV cache specs of its layers. The answer is one line of JSON on standard output
(`launcher.models.answer.Answer`). vllm_needs.py passes the text of this module: the user that it runs as may not be able
to read the folder of this program. It imports the standard library only, and vLLM when it runs.

The modules of vLLM are those of 0.32. A vLLM that has moved them is not asked: `failed` says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, Final

# The processor lacks the instructions, or the build the kernels.
_NO_KERNEL: Final = re.compile(
    r"on CPU|CUDA|No NvFp4|find a kernel|cutlass|triton|sparse attention", re.IGNORECASE
)
# The class's module cannot be imported: a package that it uses is missing (model_executor/models/registry.py).
_NOT_INSPECTED: Final = "failed to be inspected"
_MAX_REASON: Final = 300
# What a configuration is for (vllm/usage/usage_lib.py): it decides the tokens of a step.
_SERVER: Final = "OPENAI_API_SERVER"


def _module(name: str) -> Any:
    return import_module(name)


def answer_to(question: dict[str, Any]) -> dict[str, Any]:
    """The answer for a model's `folder` and the `arguments` of `vllm serve`."""
    try:
        _pretend(question["instructions"])
        config = _configured(question["folder"], question["arguments"])
    except (ImportError, AttributeError) as error:
        return {"failed": _reason(error)}
    except (Exception, SystemExit) as error:
        why = _reason(error)
        return {"failed" if _NOT_INSPECTED in why else "refused": why}
    try:
        said = _told(config)
    except Exception as error:
        return {"failed": _reason(error)}
    try:
        return said | _built(config)
    except Exception as error:
        why = _reason(error)
        return said | {"unbuilt": why, "no_kernel": bool(_NO_KERNEL.search(why))}


def _reason(error: BaseException) -> str:
    """One line. pydantic's errors begin with a heading, and end with an address of its documentation."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("For further information")]
    if len(told) > 1 and "validation error" in told[0]:
        told = [re.sub(r"\s*\[type=.*", "", line) for line in told[1:]]
    return f"{type(error).__name__}: {' '.join(told)}"[:_MAX_REASON]


def _pretend(instructions: list[str]) -> None:
    """The processor is the one that the plan is for: vLLM chooses types of states and blocks of latents by these."""
    cpu = _module("torch").cpu
    for name, asked in (("avx512_bf16", "_is_avx512_bf16_supported"), ("amx_tile", "_is_amx_tile_supported")):
        if hasattr(cpu, asked):
            setattr(cpu, asked, partial(bool, name in instructions))


def _configured(folder: str, arguments: list[str]) -> Any:
    arg_utils = _module("vllm.engine.arg_utils")
    parsing = _module("vllm.utils.argparse_utils")
    registry = _module("vllm.model_executor.models.registry")
    usage = _module("vllm.usage.usage_lib")
    # In this process: another one imports all again, for 5 s.
    registry._run_in_subprocess = lambda call: call()
    parser = arg_utils.EngineArgs.add_cli_args(parsing.FlexibleArgumentParser())
    fixed = ["--model", folder, "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
    taken, _ = parser.parse_known_args([*arguments, *fixed])
    context = getattr(usage.UsageContext, _SERVER)
    return arg_utils.EngineArgs.from_cli_args(taken).create_engine_config(context)


def _told(config: Any) -> dict[str, Any]:
    model = config.model_config
    return {
        "max_model_len": int(model.max_model_len),
        "heads": int(model.model_arch_config.total_num_attention_heads or 0) or None,
        "latent": bool(model.use_mla),
        "kv_heads": 1 if model.use_mla else int(model.get_total_num_kv_heads() or 0) or None,
        "quantization": model.quantization,
    }


def _built(config: Any) -> dict[str, Any]:
    torch = _module("torch")
    base = _module("vllm.model_executor.layers.attention_layer_base")
    kv = _module("vllm.v1.core.kv_cache_utils")
    specs_of = _module("vllm.v1.kv_cache_interface")
    platform = _module("vllm.platforms").current_platform
    set_config = _module("vllm.config").set_current_vllm_config
    layers_of = _module("vllm.config").get_layers_from_vllm_config
    of_dtype = _module("vllm.utils.torch_utils").set_default_torch_dtype
    customized = _module("vllm.v1.worker.utils").customize_attention_spec
    initialize = _module("vllm.model_executor.model_loader.utils").initialize_model
    _one_rank(set_config)
    with set_config(config):
        with of_dtype(config.model_config.dtype), torch.device("meta"):
            model = initialize(config)
        platform.update_block_size_for_backend(config)
        specs = {}
        for name, layer in layers_of(config, base.AttentionLayerBase).items():
            if getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            if spec := layer.get_kv_cache_spec(config):
                attends = isinstance(spec, specs_of.AttentionSpec)
                specs[name] = customized(layer.get_attn_backend(), spec) if attends else spec
        # The CPU backend's (v1/attention/backends/cpu_attn.py).
        config.cache_config.kv_cache_layout = "LBNHC"
        groups = kv.get_kv_cache_groups(config, dict(specs))
        request = kv._max_memory_usage_bytes_from_groups(config, groups) if specs else 0
    found = Counter(json.dumps(_layer(spec, config), sort_keys=True) for spec in specs.values())
    widths = [spec.dtype.itemsize for spec in specs.values() if hasattr(spec, "head_size")]
    return {
        "layers": [json.loads(layer) | {"count": count} for layer, count in found.items()],
        "request_bytes": int(request),
        "step_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "element_bytes": min(widths, default=0) or None,
        "weights_bytes": sum(its.numel() * its.element_size() for its in model.parameters()),
    }


def _one_rank(set_config: Any) -> None:
    """Layers ask for their rank while they are built."""
    torch, distributed = _module("torch"), _module("vllm.distributed")
    if torch.distributed.is_initialized():
        return
    with set_config(_module("vllm.config").VllmConfig()):
        meeting = f"file://{tempfile.mkdtemp()}/ranks"
        distributed.init_distributed_environment(1, 0, meeting, 0, backend="gloo")
        distributed.initialize_model_parallel(1, 1)


def _layer(spec: Any, config: Any) -> dict[str, Any]:
    """A spec in the words of `launcher.models.layers.KvLayers`."""
    kind = type(spec).__name__
    if hasattr(spec, "shapes"):
        size = sum(
            prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        states = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        return {"kind": "state", "state_bytes": int(size), "state_blocks": int(states)}
    heads, token = int(spec.num_kv_heads), int(spec.real_page_size_bytes // spec.block_size)
    if token % heads:
        heads = 1
    window = None
    if "Cross" in kind:
        kept = "cross"
    elif chunk := getattr(spec, "attention_chunk_size", None):
        kept, window = "chunked", int(chunk)
    elif kind.startswith("SlidingWindow") and (last := getattr(spec, "sliding_window", None)):
        kept, window = "sliding", int(last)
    else:
        kept = "full"
    return {
        "kind": kept, "heads": heads, "head_bytes": token // heads, "head_size": int(spec.head_size),
        "window": window,
    }  # fmt: skip


def main() -> int:
    """Answer the question on standard input. What vLLM and a model's code print goes nowhere."""
    question = json.load(sys.stdin)
    os.environ.update(question["environment"])
    # `-I` ignores PYTHONPATH, which may be where the engine lies.
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    signal.alarm(int(question["limit_s"]))
    with contextlib.suppress(OSError):
        os.nice(19)
    answer, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VLLM_CACHE_ROOT"] = tempfile.tempdir = scratch
        line = json.dumps(answer_to(question))
    os.write(answer, line.encode())
    # Threads of torch and vLLM may not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
