"""Reads TOML file, environment and flags into one Config, or raises one LauncherError.

Precedence, lowest first: defaults, file, environment (``NUMA_LAUNCHER_SECTION__KEY=value``), flags
(``section.key=value``). Values of the last two are parsed as TOML; bare words are strings.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.redaction import MASK, Redactor, is_harmless_name, secret_arguments, secret_parts
from launcher.base.text import parse_size
from launcher.base.text_files import read_toml
from launcher.config.checks import check_cost, check_proxy, check_runtime, check_telemetry
from launcher.config.explain import Tree, explain, origin_of
from launcher.config.schema import Config

_VARIABLES: Final = "engine.env."
ENV_PREFIX: Final = "NUMA_LAUNCHER_"
# Where msgspec finds the one overflow endpoint, and where its operator wrote it.
_LISTED: Final = "`$.proxy.overflow[0]"
_SINGLE: Final = "`$.proxy.overflow"


def load_config(
    path: Path | None, *, environ: Mapping[str, str], overrides: Iterable[str] = (), base: Tree | None = None
) -> Config:
    """Read and check the configuration. Raises LauncherError with secrets masked.

    `base` replaces the file's content when `path` is None."""
    try:
        return _load(path, environ, overrides, base)
    except LauncherError as error:  # the message quotes values and may be logged
        text = Redactor().text
        raise LauncherError(text(error.message), text(error.remedy)) from None


def _load(
    path: Path | None, environ: Mapping[str, str], overrides: Iterable[str], base: Tree | None
) -> Config:
    tree = read_tree(path) if path is not None else copy.deepcopy(base or {})
    origins: dict[str, str] = {}  # where a key was set; the last entry wins
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            key = _key_of_variable(name.removeprefix(ENV_PREFIX))
            origins[key] = f"environment variable {name}"
            _put(tree, key, value, origin=origins[key])
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise LauncherError(
                f"cannot use --set {override!r}: '=' is missing", "write it as section.key=value"
            )
        key = key.strip()
        said = f"--set {key}={MASK}" if _is_hidden(key) else f"--set {override}"
        origins.pop(key, None)
        origins[key] = said
        _put(tree, key, value.strip(), origin=said)
    return parse_config(tree, origin=str(path or "command line"), origins=origins)


def _is_hidden(key: str) -> bool:
    """Whether a key is a variable of the instances whose value is not quoted."""
    return key.startswith(_VARIABLES) and not is_harmless_name(key.removeprefix(_VARIABLES))


def parse_config(tree: Tree, *, origin: str, origins: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Check a tree of plain values against the schema.

    `origin` names the tree in errors; `origins` the sources of keys that were set elsewhere."""
    single = _listed(tree)
    try:
        config = msgspec.convert(tree if single is None else single, Config, strict=True)
    except msgspec.ValidationError as error:
        said = str(error) if single is None else str(error).replace(_LISTED, _SINGLE)
        raise explain(said, tree, origin, origins) from None
    _check_values(config, lambda key: origin_of(key, origin, origins))
    return config


def _listed(tree: Tree) -> Tree | None:
    """The same with `[proxy.overflow]`, as one endpoint may be written, as a list; None where it is one already."""
    proxy = tree.get("proxy")
    if not isinstance(proxy, dict) or not isinstance(proxy.get("overflow"), dict):
        return None
    return {**tree, "proxy": {**proxy, "overflow": [proxy["overflow"]]}}


def _key_of_variable(name: str) -> str:
    """`PROXY__LISTEN` is proxy.listen; names below ENGINE__ENV__ are variables and keep their case."""
    env = "ENGINE__ENV__"
    if name.upper().startswith(env):
        return f"engine.env.{name[len(env) :]}"
    return name.lower().replace("__", ".")


def read_tree(path: Path) -> Tree:
    """A TOML file. Raises LauncherError."""
    return read_toml(path, "configuration", "give an existing file with -c FILE (examples: configs/)")


def _put(tree: Tree, key: str, text: str, *, origin: str) -> None:
    """Set `section.key` in the tree to the TOML value in `text`."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    if key.startswith("engine.env.") and not isinstance(value, str):
        value = text  # OMP_WAIT=1 is the text "1"
    *parents, last = key.split(".")
    table: Any = tree
    for parent in parents:
        if isinstance(table, list) and parent.isdigit() and int(parent) < len(table):
            table = table[int(parent)]
            continue
        if isinstance(table, list) and parent.isdigit():
            raise _no_entry(key.partition(f".{parent}")[0], parent, len(table), origin)
        table = table.setdefault(parent, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict | list):
            break
    if not parents or not isinstance(table, dict):
        raise LauncherError(
            f"cannot use {origin}: '{key}' is not section.key",
            f"name the table by its number: {'.'.join(parents)}.0.{last}"
            if parents and isinstance(table, list)
            else "name a key such as proxy.listen",
        )
    table[last] = value


def _no_entry(path: str, number: str, count: int, origin: str) -> LauncherError:
    there = f"there {'is' if count == 1 else 'are'} {count}, numbered from 0"
    return LauncherError(
        f"cannot use {origin}: there is no [[{path}]] entry {number} ({there})",
        f"use the number of an existing entry, or add a [[{path}]] table to the file",
    )


def _check_values(config: Config, origin_of: Callable[[str], str]) -> None:
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
                f"cannot use {origin_of(key)}: {key}: {error}",
                'write "auto" or a size such as "40GiB"'
                if key.startswith("memory.")
                else 'write a size such as "400GiB", or remove it',
            ) from None
    if config.layout.cpus is not None:
        _check_cpus(config.layout.cpus, origin_of("layout.cpus"))
    names = [model.name for model in config.models]
    for name in names:
        if names.count(name) > 1:
            raise LauncherError(
                f"cannot use {origin_of('models')}: two [[models]] have the name '{name}'",
                "give each model a different name",
            )
    check_proxy(config, origin_of)
    check_runtime(config, origin_of)
    check_cost(config.cost, origin_of)
    check_telemetry(config.telemetry, origin_of)
    for listen in config.proxy.listen:
        parse_listen(listen, origin_of("proxy.listen"))
    least, most = config.supervision.backoff_initial_s, config.supervision.backoff_max_s
    if most < least:
        raise LauncherError(
            f"cannot use {origin_of('supervision.backoff_max_s')}: supervision.backoff_max_s = {most:g} is less than "
            f"backoff_initial_s = {least:g}",
            f"raise backoff_max_s to {least:g} or more, or lower backoff_initial_s",
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
            f"cannot use {origin}: layout.cpus = {text!r} contains no cpu",
            "remove it to use all allowed cpus",
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
            f"cannot use {origin}: proxy.listen = '{text}' is not an address",
            'write "HOST:PORT", "[IPV6]:PORT" or "unix:/path"',
        )
    return match["v6"] or match["host"] or "0.0.0.0", int(match["port"])  # noqa: S104  an empty host means all


# --- The configuration with secrets masked, and the secrets that it refers to. ---

# A value of a variable that is not known to be harmless is masked wherever it appears if it has as many characters.
MIN_UNKNOWN: Final = 12
# Far more than a token or a PEM file has; the rest is not read.
MAX_SECRET_BYTES: Final = 64 * 1024


def shown(config: Config, redactor: Redactor) -> dict[str, Any]:
    """Every key with its effective value; secrets masked."""
    tree: dict[str, Any] = redactor.tree(msgspec.to_builtins(config))
    return tree


def secret_values(config: Config, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Values that must not leave the host, and the secret files that could not be read.

    The values are those of secret-looking environment variables and arguments of this process and the instances, and the
    contents of files with a token, an API key of another endpoint or a private key. The API keys file has only hashes.
    """
    variables = (*environ.items(), *config.engine.env.items())
    values = [part for name, value in variables for part in secret_parts(name, value)]
    # Shorter ones, such as a number, are words of any text.
    values += [
        value
        for name, value in config.engine.env.items()
        if not is_harmless_name(name) and len(value) >= MIN_UNKNOWN
    ]
    values += secret_arguments((*config.engine.command, *config.engine.args))
    for overflow in config.proxy.overflow:
        values += secret_parts("url", overflow.url)
    unread = []
    for path in _files(config):
        try:
            with path.open("rb") as file:
                values.append(file.read(MAX_SECRET_BYTES).decode(errors="replace"))
        except FileNotFoundError:
            continue
        except OSError:
            unread.append(str(path))
    return values, unread


def _files(config: Config) -> Iterator[Path]:
    proxy = config.proxy
    named = (
        config.engine.hf_token_file,
        proxy.tls_key,
        proxy.tls_certificate if proxy.tls_key is None else None,  # which then contains the key
        *(overflow.api_key_file for overflow in proxy.overflow),
    )
    for name in named:
        if name is not None:
            yield Path(name)
