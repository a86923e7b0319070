"""No folder that root reads has a parent that others may write: the units, tmpfiles.conf and the defaults together.

The instances run code that comes with models, as a user of their own. What they could put where root looks would be
read, and run, as root."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.base.files import HUB, SYSTEM
from launcher.config.schema import Config
from launcher.daemon.deployment import run_dir
from launcher.fleet.config import DEFAULT_CONFIG, FleetConfig, Ingress

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
# Root's, and closed to others, on every Linux.
USUAL = frozenset(
    map(Path, ("/", "/etc", "/opt", "/root", "/run", "/usr", "/var", "/var/cache", "/var/lib", "/var/log"))
)
# Made by scripts/install.
INSTALLED = frozenset(map(Path, ("/etc/numa-launcher", "/opt/numa-launcher")))
# Written by the instances. Root hands the names on, or reads what models are like.
INSTANCES = frozenset(
    {
        SYSTEM / "home", SYSTEM / "huggingface", SYSTEM / ".cache", SYSTEM / ".config", SYSTEM / ".triton",
        Path("/var/cache/numa-launcher"),
    }
)  # fmt: skip
MADE_BY_SYSTEMD = {
    "RuntimeDirectory": "/run", "StateDirectory": "/var/lib", "CacheDirectory": "/var/cache", "LogsDirectory": "/var/log",
}  # fmt: skip
KEPT = ("usage", "bench", "tuning")
"""Folders of the state folder."""
WRITABLE = 0o022


class Folder(NamedTuple):
    mode: int
    user: str


def tmpfiles() -> dict[Path, Folder]:
    lines = (
        line.split()
        for line in (SYSTEMD / "tmpfiles.conf").read_text().splitlines()
        if line[:1] not in {"", "#"}
    )
    return {Path(path): Folder(int(mode, 8), user) for _, path, mode, user, *_ in lines}


def settings(unit: Path) -> Iterator[tuple[str, str]]:
    for line in unit.read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            yield name, value


def is_roots(unit: Path) -> bool:
    return dict(settings(unit)).get("User", "root") == "root"


ROOTS = [unit for unit in sorted(SYSTEMD.glob("*.service")) if is_roots(unit)]


def read_by_root() -> dict[Path, str]:
    """Paths, and who names them."""
    fleet = FleetConfig(ingress=Ingress(hosts=("10.0.0.1",)))
    found = {
        Path(fleet.state): "fleet.toml",
        Path(fleet.hosts.control): "fleet.toml",
        Path(fleet.hosts.keys): "fleet.toml",
    }
    found |= {SYSTEM / name: "state_folder" for name in KEPT}
    sockets = run_dir(Config(models=()))
    found |= {sockets.with_suffix(suffix): "config.toml" for suffix in (".sock", ".state", ".held")}
    found |= {DEFAULT_CONFIG: "fleet.toml"}
    for unit in ROOTS:
        for name, value in settings(unit):
            if name in MADE_BY_SYSTEMD:
                found[Path(MADE_BY_SYSTEMD[name], value)] = unit.name
            elif name not in {"Documentation", "ExecStopPost"} and not value.startswith("PATH="):
                # After any of: the begin, =, :, -, +, a blank.
                words = re.findall(r"(?:^|[=:+ -])(/[\w./-]+)", value)
                found |= {Path(word): unit.name for word in words if not word.startswith("/usr/")}
    return found


def made() -> dict[Path, Folder]:
    """All folders that there are before a unit reads them."""
    found = dict.fromkeys(USUAL | INSTALLED, Folder(0o755, "root")) | tmpfiles()
    for unit in ROOTS:
        of = dict(settings(unit))
        for name, where in MADE_BY_SYSTEMD.items():
            if name in of:
                found[Path(where, of[name])] = Folder(int(of.get(f"{name}Mode", "755"), 8), "root")
    return found


def test_the_units_name_their_folders() -> None:
    """Else this finds nothing."""
    found = set(map(str, read_by_root()))
    assert found >= {
        "/var/lib/numa-launcher/ray", "/var/lib/numa-launcher/fleet", "/var/lib/numa-launcher/usage",
        "/run/numa-launcher-ray", "/etc/numa-launcher/secrets", "/etc/numa-launcher/ray.env", "/var/log/numa-launcher",
    }  # fmt: skip
    assert {"numa-launcher.service", "numa-launcher-ray.service", "numa-launcher-ingress.service"} == {
        its.name for its in ROOTS
    }


def test_all_folders_of_the_state_folder_are_known_here() -> None:
    code = {path: path.read_text() for path in (SYSTEMD.parent / "launcher").rglob("*.py")}
    named = {
        name
        for path, text in code.items()
        if path.name != "quickstart.py"  # has a folder of its own
        for name in re.findall(r"""\bstate(?:_folder\([^"]*\))? / "(\w+)""", text)
    }
    assert named == set(KEPT)


@pytest.mark.parametrize("path", sorted(set(read_by_root()) - INSTANCES), ids=str)
def test_only_root_may_write_where_root_reads(path: Path) -> None:
    folders = made()
    for folder in (path, *path.parents):
        if folder is path and folder not in folders:
            continue  # a file, or a folder that root makes where nobody else can
        assert folder in folders, f"{folder} is made by nobody: tmpfiles.conf"
        mode, user = folders[folder]
        assert user == "root", folder
        assert not mode & WRITABLE, f"others may write to {folder}"


def test_folders_of_the_fleet_are_roots_alone_and_never_taken_over() -> None:
    """systemd gives root all that it finds in a StateDirectory=, whoever had put it there."""
    for name in ("fleet", "ray"):
        assert tmpfiles()[SYSTEM / name] == Folder(0o700, "root")
    for unit in ROOTS:
        assert not any(name == "StateDirectory" and "/" in value for name, value in settings(unit)), unit.name


def test_what_others_may_have_put_there_before_is_moved_aside_first() -> None:
    for unit, folder in (("ray", SYSTEM / "ray"), ("ingress", SYSTEM / "fleet")):
        first = next(
            value
            for name, value in settings(SYSTEMD / f"numa-launcher-{unit}.service")
            if name == "ExecStartPre"
        )
        assert first.endswith(f"-m launcher.base.files {folder}")


def test_ray_keeps_its_sessions_where_nobody_else_can_have_made_the_folder() -> None:
    started = dict(settings(SYSTEMD / "numa-launcher-ray.service"))["ExecStart"]
    assert "--temp-dir=/run/numa-launcher-ray" in started


def test_the_services_downloads_are_where_other_programs_of_root_look_for_them() -> None:
    assert ("Environment", f"HF_HOME={HUB}") in set(settings(SYSTEMD / "numa-launcher.service"))
    assert HUB in INSTANCES


def test_instances_may_write_to_their_own_folders() -> None:
    assert {path for path, folder in tmpfiles().items() if folder.mode & 0o020} == INSTANCES
