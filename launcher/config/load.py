"""From TOML file, environment and flags to one Config, or one error a person can act on.

Later wins: defaults, file, environment (``NUMA_LAUNCHER_SECTION__KEY=value``), flags
(``section.key=value``). Values of the last two are read as TOML; bare words count as strings.
"""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from launcher.config.check_proxy import check_proxy
from launcher.config.check_runtime import check_runtime
from launcher.config.schema import Config, Model
from launcher.cpuset import CpuSet
from launcher.errors import LauncherError, reason
from launcher.sizes import parse_size

ENV_PREFIX: Final = "NUMA_LAUNCHER_"

Tree = dict[str, Any]
Origins = dict[str, str]
"""Who said a key: the last one comes last."""


def load_config(
    path: Path | None, *, environ: Mapping[str, str], overrides: Iterable[str] = (), base: Tree | None = None
) -> Config:
    """Read and check the configuration. Raises LauncherError; starts nothing.

    `base` stands in for the file's content where `path` is None.
    """
    tree = _read(path) if path is not None else copy.deepcopy(base or {})
    origins: Origins = {}
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            key = _key_of_variable(name.removeprefix(ENV_PREFIX))
            origins[key] = f"environment variable {name}"
            _put(tree, key, value, origin=origins[key])
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise LauncherError(f"cannot use --set {override!r}: no '='", "write it as section.key=value")
        origins.pop(key.strip(), None)  # the last one named is the one that holds
        origins[key.strip()] = f"--set {override}"
        _put(tree, key.strip(), value.strip(), origin=f"--set {override}")
    return parse_config(tree, origin=str(path or "command line"), origins=origins)


def parse_config(tree: Tree, *, origin: str, origins: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Check a tree of plain values against the schema.

    `origin` names the tree in errors; `origins` names where keys came from that are not the tree's own.
    """
    try:
        config = msgspec.convert(tree, Config, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), tree, origin, origins) from None
    _check_values(config, lambda key: _origin_of(key, origin, origins))
    return config


def _key_of_variable(name: str) -> str:
    """`PROXY__LISTEN` is proxy.listen; the names under ENGINE__ENV__ are variables and keep their case."""
    env = "ENGINE__ENV__"
    if name.upper().startswith(env):
        return f"engine.env.{name[len(env) :]}"
    return name.lower().replace("__", ".")


def _origin_of(at: str, origin: str, origins: Mapping[str, str]) -> str:
    """Who said the value at a path such as `models[0].path`: the last override of it or of a part of it."""
    key = re.sub(r"\[(\d+)\]", r".\1", at)
    for said, name in reversed(list(origins.items())):
        if key == said or key.startswith(f"{said}."):
            return name
    return origin


def _origin_of_unknown(at: str, tree: Tree, origin: str, origins: Mapping[str, str]) -> str:
    """As `_origin_of`, of a key that is not in the schema; an override of a key below it has made it."""
    made = _value_at(tree, at)
    below = [name for said, name in origins.items() if said.startswith(f"{at}.")]
    overridden = bool(below) and isinstance(made, dict) and len(made) == len(below)
    return below[-1] if overridden else _origin_of(at, origin, origins)


def _read(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LauncherError(
            f"cannot read configuration '{path}': {reason(error)}",
            "give an existing file with -c FILE (examples: configs/)",
        ) from None
    except UnicodeDecodeError:
        raise LauncherError(
            f"cannot read configuration '{path}': not UTF-8 text", "save the file as UTF-8"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LauncherError(
            f"cannot read configuration '{path}': {error}", "correct the TOML syntax there"
        ) from None


def _put(tree: Tree, key: str, text: str, *, origin: str) -> None:
    """Set `section.key` in the tree to the TOML value in `text`."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    if key.startswith("engine.env.") and not isinstance(value, str):
        value = text  # a variable is text: OMP_WAIT=1 is "1"
    *parents, last = key.split(".")
    table: Any = tree
    for parent in parents:
        if isinstance(table, list) and parent.isdigit() and int(parent) < len(table):
            table = table[int(parent)]
            continue
        table = table.setdefault(parent, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict | list):
            break
    if not parents or not isinstance(table, dict):
        raise LauncherError(
            f"cannot use {origin}: '{key}' is not section.key", "name a key such as proxy.listen"
        )
    table[last] = value


_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$(?P<at>[^`]*)`)?")
_WRONG: Final = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<at>[^`]*)`)?$", re.DOTALL)


def _explain(error: str, tree: Tree, origin: str, origins: Mapping[str, str]) -> LauncherError:
    """Turn msgspec's message into `cannot X: why` with the value, and a remedy."""
    unknown = _UNKNOWN.match(error)
    if unknown:
        at = (unknown["at"] or "").lstrip(".")
        origin = _origin_of_unknown(f"{at}.{unknown['key']}".lstrip("."), tree, origin, origins)
        known = _known_keys(at)
        close = difflib.get_close_matches(unknown["key"], known, n=1, cutoff=0.6)
        where = f"[{at.split('[')[0]}]" if at else "the file"
        remedy = f"did you mean '{close[0]}'?" if close else f"known keys of {where}: {', '.join(known)}"
        return LauncherError(f"cannot use {origin}: unknown key '{unknown['key']}' in {where}", remedy)
    wrong = _WRONG.match(error)
    at = (wrong["at"] or "") if wrong else ""
    what = (wrong["what"] if wrong else error).removeprefix("Object ")
    origin = _origin_of(at, origin, origins)
    value = _value_at(tree, at)
    shown = f" = {value!r}" if at and value is not None and not isinstance(value, dict) else ""
    key = at or "the file"
    description = _describe(at)
    remedy = f"{key}: {description}" if description else f"see docs/configuration.md for '{key}'"
    if "missing required field `models`" in what:
        remedy = 'add a [[models]] table with name = "..." and path = "..."'
    elif "missing required field" in what:
        remedy = f"add it to {key}"
    return LauncherError(f"cannot use {origin}: {key}{shown}: {what[0].lower()}{what[1:]}", remedy)


def _known_keys(at: str) -> list[str]:
    """Keys of the table at a msgspec path such as `proxy` or `models[0]`."""
    kind: Any = Config
    for part in re.findall(r"[a-z_]+", at):
        field = _field(kind, part)
        if field is None:
            return []
        kind = Model if part == "models" else field.type
    return [f.encode_name for f in msgspec.structs.fields(kind)]


def _describe(at: str) -> str:
    """The schema's own words for the key at a msgspec path; empty for a table."""
    *parents, last = re.findall(r"[a-z_]+", at) or [""]
    kind: Any = Model if parents == ["models"] else Config
    for part in parents if parents != ["models"] else ():
        parent = _field(kind, part)
        kind = parent.type if parent else None
    field = _field(kind, last) if kind is not None else None
    notes: tuple[Any, ...] = getattr(field.type, "__metadata__", ()) if field else ()
    return next(
        (note.description for note in notes if isinstance(note, msgspec.Meta) and note.description), ""
    )


def _field(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return None
    return next((f for f in msgspec.structs.fields(kind) if f.encode_name == name), None)


def _value_at(tree: Tree, at: str) -> Any:
    value: Any = tree
    for part in re.findall(r"\w+", at.replace("[...]", "")):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return value


def _check_values(config: Config, origin_of: Callable[[str], str]) -> None:
    """What the types cannot say."""
    for key, text in (
        ("memory.kv_cache", config.memory.kv_cache),
        ("memory.reserve", config.memory.reserve),
        ("memory.instance_overhead", config.memory.instance_overhead),
        ("systemd.memory_max", config.systemd.memory_max),
    ):
        if text is None or (text == "auto" and key.startswith("memory.")):
            continue
        try:
            parse_size(text)
        except ValueError as error:
            raise LauncherError(
                f"cannot use {origin_of(key)}: {key}: {error}", 'write "auto" or a size such as "40GiB"'
            ) from None
    if config.layout.cpus is not None:
        _check_cpus(config.layout.cpus, origin_of("layout.cpus"))
    names = [model.name for model in config.models]
    for name in names:
        if names.count(name) > 1:
            raise LauncherError(
                f"cannot use {origin_of('models')}: two [[models]] are called '{name}'",
                "give each a name of its own",
            )
    check_proxy(config, origin_of)
    check_runtime(config, origin_of)
    for listen in config.proxy.listen:
        parse_listen(listen, origin_of("proxy.listen"))
    if config.supervision.backoff_max_s < config.supervision.backoff_initial_s:
        raise LauncherError(
            f"cannot use {origin_of('supervision.backoff_max_s')}: supervision.backoff_max_s = "
            f"{config.supervision.backoff_max_s} < backoff_initial_s",
            "raise backoff_max_s",
        )


def _check_cpus(text: str, origin: str) -> None:
    try:
        cpus = CpuSet.parse(text)
    except ValueError as error:
        raise LauncherError(
            f"cannot use {origin}: layout.cpus: {error}", 'write a cpu list such as "0-63,128-191"'
        ) from None
    if not cpus:
        raise LauncherError(
            f"cannot use {origin}: layout.cpus = {text!r} names no cpu",
            "leave it out to use all allowed cpus",
        )


_LISTEN: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]\s]*)):(?P<port>\d{1,5})", re.ASCII
)


def parse_listen(text: str, origin: str = "configuration") -> tuple[str, int] | str:
    """A listen address: (host, port), or the path of a UNIX socket. Raises LauncherError."""
    if text.startswith("unix:/"):
        return text.removeprefix("unix:")
    match = _LISTEN.fullmatch(text)
    if match is None or not 0 <= int(match["port"]) <= 65535:
        raise LauncherError(
            f"cannot use {origin}: proxy.listen = '{text}' is no address",
            'write "HOST:PORT", "[V6]:PORT" or "unix:/path"',
        )
    return match["v6"] or match["host"] or "0.0.0.0", int(match["port"])  # noqa: S104  an empty host means all
