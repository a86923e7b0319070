"""Input and output of lint rules. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from launcher.config.schema import Config, Model
from launcher.plan import Finding, Plan
from launcher.planning.facts import NO_FACTS, Facts
from launcher.planning.profile import UNKNOWN, ModelProfile
from launcher.planning.serving import Serving, serving_of
from launcher.topology.model import Topology


@dataclass(frozen=True, slots=True)
class Subject:
    plan: Plan
    topology: Topology
    config: Config
    profiles: Mapping[str, ModelProfile]
    facts: Facts = NO_FACTS

    def models(self) -> Iterator[tuple[Model, ModelProfile]]:
        for model in self.config.models:
            yield model, self.profiles.get(model.name, UNKNOWN)

    def served(self) -> Iterator[tuple[Model, ModelProfile, Serving]]:
        for model, profile in self.models():
            yield model, profile, serving_of(model, self.config, profile, self.topology.cpu)


Rule = Callable[[Subject], Iterator[Finding]]
