"""`fleet key`: one keys file on all hosts; a key is printed once, and nowhere else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.local_hosts import LocalHosts
from support.terminal import run

from launcher.base.errors import LauncherError
from launcher.fleet.config import FleetConfig, Ingress
from launcher.fleet.hosts import spread
from launcher.keys import key_file, key_record

NAMES = ("h1", "h2", "h3")
CONFIG = FleetConfig(ingress=Ingress(hosts=("10.0.0.1",)))


@pytest.fixture
def hosts(tmp_path: Path) -> LocalHosts:
    return LocalHosts(dict.fromkeys(NAMES, ""), tmp_path)


def fleet_key(hosts: LocalHosts, *words: str) -> int:
    return run(["key", *words], hosts, CONFIG)


def files(hosts: LocalHosts) -> list[str]:
    return [(hosts.folder / f"{name}.keys").read_text() for name in NAMES]


def test_a_key_opens_every_host_and_is_printed_once(
    hosts: LocalHosts, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert fleet_key(hosts, "add", "ann", "--concurrency", "4") == 0
    out, err = capsys.readouterr()
    key = out.strip()
    assert err == "the keys file is on 3 hosts of 3\n"
    assert len(set(files(hosts))) == 1
    (record,) = key_file.read(str(hosts.folder / "h2.keys"))
    assert (record.name, record.concurrency) == ("ann", 4)
    assert key_record.proves(key, bytes.fromhex(record.salt), bytes.fromhex(record.hash))
    assert key not in "".join(files(hosts)) + err + caplog.text
    fleet_key(hosts, "list")
    assert key not in "".join(capsys.readouterr())


def test_changes_reach_all_hosts(hosts: LocalHosts, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["add", "ann"],
        ["add", "bob"],
        ["set", "ann", "--budget", "5M-tokens/day"],
        ["revoke", "bob"],
    ):
        assert fleet_key(hosts, *words) == 0
    capsys.readouterr()
    assert fleet_key(hosts, "list", "--json") == 0
    found = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert found["ann"]["budget"] == "5M-tokens/day"
    assert found["bob"]["revoked"]
    assert key_file.version(hosts.key_stamp("h3")) == 4


def test_what_remains_of_a_budget_is_that_of_all_hosts(
    hosts: LocalHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_key(hosts, "add", "ann", "--budget", "5k-tokens/day")
    state = {
        "key": "ann", "budget": "5k-tokens/day", "unit": "tokens", "left": 1234, "ends": "2026-11-24T00:00:00+00:00",
        "spent_elsewhere": 7, "elsewhere_age_s": 1.0,
    }  # fmt: skip
    hosts.ask = lambda *_: {"budgets": [state]}  # type: ignore[method-assign, assignment]
    capsys.readouterr()
    assert fleet_key(hosts, "list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["BUDGET", "LEFT", "UNTIL"]
    assert "1,234 tokens" in row


def test_a_host_that_is_away_is_named_and_gets_it_when_it_returns(
    hosts: LocalHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.away = {"h1"}
    assert fleet_key(hosts, "add", "ann") == 1
    out, err = capsys.readouterr()
    assert out.startswith("nl-")
    assert err == (
        "the keys file is on 2 hosts of 3\nh1 gets it when it answers: cannot reach the agent of 'h1'\n"
    )
    hosts.away = set()
    assert fleet_key(hosts, "list") == 1
    assert "h1 gets it when it answers: it has another keys file" in capsys.readouterr().err
    spread(hosts)
    assert fleet_key(hosts, "list") == 0


def test_no_host_answers(hosts: LocalHosts, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.away = set(NAMES)
    with pytest.raises(LauncherError, match="cannot reach the agent"):
        fleet_key(hosts, "add", "ann")
    assert "nl-" not in capsys.readouterr().out


def test_a_refused_change_changes_nothing(hosts: LocalHosts, capsys: pytest.CaptureFixture[str]) -> None:
    fleet_key(hosts, "add", "ann")
    before = files(hosts)
    for words in (["add", "ann"], ["set", "nobody", "--concurrency", "1"], ["revoke", "nobody"]):
        with pytest.raises(LauncherError):
            fleet_key(hosts, *words)
    assert files(hosts) == before
    capsys.readouterr()


def test_of_two_operators_at_once_one_is_told_to_start_again(
    hosts: LocalHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other's change comes between reading and writing; its key stays, ours is not printed."""
    fleet_key(hosts, "add", "ann")
    capsys.readouterr()
    write = hosts.key_file
    once = [True]

    def between(host: str, text: str | None = None) -> str:
        if text is not None and once:
            once.clear()
            fleet_key(hosts, "add", "bob")
            capsys.readouterr()
        return write(host, text)

    hosts.key_file = between  # type: ignore[method-assign]
    with pytest.raises(LauncherError, match="they were changed meanwhile"):
        fleet_key(hosts, "add", "cal")
    assert capsys.readouterr().out == ""
    assert [record.name for record in key_file.read(str(hosts.folder / "h1.keys"))] == ["ann", "bob"]


def test_hosts_with_keys_of_their_own_wait_for_a_choice(
    hosts: LocalHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ann", "bob"):
        host = LocalHosts({"h1": ""}, hosts.folder / name)
        host.folder.mkdir()
        fleet_key(host, "add", name)
    for name, host_name in (("ann", "h1"), ("bob", "h3")):
        text = (hosts.folder / name / "h1.keys").read_text().partition("\n")[2]
        key_file.rewrite(str(hosts.folder / f"{host_name}.keys"), lambda _, text=text: text)
    with pytest.raises(LauncherError, match="those of h1 and h3 differ"):
        fleet_key(hosts, "add", "cal")
    assert fleet_key(hosts, "adopt", "h3") == 0
    assert len(set(files(hosts))) == 1
    assert [record.name for record in key_file.read(str(hosts.folder / "h1.keys"))] == ["bob"]
    capsys.readouterr()
