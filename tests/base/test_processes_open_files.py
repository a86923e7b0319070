"""The limit of open files, in a process of its own: it can't be taken back by one that is not root."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.base.processes import ENOUGH, SPARE, most_clients, too_few


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(256, 2000, 2000), (2000, 2000, 2000), (1024, 1024, 1024)]
)
def test_the_soft_limit_goes_up_to_the_hard_one(soft: int, hard: int, after: int) -> None:
    code = (
        "import resource\n"
        "from launcher.base.processes import raise_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(after), str(after), str(hard)]


def test_a_low_limit_is_reported() -> None:
    assert too_few(ENOUGH, 16384) is None
    assert too_few(16384 + SPARE, 16384) is None
    said = too_few(1024, 16384)
    assert said is not None
    assert "1024 files" in said
    assert "512 clients" in said
    assert "proxy.max_connections = 16384" in said
    assert "17408" in said


@pytest.mark.parametrize(
    ("limit", "wanted", "most"),
    [
        (ENOUGH, 16384, 16384),
        (17408, 16384, 16384),
        (17407, 16384, 16383),
        (4096, 16384, 3072),
        (1024, 16384, 512),
    ],
)
def test_clients_leave_descriptors_for_probes_and_instances(limit: int, wanted: int, most: int) -> None:
    assert most_clients(limit, wanted) == most


@pytest.mark.parametrize(
    ("limit", "elsewhere", "most"),
    [
        (ENOUGH, 2048, 16384),
        (17408, 384, 16000),
        (4096, 512, 2560),
        (1024, 128, 384),
        (1024, 4096, 256),  # each of so few clients has one of its own
    ],
)
def test_and_for_their_requests_connections_to_instances(limit: int, elsewhere: int, most: int) -> None:
    assert most_clients(limit, 16384, elsewhere) == most
