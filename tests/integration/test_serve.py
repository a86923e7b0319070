"""The daemon from start to stop: both sockets, status, signals, no processes left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon_process import SOON_S, DaemonProcess, eventually, fake_config
from support.ports import free_port
from support.verbs import run_verb

from launcher.control.client import ControlClient

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DaemonProcess]
# Well below supervision.stop_timeout_s (30): it did not wait for that.
STOP_S = 120.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Ready, with two more processes in each instance. Tests only look at it."""
    standing = DaemonProcess(tmp_path_factory.mktemp("d"), fake_config("--children", "2"))
    try:
        standing.wait_ready(2)
        yield standing
    finally:
        standing.end()


def test_two_instances_are_pinned_and_served(daemon: DaemonProcess) -> None:
    status = eventually(
        lambda: (s := daemon.status()) and all(slot["verified"] for slot in s["slots"]) and s, what="verified"
    )
    assert [slot["state"] for slot in status["slots"]] == ["ready", "ready"]
    assert status["endpoint"] == daemon.url
    first, second = status["slots"]
    assert set(first["cpus"].split(",")).isdisjoint(second["cpus"].split(","))
    for slot in (first, second):
        assert slot["verified"]["ok"], slot["verified"]["problems"]
        assert slot["verified"]["policies"] == [f"bind:{slot['node']}"]
        assert slot["verified"]["processes"] == 3
    assert [model["id"] for model in json.loads(daemon.ask("/v1/models")[1])["data"]] == ["fake"]
    # The exit code also reports other programs pinned to our cpus: a property of this machine.
    checked = json.loads(daemon.cli("verify", "--json").stdout)
    assert all(slot["verified"]["ok"] for slot in checked["slots"])


def test_logs(daemon: DaemonProcess) -> None:
    assert "loading" in daemon.cli("logs", "0").stdout
    line = json.loads(daemon.cli("logs", "1", "--json", "-n", "1").stdout)
    assert set(line) == {"time", "generation", "text"}


@pytest.mark.parametrize("slot", ["7", "x"])
def test_an_unknown_slot(daemon: DaemonProcess, slot: str) -> None:
    done = daemon.cli("restart", slot)
    assert done.returncode == 2
    assert slot in done.stderr


def test_a_second_daemon_on_the_same_socket_starts_nothing(daemon: DaemonProcess, tmp_path: Path) -> None:
    config = tmp_path / "second.toml"
    config.write_text(daemon.config.read_text().replace(str(daemon.port), str(free_port())))
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "serve", "-c", str(config)],
        check=False, capture_output=True, text=True, timeout=SOON_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "another numa-launcher answers there" in done.stderr
    assert daemon.status()["ready"] == 2


def test_a_taken_port_starts_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = tmp_path / "c.toml"
        config.write_text(
            fake_config("--fail", "it was started") + f'\n[proxy]\nlisten = ["127.0.0.1:{port}"]\n'
            f'[control]\nsocket = "{tmp_path}/c.sock"\n[logging]\nlevel = "debug"\n'
        )
        done = subprocess.run(
            [sys.executable, "-m", "launcher", "serve", "-c", str(config)],
            check=False, capture_output=True, text=True, timeout=SOON_S,
        )  # fmt: skip
    assert done.returncode == 2
    *_, message, remedy = done.stderr.strip().splitlines()
    assert message == f"cannot listen on '127.0.0.1:{port}': address in use"
    assert remedy
    assert "it was started" not in done.stderr


def test_sigkill_of_the_daemon_leaves_nothing(start: Start) -> None:
    daemon = start("--children", "3", instances=1)
    daemon.wait_ready(1)
    assert len(daemon.descendants()) >= 5  # shim, engine, three children
    daemon.process.kill()
    daemon.process.wait()
    daemon.nothing_left()


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_loading_ends_everything_at_once(start: Start, name: signal.Signals) -> None:
    daemon = start("--startup-s", "600", "--children", "2", instances=1)
    eventually(lambda: "loading" in daemon.log.read_text(), what="the engines to load")
    daemon.descendants()
    daemon.process.send_signal(name)
    assert daemon.process.wait(STOP_S) == 0
    daemon.nothing_left()


def test_a_second_signal_does_not_wait_for_requests(start: Start) -> None:
    daemon = start("--token-s", "10", instances=1)
    daemon.wait_ready(1)
    request = subprocess.Popen(
        ["curl", "-sS", "-N", f"{daemon.url}/v1/completions", "-H", "Content-Type: application/json",
         "-d", '{"model": "fake", "prompt": "x", "stream": true, "max_tokens": 50}'],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    eventually(lambda: daemon.status()["requests"]["in_flight"], what="the request to run")
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: "stopping:" in daemon.log.read_text())
    assert daemon.process.poll() is None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(STOP_S) == 0
    answer, _ = request.communicate(timeout=SOON_S)
    assert '"error"' in answer
    assert "[DONE]" not in answer


def test_systemd_is_told(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(SOON_S)
        daemon = start(instances=1, environ={"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "1000000"})
        said: list[str] = []
        while not any("READY=1" in word for word in said):
            said.append(listener.recv(4096).decode())
        assert "1 ready" in said[-1]
        kicks = 0
        while kicks < 4:  # again and again
            kicks += "WATCHDOG=1" in listener.recv(4096).decode()
        daemon.process.send_signal(signal.SIGTERM)
        while "STOPPING=1" not in listener.recv(4096).decode():
            continue
        assert daemon.process.wait(SOON_S) == 0


def test_plan_json_is_what_runs(daemon: DaemonProcess) -> None:
    status = daemon.wait_ready(2)
    done = run_verb("plan", "--json", "-c", str(daemon.config))
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert set(plan) >= {"slots", "reserved", "warnings", "violations"}
    for planned, running in zip(plan["slots"], status["slots"], strict=True):
        assert {
            "slot",
            "model",
            "socket",
            "node",
            "cpus",
            "omp_cpus",
            "membind",
            "kv_cache_bytes",
            "argv",
            "env",
        } <= set(planned)
        assert planned["cpus"] == running["cpus"]
        command_line = f"/proc/{running['pid']}/cmdline"
        # numactl has exec'ed into the engine
        running_argv = Path(command_line).read_text().strip("\0").split("\0")
        after_numactl = planned["argv"][planned["argv"].index(sys.executable) :]
        assert running_argv == after_numactl
        assert Path(planned["argv"][0]).name == "numactl"


def test_shell_lines_start_the_engine(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        fake_config("--fail", "started by hand") + f'\n[control]\nsocket = "{tmp_path}/c.sock"\n'
    )
    planned = run_verb("plan", "--shell", "-c", str(config))
    assert planned.returncode == 0, planned.stderr
    done = subprocess.run(
        ["sh", "-c", planned.stdout], check=False, capture_output=True, text=True, timeout=SOON_S
    )
    assert done.stdout.count("started by hand") == 2


def test_without_its_listener_of_systemd_no_other_address_is_opened(tmp_path: Path) -> None:
    """numa-launcher.socket has failed, numa-launcher-control.socket has not."""
    port, path, config = free_port(), tmp_path / "c.sock", tmp_path / "c.toml"
    config.write_text(
        fake_config(instances=1) + f'\n[proxy]\nlisten = ["127.0.0.1:{port}"]\n[control]\nsocket = "{path}"\n'
    )
    with socket.socket(socket.AF_UNIX) as control, (tmp_path / "log").open("wb") as log:
        control.bind(str(path))
        control.listen()
        fd = control.fileno()
        daemon = subprocess.Popen(
            ["bash", "-c", f'exec env LISTEN_PID=$$ "$0" -m launcher serve -c "$1" 3<&{fd}', sys.executable, config],
            env=os.environ | {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "control", "STATE_DIRECTORY": str(tmp_path / "s")},
            pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        client = ControlClient(str(path))
        status = eventually(lambda: (s := client.get("/status"))["ready"] == 1 and s, what="the instance")
        assert "systemd handed over the control socket and no listener" in status["no_listener"]
        assert status["endpoint"] == ""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=SOON_S)
        shown = run_verb("status", "--socket", str(path))
        assert shown.returncode == 1
        assert shown.stdout.startswith("DOWN 1/1 ready; cannot serve clients: ")
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(SOON_S) == 0, (tmp_path / "log").read_text()
