"""A third engine, which no line of the launcher knows: `python toy_engine.py VERB ...` is a launcher whose
`engine.kind = "command"` is this one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from launcher.base.address import UnixAddress
from launcher.cli import main
from launcher.config.schema import Config, EngineKind, Model
from launcher.engines import command, make
from launcher.engines.base import Expected, Launch, Traits, Unwanted
from launcher.engines.causes import PLAIN, Retry, rule
from launcher.engines.log import Accelerator, EngineLog
from launcher.engines.make import EngineType, Parts
from launcher.engines.numactl import Binding
from launcher.engines.software import Stack
from launcher.machine.topology import CpuInfo
from launcher.models.profile import ModelProfile
from launcher.plan.plan import EffectiveConfig, Finding, Planning, Slot, Subject, warning

SERVER: Final = Path(__file__).with_name("toy_server.py")
LANES: Final = 3
LOG: Final = EngineLog(
    causes=(
        rule("toy-out-of-ink", r"toy: out of ink", "the toy has no ink left", "refill it", Retry.BACKOFF),
        *PLAIN,
    ),
    phases=(("toy: sharpening", "sharpening pencils"), ("toy: paper", "paper in")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToyEngine:
    """Implements Engine."""

    binding: Binding
    socket_dir: str
    args: tuple[str, ...]
    health_path: str = "/health"
    wants_completion_probe: bool = True
    log: EngineLog = LOG
    accelerator: Accelerator | None = None
    unwanted: tuple[Unwanted, ...] = ()

    def launch(self, slot: Slot, generation: int) -> Launch:
        address = UnixAddress(f"{self.socket_dir}/slot{slot.id}-{generation}.sock")
        own = ("--listen", address.path, "--as", slot.model.name, "--lanes", str(slot.effective.max_num_seqs))
        prefix = self.binding.prefix(slot.placement)
        return Launch(
            argv=(*prefix, sys.executable, str(SERVER), *own, *self.args), env={}, secrets=frozenset(), address=address,
            expected=Expected(self.binding.is_strict),
        )  # fmt: skip

    def traits(self, model: Model) -> Traits:
        return Traits()


def _settings(model: Model, config: Config, profile: ModelProfile, cpu: CpuInfo | None) -> EffectiveConfig:
    its = command.effective_config(model, config, profile, cpu)
    return replace(its, max_num_seqs=LANES)


def _ink(subject: Subject) -> list[Finding]:
    told = "--ink" in subject.config.engine.args
    return [warning("toy-ink", "the ink of the toy is limited", "remove --ink")] if told else []


def _make(config: Config, parts: Parts) -> ToyEngine:
    return ToyEngine(parts.binding, parts.socket_dir, config.engine.args)


TOY: Final = EngineType(
    title=lambda _engine: "toy",
    planning=Planning(settings=_settings, rules=(lambda subject: iter(_ink(subject)),)),
    probe=lambda _engine: Stack(command=(sys.executable,)),
    make=_make,
)

if __name__ == "__main__":
    make.TYPES[EngineKind.COMMAND] = TOY
    sys.exit(main())
