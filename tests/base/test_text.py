"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.text import GIB, MIB, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("512MB", 512_000_000),
        ("128MiB", 128 * MIB),
        ("0", 0),
        ("7 B", 7),
        ("2TiB", 2048 * GIB),
        (" 3KB ", 3000),
    ],
)
def test_parse(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "40 gib", "1e3", "auto", "1GiB2", "٣GiB", "1.GiB"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (GIB * 3 // 2, "1.5 GiB"), (400 * GIB, "400 GiB")],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 10**15))
def test_format_is_within_half_a_percent(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= max(1, size * 0.006)


def test_sizes_for_people() -> None:
    shown = [format_size(1024**power * 3 // 2) for power in range(6)]
    assert shown == ["1 B", "1.5 KiB", "1.5 MiB", "1.5 GiB", "1.5 TiB", "1536 TiB"]
    assert format_size(0) == "0 B"
