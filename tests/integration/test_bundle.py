"""A bundle of a running daemon contains none of the secrets planted in configuration, environment and logs."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon_process import FAKE_ENGINE, DaemonProcess, eventually

pytestmark = pytest.mark.timeout(900)

CONFIG_ENV, DAEMON_ENV, TOKEN_FILE, ARGV, RELOADED, URL, HEADER, FORM = (
    "Kq7-config-env", "Kq7-daemon-env", "Kq7-token-file", "Kq7-argv", "Kq7-reloaded", "Kq7-url", "Kq7-header",
    "hf_Kq7abcdefghijklmnop",
)  # fmt: skip
SECRETS = (CONFIG_ENV, DAEMON_ENV, TOKEN_FILE, ARGV, RELOADED, URL, HEADER, FORM)


def contents(packed: Path) -> Iterator[tuple[str, bytes]]:
    """All files of a bundle, unpacked."""
    yield "the archive", gzip.decompress(packed.read_bytes())
    with tarfile.open(packed) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            data = file.read()
            yield member.name, data
            if member.name.endswith(".tar.gz"):
                with tarfile.open(fileobj=io.BytesIO(data)) as inner:
                    for deeper in inner:
                        if (found := inner.extractfile(deeper)) is not None:
                            yield f"{member.name}/{deeper.name}", found.read()


def test_no_secret_leaves_the_host(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN_FILE}\n")
    # An engine that prints its arguments and environment at start, as engines do.
    talk = (
        f'env; echo "args: $0 $*"; echo "header Authorization: Bearer {HEADER}"; echo "found {FORM}"; '
        f'echo "index https://me:{URL}@example.org/simple"; cat {tmp_path / "token"}; '
        f'exec {sys.executable} {FAKE_ENGINE} --uds "$1" --model fake'
    )
    command = json.dumps(["bash", "-c", talk, "engine", "{uds}", "--api-key", ARGV])
    environ = {"MY_UPSTREAM_PASSWORD": DAEMON_ENV}
    folder = tmp_path / "own"
    folder.mkdir()
    daemon = DaemonProcess(
        folder,
        f"""
[[models]]
name = "fake"
path = "fake"
[layout]
instances_per_socket = 1
[engine]
kind = "command"
command = {command}
env = {{ MY_API_KEY = "{CONFIG_ENV}", INDEX = "https://me:{URL}@example.org/simple" }}
hf_token_file = "{tmp_path / "token"}"
""",
        environ,
    )
    try:
        daemon.wait_ready(1)
        said = daemon.cli("logs", "0").stdout
        for secret in (CONFIG_ENV, DAEMON_ENV, TOKEN_FILE, ARGV, URL, HEADER, FORM):
            assert secret in said, "it is planted"
        refused = daemon.cli("reload", "--dry-run", "--set", f"engine.env.OTHER_SECRET={RELOADED}")
        assert refused.returncode == 1, refused.stderr
        os.kill(daemon.slot(0)["pid"], 9)
        eventually(lambda: daemon.slot(0)["last_cause"], what="a cause")
        done = daemon.cli("bundle", "-c", str(daemon.config), "-o", str(tmp_path / "up.tar.gz"))
        assert done.returncode == 0, done.stderr
        assert "logs/slot-0.txt" in done.stdout
    finally:
        daemon.end()
    down = daemon.cli("bundle", "-c", str(daemon.config), "-o", str(tmp_path / "down.tar.gz"))
    assert down.returncode == 0, down.stderr
    assert "missing: status, running plan" in down.stdout
    for packed in (tmp_path / "up.tar.gz", tmp_path / "down.tar.gz"):
        for name, data in contents(packed):
            for secret in SECRETS:
                assert secret.encode() not in data, f"{secret} is in {name}"
    inside = dict(contents(tmp_path / "up.tar.gz"))
    names = {name.partition("/")[2] for name in inside}
    assert {
        "status.json",
        "plan.json",
        "config.json",
        "events.json",
        "metrics.txt",
        "causes.txt",
        "doctor.txt",
    } <= names
    (log,) = [data for name, data in inside.items() if name.endswith("logs/slot-0.txt")]
    assert b"MY_API_KEY=<redacted>" in log
    assert b"header Authorization: <redacted>" in log
    (events,) = [data for name, data in inside.items() if name.endswith("events.json")]
    assert b"OTHER_SECRET=<redacted>" in events
