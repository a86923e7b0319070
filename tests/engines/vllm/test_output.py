"""Whether an instance computes with ZenTorch, by its log and its libraries."""

from __future__ import annotations

import pytest

from launcher.engines.vllm.output import ZENTORCH

YES = "INFO AMD Zen CPU detected with zentorch installed, using ZenCpuPlatform."
OLD = "INFO Loading plugin zentorch"
NO = "WARNING AMD Zen CPU detected but zentorch failed to import, falling back to CpuPlatform."


@pytest.mark.parametrize(
    ("lines", "maps", "active"),
    [
        ([YES], "", True),
        ([OLD], "", True),
        ([OLD, "Unsupported vLLM version: 0.32. Plugin supports versions: 0.11"], "", False),
        ([NO], "", False),
        ([NO], "7f00 r-xp /x/libzentorch.so", True),
        (["INFO Starting"], "7f00 r-xp /x/libtorch.so", False),
        (["INFO Starting"], "", None),
        ([], "", None),
    ],
)
def test_zentorch_active(lines: list[str], maps: str, active: bool | None) -> None:
    assert ZENTORCH.active(lines, maps) is active
