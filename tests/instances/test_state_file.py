"""What the next daemon is told."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from launcher.base.address import TcpAddress, UnixAddress
from launcher.engines.base import Launch
from launcher.instances.state_file import Record, StateFile, digest

ONE = Record(slot=0, generation=2, unit="numa-launcher-slot0.service", digest="d", socket="/run/s", pid=7)
TWO = Record(slot=1, generation=1, unit="numa-launcher-slot1.service", digest="e", port=4000)
LAUNCH = Launch(
    argv=("serve", "--port", "4000"),
    env={"A": "1", "A_TOKEN": "x"},
    secrets=frozenset({"A_TOKEN"}),
    address=UnixAddress("/run/s"),
)


async def test_the_next_daemon_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "instances.json"
    first = StateFile(path)
    await first.put(ONE)
    await first.put(TWO)
    assert StateFile(path).records == {0: ONE, 1: TWO}
    await first.remove(0)
    await first.remove(0)
    assert StateFile(path).records == {1: TWO}
    assert (ONE.address, TWO.address) == (UnixAddress("/run/s"), TcpAddress("127.0.0.1", 4000))


async def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "instances.json"
    await StateFile(path).put(ONE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "instances": []}', '{"version": 1}'])
def test_an_unreadable_file_is_logged_and_nothing_is_adopted(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "instances.json"
    path.write_text(text)
    assert StateFile(path).records == {}
    assert "state file" in caplog.text


def test_a_value_that_is_only_not_known_to_be_harmless_is_in_the_digest() -> None:
    """Its instance is started again when it changes, although it is not shown."""
    launch = replace(LAUNCH, env={"HOOK": "x"}, secrets=frozenset({"HOOK"}))
    assert digest(launch) != digest(replace(launch, env={"HOOK": "y"}))


def test_the_digest_is_of_what_would_run() -> None:
    assert digest(LAUNCH) == digest(replace(LAUNCH, env={"A_TOKEN": "x", "A": "1"}))
    assert digest(LAUNCH) == digest(replace(LAUNCH, env={"A": "1", "A_TOKEN": "another"})), (
        "a new token is no new model"
    )
    others = [
        replace(LAUNCH, argv=("serve", "--port", "4001")),
        replace(LAUNCH, env={"A": "2", "A_TOKEN": "x"}),
        replace(LAUNCH, address=UnixAddress("/run/t")),
        replace(LAUNCH, env={"A": "1"}, secrets=frozenset()),
    ]
    assert len({digest(launch) for launch in [LAUNCH, *others]}) == 5


def test_the_port_is_not_in_the_digest() -> None:
    first = replace(LAUNCH, address=TcpAddress("127.0.0.1", 4000))
    second = replace(first, argv=("serve", "--port", "4999"), address=TcpAddress("127.0.0.1", 4999))
    assert digest(first) == digest(second)


def test_another_release_of_the_same_versions_starts_the_same(tmp_path: Path) -> None:
    """What an upgrade of numa-launcher alone leaves running; and what the layout before releases has started."""

    def of(venv: str, version: str = "0.32.0") -> str:
        env = {"VLLM_CACHE_ROOT": f"/var/cache/vllm{version}/slot0/vllm", "LD_PRELOAD": f"{venv}/lib/x.so"}
        argv = ("numactl", "--membind=0", f"{venv}/bin/vllm", "serve", "/m")
        return digest(Launch(argv, env, frozenset(), UnixAddress("/run/s")), venv)

    opt = "/opt/numa-launcher"
    same = {of(f"{opt}/releases/0.1-a/venv"), of(f"{opt}/releases/0.2-b/venv"), of(f"{opt}/venv")}
    assert len(same) == 1
    assert of(f"{opt}/releases/0.2-b/venv", "0.33.0") not in same
    assert of("/srv/venv") not in same


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """As numa-launcher 0.1.0 wrote it before the instances' module was renamed."""
    path = tmp_path / "instances.json"
    path.write_text(
        """{
  "version": 1,
  "instances": [
    {
      "slot": 3,
      "generation": 7,
      "unit": "numa-launcher-slot3.service",
      "digest": "0123456789abcdef0123456789abcdef",
      "socket": "/run/numa-launcher/control.instances/slot3.sock",
      "port": null,
      "pid": 4711,
      "invocation": "5a1c",
      "started": 1763800000.5
    }
  ]
}
"""
    )
    record = StateFile(path).records[3]
    assert (record.generation, record.pid, record.started) == (7, 4711, 1763800000.5)
    assert record.address == UnixAddress("/run/numa-launcher/control.instances/slot3.sock")
