"""The harness of the virtual hosts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from vm.image import HERE, HostToolError, check_tools
from vm.vm import LAYOUTS, run

SCRIPT = """#!/bin/bash
nproc
numactl --hardware | head -n 1
cat system-state /proc/1/comm given
echo kept > left-behind
exit 7
"""


@pytest.mark.release
def test_a_host_runs_a_script_and_returns_its_exit_code(tmp_path: Path) -> None:
    script, given = tmp_path / "say", tmp_path / "given"
    script.write_text(SCRIPT)
    given.write_text("from outside\n")
    done = run(LAYOUTS["2s8"], script, tmp_path / "work", timeout_s=900, files=[given])
    assert done.status == 7
    assert done.output.splitlines() == ["8", "available: 2 nodes (0-1)", "running", "systemd", "from outside"]
    assert (tmp_path / "work" / "left-behind").read_text() == "kept\n"


def test_a_guest_that_exceeds_its_time_is_stopped_and_its_output_shown(tmp_path: Path) -> None:
    script = tmp_path / "sleep"
    script.write_text("#!/bin/sh\nsleep 1000\n")
    with pytest.raises(HostToolError, match="not ready in time"):
        run(LAYOUTS["2s8"], script, tmp_path / "work", timeout_s=2)


def test_shellcheck() -> None:
    assert shutil.which("shellcheck"), "scripts/test installs shellcheck"
    scripts = [HERE / name for name in ("customize", "mkimage", "rootfs/opt/guest-run", "guest/contract")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(HostToolError, match=r"run apt-get install .*qemu-system-x86 .*mmdebstrap"):
        check_tools()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_consistent(name: str) -> None:
    layout = LAYOUTS[name]
    dealt = [cpu for cpus in layout.node_cpus() for cpu in cpus]
    assert dealt == list(range(layout.cpus))
    assert len(layout.distances) == len(layout.nodes)
    assert all(row[node] == 10 and len(row) == len(layout.nodes) for node, row in enumerate(layout.distances))
