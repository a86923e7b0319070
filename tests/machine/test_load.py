"""RAPL's counters: a planted powercap tree, and this machine's own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.machine.load import POWERCAP, Energy

RANGE = 65_532_610_987  # of an EPYC 9004


class Tree:
    """Two packages, a part of one, the platform and the second interface, as a kernel shows them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder, name in (
            ("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:0:0", "core"),
            ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0"), ("dtpm", ""),
        ):  # fmt: skip
            (root / folder).mkdir(parents=True)
            (root / folder / "name").write_text(f"{name}\n")
            (root / folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
            self.count(folder, 0)
        (root / "intel-rapl").mkdir()

    def count(self, folder: str, uj: int) -> None:
        (self.root / folder / "energy_uj").write_text(f"{uj}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "powercap")


def test_packages_alone_are_measured(tree: Tree) -> None:
    energy = Energy(0.0, tree.root)
    for folder in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:2", "intel-rapl-mmio:0"):
        tree.count(folder, 2_500_000_000)
    found = energy.measure(10.0)
    assert found is not None
    assert found.joules == {"package-0": 2500.0, "package-1": 0.0}
    assert found.seconds == 10.0


def test_each_reading_is_since_the_last(tree: Tree) -> None:
    energy = Energy(0.0, tree.root)
    for step in (1, 2, 3):
        tree.count("intel-rapl:1", step * 4_000_000)
        found = energy.measure(float(step))
        assert found is not None
        assert found.joules["package-1"] == 4.0


def test_a_counter_wraps_around(tree: Tree) -> None:
    tree.count("intel-rapl:0", RANGE - 1_000_000)
    energy = Energy(0.0, tree.root)
    tree.count("intel-rapl:0", 2_000_000)
    found = energy.measure(10.0)
    assert found is not None
    assert found.joules["package-0"] == 3.0


def test_a_counter_that_was_reset_is_not_a_wrap(tree: Tree) -> None:
    tree.count("intel-rapl:0", 30_000_000_000)
    energy = Energy(0.0, tree.root)
    tree.count("intel-rapl:0", 0)
    assert energy.measure(10.0) is None
    tree.count("intel-rapl:0", 5_000_000)
    found = energy.measure(20.0)
    assert found is not None
    assert found.joules["package-0"] == 5.0


def test_a_time_in_which_it_may_have_wrapped_twice_is_not_counted(tree: Tree) -> None:
    energy = Energy(0.0, tree.root)
    tree.count("intel-rapl:0", 1_000_000)
    assert energy.measure(60.0) is None
    assert energy.measure(70.0) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_counters_that_only_root_may_read() -> None:
    with tempfile.TemporaryDirectory() as folder:  # others may not enter pytest's
        Path(folder).chmod(0o755)
        tree = Tree(Path(folder) / "powercap")
        (tree.root / "intel-rapl:1" / "energy_uj").chmod(0o400)
        os.seteuid(65534)
        try:
            with pytest.raises(LauncherError) as error:
                Energy(0.0, tree.root)
        finally:
            os.seteuid(0)
    assert "only root may read it (since CVE-2020-8694)" in error.value.message
    assert "chmod g+r" in error.value.remedy
    assert "cost.watts" in error.value.remedy


@pytest.mark.parametrize("text", ["", "much\n"])
def test_a_counter_without_a_number(tree: Tree, text: str) -> None:
    (tree.root / "intel-rapl:0" / "energy_uj").write_text(text)
    with pytest.raises(LauncherError, match="invalid literal"):
        Energy(0.0, tree.root)


def test_a_counter_that_went_away(tree: Tree) -> None:
    energy = Energy(0.0, tree.root)
    (tree.root / "intel-rapl:1" / "energy_uj").unlink()
    with pytest.raises(LauncherError, match="no such file"):
        energy.measure(1.0)


def test_a_machine_without_counters(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="has no package domain") as error:
        Energy(0.0, tmp_path)
    assert "intel_rapl_msr" in error.value.remedy


def test_this_machine_has_counters_or_says_why_not() -> None:
    if any(POWERCAP.glob("intel-rapl:*")) and os.geteuid() == 0:
        found = Energy(0.0).measure(1.0)
        assert found is None or all(joules >= 0 for joules in found.joules.values())
        return
    with pytest.raises(LauncherError, match=str(POWERCAP)) as error:
        Energy(0.0)
    assert "cost.watts" in error.value.remedy
