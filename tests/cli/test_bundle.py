"""A bundle: all that a bug report needs, whatever is broken, and no secret."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_operations import CAUSE, Backstage, FakeOperations, slot_status

from launcher.base.errors import LauncherError
from launcher.cli import bundle as bundle_parts
from launcher.cli import main
from launcher.cli.bundle import Bundle
from launcher.machine.snapshot import read_snapshot

# Values that the configuration leads to, and how each is said: in the file, by a file of its own, by the environment.
IN_CONFIG, IN_FILE, IN_ENVIRON, IN_ARGV, IN_URL = (
    f"planted-{where}-Zq9" for where in ("config", "file", "environ", "argv", "url")
)
PLANTED = (IN_CONFIG, IN_FILE, IN_ENVIRON, IN_ARGV, IN_URL)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMA_LAUNCHER_ENGINE__ENV__SECOND_SECRET", IN_ENVIRON)
    (tmp_path / "token").write_text(f"{IN_FILE}\n")
    file = tmp_path / "config.toml"
    file.write_text(f"""
[[models]]
name = "m"
path = "m"
[engine]
kind = "command"
command = ["{sys.executable}", "server.py", "--uds", "{{uds}}", "--api-key", "{IN_ARGV}"]
env = {{ MY_API_KEY = "{IN_CONFIG}", LANG = "C", NOTE = "plain", INDEX = "https://me:{IN_URL}@example.org/simple" }}
hf_token_file = "{tmp_path / "token"}"
[control]
socket = "{tmp_path / "c.sock"}"
""")
    return file


@pytest.fixture
def operations() -> FakeOperations:
    operations = FakeOperations()
    operations.lines = [
        "loading",
        f"raw {IN_CONFIG} and {IN_FILE}",
        f"env: {{'SECOND_SECRET': '{IN_ENVIRON}'}}",
        json.dumps(
            {
                "argv": ["--api-key", IN_ARGV],
                "note": f"pip --index-url https://me:{IN_URL}@example.org/simple",
            }
        ),
        "Authorization: Bearer a-clients-own-key",
        "Cookie: session=a-clients-own-session",
    ]
    died = {"last_cause": CAUSE, "last_cause_at": 100.0, "last_cause_generation": 1}
    operations.slots = {0: slot_status(0, state="failed", **died), 1: slot_status(1)}
    return operations


@pytest.fixture
def daemon(tmp_path: Path, operations: FakeOperations) -> Iterator[Backstage]:
    with Backstage(str(tmp_path / "c.sock"), operations) as daemon:
        yield daemon


def files_in(packed: Path) -> dict[str, bytes]:
    """Every file inside by its name, snapshots unpacked, too."""
    found: dict[str, bytes] = {}
    with tarfile.open(packed) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            file = tar.extractfile(member)
            assert file is not None
            found[name] = file.read()
            assert (member.uname, member.uid, stat.S_IMODE(member.mode)) == ("", 0, 0o600)
    with tarfile.open(fileobj=io.BytesIO(found["topology-snapshot.tar.gz"])) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                found[f"snapshot/{member.name}"] = file.read()
    return found


def assert_no_secret(packed: Path) -> None:
    raw = gzip.decompress(packed.read_bytes())
    for name, data in {"all": raw, **files_in(packed)}.items():
        for secret in (*PLANTED, "a-clients-own-key", "a-clients-own-session"):
            assert secret.encode() not in data, f"{secret} is in {name}"


def test_with_a_daemon(
    daemon: Backstage, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "b.tar.gz"
    assert main(["bundle", "-c", str(config), "-o", str(packed)]) == 0
    assert stat.S_IMODE(packed.stat().st_mode) == 0o600
    files = files_in(packed)
    assert {name for name in files if "snapshot/" not in name} == {
        "README.txt", "versions.json", "doctor.txt", "topology.txt", "topology-snapshot.tar.gz", "status.txt",
        "status.json", "config.json", "plan.json", "reload.json", "events.json", "metrics.txt", "logs/slot-0.txt",
        "logs/slot-1.txt", "causes.txt",
    } | {name for name in ("journal.txt",) if Path("/run/systemd/system").is_dir()}  # fmt: skip
    for name, data in files.items():
        if name.endswith(".json"):
            json.loads(data)
    assert_no_secret(packed)
    assert b"oom: it died" in files["causes.txt"]
    assert files["logs/slot-1.txt"].startswith(b"1970-01-01T00:00:00Z g1 | loading\n")
    assert b"<redacted>" in files["logs/slot-1.txt"]
    assert json.loads(files["status.json"])["ready"] == 1
    (tmp_path / "again.tar.gz").write_bytes(files["topology-snapshot.tar.gz"])
    assert read_snapshot(tmp_path / "again.tar.gz").cores, "it replays"
    # What is printed names every file, so that a person can check.
    out = capsys.readouterr().out
    for name in files:
        assert name in out or name == "README.txt" or name.startswith("snapshot/")
    assert f"wrote {packed}" in out
    assert "Review it before you send it" in out


def test_without_a_daemon(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "b.tar.gz"
    assert main(["bundle", "-c", str(config), "-o", str(packed)]) == 0
    files = files_in(packed)
    assert_no_secret(packed)
    assert json.loads(files["config.json"])["engine"]["env"] == {
        "MY_API_KEY": "<redacted>", "LANG": "C", "NOTE": "<redacted>", "SECOND_SECRET": "<redacted>",
        "INDEX": "<redacted>",
    }  # fmt: skip
    assert json.loads(files["plan.json"])["slots"]
    assert {"doctor.txt", "versions.json", "topology.txt"} <= files.keys()
    out = capsys.readouterr().out
    assert "missing: status, running plan and configuration, events" in out
    assert "no such socket" in out
    assert b"missing: status" in files["README.txt"]


def test_without_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No configuration, no daemon, and a doctor that is ill: what there is is packed, the rest is named."""

    def ill(*_: Any) -> str:
        raise ValueError("no such cpu")

    monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("NUMA_LAUNCHER_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setattr(bundle_parts, "_doctor", ill)
    packed = tmp_path / "b.tar.gz"
    assert main(["bundle", "-o", str(packed)]) == 0
    assert {"README.txt", "versions.json", "topology.txt"} <= files_in(packed).keys()
    out = capsys.readouterr().out
    assert "missing: doctor.txt: ValueError: no such cpu" in out
    assert "warning: cannot read configuration" in out
    assert "recognised by their form only" in out


def test_a_configuration_that_is_broken(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why it can't be used is said, and the file is there as far as it can be read; `serve` would not start."""
    monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.delenv("NUMA_LAUNCHER_ENGINE__ENV__SECOND_SECRET")
    config.write_text(
        config.read_text() + f'[proxy.overflow]\nurl = "https://me:{IN_URL}@example.org/v1"\nmodels = {{}}\n'
    )
    packed = tmp_path / "b.tar.gz"
    assert main(["bundle", "-c", str(config), "-o", str(packed)]) == 0
    files = files_in(packed)
    assert_no_secret(packed)
    assert json.loads(files["config-file.json"])["engine"]["env"]["NOTE"] == "<redacted>"
    out = capsys.readouterr().out
    assert "warning: cannot use" in out
    assert IN_URL not in out
    config.write_text("this is = no [ TOML")
    assert main(["bundle", "-c", str(config), "-o", str(tmp_path / "c.tar.gz")]) == 0
    assert "missing: config-file.json: cannot read configuration" in capsys.readouterr().out


def test_to_standard_output(daemon: Backstage, config: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "bundle", "-c", str(config), "-o", "-"],
        check=True,
        capture_output=True,
    )
    (tmp_path / "b.tar.gz").write_bytes(done.stdout)
    assert "status.json" in files_in(tmp_path / "b.tar.gz")
    assert b"wrote standard output" in done.stderr


def test_nothing_is_written_over(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").write_text("precious")
    assert main(["bundle", "-c", str(config), "-o", str(tmp_path / "there")]) == 2
    assert capsys.readouterr().err.splitlines()[0].endswith("there': the file exists")
    assert (tmp_path / "there").read_text() == "precious"
    assert main(["bundle", "-c", str(config), "-o", str(tmp_path / "no" / "folder")]) == 2
    assert "no such file or directory" in capsys.readouterr().err


def test_of_a_full_disk_nothing_is_left(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.BytesIO):
        def write(self, _data: Any) -> int:
            raise OSError(28, "No space left on device")

    def full(fd: int, _mode: str) -> Full:
        os.close(fd)
        return Full()

    file = tmp_path / "b.tar.gz"
    with monkeypatch.context() as patch:
        patch.setattr("launcher.cli.bundle.os.fdopen", full)
        assert main(["bundle", "-c", str(config), "-o", str(file)]) == 2
    said, remedy = capsys.readouterr().err.splitlines()
    assert said == f"cannot write '{file}': no space left on device"
    assert "space" in remedy
    assert not file.exists()


@pytest.mark.usefixtures("daemon")
def test_a_daemon_that_breaks_off(
    operations: FakeOperations,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It answers status and then no more: each part says so, none is waited for long."""

    def silent(*_: Any) -> Any:
        raise LauncherError(f"cannot say {IN_CONFIG}", "wait")

    for name in ("plan", "events", "log_tail"):
        monkeypatch.setattr(operations, name, silent)
    packed = tmp_path / "b.tar.gz"
    assert main(["bundle", "-c", str(config), "-o", str(packed)]) == 0
    out = capsys.readouterr().out
    for name in ("plan.json", "events.json", "logs/slot-0.txt"):
        assert f"missing: {name}: cannot say <redacted>" in out
    assert "status.json" in files_in(packed)
    assert_no_secret(packed)


def test_the_end_of_what_is_long_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_parts, "MAX_PART_BYTES", 10)
    bundle = Bundle()
    bundle.add("x", "", lambda: "0123456789abcdef")
    assert bundle.parts[0].data == b"6789abcdef"


def test_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journalctl that says what it was asked, on a host that looks like one of systemd's."""
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\nfor word; do echo "$word"; done\nexit "${JOURNAL_CODE:-0}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bundle_parts, "SYSTEMD_RUNS", tmp_path)
    words = bundle_parts._journal(7).splitlines()
    assert words[:4] == ["--unit", "numa-launcher.service", "--unit", "numa-launcher-slot*.service"]
    assert {"--lines=7", "--no-hostname"} <= set(words)
    monkeypatch.setenv("JOURNAL_CODE", "1")
    with pytest.raises(LauncherError, match="cannot read the journal: journalctl exited with 1") as caught:
        bundle_parts._journal(7)
    assert caught.value.remedy == "run it by hand: journalctl -u numa-launcher"
    monkeypatch.setattr(bundle_parts, "SYSTEMD_RUNS", tmp_path / "no")
    bundle = bundle_parts.Bundle()
    bundle.add("journal.txt", "the journal", lambda: bundle_parts._journal(7))
    assert bundle.missing == [
        ("journal.txt", "cannot read the journal: systemd is not running; add the output of the daemon")
    ]
