"""The strict-HTTP table against the real listener, with an engine behind it that keeps what it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from proxy.http_cases import CASES
from proxy.http_cases.model import Case
from proxy.http_cases.player import faults_behind, fits, play
from proxy.http_cases.recorder import Recorder
from support.proxy_under_test import Build, ProxyUnderTest, until


def _groups() -> dict[str, list[Case]]:
    """The cases by the first word of their name and by the proxy's settings."""
    found: dict[str, list[Case]] = {}
    for case in CASES:
        settings = (f"{name}={value}" for name, value in case.settings.items())
        found.setdefault(" ".join((case.name.partition(":")[0], *settings)), []).append(case)
    return found


GROUPS = _groups()


@pytest.mark.parametrize("group", GROUPS)
async def test_strict_http(build: Build, tmp_path: Path, group: str) -> None:
    """Every case of the group is played, one after the other on one proxy, each with an engine of its own."""
    wrong: list[str] = []
    proxy: ProxyUnderTest | None = None
    for generation, case in enumerate(GROUPS[group], start=1):
        proxy = proxy or await build(**case.settings)
        if found := await _faults(proxy, case, generation, tmp_path / f"{generation}.sock"):
            wrong.append(found)
            proxy = None  # the next case gets another one, as this may not be as it was
    assert not wrong, f"{len(wrong)} of {len(GROUPS[group])} cases\n" + "\n".join(wrong)


async def _faults(proxy: ProxyUnderTest, case: Case, generation: int, path: Path) -> str:
    """The case, and what is wrong with what came of it; empty where all is right."""
    host, port = proxy.server.endpoint.removeprefix("http://").rsplit(":", 1)
    async with Recorder(path) as engine:
        proxy.server.add_upstream(0, generation, "m", engine.address, 64)
        try:
            seen = await play(case, host, int(port))
            await until(lambda: proxy.sums()["in_flight"] == 0)
        except Exception as error:  # the other cases are played all the same
            return f"{case.name} (RFC {case.rfc})\n  {error!r}\n  behind {engine.requests}\n"
        finally:
            proxy.server.remove_upstream(0, generation, "the case is over")
    behind = engine.requests
    faults = seen.faults + faults_behind(engine)
    if not faults and any(fits(outcome, seen, behind) for outcome in case.right):
        return ""
    told = f"  answers {seen.answers}\n  closed {seen.closed}\n  behind {behind}\n  faults {faults}\n"
    return f"{case.name} (RFC {case.rfc})\n{told}  right {case.right}"


def test_the_table_is_one() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 400
    assert all(case.rfc and case.sends and case.right for case in CASES)
