"""Merges the operator's vLLM arguments with the launcher's; the operator's replace them flag by flag. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from launcher.config.schema import Config, EngineKind
from launcher.errors import LauncherError

# Short spellings of flags that the launcher also passes (vllm/engine/arg_utils.py, 0.32).
_SHORT: Final = {"-q": "--quantization", "-tp": "--tensor-parallel-size", "-sc": "--speculative-config"}
# Flags that only the launcher sets -> remedy.
_RESERVED: Final = {
    "--uds": "remove it: the launcher gives each instance a socket of its own",
    "--host": "remove it: clients connect to proxy.listen; instances accept connections of the launcher only",
    "--port": "remove it: clients connect to proxy.listen; instances accept connections of the launcher only",
    "--api-key": "remove it: instances are reachable through the proxy only",
    "--model": "set `path` in [[models]] instead",
    "--served-model-name": "set `name` in [[models]] instead",
}

_NUMBER: Final = re.compile(r"-\d+(?:\.\d+)?", re.ASCII)


def flag_of(argument: str) -> str | None:
    """The canonical flag of one argument: "--no-enable_x=1" is "--enable-x". None for a value."""
    if not argument.startswith("-") or argument == "-" or _NUMBER.fullmatch(argument):
        return None
    flag = argument.partition("=")[0].replace("_", "-")
    if flag.startswith("--no-"):
        flag = "--" + flag.removeprefix("--no-")
    return _SHORT.get(flag, flag)


def merge(ours: Sequence[tuple[str, ...]], theirs: Sequence[str]) -> tuple[str, ...]:
    """The launcher's options (flag and values each) without those that `theirs` sets, then `theirs` unchanged.

    Raises LauncherError for an argument that is not a flag, is reserved, or has flag and value in one string."""
    replaced: set[str] = set()
    for argument in theirs:
        flag = flag_of(argument)
        if flag is None:
            if not replaced:
                raise LauncherError(
                    f"cannot use {argument!r} in engine.args: it is not an option",
                    'options start with "--"; the model is set by `path` in [[models]]',
                )
            continue
        if " " in flag:
            name, _, value = argument.partition(" ")
            raise LauncherError(
                f"cannot use {argument!r} in engine.args: it has flag and value in one argument",
                f'write two: "{name}", "{value.strip()}"',
            )
        if flag in _RESERVED:
            raise LauncherError(
                f"cannot set {argument!r} in engine.args: the launcher sets it", _RESERVED[flag]
            )
        replaced.add(flag)
    kept = (word for option in ours if flag_of(option[0]) not in replaced for word in option)
    return (*kept, *theirs)


def has_flag(arguments: Sequence[str], flag: str) -> bool:
    """Whether `flag` is on in `arguments`; the last occurrence counts."""
    on = False
    for argument in arguments:
        if flag_of(argument) == flag:
            on = not argument.replace("_", "-").startswith("--no-")
    return on


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of `flag`, in either form; None without one."""
    value: str | None = None
    for index, argument in enumerate(arguments):
        if flag_of(argument) != flag:
            continue
        _, equals, text = argument.partition("=")
        following = arguments[index + 1 : index + 2]
        value = text if equals else following[0] if following and flag_of(following[0]) is None else None
    return value


def lora_adapters(config: Config, name: str) -> tuple[str, ...]:
    """Names of a model's LoRA adapters: --lora-modules in engine.args.

    An adapter without a base model belongs to the only model; with several models, to none. Entries that vLLM cannot
    read are skipped: vLLM reports them when it starts (LoRAParserAction, vllm/entrypoints/launchers/cli_args.py,
    0.32)."""
    if config.engine.kind is not EngineKind.VLLM:
        return ()
    names = {name, *(alias for model in config.models if model.name == name for alias in model.aliases)}
    if all(model.name == name for model in config.models):
        names.add("")
    modules = (_lora_module(value) for value in _values_of(config.engine.args, "--lora-modules"))
    return tuple(adapter for adapter, base in filter(None, modules) if base in names)


def _values_of(arguments: Sequence[str], flag: str) -> list[str]:
    """All values of a flag that takes several; a repeated flag replaces the earlier values."""
    values: list[str] = []
    ours = False
    for argument in arguments:
        found = flag_of(argument)
        if found is not None:
            ours = found == flag
            if ours:
                _, equals, text = argument.partition("=")
                values = [text] if equals else []
        elif ours:
            values.append(argument)
    return values


def _lora_module(value: str) -> tuple[str, str] | None:
    """Name and base model ("" for none) of "name=path" or {"name": .., "path": .., "base_model_name": ..}."""
    if "=" in value and "," not in value:
        return value.partition("=")[0], ""
    try:
        module = json.loads(value)
        return str(module["name"]), str(module.get("base_model_name") or "")
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
