"""Where measurements are kept: the state folder of the service, or of the user who measures."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from launcher.errors import LauncherError, reason

SYSTEM: Final = Path("/var/lib/numa-launcher")
_NAME: Final = "numa-launcher"
_REMEDY: Final = "name a folder with --state-dir DIR"


def state_folder(chosen: Path | None, environ: Mapping[str, str], uid: int) -> Path:
    """The state folder: `chosen` (--state-dir), else $STATE_DIRECTORY (systemd.exec(5)), else /var/lib/numa-launcher
    for root, else numa-launcher in $XDG_STATE_HOME or ~/.local/state (XDG Base Directory Specification).

    It may not exist yet. Raises LauncherError for a user without a home folder."""
    if chosen is not None:
        return chosen.absolute()
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given)
    if uid == 0:
        return SYSTEM
    xdg = environ.get("XDG_STATE_HOME", "")
    # The specification: a relative path is invalid and is ignored.
    base = Path(xdg) if xdg.startswith("/") else _home(environ, uid) / ".local/state"
    return base / _NAME


def _home(environ: Mapping[str, str], uid: int) -> Path:
    home = environ.get("HOME", "")
    if not home:
        try:
            home = pwd.getpwuid(uid).pw_dir
        except KeyError:
            raise LauncherError(
                f"cannot find the state folder: user {uid} has no home folder and $HOME is not set", _REMEDY
            ) from None
    return Path(home)


def make_folder(folder: Path) -> Path:
    """Create a folder of results below the state folder. Others may read it, as results have no secrets.

    Raises LauncherError, also for one in which another user may replace files."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        facts, link = folder.stat(), folder.lstat()
    except OSError as error:
        raise LauncherError(f"cannot keep results in '{folder}': {reason(error)}", _REMEDY) from None
    if not {facts.st_uid, link.st_uid} <= {os.geteuid(), 0} or facts.st_mode & 0o022:
        raise LauncherError(
            f"cannot keep results in '{folder}': users other than its owner may write there",
            f"run: chmod go-w '{folder}', or {_REMEDY}",
        )
    return folder
