"""tuning/best.json in the state folder: the layouts measured best, one for each set of models."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from launcher.errors import LauncherError, reason
from launcher.host.replace_file import replace_file
from launcher.host.state_folder import make_folder
from launcher.tuning.remembered import BestLayout

VERSION: Final = 1
# A verdict has 2 KiB; more than this is not our file.
MAX_BYTES: Final = 4 * 1024**2


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    layouts: tuple[BestLayout, ...]


def best_file(state: Path) -> Path:
    return state / "tuning" / "best.json"


def remember(state: Path, best: BestLayout) -> Path:
    """Add a verdict; it replaces the one for the same models. Raises LauncherError."""
    file = best_file(state)
    others = (it for it in recall(state) if _paths(it) != _paths(best))
    body = msgspec.json.format(msgspec.json.encode(_File(version=VERSION, layouts=(*others, best))), indent=1)
    make_folder(file.parent)
    try:
        replace_file(file, body + b"\n", mode=0o644, folder_mode=0o755)
    except OSError as error:
        raise LauncherError(
            f"cannot remember the measured layout in '{file}': {reason(error)}",
            "free disk space, or name another folder with --state-dir DIR; the verdict above holds",
        ) from None
    return file


def recall(state: Path) -> tuple[BestLayout, ...]:
    """The verdicts; none without a readable file of this version. A measurement that cannot be read is no error:
    nothing but a line of `plan` and `status` depends on it."""
    try:
        with best_file(state).open("rb") as stream:
            data = stream.read(MAX_BYTES)
        found = msgspec.json.decode(data, type=_File)
    except (OSError, msgspec.MsgspecError):
        return ()
    return found.layouts if found.version == VERSION else ()


def _paths(best: BestLayout) -> list[str]:
    return [model.path for model in best.fingerprint.models]
