"""Operations over all hosts, from the words of the command line to text and exit code, over real control sockets."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.fake_operations import Backstage, FakeOperations, slot_status
from support.ledger_file import LedgerFile, unix
from support.local_hosts import LocalHosts
from support.terminal import run

from launcher.base.errors import LauncherError
from launcher.base.text import printable
from launcher.cli.fleet_operations import plan_of
from launcher.daemon.status import Status
from launcher.fleet.config import FleetConfig, Ingress
from launcher.fleet.members import MemberState

NAMES = ("h1", "h2", "h3")
NOW = unix("2026-11-23T01:30")


class Daemon(FakeOperations):
    def status(self) -> Status:
        return replace(super().status(), requests={"in_flight": 0})

    def plan(self) -> dict[str, Any]:
        """One slot for each of its slots' cpus."""
        slots = [
            {"slot": slot.slot, "model": slot.model, "cpus": slot.cpus, "kv_cache_bytes": slot.kv_cache_bytes}
            for slot in self.slots.values()
        ]
        return {"slots": slots, "warnings": [], "violations": []}


class Fleet:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.daemons = {name: Daemon(now=NOW) for name in NAMES}
        sockets = {name: str(folder / f"{name}.sock") for name in NAMES}
        for name in NAMES:
            stack.enter_context(Backstage(sockets[name], self.daemons[name]))
        self.hosts = LocalHosts(sockets, folder)
        self.config = FleetConfig(ingress=Ingress(hosts=("10.0.0.1",)), state=str(folder / "state"))

    def __call__(self, *words: str) -> int:
        """`numa-launcher fleet WORDS`."""
        return run(words, self.hosts, self.config)


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("f"), stack)


# --- plan -----------------------------------------------------------------------------------------


def test_plans_side_by_side_with_what_differs_marked(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.daemons["h3"].machine_name = "epyc-7763-1p"
    fleet.daemons["h3"].slots.pop(1)
    assert fleet("plan") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("HOST  CPU ")
    assert head.endswith("INSTANCES  CORES EACH  MODEL  KV CACHE EACH  WARNINGS")
    rows = dict(zip(NAMES, lines, strict=False))
    assert "*" not in rows["h1"] + rows["h2"]
    assert rows["h3"].count("*") == 6  # cpu, sockets, nodes, cores, memory, instances
    assert lines[-1] == "* differs from most hosts: h3"


def test_plans_as_json(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.hosts.away = {"h2"}
    fleet.daemons["h3"].slots[1] = slot_status(1, model="other")
    assert fleet("plan", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"]["h1"]["model"] == "m"
    assert found["differences"] == {"h3": ["model"]}
    assert found["missing"] == {"h2": "cannot reach the agent of 'h2'"}


def test_the_cores_of_a_slot_are_counted_not_its_cpus() -> None:
    topology = {
        "name": "cpu", "sockets": [{}], "nodes": [{"memory_bytes": 1 << 30}],
        "cores": [{"cpus": [core, core + 4]} for core in range(4)],
    }  # fmt: skip
    slots = [
        {"slot": 0, "model": "m", "cpus": "0-1,4-5", "kv_cache_bytes": None},
        {"slot": 1, "model": "m", "cpus": "2", "kv_cache_bytes": 1 << 30},
    ]
    found = plan_of(topology, {"slots": slots})
    assert (found["cores each"], found["kv cache each"], found["memory"]) == ("2, 1", "1 GiB", "1 GiB")


# --- verify ---------------------------------------------------------------------------------------


def test_all_hosts_are_verified_the_worst_first(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet("verify") == 0
    assert capsys.readouterr().out.splitlines() == [f"{name}: as planned, 2 slots" for name in NAMES]
    fleet.daemons["h2"].slots[0] = slot_status(0, state="failed", verified=None)
    fleet.daemons["h2"].verify = _nothing  # type: ignore[method-assign]
    fleet.hosts.away = {"h3"}
    assert fleet("verify") == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "h2: not every instance runs, 2 slots"
    assert out.splitlines()[-1] == "h1: as planned, 2 slots"
    assert err.startswith("h3: NO ANSWER: cannot reach the agent of 'h3'")


async def _nothing(_slot: int) -> None: ...


def test_verify_as_json(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.hosts.away = {"h3"}
    assert fleet("verify", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [slot["verified"]["ok"] for slot in found["hosts"]["h1"]] == [True, True]
    assert list(found["missing"]) == ["h3"]


# --- usage ----------------------------------------------------------------------------------------


@pytest.fixture
def served(fleet: Fleet) -> Fleet:
    for number, name in enumerate(NAMES, 1):
        ledger = LedgerFile(fleet.folder / name / "usage.db", began="2026-11-02T09:14")
        figures = {
            "requests": number,
            "completed": number,
            "prompt_tokens": 100 * number,
            "first_byte": [0.2],
        }
        for key in ("ann", f"only-{name}"):
            ledger.hour("2026-11-22T10:00", "key", key, **figures)
            ledger.hour("2026-11-22T10:00", **figures)
        fleet.daemons[name].ledger = ledger.path
    return fleet


def test_usage_of_all_hosts_is_one_report(served: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert served("usage", "--by", "key", "--csv", "--since", "2026-11-01") == 0
    out, err = capsys.readouterr()
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(out))}
    assert rows["ann"]["prompt_tokens"] == "600"
    assert rows["ann"]["first_byte_p50_s"] == ""
    assert rows["only-h3"]["requests"] == "3"
    assert err == "percentiles of several hosts cannot be told from those of each: see --by host\n"


def test_usage_by_host(served: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert served("usage", "--by", "host", "--since", "2026-11-01", "--wide") == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:7]]
    assert lines == [["HOST", "REQUESTS"], ["h3", "6"], ["h2", "4"], ["h1", "2"], ["total", "12"]]


def test_a_sum_without_a_host_says_so(served: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    served.hosts.away = {"h3"}
    assert served("usage", "--json", "--since", "2026-11-01") == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["total"]["requests"] == 6
    assert (found["hosts"], list(found["missing"])) == (["h1", "h2"], ["h3"])
    assert err.startswith("INCOMPLETE: without h3\n")


def test_a_key_that_a_host_never_served_is_no_missing_host(
    served: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served("usage", "--key", "only-h2", "--json", "--since", "2026-11-01") == 0
    assert json.loads(capsys.readouterr().out)["total"]["requests"] == 2


# --- targets --------------------------------------------------------------------------------------


def test_targets_for_prometheus(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """A lost host stays in the list: its alert is NumaLauncherDown."""
    fleet.hosts.away = {"h2"}
    assert fleet("targets") == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["targets"] for group in found] == [[f"{name}:8000"] for name in NAMES]
    assert found[1]["labels"] == {"fleet": "fleet", "host": "h2", "__scheme__": "http"}


def test_targets_are_written_for_prometheus_to_read(fleet: Fleet) -> None:
    file = fleet.folder / "targets.json"
    assert fleet("targets", "--file", str(file)) == 0
    assert len(json.loads(file.read_text())) == 3
    assert file.stat().st_mode & 0o777 == 0o644


# --- upgrade --------------------------------------------------------------------------------------


def test_an_upgrade_by_the_configured_command(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:

    hosts = replace(fleet.config.hosts, upgrade=("sh", "-c", 'test "$HOST" = h1'))
    fleet.config = replace(fleet.config, hosts=hosts)
    monkeypatch.setattr("launcher.cli.fleet_upgrade.POLL_S", 0.01)
    with pytest.raises(Exception, match="cannot upgrade h2: the command ended with exit code 1") as caught:
        fleet("upgrade")
    assert "run it on the host by hand" in printable(str(getattr(caught.value, "remedy", "")))
    assert "h1: 2 of 2 ready, version 0; serves again" in capsys.readouterr().out
    assert fleet.hosts.states["h2"] is MemberState.DRAINING
    with pytest.raises(Exception, match="no such host"):
        fleet("upgrade", "--accept", "h9")


@pytest.mark.parametrize(
    "words", [("plan",), ("verify",), ("usage",), ("key", "list"), ("targets",), ("upgrade",)], ids=" ".join
)
def test_a_fleet_without_hosts(tmp_path: Path, words: tuple[str, ...]) -> None:
    config = FleetConfig(ingress=Ingress(hosts=("10.0.0.1",)), state=str(tmp_path))
    with pytest.raises(LauncherError, match="cannot ask the hosts: the fleet has none"):
        run(words, LocalHosts({}, tmp_path), config)
