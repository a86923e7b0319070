"""The daemon that a visit starts: its configuration, and real ones with the fake engine."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.daemon_process import eventually, fake_config
from support.processes import still_running

from launcher.base.errors import LauncherError
from launcher.config.loading import load_config, parse_config
from launcher.config.schema import Config, SpawnerKind, Strategy
from launcher.control.client import ControlClient
from launcher.measure.tune.model import Layout, NotStartedError
from launcher.measure.tune.private_daemon import InstancesUser, instances_user, private_config, running

ONE, TWO = (
    Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=count, reserve_cores=0) for count in (1, 2)
)
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


def start(tmp_path: Path, config: Config, layout: Layout = ONE) -> Any:
    return running(
        config, layout, run=tmp_path / "run", cache=tmp_path / "cache", log=tmp_path / "daemon.log"
    )


def test_all_instances_are_ready_and_everything_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMA_LAUNCHER_LAYOUT__INSTANCES_PER_SOCKET", "1")  # in the configuration already
    config = config_of(tmp_path, fake_config("--children", "2", instances=1))
    with start(tmp_path, config, TWO) as daemon:
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


def test_a_daemon_that_refuses_to_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is ours, whatever the working directory has of its name."""
    (tmp_path / "launcher.py").write_text("raise SystemExit('planted')\n")
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, fake_config())
    too_many = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=4096, reserve_cores=0)
    with pytest.raises(NotStartedError, match="cannot "), start(tmp_path, config, too_many) as daemon:
        daemon.wait_ready()


RUN = """
import sys, time
from pathlib import Path
from launcher.config.loading import load_config
from launcher.config.schema import Strategy
from launcher.measure.tune.model import Layout
from launcher.measure.tune.private_daemon import running
folder = Path(sys.argv[1])
layout = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=1, reserve_cores=0)
config = load_config(folder / "given.toml", environ={})
with running(config, layout, run=folder / "run", cache=folder / "cache", log=folder / "daemon.log") as daemon:
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
        assert len(tree) >= 1 + 2, tree  # the daemon, a shim, an engine
        os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not still_running(tree))
    # The next start in the same run removes the sockets' folder.
    assert Path(folder).exists()
    with start(tmp_path, config_of(tmp_path, fake_config())) as daemon:
        daemon.wait_ready()
        assert ControlClient(f"{folder}/control.sock").get("/status")["ready"] == 1
    assert not Path(folder).exists()


def test_root_runs_no_engine_as_root(tmp_path: Path) -> None:
    """The instances' user where there is one; whoever is not root runs them itself."""
    nobody = pwd.getpwnam("nobody")
    config = config_of(tmp_path, fake_config() + '[systemd]\nuser = "nobody"\n')

    def user(euid: int, python: str = "/bin/true") -> InstancesUser | None:
        return instances_user(config, euid, python=python)

    assert user(1000) is None
    if os.geteuid() == 0:
        assert user(0) == InstancesUser("nobody", nobody.pw_uid, nobody.pw_gid, nobody.pw_dir)
        with pytest.raises(
            LauncherError, match="cannot tune as root: engines run as user 'nobody', which cannot run"
        ):
            user(0, python="/bin/false")
    absent = config_of(tmp_path, fake_config() + '[systemd]\nuser = "no-such-user"\n')
    assert instances_user(absent, 0, python="/bin/true") is None
    as_root = config_of(tmp_path, fake_config() + '[systemd]\nuser = "root"\n')
    assert instances_user(as_root, 0, python="/bin/true") is None


def test_the_users_environment_is_not_roots() -> None:
    user = InstancesUser("nobody", 65534, 65534, "/var/lib/x")
    environ = user.environ({"HOME": "/root", "XDG_CACHE_HOME": "/root/c", "PATH": "/bin", "USER": "root"})
    assert environ == {
        "HOME": "/var/lib/x", "HF_HOME": "/var/lib/numa-launcher/huggingface", "PATH": "/bin", "USER": "nobody",
        "LOGNAME": "nobody",
    }  # fmt: skip
    assert user.environ({"HF_HOME": "/srv/models"})["HF_HOME"] == "/srv/models"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a daemon as another user")
def test_daemon_and_engines_of_root_run_as_the_instances_user(tmp_path: Path) -> None:
    """The user owns the sockets' folder and the compile caches, reads a copy of the token, and cannot read root's."""
    token = tmp_path / "token"
    token.write_text("hf_secret")
    token.chmod(0o600)
    # The interpreter may be in root's home, which the user cannot enter: a user namespace of one process more has no use
    # here, so the user is root's number with another group, and what is handed over is looked at.
    user = InstancesUser("root", 0, pwd.getpwnam("nobody").pw_gid, "/var/empty")
    (of_another := tmp_path / "cache" / "compiled").mkdir(parents=True)
    os.chown(of_another.parent, pwd.getpwnam("nobody").pw_uid, -1)
    text = fake_config(instances=1) + f'hf_token_file = "{token}"\n'
    with running(
        config_of(tmp_path, text), ONE, run=tmp_path / "run", cache=tmp_path / "cache", log=tmp_path / "log",
        user=user,
    ) as daemon:  # fmt: skip
        daemon.wait_ready()
        folder = Path(daemon.status()["slots"][0]["address"].removeprefix("unix:")).parent.parent
        ours = [p for p in processes_with(str(folder)) if p.is_running()]
        assert len(ours) >= 3
        assert {p.gids().effective for p in ours} == {user.gid}
        assert (folder / "hf-token").read_text() == "hf_secret"
        assert (folder / "hf-token").stat().st_mode & 0o077 == 0
        for path in (folder, folder / "config.toml", folder / "hf-token", tmp_path / "cache"):
            assert path.stat().st_gid == user.gid, path
        assert not of_another.exists(), "the user could not write there"
