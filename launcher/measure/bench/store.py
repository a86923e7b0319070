"""Stored results: STATE/bench/ID.json, with the load generator's files in STATE/bench/ID/."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Final

import msgspec

from launcher.base.errors import LauncherError, reason
from launcher.base.files import replace_file
from launcher.measure.bench.result import BenchResult

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.-]+")


def new_folder(results: Path, workload: str, now: dt.datetime) -> Path:
    """A new folder for the files of one result; its name, the result's id, sorts by time. Raises LauncherError."""
    name = f"{now:%Y%m%d-%H%M%S}-{_UNSAFE.sub('-', workload).strip('-') or 'dataset'}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = results / f"{name}{suffix}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(folder, error) from None
        return folder
    raise LauncherError(f"cannot create '{results / name}': it exists 99 times", "try again in a second")


def save(results: Path, result: BenchResult) -> Path:
    """Writes the result atomically. Raises LauncherError."""
    file = results / f"{result.id}.json"
    try:
        replace_file(file, msgspec.json.encode(result), mode=0o644, folder_mode=0o755)
    except OSError as error:
        raise _unwritable(file, error) from None
    return file


def _unwritable(path: Path, error: OSError) -> LauncherError:
    return LauncherError(
        f"cannot store the result in '{path}': {reason(error)}",
        "free space there, or name another folder with --state-dir",
    )


def find(results: Path, name: str) -> Path:
    """The file of a result, given as a path or as an id. Raises LauncherError."""
    for file in (Path(name), results / f"{name}.json"):
        if file.is_file():
            return file
    raise LauncherError(
        f"cannot find result '{name}': no such file, and no such id in '{results}'",
        "numa-launcher bench list prints the ids",
    )


def load(file: Path) -> BenchResult:
    """Raises LauncherError for a file that is no result."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=BenchResult)
    except OSError as error:
        raise LauncherError(f"cannot read result '{file}': {reason(error)}", "give a readable file") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LauncherError(
            f"cannot read result '{file}': {error}", "give a file that `numa-launcher bench` wrote"
        ) from None


def load_all(results: Path) -> tuple[list[BenchResult], list[str]]:
    """All results, oldest first, and what is wrong with those that cannot be read."""
    found: list[BenchResult] = []
    broken: list[str] = []
    for file in sorted(results.glob("*.json")):
        try:
            found.append(load(file))
        except LauncherError as error:
            broken.append(error.message)
    return found, broken
