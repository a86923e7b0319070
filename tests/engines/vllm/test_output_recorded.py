"""What real vLLM 0.32 printed when it died, and the cause that is read from it.

Each file under recorded/ is one run on a 2-core machine: how the main process ended, then its last lines, long ones
cut, paths of the machine replaced. The part of the name before the first dot is the cause.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.engines.causes import Retry
from launcher.engines.vllm.output import VLLM_LOG
from launcher.instances.diagnosis import OBSERVED, diagnose
from launcher.instances.ports import Exit
from launcher.machine.oom import KernelReport

FILES = sorted((Path(__file__).parent / "recorded").glob("*.txt"))
# The kernel's log was readable there, and had nothing to say of memory unless a file beside the run says so.
QUIET = KernelReport(readable=True)


def ended(line: str) -> Exit:
    number = int(line.rsplit(maxsplit=1)[-1])
    return Exit(None, number) if line.startswith("signal") else Exit(number, None)


def kernel_of(file: Path) -> KernelReport:
    said = file.with_suffix(".kernel")
    if not said.exists():
        return QUIET
    lines = tuple(said.read_text(encoding="utf-8").splitlines())
    return KernelReport(cgroup_kills=1, cgroup_file="memory.oom_control", oom_lines=lines, readable=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_cause_of_a_recorded_end(file: Path) -> None:
    head, *tail = file.read_text(encoding="utf-8").splitlines()
    name = file.name.split(".")[0]
    cause = diagnose(ended(head), tail, VLLM_LOG, served="serving" in file.name, kernel=kernel_of(file))
    assert cause.name == name, cause
    assert cause.evidence
    assert cause.remedy


def test_enough_of_it_is_real() -> None:
    real = {file.name.split(".")[0] for file in FILES}
    assert len(real & {rule.name for rule in (*VLLM_LOG.causes, *OBSERVED)}) >= 12


def test_policies() -> None:
    policy = {rule.name: rule.retry for rule in (*VLLM_LOG.causes, *OBSERVED)}
    assert {name for name, retry in policy.items() if retry is Retry.NOW} == {
        "compile-cache-corrupt", "killed-by-operator", "hung",
    }  # fmt: skip
    assert policy["kv-too-large"] is policy["cgroup-oom"] is Retry.BACKOFF
    assert policy["model-not-found"] is Retry.BACKOFF, "its mount may be away"
    assert policy["bad-argument"] is policy["model-damaged"] is Retry.NEVER
