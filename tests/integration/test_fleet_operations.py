"""Operations over two hosts' real daemons: what one machine can show of a fleet without Ray and HAProxy."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.local_hosts import LocalHosts
from support.terminal import run

from launcher.base.errors import LauncherError
from launcher.cli import fleet_upgrade
from launcher.fleet.config import FleetConfig, Hosts, Ingress
from launcher.fleet.hosts import Exchange

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DaemonProcess]
NAMES = ("h1", "h2")


class Fleet(LocalHosts):
    """`run` restarts the host's daemon, as systemctl does. That waits until an instance is ready; this, until all start."""

    def __init__(self, daemons: dict[str, DaemonProcess], folder: Path) -> None:
        super().__init__(
            {name: str(daemon.socket) for name, daemon in daemons.items()}, folder,
            {name: f"127.0.0.1:{daemon.port}" for name, daemon in daemons.items()},
        )  # fmt: skip
        self.daemons = daemons
        self.config = FleetConfig(
            ingress=Ingress(hosts=("127.0.0.1",)),
            state=str(folder / "state"),
            hosts=Hosts(upgrade=("restart",)),
        )

    def __call__(self, *words: str) -> int:
        """`numa-launcher fleet WORDS`."""
        return run(words, self, self.config)

    def run(self, host: str, words: Sequence[str], timeout_s: float) -> tuple[int, str]:
        self.ran.append((host, tuple(words)))
        self.daemons[host].process.send_signal(signal.SIGTERM)
        self.daemons[host].process.wait(timeout_s)
        self.daemons[host].restart()

        def all_begun() -> bool:
            slots = self.daemons[host].status().get("slots", ())
            return bool(slots) and all(slot["generation"] for slot in slots)

        eventually(all_begun, what=f"instances of {host} start")
        return 0, ""


def started(start: Start, folder: Path) -> Fleet:
    """Two daemons with two instances each."""
    daemons = {name: start("--token-s", "0.02") for name in NAMES}
    found = Fleet(daemons, folder)
    for daemon in daemons.values():
        daemon.wait_ready(2)
    return found


@pytest.fixture
def fleet(start: Start, tmp_path: Path) -> Fleet:
    return started(start, tmp_path)


@pytest.fixture(scope="module")
def shared(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Tests may restart its instances, but not its daemons."""
    return started(start_shared, tmp_path_factory.mktemp("f"))


def chat(daemon: DaemonProcess, key: str | None = None, tokens: int = 8) -> tuple[int, str]:
    """Status and text of a streamed answer."""
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": tokens,
        "stream": True,
    }
    return daemon.ask("/v1/chat/completions", body, Authorization=f"Bearer {key}" if key else None)


def test_plan_verify_and_usage_of_two_daemons(shared: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert shared("plan", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == {}
    assert found["hosts"]["h1"]["instances"] == "2"
    shared("verify", "--json")  # its exit code also tells of other programs of this machine
    checked = json.loads(capsys.readouterr().out)["hosts"]
    assert [slot["verified"]["ok"] for name in NAMES for slot in checked[name]] == [True] * 4
    for _ in range(3):
        assert chat(shared.daemons["h1"])[0] == 200
    assert chat(shared.daemons["h2"])[0] == 200

    def served() -> dict[str, Any]:
        assert shared("usage", "--by", "host", "--json") == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report if report["total"]["requests"] >= 4 else {}

    report = eventually(served, what="entered in the ledgers")
    assert {row["name"]: row["completed"] for row in report["rows"]} == {"h1": 3, "h2": 1}
    own = [json.loads(shared.daemons[name].cli("usage", "--json").stdout)["total"] for name in NAMES]
    for figure in ("requests", "completed", "prompt_tokens", "output_tokens"):
        assert report["total"][figure] == sum(each[figure] for each in own)


@pytest.mark.long
def test_an_upgrade_waits_for_streams_and_compares(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream of the host that is upgraded ends whole; the other host's go on."""
    # Other jobs take CPUs between the two measurements. What counts as slower: tests/cli/test_fleet_upgrade.py.
    for noise in ("TTFT_NOISE_S", "TPOT_NOISE_S"):
        monkeypatch.setattr(fleet_upgrade, noise, 3600.0)
    compared: list[tuple[fleet_upgrade.Figures, fleet_upgrade.Figures]] = []

    def compare(before: fleet_upgrade.Figures, after: fleet_upgrade.Figures) -> list[str]:
        compared.append((before, after))
        return worse(before, after)

    worse = fleet_upgrade.worse
    monkeypatch.setattr(fleet_upgrade, "worse", compare)
    ended: dict[str, tuple[int, str]] = {}
    first = threading.Thread(target=lambda: ended.update(h1=chat(fleet.daemons["h1"], tokens=200)))
    first.start()
    eventually(lambda: fleet.daemons["h1"].status()["requests"]["in_flight"], what="a running stream")
    pids = [fleet.daemons[name].status()["pid"] for name in NAMES]
    assert fleet("upgrade", "--bench", "fake") == 0
    first.join(SOON_S)
    status, text = ended["h1"]
    assert (status, text.rstrip().endswith("data: [DONE]")) == (200, True)
    assert [host for host, _ in fleet.ran] == [*NAMES]
    assert all(fleet.daemons[name].status()["pid"] != pid for name, pid in zip(NAMES, pids, strict=True))
    assert len(compared) == len(NAMES)
    for figures in (figures for pair in compared for figures in pair):
        assert (figures.ready, figures.slots, figures.misplaced) == (2, 2, ())
        assert figures.ttft_s
        assert figures.tpot_s
    said = capsys.readouterr().out.splitlines()
    for name in NAMES:
        assert f"{name}: 2 of 2 ready; upgrading: restart" in said
        assert any(line.startswith(f"{name}: 2 of 2 ready, version ") for line in said)


@pytest.mark.long
def test_an_upgrade_that_breaks_the_first_host_spares_the_second(fleet: Fleet) -> None:
    """Its instances do not become ready with the new configuration."""
    config = fleet.daemons["h1"].config
    text = config.read_text()
    config.write_text(text.replace('"--token-s"', '"--no-such-option", "--token-s"'))
    with pytest.raises(LauncherError, match="cannot upgrade h1") as caught:
        fleet("upgrade", "--ready-timeout", "20")
    assert "it gets no new requests" in caught.value.remedy
    assert [host for host, _ in fleet.ran] == ["h1"]
    assert chat(fleet.daemons["h2"])[0] == 200
    config.write_text(text)
    assert fleet("upgrade") == 0
    assert [host for host, _ in fleet.ran] == ["h1", "h1", "h2"]
    assert fleet.daemons["h1"].status()["ready"] == 2


def test_a_reload_of_all_hosts(shared: Fleet) -> None:
    for daemon in shared.daemons.values():
        daemon.config.write_text(daemon.config.read_text().replace("max_num_seqs = 64", "max_num_seqs = 32"))
    assert shared("upgrade", "--reload") == 0
    assert not shared.ran
    for daemon in shared.daemons.values():
        assert json.loads(daemon.cli("reload", "--show", "--json").stdout)["stage"] == "done"


class Keyed:
    """Two daemons with one instance each, and the keys that they let in."""

    def __init__(self, start: Start, folder: Path) -> None:
        self.folder = folder
        self.hosts = LocalHosts(dict.fromkeys(NAMES, ""), folder)
        self.ann = self.key("add", "ann")
        self.daemons = {
            name: start(
                instances=1, environ={"NUMA_LAUNCHER_PROXY__API_KEYS_FILE": str(folder / f"{name}.keys")}
            )
            for name in NAMES
        }
        self.hosts.sockets = {name: str(daemon.socket) for name, daemon in self.daemons.items()}
        for daemon in self.daemons.values():
            daemon.wait_ready(1)

    def key(self, *words: str) -> str:
        """`numa-launcher fleet key WORDS`; what it prints."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run(["key", *words], self.hosts, FleetConfig(ingress=Ingress(hosts=("127.0.0.1",)))) == 0
        return out.getvalue().strip()


@pytest.fixture(scope="module")
def keyed(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    return Keyed(start_shared, tmp_path_factory.mktemp("k"))


def test_a_key_opens_both_daemons_until_it_is_revoked(keyed: Keyed) -> None:
    daemons = keyed.daemons
    bob = keyed.key("add", "bob")
    for name, daemon in daemons.items():
        assert chat(daemon)[0] == 401
        assert chat(daemon, keyed.ann)[0] == 200
        eventually(lambda its=daemon: chat(its, bob)[0] == 200, what=f"bob on {name}")
    keyed.key("revoke", "bob")
    for name, daemon in daemons.items():
        eventually(lambda its=daemon: chat(its, bob)[0] == 401, what=f"bob is revoked on {name}")
    assert [chat(daemon, keyed.ann)[0] for daemon in daemons.values()] == [200, 200]


def test_a_budget_holds_over_both_daemons(keyed: Keyed) -> None:
    """What was spent on one host counts on the other after an exchange, and only then."""
    daemons = keyed.daemons
    key = keyed.key("add", "cid", "--budget", "200-tokens/day")
    one, other = daemons.values()
    exchange = Exchange(keyed.hosts)
    for daemon in daemons.values():
        eventually(lambda its=daemon: its.get("/budgets")["budgets"], what="the key is known")

    def budget(daemon: DaemonProcess) -> dict[str, Any]:
        [state] = daemon.get("/budgets")["budgets"]
        return dict(state)

    while budget(one)["spent"] < 120:
        assert chat(one, key)[0] == 200
    assert exchange.turn() == {}
    assert budget(other)["spent"] == budget(other)["spent_elsewhere"] == budget(one)["spent_here"]
    while budget(other)["spent"] < 200:
        assert chat(other, key)[0] == 200
    assert chat(other, key)[0] == 429
    assert chat(one, key)[0] == 200  # it does not know yet
    assert exchange.turn() == {}
    assert [chat(daemon, key)[0] for daemon in daemons.values()] == [429, 429]
    assert (
        budget(one)["spent"]
        == budget(other)["spent"]
        == budget(one)["spent_here"] + budget(other)["spent_here"]
    )
    listed = one.cli("key", "list", "--file", str(keyed.folder / "h1.keys")).stdout
    assert "ELSEWHERE" in listed
    assert f"{budget(other)['spent_here']:,} tokens" in listed
