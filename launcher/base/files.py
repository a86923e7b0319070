"""Replaces a file atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from launcher.base.errors import AWAY, LauncherError, reason


def why_away(path: str) -> str | None:
    """The reason why there is nothing at `path`, where that may pass by itself (AWAY): its file system is mounted late, or
    it is not made yet. None where there is something, or another error: what reads it names that."""
    try:
        Path(path).stat()
    except OSError as error:
        return reason(error) if error.errno in AWAY else None
    return None


def replace_file(path: Path, data: bytes, *, mode: int = 0o600, folder_mode: int = 0o700) -> None:
    """Write a file as a whole: a reader, or a process killed meanwhile, leaves the old content or the new.

    The file never has wider permissions than `mode`; its folder is made if needed. Raises OSError, PermissionError where
    other users may write into the folder."""
    path.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
    _check_owner(path.parent)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _check_owner(folder: Path) -> None:
    facts = folder.stat()
    owners = {folder.lstat().st_uid, facts.st_uid}
    if not owners <= {os.geteuid(), 0} or facts.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "other users may write there", str(folder))


# --- Folders and files that nobody but root may have written, or the user of this process where that is not root.
#
# The instances' user runs code that comes with models. A file of that user in a folder of root is not to be believed,
# whatever it says, and not to be written through: it may be a link. ``python -m launcher.base.files FOLDER`` makes a
# folder before a program starts that believes what is in it, and is not ours.

ASIDE: Final = ".foreign-"
"""In the new name of what was moved aside, before its number."""
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_MOST: Final = 1000  # moved aside under one name
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_own(path: Path) -> bytes:
    """Raises OSError; PermissionError for a link, and where another user owns the file or its folder, or may change it."""
    with _opened(path.parent, os.O_DIRECTORY) as folder:
        _check(os.fstat(folder), path.parent)
        with _opened(path, folder=folder) as descriptor:
            facts = os.fstat(descriptor)
            _check(facts, path)
            if not stat.S_ISREG(facts.st_mode):
                raise PermissionError(errno.EPERM, "it is no file", str(path))
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()


def own_folder(path: Path) -> list[str]:
    """Make a folder of this user's, mode 0700. A folder or link of another user in its place, and what others put into it,
    is moved aside. Returns the new paths, also of what was moved aside earlier and is still there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if _is_foreign(path.lstat()):
            _move(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(path, os.O_DIRECTORY) as folder:
        facts = os.fstat(folder)
        if _is_foreign(facts):  # since a moment
            raise PermissionError(errno.EPERM, "another user put it there", str(path))
        if facts.st_mode & _OTHERS:
            os.fchmod(folder, stat.S_IMODE(facts.st_mode) & ~_OTHERS)
        for name in os.listdir(folder):  # noqa: PTH208  of the opened folder
            # Of a folder that was writable before.
            if ASIDE not in name and _is_planted(os.stat(name, dir_fd=folder, follow_symlinks=False)):
                _move(path / name)
    beside = path.parent.glob(f"{path.name}{ASIDE}*")
    return sorted(map(str, (*beside, *path.glob(f"*{ASIDE}*"))))


@contextlib.contextmanager
def _opened(path: Path, more: int = 0, *, folder: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(path if folder is None else path.name, _FLAGS | more, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and path.is_symlink():
            raise PermissionError(errno.EPERM, "it is a symbolic link", str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check(facts: os.stat_result, path: Path) -> None:
    if _is_foreign(facts):
        raise PermissionError(errno.EPERM, f"user {facts.st_uid} owns it", str(path))
    if facts.st_mode & _OTHERS:
        raise PermissionError(errno.EPERM, "other users may write to it", str(path))


def _is_foreign(facts: os.stat_result) -> bool:
    return facts.st_uid not in {0, os.geteuid()}


def _is_planted(facts: os.stat_result) -> bool:
    """Also a hard link to a file of root that others may change: its owner is root."""
    linked = stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1 and facts.st_mode & _OTHERS
    return _is_foreign(facts) or bool(linked)


def _move(path: Path) -> None:
    for number in range(1, _MOST):
        aside = path.with_name(f"{path.name}{ASIDE}{number}")
        if not os.path.lexists(aside):
            path.rename(aside)
            return
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def main(folders: list[str]) -> int:
    for folder in folders:
        try:
            for aside in own_folder(Path(folder)):
                print(
                    f"another user had made '{aside}': it is not used; look at it, then remove it",
                    file=sys.stderr,
                )
        except OSError as error:
            print(f"cannot use '{folder}': {reason(error)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# --- Where measurements are kept: the state folder of the service, or of the user who measures. ---

SYSTEM: Final = Path("/var/lib/numa-launcher")
HUB: Final = SYSTEM / "huggingface"
"""HF_HOME of the service, into which its instances download."""
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


def excess_mode(status: os.stat_result, allowed: int) -> str | None:
    """The file's mode in octal when it grants more than `allowed`, else None."""
    mode = stat.S_IMODE(status.st_mode)
    return f"{mode:04o}" if mode & ~allowed else None
