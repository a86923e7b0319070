"""Checks a plan against the engine's actual behaviour: a table of small rules. Pure.

Each rule is a generator of findings about the finished plan. Rules about vLLM are skipped for engine.kind
"command", and vice versa. A rule whose fact is unknown (facts.py) is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from launcher.config.schema import Config, EngineKind
from launcher.plan import Finding, Plan
from launcher.planning.facts import NO_FACTS, Facts
from launcher.planning.profile import ModelProfile
from launcher.planning.rules import Rule, Subject
from launcher.planning.rules_command import COMMAND_RULES
from launcher.planning.rules_host import HOST_RULES
from launcher.planning.rules_model import MODEL_RULES
from launcher.planning.rules_placement import BINDING_RULES, PLACEMENT_RULES
from launcher.planning.rules_secrets import SECRETS_RULES
from launcher.planning.rules_zentorch import ZENTORCH_RULES
from launcher.topology.model import Topology

VLLM_RULES: Final[tuple[Rule, ...]] = BINDING_RULES + MODEL_RULES + ZENTORCH_RULES + HOST_RULES


def lint(
    plan: Plan,
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    facts: Facts = NO_FACTS,
) -> tuple[Finding, ...]:
    """Findings of all applicable rules, in the order of the table."""
    subject = Subject(plan, topology, config, profiles, facts)
    rules = (
        SECRETS_RULES
        + PLACEMENT_RULES
        + (VLLM_RULES if config.engine.kind is EngineKind.VLLM else COMMAND_RULES)
    )
    return tuple(finding for rule in rules for finding in rule(subject))
