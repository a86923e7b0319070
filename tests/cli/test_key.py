"""`numa-launcher key`."""

from __future__ import annotations

import json
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace
from support.fake_operations import Backstage, FakeOperations
from support.keys import Fields

from launcher.accounts.budgets import Budgets, BudgetState, Past, Rules
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LedgerFile
from launcher.accounts.report_values import hour_begin
from launcher.accounts.spent_sums import SpentSums
from launcher.base.clock import Clock
from launcher.cli import main
from launcher.keys.api_keys import ApiKeys

Output = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def run(file: Path, *words: str) -> int:
    return main(["key", *words, "--file", str(file)])


def listed(file: Path, capsys: Output) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(file, "list", "--json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_add_prints_the_key_once_and_keeps_no_copy(file: Path, capsys: Output) -> None:
    assert run(file, "add", "ann") == 0
    shown = capsys.readouterr()
    key = shown.out.strip()
    assert key.startswith("nl-")
    assert "not shown again" in shown.err
    assert key not in file.read_text()
    assert key[12:] not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    entry = ApiKeys(str(file)).check(Fields(("authorization", f"Bearer {key}")), 0.0)
    assert entry is not None
    assert entry.record.name == "ann"


def test_add_with_everything(file: Path, capsys: Output) -> None:
    assert run(
        file, "add", "bob", "--concurrency", "4", "--requests-per-minute", "60", "--tokens-per-minute", "100_000",
        "--model", "a", "--model", "org/b", "--local-only", "--json",
    ) == 0  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    (record,) = listed(file, capsys)
    assert made.pop("key").startswith(f"nl-{record['id']}-")
    assert made == record
    assert record["revoked"] is None
    assert (record["concurrency"], record["requests_per_minute"], record["tokens_per_minute"]) == (
        4,
        60,
        100_000,
    )
    assert record["models"] == ["a", "org/b"]
    assert record["local_only"] is True
    assert "hash" not in record
    assert "salt" not in record


def test_list_for_people(file: Path, capsys: Output) -> None:
    run(file, "add", "ann", "--tokens-per-minute", "100000", "--local-only")
    run(file, "add", "bob", "--model", "m")
    run(file, "revoke", "bob")
    capsys.readouterr()
    assert run(file, "list") == 0
    head, ann, bob = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "NAME", "CREATED", "LIMITS", "MODELS"]
    assert "100,000 tokens/min, local only" in ann
    assert ann.endswith("  all")
    assert "revoked 20" in bob


def test_revoke_by_name_and_id(file: Path, capsys: Output) -> None:
    keys = []
    for name in ("ann", "bob"):
        capsys.readouterr()
        run(file, "add", name)
        keys.append(capsys.readouterr().out.strip())
    ann, bob = listed(file, capsys)
    assert run(file, "revoke", "ann") == 0
    assert run(file, "revoke", bob["id"]) == 0
    assert all(record["revoked"] for record in listed(file, capsys))
    when = [record["revoked"] for record in listed(file, capsys)]
    assert run(file, "revoke", ann["id"]) == 0  # again: done already
    assert [record["revoked"] for record in listed(file, capsys)] == when
    assert not list(ApiKeys(str(file)))
    assert run(file, "add", "ann") == 0  # the name is free again
    assert [record["name"] for record in listed(file, capsys)] == ["ann", "bob", "ann"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["add", "ann"], "cannot add key 'ann': the name is in use"),
        (["revoke", "zed"], "cannot revoke key 'zed': no key has this id or name"),
        (["add", ""], "cannot make key ''"),
        (["add", "a\nb"], "cannot make key"),
        (["add", "x" * 65], "cannot make key"),
    ],
)
def test_errors(file: Path, capsys: Output, words: list[str], error: str) -> None:
    run(file, "add", "ann")
    before = file.read_text()
    assert run(file, *words) == 2
    said = capsys.readouterr().err
    assert error in said
    assert file.read_text() == before


def test_a_missing_file(file: Path, capsys: Output) -> None:
    assert run(file, "list") == 2
    assert f"numa-launcher key add NAME --file {file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["add"],
        ["explode"],
        ["add", "a", "--concurrency", "0"],
        ["add", "a", "--tokens-per-minute", "many"],
    ],
)
def test_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["key", *words])
    assert caught.value.code == 2


def test_the_configuration_names_the_file(file: Path, tmp_path: Path, capsys: Output) -> None:
    config = tmp_path / "config.toml"
    models = '[[models]]\nname = "m"\npath = "/m"\n'
    config.write_text(f'{models}[proxy]\napi_keys_file = "{file}"\n')
    assert main(["key", "add", "ann", "-c", str(config)]) == 0
    assert file.exists()
    config.write_text(models)
    assert main(["key", "list", "-c", str(config)]) == 2
    assert 'api_keys_file = "/etc/numa-launcher/api-keys"' in capsys.readouterr().err


def test_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("NUMA_LAUNCHER_CONFIG", str(tmp_path / "none.toml"))
    assert main(["key", "list"]) == 2
    assert "--file FILE" in capsys.readouterr().err


def test_budgets_are_checked_when_they_are_given(file: Path, capsys: Output, tmp_path: Path) -> None:
    assert run(file, "add", "ann", "--budget", "20M-tokens/month", "--overflow", "never") == 0
    [record] = listed(file, capsys)
    assert (record["budget"], record["overflow"]) == ("20M-tokens/month", "never")
    with pytest.raises(SystemExit):
        run(file, "add", "bob", "--budget", "lots")
    assert "'lots' is not a budget such as" in capsys.readouterr().err
    config = tmp_path / "config.toml"
    model = f'[[models]]\nname = "m"\npath = "{tmp_path}"\n'
    config.write_text(f'{model}[proxy]\napi_keys_file = "{file}"\n')
    words = ["key", "add", "bob", "--budget", "50-usd/week", "-c", str(config)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "cannot hold budget '50-usd/week': a token that is served here has no price" in said
    assert "[cost.price]" in said
    with config.open("a") as text:
        text.write("[cost.price]\ninput = 0\noutput = 0\n")
    assert main(words) == 0
    assert [record["name"] for record in listed(file, capsys)] == ["ann", "bob"]


def test_set_changes_limits_and_removes_them(file: Path, capsys: Output) -> None:
    run(file, "add", "ann", "--concurrency", "4", "--model", "m", "--budget", "5-tokens/day")
    run(file, "add", "bob")
    capsys.readouterr()
    assert run(file, "set", "ann", "--budget", "1G-tokens/week", "--overflow", "full") == 0
    assert "(ann) changed: 4 at once, overflow full, budget 1G-tokens/week" in capsys.readouterr().err
    ann, bob = listed(file, capsys)
    assert (ann["budget"], ann["concurrency"], ann["models"]) == ("1G-tokens/week", 4, ["m"])
    assert bob["budget"] is None
    words = [f"--{name}=none" for name in ("budget", "overflow", "concurrency")]
    assert run(file, "set", ann["id"], *words, "--tokens-per-minute", "9") == 0
    ann, bob = listed(file, capsys)
    assert (ann["budget"], ann["overflow"], ann["concurrency"], ann["tokens_per_minute"]) == (
        None,
        None,
        None,
        9,
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["set", "ann"], "cannot change key 'ann': no limit is given"),
        (["set", "zed", "--budget", "none"], "cannot change key 'zed': no key has this id or name"),
    ],
)
def test_set_that_changes_nothing(file: Path, capsys: Output, words: list[str], error: str) -> None:
    run(file, "add", "ann")
    before = file.read_text()
    assert run(file, *words) == 2
    assert error in capsys.readouterr().err
    assert file.read_text() == before


def test_list_asks_the_daemon_what_is_left(file: Path, capsys: Output, tmp_path: Path) -> None:
    run(file, "add", "ann", "--budget", "20k-tokens/month")
    run(file, "add", "bob")
    run(file, "add", "cid", "--budget", "50-usd/week")
    run(file, "add", "dan", "--budget", "7-tokens/day")
    state = BudgetState(
        key="ann", budget="20k-tokens/month", unit="tokens", limit=20_000, spent=7655, reserved=5, left=12_345,
        begins="2026-11-01T00:00:00+01:00", ends="2026-12-01T00:00:00+01:00",
    )  # fmt: skip
    money = replace(state, key="cid", budget="50-usd/week", unit="USD", limit="50", spent="1.5", left="48.5")
    unknown = replace(state, key="dan", budget="7-tokens/day", spent=None, left=None)
    operations = FakeOperations(held=[state, money, unknown])
    with Backstage(str(tmp_path / "control"), operations):
        capsys.readouterr()
        assert run(file, "list", "--socket", str(tmp_path / "control")) == 0
        head, ann, bob, cid, dan = capsys.readouterr().out.splitlines()
        assert run(file, "list", "--socket", str(tmp_path / "control"), "--json") == 0
        shown = json.loads(capsys.readouterr().out)
    assert head.split()[-3:] == ["BUDGET", "LEFT", "UNTIL"]
    assert ann.split()[-4:] == ["20k-tokens/month", "12,345", "tokens", "2026-12-01T00:00:00+01:00"]
    assert bob.split()[-3:] == ["-", "-", "-"]
    assert "48.5 USD" in cid
    assert dan.split()[-3:] == ["7-tokens/day", "-", "2026-12-01T00:00:00+01:00"]
    assert shown[0]["spending"]["left"] == 12_345
    assert "spending" not in shown[1]


def test_list_shows_what_was_spent_on_other_hosts(file: Path, capsys: Output, tmp_path: Path) -> None:
    for name, budget in (("ann", "20k-tokens/month"), ("cid", "50-usd/week")):
        run(file, "add", name, "--budget", budget)
    ann = BudgetState(
        key="ann", budget="20k-tokens/month", unit="tokens", limit=20_000, spent=7655, reserved=5, left=12_345,
        begins="2026-11-01T00:00:00+01:00", ends="2026-12-01T00:00:00+01:00", spent_here=655, spent_elsewhere=7000,
        elsewhere_age_s=3.2,
    )  # fmt: skip
    cid = replace(
        ann, key="cid", budget="50-usd/week", unit="USD", limit="50", spent="1.5", left="48.5",
        spent_elsewhere="1.25", elsewhere_age_s=75.0,
    )  # fmt: skip
    with Backstage(str(tmp_path / "control"), FakeOperations(held=[ann, cid])):
        capsys.readouterr()
        assert run(file, "list", "--socket", str(tmp_path / "control")) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["BUDGET", "LEFT", "ELSEWHERE", "UNTIL"]
    assert first.split()[-5:-1] == ["12,345", "tokens", "7,000", "tokens"]
    assert "1.25 USD (75 s old)" in second


def test_list_without_a_daemon_reads_the_ledger(
    file: Path, capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(file, "add", "ann", "--budget", "20k-tokens/month")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[[models]]\nname = "m"\npath = "{tmp_path}"\n[proxy]\napi_keys_file = "{file}"\n'
        f'[usage]\npath = "{tmp_path}/usage.db"\n[control]\nsocket = "{tmp_path}/none"\n'
    )
    words = ["key", "list", "-c", str(config)]
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-3:] == ["20k-tokens/month", "-", "-"]
    past = Past([("ann", time.time(), 500, 0)])
    (tmp_path / "usage.db").touch()
    monkeypatch.setattr("launcher.accounts.spent_before.read_past", lambda *_: past)
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-3:-1] == ["19,500", "tokens"]
    # What a daemon had served and not entered when it was killed.
    sums, zone = SpentSums(), ZoneInfo("UTC")
    budgets = Budgets(Rules(), zone, Clock(), sums.slot)
    budgets.learn(Past())
    budgets.follow({"ann": "20k-tokens/month"})
    budgets.spend(EndedRequest(time.time(), "r", "ann", output_tokens=600))
    with closing(
        LedgerFile(tmp_path / "usage.db", "UTC", partial(hour_begin, zone=zone), time.time(), [sums])
    ) as ledger:
        ledger.write([], {})
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-3:-1] == ["19,400", "tokens"]


@pytest.mark.parametrize("words", [("add", "bob"), ("set", "ann", "--concurrency", "2"), ("revoke", "ann")])
def test_a_fleets_file_is_changed_on_all_hosts_only(
    words: tuple[str, ...], file: Path, capsys: Output
) -> None:
    """Within seconds the fleet replaces it by that of the other hosts: a key that was revoked here would be valid again."""
    assert run(file, "add", "ann") == 0
    text = f"# fleet 3\n{file.read_text()}"
    file.write_text(text)
    capsys.readouterr()
    assert run(file, *words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"cannot change API keys '{file}': a fleet has this file" in shown.err
    assert "numa-launcher fleet key" in shown.err
    assert file.read_text() == text
    assert [record["name"] for record in listed(file, capsys)] == ["ann"]
