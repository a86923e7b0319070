"""`plan` and `topology` as a person calls them, on machines that are not this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.asked_engine import ANSWER, answering_vllm
from support.model_folders import model
from support.synthetic import Machine

from launcher.cli import main
from launcher.machine import sysfs
from launcher.machine.named import find_topology
from launcher.machine.topology_text import to_json

DOCS = Path(__file__).resolve().parents[2] / "docs"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_topology_of_a_known_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--machine", "epyc-9454-2p", "--json"]) == 0
    assert json.loads(said(capsys)) == to_json(find_topology("epyc-9454-2p"))


def test_a_snapshot_plans_as_the_machine_it_was_taken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Machine(sockets=2, l3=2, cores=8, smt=2).write(tmp_path / "tree")
    file = tmp_path / "snap.tar.gz"
    assert main(["topology", "snapshot", "-o", str(file), "--root", str(root)]) == 0
    assert f"wrote {file}" in said(capsys)
    main(["topology", "--snapshot", str(file), "--json"])
    assert json.loads(said(capsys)) == to_json(sysfs.read(root))
    assert main(["plan", "--snapshot", str(file), "--json"]) == 0
    snapshot = said(capsys)
    assert main(["plan", "--root", str(root), "--json"]) == 0
    assert said(capsys) == snapshot


def test_a_machine_that_cannot_be_read_is_packed_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "snap.tar.gz"
    assert main(["topology", "snapshot", "-o", str(file), "--root", str(tmp_path / "empty")]) == 1
    assert "there is no cpuN folder" in capsys.readouterr().err
    assert main(["topology", "--snapshot", str(file)]) == 2
    assert f"{file}:sys/devices/system/cpu: there is no cpuN folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["topology", "snapshot"], "cannot save a snapshot: -o is missing"),
        (
            ["topology", "snapshot", "-o", "x", "--machine", "epyc-9755-1p"],
            "cannot save a snapshot with --machine",
        ),
        (["topology", "-o", "x"], "cannot use -o: it needs the action snapshot"),
        (
            ["topology", "--machine", "epyc-9755-1p", "--svg", "/nowhere/x.svg"],
            "cannot write '/nowhere/x.svg'",
        ),
        (["plan", "--machine", "epyc-9755-1p", "--compare", "--shell"], "cannot use --compare with --shell"),
        (["plan", "--machine", "epyc-9999"], "cannot find machine 'epyc-9999'"),
    ],
)
def test_refusals(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    first, remedy = capsys.readouterr().err.splitlines()
    assert first.startswith(why)
    assert remedy


def test_another_machine_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--machine", "epyc-9755-2p"]) == 0
    shown = said(capsys)
    assert "warning: no model given: this plan covers cpus only" in shown
    assert "socket 0\n" not in shown, "a pipe gets no picture unless it is asked for"
    assert main(["plan", "--machine", "epyc-9755-2p", "--shell"]) == 0
    assert "--membind=1 vllm serve MODEL" in said(capsys)
    assert main(["plan", "--machine", "epyc-9654-2p-nps4", "--instances-per-socket", "2"]) == 1


def test_picture(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--machine", "epyc-9755-2p", "--picture"])
    plain = said(capsys)
    assert "    01010101 01010101" in plain
    assert "\x1b" not in plain
    main(["plan", "--machine", "epyc-9755-2p", "--color", "always"])
    assert "\x1b[48;5;32" in said(capsys)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--machine", "epyc-9755-2p", "--compare"]) == 0
    head, *lines = said(capsys).splitlines()
    assert head.split() == ["interleaved", "contiguous", "l3-aligned", "per-node"]
    assert lines[0].split() == ["instances", "4", "4", "4", "2"]
    assert main(["plan", "--machine", "epyc-9755-2p", "--compare", "--json"]) == 0
    assert [entry["instances"] for entry in json.loads(said(capsys))["strategies"]] == [4, 4, 4, 2]
    refused = ["--instances-per-socket", "2", "--machine", "epyc-9654-2p-nps4"]
    assert main(["plan", *refused, "--compare"]) == 1


def test_svg_of_a_plan_shows_its_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.svg"
    assert main(["plan", "--machine", "epyc-9654-2p-nps4", "--svg", str(file)]) == 0
    text = file.read_text()
    assert "interleaved: 8 instances, 6 cpus reserved" in text
    assert "slot 7" in text
    assert "node 7" in text
    assert main(["topology", "--machine", "epyc-9454-2p-cxl", "--svg", str(file)]) == 0
    assert "memory without cpus" in file.read_text()


def test_svg_names_model_memory_and_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        '[[models]]\nname = "one"\npath = "x/one"\nnodes = [0]\n'
        '[[models]]\nname = "two"\npath = "x/two"\nnodes = [1]\n[memory]\nkv_cache = "4GiB"\n'
    )
    root = Machine(nodes=2, cores=4, memoryless=frozenset({1})).write(tmp_path / "tree")
    file = tmp_path / "plan.svg"
    main(["plan", "-c", str(config), "--root", str(root), "--svg", str(file)])
    text = file.read_text()
    assert ">two<" in text
    assert "node 1, memory 0" in text
    assert "KV 4 GiB" in text


def test_the_picture_in_the_docs_is_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.svg"
    arguments = ("--strategy", "interleaved", "--instances-per-socket", "2", "--reserve-cores", "0")
    main(["plan", "--machine", "epyc-9755-2p", *arguments, "--svg", str(file)])
    assert (DOCS / "plan-epyc-9755-2p.svg").read_text() == file.read_text(), "stale: run scripts/docs"


@pytest.mark.parametrize(
    "words",
    [
        ["topology", "--machine", "epyc-9755-2p"],
        ["plan", "--machine", "epyc-9755-2p"],
        [
            "plan",
            "--model",
            "MODEL",
            "--set",
            "engine.kind=command",
            "--set",
            'engine.command=["true","{uds}"]',
        ],
    ],
)
def test_a_verb_imports_no_numpy(words: list[str], tmp_path: Path) -> None:
    """It is half of the time that `topology` takes, and a fifth of that of `plan`; psutil and cpuinfo are another tenth."""
    code = (
        f"import sys; from launcher.cli import main; main({words!r}); "
        "sys.exit(bool({'numpy', 'psutil', 'cpuinfo', 'asyncio'} & sys.modules.keys()))"
    )
    environ = {**os.environ, "STATE_DIRECTORY": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=240, env=environ
    )
    assert done.returncode == 0


def test_the_engine_is_asked_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    config = tmp_path / "config.toml"
    config.write_text(
        f'models = [{{name = "m", path = "{model(tmp_path / "model")}", max_num_seqs = 1}}]\n'
        f'[engine]\ncommand = ["{answering_vllm(tmp_path, ANSWER)}"]\ntcmalloc = "off"\n'
    )
    words = ["plan", "--machine", "epyc-9755-1p", "-c", str(config)]
    for more, sources in (([], ["config", "assumed"]), (["--ask-engine"], ["engine"]), ([], ["engine"])):
        assert main([*words, *more, "--json"]) == 0
        (its,) = json.loads(said(capsys))["models"]
        assert its["sources"] == sources
    assert (tmp_path / "asked").read_text() == "."
    assert main(words) == 0
    assert "weights 4 GiB, by engine\n" in said(capsys)
    # On this machine, in the rows of doctor; another question, as its processor is another.
    main(["doctor", "-c", str(config), "--json"])
    rows = [row["fact"] for row in json.loads(said(capsys))["rows"] if row["check"] == "model"]
    assert rows == ["m: the engine builds it: weights 4 GiB, one request of 4096 tokens 118 MiB of KV cache"]
