"""vLLM's answers to what planning asks of an engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from launcher.config.schema import Config, Runtime
from launcher.engines.software import Stack
from launcher.engines.vllm.demand import demand_of, needs_of
from launcher.engines.vllm.rules_binding import BINDING_RULES
from launcher.engines.vllm.rules_host import HOST_RULES
from launcher.engines.vllm.rules_model import MODEL_RULES, ZENTORCH_RULES, divides
from launcher.engines.vllm.settings import WEIGHT_PREPACK, effective_config
from launcher.plan.plan import Planning

PLANNING: Final = Planning(
    settings=effective_config,
    rules=BINDING_RULES + MODEL_RULES + ZENTORCH_RULES + HOST_RULES,
    # Each worker, to the node of its first cpu (vllm/v1/worker/cpu_worker.py, 0.32).
    binds_itself=True,
    # Wherever it is bound (v1/worker/cpu_worker.py, determine_available_memory).
    far_memory="vLLM 0.32 does not start there: it compares its KV cache with the free memory of the cpus' own node",
    demand=demand_of,
    needs=needs_of,
    divides=divides,
    other_processes=True,  # the API server and EngineCore
)


def facts_of(stack: Stack, config: Config, environ: Mapping[str, str]) -> Mapping[str, str]:
    """`plan.Facts.engine`: the versions of vLLM and zentorch, and WEIGHT_PREPACK as the instances inherit it."""
    found = {"vllm": stack.vllm, "zentorch": stack.zentorch}
    if config.engine.runtime is Runtime.HOST:
        found[WEIGHT_PREPACK] = environ.get(WEIGHT_PREPACK)
    return {name: value for name, value in found.items() if value is not None}
