"""Machines by name: descriptions in machines/ (configs/machines in a checkout), own files, one-line descriptions.

A name may end in -nps2 or -nps4 (AMD's nodes per socket; -nps1 is what the descriptions have) and in
-smtoff: epyc-9654-2p-nps4-smtoff.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.errors import LauncherError, reason
from launcher.topology.machine import UNNAMED, Machine, parse_machine
from launcher.topology.model import CpuInfo, Topology

FOLDER: Final = Path(__file__).parent / "machines"
_SUFFIXES: Final = re.compile(r"(?P<name>.+?)(?:-nps(?P<nps>[124]))?(?P<smtoff>-smtoff)?", re.ASCII)
_CPU_KEYS: Final[dict[str, type]] = {"vendor": str, "model": str, "family": int, "flags": str}


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find_topology(text: str) -> Topology:
    """The machine for --machine: a built-in name, a TOML file, or a description. Raises LauncherError."""
    try:
        return _find(text).topology()
    except ValueError as error:
        raise LauncherError(
            f"cannot use machine {text!r}: {error}",
            'describe it like "socket:2 node:1(memory=768GiB) l3:16(size=32MiB) core:8 smt:2" (docs/topology.md)',
        ) from None


def _find(text: str) -> Machine:
    if ":" in text and "/" not in text:
        return parse_machine(text)
    if text.endswith(".toml"):
        return _read(Path(text))
    match = _SUFFIXES.fullmatch(text)
    known = names()
    if match is None or match["name"] not in known:
        close = difflib.get_close_matches(text, known, n=1)
        raise LauncherError(
            f"cannot find machine {text!r}"
            + (f": did you mean {close[0]!r}?" if close else ": no such name"),
            f"choose one of {', '.join(known)}, optionally with -nps2, -nps4 (AMD) and -smtoff, or give a .toml file",
        )
    machine = _read(FOLDER / f"{match['name']}.toml")
    if match["nps"] not in {None, "1"}:
        machine = machine.split(int(match["nps"]))
    return replace(machine, smt=1) if match["smtoff"] else machine


def _read(file: Path) -> Machine:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(reason(error)) from None
    unknown = sorted(tree.keys() - {"layout", "cpu"})
    if unknown or not isinstance(tree.get("layout"), str):
        raise ValueError(f"unknown key {unknown[0]!r}" if unknown else "`layout` is missing or not a text")
    return parse_machine(tree["layout"], _cpu(tree.get("cpu", {})))


def _cpu(table: dict[str, Any]) -> CpuInfo:
    for key, value in table.items():
        if not isinstance(value, _CPU_KEYS.get(key, ())):
            raise ValueError(  # noqa: TRY004 - the file's fault, not the caller's
                f"key {key!r} of [cpu] is unknown or of the wrong type: it has {', '.join(_CPU_KEYS)}"
            )
    return CpuInfo(
        vendor=table.get("vendor", UNNAMED.vendor), model=table.get("model", UNNAMED.model),
        family=table.get("family"), flags=frozenset(table.get("flags", "").split()),
    )  # fmt: skip
