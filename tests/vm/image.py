"""The disk of a virtual host: a small Debian with systemd as PID 1 and a Python for the project.

Made with mmdebstrap from the apt sources this machine uses itself, without root rights being needed
for a mount: tar, then `mke2fs -d`. Kept in the cache folder under a name made of everything that went
into it, so it is built once and again only when its recipe or the project's dependencies change.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support.tools import HOST_IMAGES

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent

# Program -> Debian package that has it.
NEEDS: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "cpio": "cpio",
}

PACKAGES: Final = (
    *("systemd", "systemd-sysv", "dbus", "udev", "kmod", "util-linux", "procps", "busybox-static"),
    *("python3", "python3-venv", "numactl", "libtcmalloc-minimal4", "libsystemd0", "haproxy"),
    # Addresses and links that come and go.
    "iproute2",
)
# Beside the project's own dependencies, for tests that run inside.
TEST_WHEELS: Final = ("hypothesis>=6.100", "pytest>=8.3", "pytest-asyncio>=1.5", "pytest-timeout>=2.3")
# Folders and files below the kernel's modules that reach the disk and the shared folder.
MODULES: Final = (
    *(
        "drivers/virtio",
        "drivers/block/virtio_blk.ko",
        "drivers/char/hw_random",
        "net/9p",
        "fs/9p",
        "fs/netfs",
    ),
    *("fs/fscache", "fs/ext4", "fs/jbd2", "fs/mbcache.ko", "lib", "arch/x86/crypto/crc32c-intel.ko"),
    *("crypto/crc32c_generic.ko", "drivers/cxl", "drivers/dax", "fs/autofs", "drivers/net/dummy.ko"),
)
# Work of a first boot that tests do not need; each item costs seconds under emulation.
MASKED: Final = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer"),
    *("e2scrub_reap.service", "fstrim.timer", "systemd-timesyncd.service", "systemd-pstore.service"),
    *("systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount", "getty.target"),
    *("modprobe@drm.service", "modprobe@dm_mod.service", "haproxy.service"),
)
BUILD_TIMEOUT_S: Final = 1200.0
# Free space for what a test installs and logs.
SPARE_MIB: Final = 768


class HostToolError(Exception):
    """A missing program, or a failed step of the build."""


@dataclass(frozen=True)
class Image:
    """What qemu boots."""

    kernel: Path
    initrd: Path
    disk: Path


def check_tools() -> None:
    """Raises HostToolError with the packages to install."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [package for program, package in NEEDS.items() if shutil.which(program, path=path) is None]
    if missing:
        raise HostToolError(f"cannot boot a virtual host: run apt-get install {' '.join(missing)}")


def image() -> Image:
    """The image for this recipe; built if missing (minutes)."""
    check_tools()
    folder = HOST_IMAGES / recipe_key()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "disk.ext4").is_file():
            for old in folder.parent.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-") as work:
                _build(Path(work))
                (Path(work) / "out").rename(folder)
    return Image(folder / "vmlinuz", folder / "initrd", folder / "disk.ext4")


def dependencies() -> list[str]:
    """The project's dependencies as a system service, from pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["systemd"]]


def recipe_key() -> str:
    """A hash of everything that the image is built from."""
    parts = [
        Path(__file__).read_text(),
        (HERE / "mkimage").read_text(),
        (HERE / "customize").read_text(),
        (HERE / "bytecode.py").read_text(),
        suite(),
        *dependencies(),
        sys.version,
    ]
    parts += [path.read_text() for path in sorted((HERE / "rootfs").rglob("*")) if path.is_file()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def suite() -> str:
    """This machine's Debian release, which the guest gets as well."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    if release.get("ID") != "debian":
        raise HostToolError("cannot build a virtual host: its recipe is for Debian hosts")
    return release["VERSION_CODENAME"].strip('"')


def _build(work: Path) -> None:
    log = HOST_IMAGES / "build.log"
    with log.open("w") as out:
        try:
            _wheelhouse(work / "wheels", out.fileno())
            _bootstrap(work, out.fileno())
            unprivileged = [] if os.geteuid() == 0 else ["fakeroot"]
            _run([*unprivileged, str(HERE / "mkimage"), str(work), str(SPARE_MIB)], out.fileno())
        except (OSError, subprocess.SubprocessError) as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise HostToolError(f"cannot build the virtual host's image: {error}\n{tail}") from error


def _wheelhouse(folder: Path, log: int) -> None:
    """Wheels of the dependencies for the guest's Python, which has this one's version: the guest has no network."""
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--wheel-dir",
            str(folder),
            *dependencies(),
            *TEST_WHEELS,
        ],
        log,
    )


def _bootstrap(work: Path, log: int) -> None:
    tree = work / "rootfs"
    shutil.copytree(HERE / "rootfs", tree)
    units = tree / "etc/systemd/system"
    for name in MASKED:
        (units / name).symlink_to("/dev/null")
    (units / "multi-user.target.wants").mkdir()
    (units / "multi-user.target.wants/guest-run.service").symlink_to("../guest-run.service")
    shutil.move(work / "wheels", tree / "opt/wheelhouse")
    shutil.copy(HERE / "bytecode.py", tree / "opt")
    _run(
        [
            "mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}",
            '--aptopt=Acquire::Languages "none"',
            "--dpkgopt=path-exclude=/usr/share/man/*",
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-exclude=/usr/share/locale/*",
            f"--customize-hook=sync-in {tree} /",
            f'--customize-hook=MODULES="{" ".join(MODULES)}" {HERE / "customize"} "$1" {sys.version_info.minor}',
            suite(), str(work / "root.tar"), *_sources(),
        ],
        log,
    )  # fmt: skip


def _sources() -> list[str]:
    """The lines of apt's own configuration on this machine, one-line style, for its own release."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    name = suite()
    lines = []
    for site, release in sorted({tuple(line.split()) for line in done.stdout.splitlines()}):
        if release in {name, f"{name}-updates", f"{name}-security"}:
            lines.append(f"deb {site} {release} main")
    if not lines:
        raise HostToolError(f"cannot build a virtual host: apt has no source of {name}; run apt-get update")
    return lines


def _run(command: list[str], log: int) -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        timeout=BUILD_TIMEOUT_S, env=os.environ | {"PATH": path},
    )  # fmt: skip
