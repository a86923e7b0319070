"""vLLM's answers to what planning asks of an engine. Pure."""

from __future__ import annotations

from typing import Final

from launcher.engines.vllm.demand import demand_of, needs_of
from launcher.engines.vllm.rules_binding import BINDING_RULES
from launcher.engines.vllm.rules_host import HOST_RULES
from launcher.engines.vllm.rules_model import MODEL_RULES, ZENTORCH_RULES
from launcher.engines.vllm.settings import effective_config
from launcher.plan.plan import Planning

PLANNING: Final = Planning(
    settings=effective_config,
    rules=BINDING_RULES + MODEL_RULES + ZENTORCH_RULES + HOST_RULES,
    # Each worker, to the node of its first cpu (vllm/v1/worker/cpu_worker.py, 0.32).
    binds_itself=True,
    demand=demand_of,
    needs=needs_of,
)
