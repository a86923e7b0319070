"""Plans of a configuration, by the planning of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.schema import Config
from launcher.engines.make import engine_type
from launcher.machine.topology import Topology
from launcher.models.profile import ModelProfile
from launcher.plan import comparison, planner
from launcher.plan.plan import NO_FACTS, Facts, Finding, Plan


def make_plan(
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    facts: Facts = NO_FACTS,
    **more: Any,
) -> Plan:
    planning = engine_type(config.engine.kind).planning
    return planner.make_plan(topology, config, profiles, facts, planning=planning, **more)


def lint(
    plan: Plan,
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    facts: Facts = NO_FACTS,
    **more: Any,
) -> tuple[Finding, ...]:
    planning = engine_type(config.engine.kind).planning
    return planner.lint(plan, topology, config, profiles, facts, planning=planning, **more)


def compare(
    topology: Topology, config: Config, profiles: Mapping[str, ModelProfile], **more: Any
) -> tuple[comparison.Column, ...]:
    planning = engine_type(config.engine.kind).planning
    return comparison.compare(topology, config, profiles, planning=planning, **more)
