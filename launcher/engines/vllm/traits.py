"""Abilities of vLLM's instances, by its arguments and the model's folder: LoRA adapters, sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from launcher.base.errors import LauncherError
from launcher.config.schema import Model
from launcher.engines.base import MOST_TOKENS
from launcher.engines.vllm.arguments import flag_of, json_of, value_of
from launcher.models.reader import find_model
from launcher.models.weight_files import read_model_json


def lora_adapters(args: Sequence[str], models: Sequence[Model], model: Model) -> tuple[str, ...]:
    """Names of the LoRA adapters of `model`, one of `models`: --lora-modules in engine.args.

    An adapter without a base model belongs to the only model; with several models, to none. Entries that vLLM cannot
    read are skipped: vLLM reports them when it starts (LoRAParserAction, vllm/entrypoints/launchers/cli_args.py,
    0.32)."""
    names = {model.name, *model.aliases}
    if all(each.name == model.name for each in models):
        names.add("")
    modules = (_lora_module(value) for value in _values_of(args, "--lora-modules"))
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


# --- Sampling parameters that a server applies to requests without them. ---
#
# vLLM 0.32 (config/model.py, get_diff_sampling_param): `--generation-config` names a folder with generation_config.json,
# `auto` (the default) is the model's own, `vllm` none; `--override-generation-config` changes single values. vLLM reads
# config.json where there is no generation_config.json (transformers_utils/config.py, try_get_generation_config).

TAKEN: Final = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p",
    "max_new_tokens",
)  # fmt: skip
"""The parameters that vLLM reads from a generation config."""

_GENERATION: Final = "--generation-config"
_OVERRIDE: Final = "--override-generation-config"


def sampling_defaults(args: Sequence[str], model: Model) -> dict[str, float]:
    """vLLM's names (`max_tokens` for `max_new_tokens`) and values; MOST_TOKENS where requests are capped
    (`override_max_tokens` in vLLM's chat_completion/serving.py).

    Reads the model's folder. A missing or unreadable file counts as empty: vLLM reports it, or refuses to start."""
    source = value_of(args, _GENERATION) or "auto"
    override = json_of(args, _OVERRIDE)
    found = {} if source == "vllm" else _read(_folder(args, model, source))
    taken = {name: value for name, value in (found | override).items() if name in TAKEN and _is_number(value)}
    limit = taken.pop("max_new_tokens", None)
    defaults = dict(taken)
    if limit is not None:
        defaults["max_tokens"] = limit
    cap = limit if source not in {"auto", "vllm"} else override.get("max_new_tokens")
    if _is_number(cap):
        defaults[MOST_TOKENS] = cap
    return defaults


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _folder(args: Sequence[str], model: Model, source: str) -> Path | None:
    path = source if source != "auto" else value_of(args, "--hf-config-path") or model.path
    try:
        return find_model(path)
    except LauncherError:
        return None


def _read(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    for name in ("generation_config.json", "config.json"):
        try:
            parsed = json.loads(read_model_json(folder / name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}
    return {}
