"""Writes a layout into the configuration file. Comments, order and all other settings stay as they are."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import tomlkit
from msgspec import Struct
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

from launcher.base.errors import LauncherError, reason
from launcher.config.schema import Engine
from launcher.engines.make import engine_type
from launcher.measure.tune.layout import limits_of
from launcher.measure.tune.model import Layout, Stack

# Keys of [layout], with the defaults that need no line; strategy is always written.
_LAYOUT: Final[Mapping[str, Any]] = {
    "strategy": None, "instances_per_socket": "auto", "reserve_cores": "auto", "span_nodes": False,
}  # fmt: skip
_INSTALLATION: Final = (
    "it is an installation of vLLM, not a setting",
    "set [engine] command to that installation's vllm, then run tune --apply again",
)
_STACKS: Final[Mapping[Stack, tuple[str, str]]] = {
    "vllm": _INSTALLATION,
    "zentorch": _INSTALLATION,
    "llama.cpp": (
        "it is another engine, whose arguments are others",
        'set engine.kind = "llama.cpp" and the model\'s path to the GGUF file, and write the fragment that `tune` prints',
    ),
}
_BY_HAND: Final = "write the fragment that `tune` prints into the file by hand"


class Applied(Struct, frozen=True):
    file: Path
    kept: Path | None
    """The old file; None when nothing had to be changed."""
    changed: tuple[str, ...]
    """One line per key: `layout.strategy: "contiguous" → "interleaved"`."""


def layout_toml(layout: Layout) -> str:
    """The layout as a fragment of the configuration."""
    document = tomlkit.document()
    document["layout"] = dict.fromkeys(("strategy", "instances_per_socket", "reserve_cores"), "")
    _set_layout(document, layout)
    limits = "".join(f"{key} = {value}\n" for key, value in limits_of(layout).items())
    return document.as_string() + (
        f"\n# in each [[models]], and not in engine.args:\n{limits}" if limits else ""
    )


def apply_layout(file: Path, layout: Layout, *, now: datetime) -> Applied:
    """Write `layout` into a configuration file; `now` names the copy of the old one.

    A link stays a link: its target is replaced. Raises LauncherError when the file cannot be read or written, is not TOML,
    or another program changed it meanwhile; it is unchanged then."""
    if layout.stack is not None:
        what, remedy = _STACKS[layout.stack]
        raise LauncherError(f"cannot write stack '{layout.stack}' into '{file}': {what}", remedy)
    target = file.resolve()
    before, old = _read(file, target)
    try:
        document = tomlkit.parse(old)
        changed = (*_set_layout(document, layout), *_set_limits(document, layout))
        new = document.as_string().encode()
    except (TOMLKitError, ValueError, AttributeError, TypeError) as error:
        raise LauncherError(f"cannot change '{file}': {error}", _BY_HAND) from None
    if not changed:
        return Applied(file, None, ())
    kept = target.with_name(f"{target.name}.before-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}")
    try:
        _replace(target, kept, before, old, new)
    except OSError as error:
        raise LauncherError(f"cannot write '{file}': {reason(error)}", _remedy(error)) from None
    return Applied(file, kept, changed)


def _remedy(error: OSError) -> str:
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "run tune --apply as a user who may write the file and its folder"
    return "run tune --apply again" if error.errno in {errno.ESTALE, errno.EEXIST} else _BY_HAND


def _read(file: Path, target: Path) -> tuple[os.stat_result, bytes]:
    try:
        before = target.stat()
        if not stat.S_ISREG(before.st_mode):
            raise LauncherError(f"cannot change '{file}': it is not a regular file", _BY_HAND)
        return before, target.read_bytes()
    except OSError as error:
        raise LauncherError(
            f"cannot read '{file}': {reason(error)}", "name an existing file with -c FILE"
        ) from None


def _set_layout(document: MutableMapping[str, Any], layout: Layout) -> list[str]:
    wanted = {key: getattr(layout, key) for key in _LAYOUT} | {"strategy": layout.strategy.value}
    section = document.setdefault("layout", tomlkit.table())
    needed = {key: value for key, value in wanted.items() if key in section or value != _LAYOUT[key]}
    return list(_set(section, "layout", needed))


def _set_limits(document: MutableMapping[str, Any], layout: Layout) -> Iterator[str]:
    for index, model in enumerate(document.get("models", ())):
        yield from _set(model, f"models.{index}", limits_of(layout))
    yield from _remove_overriding(document.get("engine", {}), layout)


def _remove_overriding(engine: MutableMapping[str, Any], layout: Layout) -> Iterator[str]:
    """engine.args would override the limits."""
    args = engine.get("args", [])
    positions = engine_type(engine.get("kind", Engine().kind)).overriding(args, limits_of(layout))
    if positions:
        yield f"engine.args: without {' '.join(args[index] for index in positions)}"
    for index in reversed(positions):
        del args[index]


def _set(section: Any, name: str, wanted: Mapping[str, Any]) -> Iterator[str]:
    changed = {key: value for key, value in wanted.items() if section.get(key) != value}
    for key, value in changed.items():
        was = section.get(key)
        yield f"{name}.{key}: {'not set' if was is None else _toml(was)} → {_toml(value)}"
    after = _pop_comments(section)
    section.update(changed)
    for item in reversed(after):
        section.add(item)


def _pop_comments(section: Any) -> list[Item]:
    """Comments and empty lines after the last key, last first: they may belong to the next table, and tomlkit appends keys
    after them."""
    body = section.value.body if isinstance(section, Table) else []
    found = []
    while body and body[-1][0] is None:
        found.append(body.pop()[1])
    return found


def _toml(value: Any) -> str:
    return str(tomlkit.item(value).as_string())


def _replace(target: Path, kept: Path, before: os.stat_result, old: bytes, new: bytes) -> None:
    """Both files get the old one's mode, owner and attributes before they have content. Raises OSError."""
    if not os.access(target, os.W_OK):  # a rename needs the folder's permission only
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    beside = target.with_name(f".{target.name}.new")
    beside.unlink(missing_ok=True)
    written: list[Path] = []
    try:
        for path, data in ((kept, old), (beside, new)):
            _write_like(target, before, path, data)
            written.append(path)
        if not os.path.samestat(before, target.stat()) or target.read_bytes() != old:
            raise OSError(errno.ESTALE, "another program changed it meanwhile")
        beside.replace(target)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _write_like(model: Path, facts: os.stat_result, path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            created = os.fstat(fd)
            if (created.st_uid, created.st_gid) != (facts.st_uid, facts.st_gid):
                os.fchown(fd, facts.st_uid, facts.st_gid)
            os.fchmod(fd, stat.S_IMODE(facts.st_mode))
            _copy_attributes(model, fd)
            file.write(data)
            file.flush()
            os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _copy_attributes(model: Path, fd: int) -> None:
    """Access control lists and the SELinux label, where the file system has them."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(model):
            os.setxattr(fd, name, os.getxattr(model, name))
