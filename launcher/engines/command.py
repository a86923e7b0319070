"""`engine.kind = "command"`: any OpenAI-compatible server, started from an argv template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.base.errors import LauncherError, PassingError
from launcher.config.schema import Config, Model, Runtime
from launcher.config.schema import Engine as EngineConfig
from launcher.engines.base import Expected, Launch, Traits, Unwanted, preloaded, secret_names
from launcher.engines.llama_cpp.arguments import TEMPLATE_RULES, slots_of
from launcher.engines.log import PLAIN_LOG, Accelerator, EngineLog
from launcher.engines.numactl import Binding
from launcher.engines.software import Stack, find_program, find_tcmalloc
from launcher.machine.topology import CpuInfo
from launcher.models.identity import model_files
from launcher.models.profile import ModelProfile
from launcher.plan.plan import (
    DEFAULT_MAX_MODEL_LEN,
    EffectiveConfig,
    Planning,
    Slot,
)

LOOPBACK: Final = "127.0.0.1"
PLACEHOLDERS: Final = ("uds", "port", "cpus", "threads", "slot", "model", "name")
# "{{word}}" stands for a literal "{word}"; other braces (JSON in an argument) are left alone.
_PLACEHOLDER: Final = re.compile(r"\{\{(?P<literal>\w+)\}\}|\{(?P<name>[A-Za-z_]\w*)\}", re.ASCII)

PortAllocator = Callable[[], int]
"""Returns a loopback port that is currently free."""


def placeholders(template: tuple[str, ...]) -> frozenset[str]:
    """Names in braces in an argv template."""
    return frozenset(m["name"] for word in template for m in _PLACEHOLDER.finditer(word) if m["name"])


def check_template(template: tuple[str, ...]) -> None:
    """Raises LauncherError for an unknown placeholder, or when the template has no address to listen on."""
    names = placeholders(template)
    for name in sorted(names - set(PLACEHOLDERS)):
        raise LauncherError(
            f"cannot fill in engine.command: unknown placeholder '{{{name}}}'",
            f"use {', '.join(f'{{{known}}}' for known in PLACEHOLDERS)}; {{{{{name}}}}} is the text itself",
        )
    if not names & {"uds", "port"}:
        raise LauncherError(
            f"cannot use engine.command {' '.join(template)!r}: it has neither {{uds}} nor {{port}}",
            "add {uds} (path of a UNIX socket) or {port} (a loopback port) as the server's address",
        )


class CommandEngine(Struct, frozen=True):
    """A custom server. Implements Engine. Raises LauncherError for a bad template."""

    template: tuple[str, ...]
    binding: Binding
    socket_dir: str
    free_port: PortAllocator
    """Called once per launch of a template with {port}. If another process binds the port first, the server
    exits, and the next generation gets another port."""
    user_env: Mapping[str, str] = field(default_factory=dict)
    ld_preload: str | None = None
    hf_token: str | None = None
    local_models: Mapping[str, str] = field(default_factory=dict)
    """`path` of each model that is a file or directory here, to its absolute path."""
    health_path: str = "/health"
    wants_completion_probe: bool = True
    log: EngineLog = PLAIN_LOG
    accelerator: Accelerator | None = None
    unwanted: tuple[Unwanted, ...] = ()

    def __post_init__(self) -> None:
        check_template(self.template)

    def launch(self, slot: Slot, generation: int) -> Launch:
        address = self._address(slot.id, generation)
        values = {
            "uds": address.path if isinstance(address, UnixAddress) else "",
            "port": str(address.port) if isinstance(address, TcpAddress) else "",
            "cpus": slot.placement.cpus.format(),
            "threads": str(len(slot.placement.cpus)),
            "slot": str(slot.id),
            "model": self.local_models.get(slot.model.path, slot.model.path),
            "name": slot.model.name,
        }
        env: dict[str, str] = {}
        if self.ld_preload is not None:
            env["LD_PRELOAD"] = self.ld_preload
        if self.hf_token is not None:
            env["HF_TOKEN"] = self.hf_token
        env |= self.user_env
        argv = tuple(
            _PLACEHOLDER.sub(lambda m: values[m["name"]] if m["name"] else f"{{{m['literal']}}}", word)
            for word in self.template
        )
        return Launch(
            argv=(*self.binding.prefix(slot.placement), *argv), env=env, secrets=secret_names(env),
            address=address, files=slot.files,
            expected=Expected(self.binding.is_strict, libraries=preloaded(env)), unwanted=self.unwanted,
        )  # fmt: skip

    def traits(self, model: Model) -> Traits:  # noqa: ARG002  nothing is known
        return Traits()

    def _address(self, slot: int, generation: int) -> Address:
        # With both placeholders the socket is used: it has no race for the address.
        if "uds" in placeholders(self.template):
            return UnixAddress(f"{self.socket_dir}/slot{slot}-{generation}.sock")
        return TcpAddress(LOOPBACK, self.free_port())


def effective_config(
    model: Model, config: Config, profile: ModelProfile, _cpu: CpuInfo | None = None
) -> EffectiveConfig:
    """[[models]]; and no more requests at once than a llama-server is told to compute."""
    engine, length, step = (
        config.engine,
        model.max_model_len or profile.max_model_len,
        model.max_num_batched_tokens,
    )
    told = slots_of((*engine.command, *engine.args), engine.env)
    ranks = 1 if model.tensor_parallel_size == "auto" else model.tensor_parallel_size
    seqs = model.max_num_seqs if told is None else min(told, model.max_num_seqs)
    return EffectiveConfig(
        name=model.name, dtype=model.dtype, quantization=model.quantization,
        tensor_parallel_size=ranks, max_model_len=length, max_num_seqs=seqs,
        max_num_batched_tokens=step, step_tokens=step or seqs * (length or DEFAULT_MAX_MODEL_LEN),
        block_size=model.block_size or 1, kv_cache_dtype=None, kv_element_bytes=profile.kv_element_bytes, kv_bytes=None,
        kv_source="the engine's own", eager=False, hybrid=True,
    )  # fmt: skip


PLANNING: Final = Planning(settings=effective_config, rules=TEMPLATE_RULES)
"""A server that only its command describes."""


# --- The server on this host. ---


def probe(engine: EngineConfig) -> Stack:
    """Finds the program that engine.command begins with; an allocator is preloaded only when its path is configured.

    Raises LauncherError for a program or library that is not here, PassingError where it may come by itself."""
    tcmalloc = None if engine.tcmalloc == "auto" else find_tcmalloc(engine.tcmalloc)
    return Stack(command=(find_program(engine.command[0]), *engine.command[1:]), tcmalloc=tcmalloc)


def require_models(config: Config) -> None:
    """Raises PassingError for a model that is a path and not there: the server would end, and again."""
    engine = config.engine
    if engine.runtime is not Runtime.HOST or "model" not in placeholders((*engine.command, *engine.args)):
        return
    for model in config.models:
        if Path(model.path).expanduser().is_absolute():
            try:
                model_files(model.path)
            except PassingError:
                raise
            except LauncherError:  # its own user may be able to read it
                continue
