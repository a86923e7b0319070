"""The strict-HTTP table against the real listener, with an engine behind it that keeps what it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from proxy.http_cases import CASES
from proxy.http_cases.model import Case
from proxy.http_cases.player import faults_behind, fits, play
from proxy.http_cases.recorder import Recorder
from support.proxy_under_test import Build


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_strict_http(build: Build, tmp_path: Path, case: Case) -> None:
    proxy = await build(**case.settings)
    host, port = proxy.server.endpoint.removeprefix("http://").rsplit(":", 1)
    async with Recorder(tmp_path / "engine.sock") as engine:
        proxy.server.add_upstream(0, 1, "m", engine.address, 64)
        seen = await play(case, host, int(port))
        behind = engine.requests
        report = f"{case.name} (RFC {case.rfc})\n  answers {seen.answers}\n  closed {seen.closed}\n  behind {behind}\n"
        faults = seen.faults + faults_behind(engine)
        assert not faults, f"{report}  faults {faults}"
        assert any(fits(outcome, seen, behind) for outcome in case.right), f"{report}  right {case.right}"
        await proxy.server.stop(0)


def test_the_table_is_one() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 400
    assert all(case.rfc and case.sends and case.right for case in CASES)
