"""The audit trail of a real daemon: requests, control actions, SIGHUP, SIGKILL, a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import DaemonProcess, eventually
from support.verbs import run_verb

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DaemonProcess]
PROMPT = "tell nobody of the pelican"


def ask(daemon: DaemonProcess, request_id: str) -> tuple[int, dict[str, Any]]:
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 4}
    status, text = daemon.ask("/v1/completions", body, X_Request_Id=request_id)
    return status, json.loads(text)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    texts = [text for path in sorted(folder.glob("audit-*.jsonl")) for text in path.read_text().splitlines()]
    return [line for line in map(json.loads, texts) if line["kind"] == kind]


def verified(folder: Path, *more: str) -> tuple[int, str]:
    done = run_verb("audit", "verify", str(folder), *more)
    return done.returncode, done.stdout + done.stderr


def test_who_asked_for_what(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "trail"
    daemon = start(more=f'[audit]\npath = "{folder}"\nstrict = true\n', instances=1)
    daemon.wait_ready(1)
    assert [ask(daemon, f"mine-{number}")[0] for number in range(20)] == [200] * 20
    assert daemon.cli("drain", "0", "--force").returncode == 0
    assert daemon.cli("resume", "0").returncode == 0
    assert daemon.cli("stop", "7").returncode == 2
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(lines(folder, "control")) == 4)
    eventually(lambda: len(lines(folder, "request")) == 20)
    assert verified(folder)[0] == 0
    # They are counted after they are written.
    eventually(lambda: "numa_launcher_audit_entries_total 24.0" in daemon.metrics())
    assert "numa_launcher_audit_ok 1.0" in daemon.metrics()
    reload = daemon.config.read_text().replace("strict = true", "strict = false")
    daemon.config.write_text(reload)
    refused = daemon.cli("reload")
    assert refused.returncode != 0
    assert "audit.strict" in refused.stderr
    daemon.end()

    requests, actions = lines(folder, "request"), lines(folder, "control")
    assert [line["request_id"] for line in requests] == [f"mine-{number}" for number in range(20)]
    assert {(line["model"], line["status"], line["outcome"], line["slot"]) for line in requests} == {
        ("fake", 200, "completed", 0)
    }
    assert all(line["prompt_tokens"] > 0 and line["output_tokens"] > 0 for line in requests)
    drain, resume, stop, hangup, late = actions
    assert (drain["verb"], drain["slot"], drain["result"], drain["uid"]) == (
        "drain",
        "0",
        "done",
        os.getuid(),
    )
    assert drain["arguments"].startswith("/v1/slots/0/drain?")
    assert (resume["verb"], resume["status"]) == ("resume", 200)
    assert (stop["verb"], stop["status"], stop["result"]) == ("stop", 404, "refused")
    assert (hangup["verb"], hangup["arguments"], hangup["uid"]) == ("reload", "SIGHUP", None)
    assert (late["verb"], late["result"], late["uid"]) == ("reload", "refused", os.getuid())
    assert [line["kind"] for line in lines(folder, "stop")] == ["stop"]
    assert "pelican" not in "".join(path.read_text() for path in folder.iterdir())
    code, said = verified(folder)
    assert (code, "nothing was changed" in said) == (0, True)


@pytest.mark.release
def test_a_killed_daemon_and_the_next_one(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "trail"
    more = f'[audit]\npath = "{folder}"\n'
    for turn in range(2):
        daemon = start(more=more, instances=1)
        daemon.wait_ready(1)
        for number in range(5):
            assert ask(daemon, f"{turn}-{number}")[0] == 200
        eventually(lambda turn=turn: len(lines(folder, "request")) == 5 * (turn + 1))
        if turn == 0:
            daemon.process.kill()
            daemon.process.wait()
        daemon.end()
    code, said = verified(folder, "--json")
    assert (code, json.loads(said)["killed"]) == (0, 1)
    path = min(folder.glob("audit-*.jsonl"))
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"request_id":"0-3"', b'"request_id":"0-4"'))
    code, said = verified(folder)
    assert code == 1
    assert said.startswith(f"{path}:6: changed")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount: run scripts/test integration as root")
def test_a_full_disk_refuses_until_it_is_freed(start: Start, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=0755", "tmpfs", disk], check=True)
    try:
        daemon = start(more=f'[audit]\npath = "{disk}/trail"\nstrict = true\n', instances=1)
        daemon.wait_ready(1)
        assert ask(daemon, "before")[0] == 200
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass
        # The last block of the file has room for some lines.
        refused: list[dict[str, Any]] = []

        def is_refused() -> bool:
            status, answer = ask(daemon, "meanwhile")
            if status == 503:
                refused.append(answer)
            return status == 503

        eventually(is_refused)
        assert refused[0]["error"]["code"] == "audit_unavailable"
        assert "no space left on device" in refused[0]["error"]["message"]
        assert any("cannot write the audit trail" in line for line in daemon.status()["warnings"])
        assert daemon.cli("drain", "0", "--force").returncode == 0
        assert daemon.cli("resume", "0").returncode == 0
        filler.unlink()
        eventually(lambda: ask(daemon, "after")[0] == 200)
        daemon.end()
        found = [line["request_id"] for line in lines(disk / "trail", "request")]
        assert (found[0], found[-1]) == ("before", "after")
        assert len(lines(disk / "trail", "control")) == 2
        assert lines(disk / "trail", "lost") == []
        assert verified(disk / "trail")[0] == 0
        said = [
            line for line in daemon.log.read_text().splitlines() if "cannot write the audit trail" in line
        ]
        assert len(said) == 1
    finally:
        subprocess.run(["umount", disk], check=True)
