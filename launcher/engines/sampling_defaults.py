"""Sampling parameters that a vLLM server applies to requests without them.

vLLM 0.32 (config/model.py, get_diff_sampling_param): `--generation-config` names a folder with generation_config.json,
`auto` (the default) is the model's own, `vllm` none; `--override-generation-config` changes single values. vLLM reads
config.json where there is no generation_config.json (transformers_utils/config.py, try_get_generation_config).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from launcher.config.schema import Config, EngineKind
from launcher.engines.arguments import flag_of, value_of
from launcher.errors import LauncherError
from launcher.planning.model_profile import find_model

TAKEN: Final = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p",
    "max_new_tokens",
)  # fmt: skip
"""The parameters that vLLM reads from a generation config."""

MOST_TOKENS: Final = "most_tokens"
"""Name for a limit that no request may exceed (`override_max_tokens` in vLLM's chat_completion/serving.py)."""

_GENERATION: Final = "--generation-config"
_OVERRIDE: Final = "--override-generation-config"


def sampling_defaults(config: Config, model: str) -> dict[str, float]:
    """vLLM's names (`max_tokens` for `max_new_tokens`) and values; MOST_TOKENS where requests are capped.

    Reads the model's folder. A missing or unreadable file counts as empty: vLLM reports it, or refuses to start."""
    if config.engine.kind is not EngineKind.VLLM:
        return {}
    arguments = config.engine.args
    source = value_of(arguments, _GENERATION) or "auto"
    override = _override(arguments)
    found = {} if source == "vllm" else _read(_folder(config, model, source))
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


def _folder(config: Config, model: str, source: str) -> Path | None:
    if source != "auto":
        path: str | None = source
    else:
        own = next((entry.path for entry in config.models if entry.name == model), None)
        path = value_of(config.engine.args, "--hf-config-path") or own
    try:
        return None if path is None else find_model(path)
    except LauncherError:
        return None


def _read(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    for name in ("generation_config.json", "config.json"):
        try:
            parsed = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}
    return {}


def _override(arguments: Sequence[str]) -> dict[str, Any]:
    """Of `--override-generation-config JSON` and of its dotted form, `--override-generation-config.KEY VALUE`."""
    values: dict[str, Any] = {}
    whole = _parsed(value_of(arguments, _OVERRIDE))
    if isinstance(whole, dict):
        values |= whole
    for argument in arguments:
        flag = flag_of(argument)
        if flag is not None and flag.startswith(f"{_OVERRIDE}."):
            values[flag.removeprefix(f"{_OVERRIDE}.").replace("-", "_")] = _parsed(value_of(arguments, flag))
    return values


def _parsed(text: str | None) -> object:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
