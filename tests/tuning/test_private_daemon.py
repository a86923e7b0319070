"""The daemon that a visit starts: its configuration, and real ones with the fake engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.conftest import eventually, fake_config

from launcher.config.load import load_config, parse_config
from launcher.config.schema import Config, SpawnerKind, Strategy
from launcher.control.client import ControlClient
from launcher.tuning.model import Layout
from launcher.tuning.private_daemon import private_config, running
from launcher.tuning.visits import NotStartedError

TWO = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=2, reserve_cores=0)
FULL = """
[[models]]
name = "m"
path = "/models/m"
[layout]
strategy = "contiguous"
[engine]
env = { A = "1" }
[proxy]
listen = ["0.0.0.0:8000"]
tls_certificate = "/c.pem"
api_keys_file = "/keys"
policy = "round-robin"
[proxy.overflow]
url = "https://example.com/v1"
models = { m = "big" }
[control]
socket = "/run/numa-launcher/control.sock"
group = "operators"
[supervision]
spawner = "systemd"
"""


def config_of(folder: Path, text: str) -> Config:
    file = folder / "given.toml"
    file.write_text(text)
    return load_config(file, environ={})


def processes_with(word: str) -> list[psutil.Process]:
    return [
        p for p in psutil.process_iter(["cmdline"]) if any(word in part for part in p.info["cmdline"] or ())
    ]


def test_the_configuration_is_the_users_with_the_layout_and_reaches_nothing_of_the_service(
    tmp_path: Path,
) -> None:
    layout = Layout(
        strategy=Strategy.INTERLEAVED, instances_per_socket=4, reserve_cores=1, max_num_seqs=7, max_num_batched_tokens=512
    )  # fmt: skip
    tree = private_config(config_of(tmp_path, FULL), layout, tmp_path, tmp_path / "cache", {"B": "2"})
    config = parse_config(tree, origin="generated")
    assert (config.layout.strategy, config.layout.instances_per_socket) == (Strategy.INTERLEAVED, 4)
    assert (config.models[0].max_num_seqs, config.models[0].max_num_batched_tokens) == (7, 512)
    assert config.engine.env == {"A": "1", "B": "2"}
    assert config.engine.cache_dir == str(tmp_path / "cache")
    assert config.proxy.listen == ("127.0.0.1:0",)
    assert config.proxy.policy.value == "round-robin"
    assert (config.proxy.overflow, config.proxy.api_keys_file, config.proxy.tls_certificate) == (
        (),
        None,
        None,
    )
    assert config.control.socket == str(tmp_path / "control.sock")
    assert config.control.group is None
    assert config.supervision.spawner is SpawnerKind.DIRECT


def start(tmp_path: Path, config: Config, layout: Layout = TWO) -> Any:
    return running(
        config, layout, run=tmp_path / "run", cache=tmp_path / "cache", env={}, log=tmp_path / "daemon.log"
    )


def test_all_instances_are_ready_and_everything_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMA_LAUNCHER_LAYOUT__INSTANCES_PER_SOCKET", "1")  # in the configuration already
    config = config_of(tmp_path, fake_config("--children", "2", instances=1))
    with start(tmp_path, config) as daemon:
        url = daemon.wait_ready()
        assert url.startswith("http://127.0.0.1:")
        status = daemon.status()
        assert status["ready"] == len(status["slots"]) == 2
        folder = Path(status["slots"][0]["address"].removeprefix("unix:")).parent.parent
        assert str(folder) != "/"
        assert processes_with(str(folder))
    assert not processes_with(str(folder))
    assert not folder.exists()


def test_the_cause_of_a_failed_start_is_reported(tmp_path: Path) -> None:
    config = config_of(tmp_path, fake_config("--no-such-option"))
    with pytest.raises(NotStartedError, match=r"slot \d: "), start(tmp_path, config) as daemon:
        daemon.wait_ready()


def test_a_daemon_that_refuses_to_start_says_why(tmp_path: Path) -> None:
    config = config_of(tmp_path, fake_config())
    too_many = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=4096, reserve_cores=0)
    with pytest.raises(NotStartedError, match="cannot "), start(tmp_path, config, too_many) as daemon:
        daemon.wait_ready()


RUN = """
import sys, time
from pathlib import Path
from launcher.config.load import load_config
from launcher.config.schema import Strategy
from launcher.tuning.model import Layout
from launcher.tuning.private_daemon import running
folder = Path(sys.argv[1])
layout = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=2, reserve_cores=0)
config = load_config(folder / "given.toml", environ={})
with running(config, layout, run=folder / "run", cache=folder / "cache", env={}, log=folder / "daemon.log") as daemon:
    daemon.wait_ready()
    print(daemon.status()["slots"][0]["address"], flush=True)
    time.sleep(600)
"""


def test_sigkill_of_tune_leaves_no_daemon_and_no_engine(tmp_path: Path) -> None:
    config_of(tmp_path, fake_config("--children", "2"))
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = str(Path(process.stdout.readline().strip().removeprefix("unix:")).parent.parent)
        tree = psutil.Process(process.pid).children(recursive=True)
        assert len(tree) >= 1 + 2 * 2, tree  # the daemon, shims, engines
        os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
    # The next start in the same run removes the sockets' folder.
    assert Path(folder).exists()
    with start(tmp_path, config_of(tmp_path, fake_config())) as daemon:
        daemon.wait_ready()
        assert ControlClient(f"{folder}/control.sock").get("/status")["ready"] == 2
    assert not Path(folder).exists()
