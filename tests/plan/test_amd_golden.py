"""AMD's published pattern (ZD-059, ZD-060), to the letter: cpus, memory node and environment.

    numactl --physcpubind=$(seq -s, 0 2 127) --membind=0 vllm ...     with TORCHINDUCTOR_FREEZING=1

and the second instance on the odd cores. golden/ holds what `plan --json` says, but for folders of this host.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main

GOLDEN = Path(__file__).parent / "golden"
AMD = ("--strategy", "interleaved", "--instances-per-socket", "2", "--reserve-cores", "0")
HOST_FOLDERS = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "VLLM_RPC_BASE_PATH"}


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *options, *AMD, "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    for slot in shown["slots"]:
        slot["env"] = {name: value for name, value in slot["env"].items() if name not in HOST_FOLDERS}
        socket = slot["argv"].index("--uds") + 1
        slot["argv"][socket] = Path(slot["argv"][socket]).name
    return shown


@pytest.mark.parametrize("machine", ["epyc-9755-1p", "epyc-9755-2p"])
def test_golden(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("slot", "socket", "node", "cpus", "omp_cpus", "membind", "argv", "env")
    got = [{key: slot[key] for key in keys} for slot in plan(capsys, "--machine", machine)["slots"]]
    assert got == json.loads((GOLDEN / f"{machine}-interleaved-2.json").read_text())


def test_one_socket(capsys: pytest.CaptureFixture[str]) -> None:
    shown = plan(capsys, "--machine", "epyc-9755-1p")
    even, odd = (",".join(map(str, range(start, 128, 2))) for start in (0, 1))
    assert [slot["cpus"] for slot in shown["slots"]] == [even, odd]
    assert [slot["membind"] for slot in shown["slots"]] == ["0", "0"]
    for slot, cpus in zip(shown["slots"], (even, odd), strict=True):
        assert slot["argv"][:5] == ["numactl", f"--physcpubind={cpus}", "--membind=0", "vllm", "serve"]
        assert slot["env"]["TORCHINDUCTOR_FREEZING"] == "1"
        # One core stays out of OpenMP's list, yet in numactl's set: for API server and EngineCore.
        assert cpus.startswith(slot["env"]["VLLM_CPU_OMP_THREADS_BIND"] + ",")
    assert shown["reserved"] == ""
    assert shown["violations"] == []
    assert [warning["code"] for warning in shown["warnings"]] == ["memory-not-planned"]


def test_two_sockets(capsys: pytest.CaptureFixture[str]) -> None:
    shown = plan(capsys, "--machine", "epyc-9755-2p")
    assert [(slot["socket"], slot["node"], slot["membind"]) for slot in shown["slots"]] == [
        (0, 0, "0"),
        (0, 0, "0"),
        (1, 1, "1"),
        (1, 1, "1"),
    ]
    starts = [",".join(map(str, range(base + k, base + 128, 2))) for base in (0, 128) for k in (0, 1)]
    assert [slot["cpus"] for slot in shown["slots"]] == starts
