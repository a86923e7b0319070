"""The words before the engine's command, and the ladder of what a machine permits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, TimedOutError
from launcher.config.schema import Engine
from launcher.engines.numactl import Binding, MemPolicy, choose_binding, probe_binding, run_probe
from launcher.plan.plan import Slot

MakeSlot = Callable[..., Slot]


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        (Binding(MemPolicy.MEMBIND, numactl="numactl"), ("numactl", "--physcpubind=0,2", "--membind=0-1")),
        (Binding(MemPolicy.PREFERRED, numactl="numactl"), ("numactl", "--physcpubind=0,2", "--preferred=0")),
        (Binding(MemPolicy.NONE, numactl="numactl"), ("numactl", "--physcpubind=0,2")),
        (Binding(MemPolicy.NONE, taskset="taskset"), ("taskset", "--cpu-list", "0,2")),
        (Binding(MemPolicy.NONE), ()),
    ],
)
def test_prefix(make_slot: MakeSlot, binding: Binding, words: tuple[str, ...]) -> None:
    assert binding.prefix(make_slot(cpus="0,2", nodes="0-1").placement) == words


def test_without_numa_no_memory_is_bound(make_slot: MakeSlot) -> None:
    placement = make_slot(cpus="0", nodes="").placement
    assert Binding(MemPolicy.MEMBIND, numactl="numactl").prefix(placement) == ("numactl", "--physcpubind=0")


class Machine:
    """Stands for numactl: refuses the options it is told to."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused

    def __call__(self, command: tuple[str, ...]) -> str | None:
        for word in command:
            if word.startswith(self.refused):
                return "set_mempolicy: Operation not permitted"
        return None


@pytest.mark.parametrize(
    ("refused", "policy", "numactl", "said"),
    [
        ((), MemPolicy.MEMBIND, "numactl", None),
        (("--membind",), MemPolicy.PREFERRED, "numactl", "--preferred"),
        (("--membind", "--preferred"), MemPolicy.NONE, "numactl", "no memory policy"),
        (("--physcpubind",), MemPolicy.NONE, None, "taskset pins"),
    ],
)
def test_ladder(refused: tuple[str, ...], policy: MemPolicy, numactl: str | None, said: str | None) -> None:
    machine = Machine(*refused) if refused else lambda _: None
    binding = choose_binding("numactl", "taskset", CpuSet([0]), CpuSet([0, 1]), machine)
    assert (binding.policy, binding.numactl) == (policy, numactl)
    if said is None:
        assert binding.warning is None
    else:
        assert binding.warning is not None
        assert said in binding.warning
        assert "Operation not permitted" in binding.warning


def test_without_nodes_only_cpus_are_probed() -> None:
    assert choose_binding("numactl", None, CpuSet([0]), CpuSet(), Machine("--membind")).warning is None


def test_missing_numactl_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LauncherError, match="no command 'numactl'") as missing:
        probe_binding(Engine(), CpuSet([0]), CpuSet([0]))
    assert "apt-get install numactl" in missing.value.remedy


def test_off_never_asks_numactl() -> None:
    assert probe_binding(Engine(numactl="off"), CpuSet([0]), CpuSet([0])).numactl is None


def test_probe_quotes_the_first_complaint() -> None:
    assert run_probe(("true",)) is None
    assert run_probe(("sh", "-c", "echo >&2; echo no >&2; exit 1")) == "no"
    assert run_probe(("sh", "-c", "exit 3")) == "exit code 3"
    assert "No such file" in (run_probe(("/nowhere/numactl",)) or "")


def test_no_answer_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy machine would cost the memory binding for as long as the daemon runs."""
    monkeypatch.setattr("launcher.engines.numactl.PROBE_TIMEOUT_S", 0.05)
    with pytest.raises(TimedOutError, match=r"cannot wait longer for 'sleep': no answer within 0.05 s"):
        run_probe(("sleep", "30"))
