"""Shared by the guest's scripts that run the shipped units: the package, its command, the units and their users."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from notes import note, sh

UNIT = "numa-launcher"
BIN = Path(sys.executable).parent
SITE = Path(sysconfig.get_path("purelib"))


def install_package() -> None:
    """As pip installs a pure Python wheel, in a twentieth of the time under emulation; and the fake engine, where instances,
    which run as a user of their own, may read it."""
    (wheel,) = Path().glob("*.whl")
    note("install", sh(sys.executable, "-m", "zipfile", "--extract", str(wheel), str(SITE)))
    command = BIN / UNIT
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom launcher.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    shutil.copy("fake_engine.py", "/srv")


def install_units(*services: str) -> None:
    """The units as they are, but for the PATH of these services."""
    units = Path("/etc/systemd/system")
    for unit in Path().glob("numa-launcher*.s*"):  # a wheel's name has no dash there
        shutil.copy(unit, units)
    for kind in ("sysusers", "tmpfiles"):
        shutil.copy(f"{kind}.conf", f"/usr/lib/{kind}.d/{UNIT}.conf")
    note("user", [sh("systemd-sysusers", f"{UNIT}.conf"), sh("systemd-tmpfiles", "--create", f"{UNIT}.conf")])
    for service in services:
        drop_in = units / f"{service}.service.d"
        drop_in.mkdir()
        (drop_in / "path.conf").write_text(
            f"[Service]\nEnvironment=PATH={BIN}:/usr/sbin:/usr/bin:/sbin:/bin\n"
        )
    note("daemon-reload", sh("systemctl", "daemon-reload"))
