"""One secret of each kind is planted in a running daemon; none appears in any of its outputs."""

from __future__ import annotations

import contextlib
import grp
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon_process import FAKE_ENGINE, DaemonProcess, eventually
from support.verbs import run_verb

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user"),
]

KINDS = (
    "config-env", "daemon-env", "inherited-setting", "token-file", "argument", "argument-url", "env-url", "git-token",
    "daemon-proxy", "bare-proxy", "overflow-url", "overflow-file", "reloaded-env", "reloaded-argument", "client-key",
    "signed-url", "header",
)  # fmt: skip
SECRETS = {kind: f"Kq7-{kind}" for kind in KINDS} | {"form": "hf_Kq7abcdefghijklmnop"}
# A user that nobody has on a real machine, in a group that is there.
READER = 4_000_001
READERS = next(group for group in sorted(grp.getgrall()) if group.gr_gid not in {0, os.getegid()})
GET = (
    "status",
    "plan",
    "config",
    "events?tail=1000",
    "metrics",
    "reload",
    "slots/0/logs?tail=1000",
    "slots/1/logs",
)


def command(folder: Path, *more: str) -> str:
    """An engine that prints its arguments and environment, as engines do when they start and fail."""
    names = "MY_API_KEY MY_UPSTREAM_PASSWORD NUMA_LAUNCHER_ENGINE__ENV__X_SECRET INDEX MIRROR https_proxy FTP_PROXY SIGNED"
    said = "; ".join(f'echo "error: {name}=${name} is refused"' for name in names.split())
    talk = (
        f'env; echo "args: $0 $*"; {said}; echo "error: $(cat {folder}/token), {SECRETS["form"]}"; echo "error: $*"; '
        f'echo "header Authorization: Bearer {SECRETS["header"]}"; '
        f'exec {sys.executable} {FAKE_ENGINE} --uds "$1" --model fake'
    )
    s = SECRETS
    words = [
        "bash",
        "-c",
        talk,
        "engine",
        "{uds}",
        "--api-key",
        s["argument"],
        f"--index=https://me:{s['argument-url']}@h/",
    ]
    return json.dumps([*words, *more])


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that another user can pass."""
    made = Path(tempfile.mkdtemp(prefix="nl-secrets-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    s = SECRETS
    for name in ("token", "overflow"):
        (folder / name).write_text(s[f"{name}-file"] + "\n")
        (folder / name).chmod(0o600)
    config = f"""
[[models]]
name = "fake"
path = "fake"
[layout]
instances_per_socket = 2
[engine]
kind = "command"
command = {command(folder)}
hf_token_file = "{folder / "token"}"
[engine.env]
MY_API_KEY = "{s["config-env"]}"
INDEX = "https://me:{s["env-url"]}@example.org/simple"
MIRROR = "https://{s["git-token"]}@example.org/repository"
SIGNED = "https://store.example.org/x?sv=1&sig={s["signed-url"]}"
[proxy.overflow]
url = "http://127.0.0.1:9/v1"
api_key_file = "{folder / "overflow"}"
models = {{ fake = "there" }}
"""
    environ = {
        "MY_UPSTREAM_PASSWORD": s["daemon-env"],
        "NUMA_LAUNCHER_ENGINE__ENV__X_SECRET": s["inherited-setting"],
        "https_proxy": f"http://me:{s['daemon-proxy']}@192.0.2.1:3128",
        "FTP_PROXY": f"me:{s['bare-proxy']}@192.0.2.1:3128",
        "NUMA_LAUNCHER_CONTROL__READ_GROUP": READERS.gr_name,
    }
    made = DaemonProcess(folder, config, environ)
    yield made
    made.end()


def as_reader(daemon: DaemonProcess, *words: str) -> str:
    """The response to a member of the read group."""
    user = ("setpriv", f"--reuid={READER}", f"--regid={READERS.gr_gid}", "--clear-groups")
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*user, "curl", "--silent", "--show-error", "--max-time", "10", "--unix-socket", str(daemon.socket), *words],
            check=False, capture_output=True, text=True, timeout=30, cwd="/",
        )  # fmt: skip
        return done.stdout + done.stderr
    raise AssertionError("no answer")


def outputs(daemon: DaemonProcess, folder: Path) -> Iterator[tuple[str, str]]:
    """Every output by name, except instance logs, which are the engine's own text."""
    for path in GET:
        yield f"GET /v1/{path} for a reader", as_reader(daemon, f"http://localhost/v1/{path}")
    where = "http://localhost/v1/slots/0/logs?tail=1000&follow=1"
    yield "logs followed by a reader", as_reader(daemon, "--max-time", "2", "--no-buffer", where)
    for words in (
        "status", "status --json", "status --wide", "why 0 -n 1000", "why 0 --json -n 1000", "events -n 1000",
        "events --json", "events --audit", "reload --show", "verify", "verify --json",
    ):  # fmt: skip
        done = daemon.cli(*words.split())
        yield words, done.stdout + done.stderr
    dry = (
        f"reload --dry-run --set engine.env.OTHER_SECRET={SECRETS['reloaded-env']}",
        f"reload --dry-run --set engine.nothing_token={SECRETS['reloaded-env']}",
    )
    for words in dry:
        done = daemon.cli(*words.split())
        yield words.partition("=")[0], done.stdout + done.stderr
    changed = command(folder, "--hf-token", SECRETS["reloaded-argument"])
    done = daemon.cli("reload", "--dry-run", "--set", f"engine.command={changed}")
    assert "becomes" in done.stdout, done
    yield "reload --dry-run of arguments", done.stdout + done.stderr
    for offline in ("plan", "plan --json", "plan --shell", "doctor", "doctor --json"):
        ran = run_verb(*offline.split(), "-c", str(daemon.config))
        yield offline, ran.stdout + ran.stderr
    said = daemon.log.read_text().splitlines()
    yield "the daemon's log", "\n".join(line for line in said if " | " not in line)


def test_no_secret_is_shown(daemon: DaemonProcess, folder: Path) -> None:
    daemon.wait_ready(2)
    said = daemon.cli("logs", "0", "-n", "1000").stdout
    elsewhere = ("overflow", "reloaded", "client")
    for kind, secret in SECRETS.items():
        assert secret in said or kind.startswith(elsewhere), f"{kind} is planted"
    key = f"Authorization: Bearer {SECRETS['client-key']}"
    subprocess.run(
        ["curl", "--silent", "-H", key, daemon.url + "/v1/models"], check=True, capture_output=True
    )
    os.kill(daemon.slot(0)["pid"], 9)
    eventually(lambda: daemon.slot(0)["last_cause"], what="a cause")
    assert daemon.slot(0)["last_cause"]["evidence"]
    daemon.wait_ready(2)
    found = dict(outputs(daemon, folder))
    for name, text in found.items():
        assert text.strip() or name == "events --audit", name
        for kind, secret in SECRETS.items():
            assert secret not in text, f"{kind} is in {name}"
    assert "<redacted>" in found["plan --json"]
    assert '"${MY_API_KEY:?set it first}"' in found["plan --shell"]
    assert '"${SECRET_1:?set it first}"' in found["plan --shell"]
    assert "contains a secret" in found["plan"]
    assert "me:Kq7" not in daemon.cli("why", "0").stdout

    bundled = bundle(daemon, folder / "up.tar.gz", "logs/slot-0.txt")
    daemon.end()
    bundle(daemon, folder / "down.tar.gz", "missing: status, running plan")
    names = {
        "status.json",
        "plan.json",
        "config.json",
        "events.json",
        "metrics.txt",
        "causes.txt",
        "doctor.txt",
    }
    assert names <= {name.partition("/")[2] for name in bundled}
    (log,) = [data for name, data in bundled.items() if name.endswith("logs/slot-0.txt")]
    assert b"MY_API_KEY=<redacted>" in log
    assert b"header Authorization: <redacted>" in log
    (events,) = [data for name, data in bundled.items() if name.endswith("events.json")]
    assert b"OTHER_SECRET=<redacted>" in events


def bundle(daemon: DaemonProcess, packed: Path, says: str) -> dict[str, bytes]:
    """The files of a bundle, by name: no secret leaves the host."""
    done = daemon.cli("bundle", "-c", str(daemon.config), "-o", str(packed))
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    found = dict(contents(packed))
    for name, data in found.items():
        for kind, secret in SECRETS.items():
            assert secret.encode() not in data, f"{kind} is in {name} of {packed.name}"
    return found


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
