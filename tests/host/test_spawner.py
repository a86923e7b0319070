"""systemd's units keep the contract of a Spawner: tests/instances/test_spawner_contract.py, in a virtual host.

The same host as test_oncall.py's, while numa-launcher is installed on it.
"""

from __future__ import annotations

from typing import Any


def test_the_contract_holds_for_units(night: dict[str, Any]) -> None:
    done = night["contract"]
    assert done["status"] == 0, done["out"]
    assert " passed" in done["out"]
    assert "skipped" not in done["out"]
