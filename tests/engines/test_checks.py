"""The rows of a server that only its command describes."""

from __future__ import annotations

import pytest

from launcher.engines.checks import Installed, Tier, Trouble, Verdict
from launcher.engines.make import engine_type
from launcher.engines.software import Stack
from launcher.machine.hardware import HostFacts
from launcher.machine.named import find_topology

HOST = HostFacts("AuthenticAMD", "AMD EPYC 9654", 0x19, frozenset(), 8, 1)
TOPOLOGY = find_topology("epyc-7763-1p")
SERVER = Stack(command=("/s", "{uds}"))


@pytest.mark.parametrize(
    ("software", "rows"),
    [
        (
            Installed(stack=SERVER),
            [("tcmalloc", "ok", "not set for a custom command"), ("engine", "ok", "custom command: /s {uds}")],
        ),
        (
            Installed(stack=SERVER, tcmalloc="/t.so", openmp=("/a", "/b")),
            [("tcmalloc", "ok", "/t.so"), ("openmp", "ok", "/a, /b"), ("engine", "ok", "custom command: /s {uds}")],
        ),
        (
            Installed(trouble=Trouble("cannot find it", "install it"), tcmalloc_off=True),
            [("tcmalloc", "warn", "switched off by engine.tcmalloc"), ("engine", "fail", "cannot find it")],
        ),
    ],
)  # fmt: skip
def test_rows(software: Installed, rows: list[tuple[str, str, str]]) -> None:
    """Those of vLLM's compiler, libraries and versions are not among them."""
    found = [row for check in engine_type("command").checks() for row in check(software, HOST, TOPOLOGY)]
    assert [(row.check, row.verdict.value, row.fact) for row in found] == rows
    assert all(row.remedy for row in found if row.verdict is not Verdict.OK)
    assert all(row.tier is Tier.FALLBACK for row in found if row.verdict is Verdict.FAIL)
