"""CpuSet: the kernel's list format both ways, and set algebra."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.cpuset import MAX_ID, CpuSet

sets = st.frozensets(st.integers(0, 8191), max_size=300).map(CpuSet)


@given(sets)
def test_parse_is_the_inverse_of_format(cpus: CpuSet) -> None:
    assert CpuSet.parse(cpus.format()) == cpus


@given(sets, sets)
def test_algebra_is_that_of_sets(a: CpuSet, b: CpuSet) -> None:
    x, y = set(a), set(b)
    assert set(a | b) == x | y
    assert set(a & b) == x & y
    assert set(a - b) == x - y
    assert (a <= b) == (x <= y)
    assert a.isdisjoint(b) == x.isdisjoint(y)
    assert (a == b) == (x == y)
    assert list(a) == sorted(x)
    assert len(a) == len(x)
    assert bool(a) == bool(x)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        (" \n", []),
        ("0", [0]),
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("3,1,2", [1, 2, 3]),
        ("0-7:1/2", [0, 2, 4, 6]),
        ("0-9:2/4", [0, 1, 4, 5, 8, 9]),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_parse(text: str, ids: list[int]) -> None:
    assert list(CpuSet.parse(text)) == ids


@pytest.mark.parametrize(
    "text", ["x", "1-", "-1", "3-1", "1,,2", ",", "1-2:0/2", "1-2:3/2", "0-4294967295", "٣", "1 2", "1:1/2"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        CpuSet.parse(text)


def test_format_joins_runs() -> None:
    assert CpuSet([0, 1, 2, 4, 6, 7]).format() == "0-2,4,6-7"
    assert str(CpuSet(range(0, 128, 2))) == ",".join(str(i) for i in range(0, 128, 2))
    assert repr(CpuSet([1, 2])) == "CpuSet('1-2')"


def test_8192_cpus() -> None:
    every = CpuSet.parse("0-8191")
    assert len(every) == 8192
    assert CpuSet.parse(CpuSet(range(0, 8192, 2)).format()) == CpuSet.parse("0-8191:1/2")


def test_ids_are_bounded() -> None:
    for bad in (-1, MAX_ID + 1):
        with pytest.raises(ValueError, match="outside"):
            CpuSet([bad])


def test_keys_and_membership() -> None:
    assert {CpuSet([1, 2]): "a"}[CpuSet([2, 1])] == "a"
    assert 2 in CpuSet([2])
    assert "2" not in CpuSet([2])
    assert CpuSet([5, 3]).first == 3
    assert CpuSet([1]) != {1}
    with pytest.raises(IndexError):
        _ = CpuSet().first
