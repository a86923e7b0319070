"""Columns as wide as their widest cell."""

from __future__ import annotations

import pytest

from launcher.base.text import counted, fitted, table


def test_one_is_no_plural() -> None:
    assert [counted(count, "instance") for count in (0, 1, 2)] == ["0 instances", "1 instance", "2 instances"]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([("A", "LONG"), ("wide", "x")]) == ["A     LONG", "wide  x"]
    assert table([["SLOT", "NODE"], ["0", ""]]) == ["SLOT  NODE", "0"]


def test_a_row_that_is_not_like_the_others_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        table([("A", "B"), ("a",)])


def test_fitted() -> None:
    assert fitted(["abc", "abcdef", ""], 4) == ["abc", "abc…", ""]
