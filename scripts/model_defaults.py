"""Writes the defaults of all configuration classes that the installed transformers and vLLM know.

usage: scripts/model-defaults            writes launcher/models/class_defaults.json
       scripts/model-defaults --check    fails when that file is stale

A config.json leaves out what its class fills in. Each model type gets the keys that launcher/models reads, with the
class's defaults; the names it takes for the usual ones; the place of the language model; and the kinds of its layers,
where the class computes them. Beside them are the names of the models that vLLM has.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "CRITICAL"}

import transformers
import vllm
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from vllm.model_executor.models import ModelRegistry
from vllm.transformers_utils.config import _CONFIG_REGISTRY

ROOT: Final = Path(__file__).resolve().parents[1]
MODELS: Final = ROOT / "launcher" / "models"
TABLE: Final = MODELS / "class_defaults.json"
# Numbers of layers at which a class is asked for the kinds of its layers; a pattern must explain both of a pair. The
# first pair ends within the usual cycles, which shows a last layer of another kind; some classes take whole cycles only.
_COUNTS: Final = ((49, 62), (48, 60))
_LONGEST_CYCLE: Final = 16
_KINDS: Final = ("layer_types", "layers_block_type")
# Keys that set the length of the cycle where config.json has them.
_PERIODS: Final = ("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers")
_PROBE_PERIOD: Final = 3


def keys_read() -> frozenset[str]:
    """Every string in the modules that could be a key of config.json."""
    found = set()
    for module in MODELS.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]{2,40}", node.value) else set()
    return frozenset(found)


def classes(named: Mapping[str, type[PreTrainedConfig]]) -> Iterator[tuple[str, type[PreTrainedConfig]]]:
    for kind in sorted(named):
        try:
            yield kind, named[kind]
        except Exception as error:  # a class that needs a package that is not here
            print(f"left out {kind}: {type(error).__name__}: {error}", file=sys.stderr)


def declared(its: type[PreTrainedConfig]) -> dict[str, Any]:
    """The defaults that the class declares, before it derives any from others."""
    found: dict[str, Any] = {}
    for base in reversed(its.__mro__):
        if dataclasses.is_dataclass(base):
            found |= {
                field.name: field.default
                for field in dataclasses.fields(base)
                if field.default is not dataclasses.MISSING
            }
        if "__init__" in vars(base) and base is not PreTrainedConfig:
            signature = inspect.signature(vars(base)["__init__"])
            found |= {
                name: parameter.default
                for name, parameter in signature.parameters.items()
                if parameter.default is not inspect.Parameter.empty
            }
    return found


def plain(value: object) -> object:
    """The value where JSON can hold it and it is no None; else None."""
    if isinstance(value, bool | int | float | str):
        return value
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(item, bool | int | str) for item in value)
    ):
        return list(value)
    return None


def entry(its: type[PreTrainedConfig], keys: frozenset[str]) -> dict[str, Any]:
    said = {
        key: value
        for key, default in declared(its).items()
        if key in keys and (value := plain(default)) is not None
    }
    row: dict[str, Any] = {"keys": dict(sorted(said.items()))}
    if alias := {usual: own for usual, own in its.attribute_map.items() if usual in keys}:
        row["alias"] = dict(sorted(alias.items()))
    built = attempt(its)
    if built is not None:
        row |= parts(built, keys)
        row |= cycle(its)
    return row


def attempt(its: type[PreTrainedConfig], **given: object) -> PreTrainedConfig | None:
    try:
        return its(**given)
    except Exception:  # classes check their arguments, each in its way
        return None


def parts(built: PreTrainedConfig, keys: frozenset[str]) -> dict[str, Any]:
    """The place of the language model, and the class and other values of each configuration on the way."""
    try:
        text = built.get_text_config()
    except Exception:
        return {}
    its, found = built, []
    for key in next(iter(paths(built, text)), ()):
        outer, its = its, vars(its)[key]
        step = {"key": key, "type": its.model_type}
        if getattr(outer, "sub_configs", {}).get(key, AutoConfig) is not AutoConfig:
            step["fixed"] = True
        if its.model_type in _CONFIG_REGISTRY and _CONFIG_REGISTRY[its.model_type] is type(its):
            step["own"] = True
        if other := changed(its, keys):
            step["keys"] = other
        found.append(step)
    return {"text": found} if found else {}


def changed(its: PreTrainedConfig, keys: frozenset[str]) -> dict[str, Any]:
    """Values that a part of a default configuration has otherwise than its class alone."""
    other: dict[str, Any] = {}
    for name in declared(type(its)):
        alone = attempt(type(its), **other)
        value = plain(vars(its).get(name))
        if name in keys and value is not None and (alone is None or plain(vars(alone).get(name)) != value):
            other[name] = value
    return other


def paths(built: PreTrainedConfig, text: PreTrainedConfig, depth: int = 3) -> Iterator[tuple[str, ...]]:
    if built is text or not depth:
        return
    for key, value in vars(built).items():
        if value is text:
            yield (key,)
        elif isinstance(value, PreTrainedConfig):
            yield from ((key, *rest) for rest in paths(value, text, depth - 1))


def cycle(its: type[PreTrainedConfig]) -> dict[str, Any]:
    for key in _KINDS:
        for counts in _COUNTS:
            pattern = common([kinds(attempt(its, num_hidden_layers=n), key, n) for n in counts])
            if pattern is None:
                continue
            for period in _PERIODS:
                other = [
                    kinds(attempt(its, num_hidden_layers=n, **{period: _PROBE_PERIOD}), key, n)
                    for n in counts
                ]
                probed = common(other)
                if probed and len(probed["repeats"]) == _PROBE_PERIOD != len(pattern["repeats"]):
                    pattern["period"] = period
            return {"layers": pattern}
    default = attempt(its)
    for key in _KINDS:
        found = vars(default).get(key) if default is not None else None
        if isinstance(found, list) and found and "num_hidden_layers" not in declared(its):
            return {"layers": {"repeats": found, "count": len(found)}}
    return {}


def kinds(built: PreTrainedConfig | None, key: str, count: int) -> list[str]:
    found = vars(built).get(key) if built is not None else None
    return [str(kind) for kind in found] if isinstance(found, list) and len(found) == count else []


def common(found: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """The shortest list that, repeated, gives all layers; the last layer may differ."""
    if not all(found):
        return None
    for length in range(1, _LONGEST_CYCLE + 1):
        repeats = found[0][:length]
        if all(kind == repeats[i % length] for its in found for i, kind in enumerate(its[:-1])):
            last = {its[-1] for its in found}
            same = all(its[-1] == repeats[(len(its) - 1) % length] for its in found)
            if same:
                return {"repeats": list(repeats)}
            if len(last) == 1:
                return {"repeats": list(repeats), "last": last.pop()}
    return None


def table() -> dict[str, Any]:
    """`own` are vLLM's classes, which it takes at the top of a file only; parts have those of transformers.
    `architectures` are the models that vLLM has."""
    keys = keys_read()
    rows = {"classes": rows_of(CONFIG_MAPPING, keys), "own": rows_of(_CONFIG_REGISTRY, keys)}
    versions = {"transformers": transformers.__version__, "vllm": vllm.__version__.partition("+")[0]}
    return versions | {"architectures": sorted(ModelRegistry.get_supported_archs())} | rows


def rows_of(named: Mapping[str, type[PreTrainedConfig]], keys: frozenset[str]) -> dict[str, Any]:
    found = {kind: entry(its, keys) for kind, its in classes(named)}
    return {kind: row for kind, row in found.items() if row["keys"] or "text" in row}


def written(table: Mapping[str, Any]) -> str:
    """One line for each class."""
    head = [
        f"{json.dumps(key)}: {json.dumps(table[key])}" for key in ("transformers", "vllm", "architectures")
    ]
    for part in ("classes", "own"):
        lines = [f" {json.dumps(kind)}: {json.dumps(row)}" for kind, row in table[part].items()]
        head.append(f"{json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(head) + "\n}\n"


def main() -> int:
    text = written(table())
    if sys.argv[1:] == ["--check"]:
        stale = TABLE.read_text() != text
        if stale:
            print(
                f"{TABLE.relative_to(ROOT)} is stale\n  what to do: run scripts/model-defaults",
                file=sys.stderr,
            )
        return int(stale)
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
