"""Amounts of money are integers, so that sums are exact."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.money import PICOS, picos, picos_per_token, shown, to_decimal, to_text


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (0.79, 790_000_000_000),
        ("20", 20 * PICOS),
        (0.1 + 0.2, None),
        (Decimal("25.5"), 25_500_000_000_000),
        (0, 0),
    ],
)
def test_an_amount_is_exact(amount: Decimal | float | str, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="decimals"):
            picos(amount)
    else:
        assert picos(amount) == expected


@pytest.mark.parametrize("amount", ["x", "", "nan", "inf", float("nan"), float("inf"), -1, "-0.5", "1e-13"])
def test_what_is_no_amount(amount: float | str) -> None:
    with pytest.raises(ValueError, match=r"no number|no amount|decimals"):
        picos(amount)


def test_a_price_per_million_is_whole_picos_per_token() -> None:
    assert picos_per_token(0.15) == 150_000
    assert picos_per_token("0.0375") == 37_500
    assert picos_per_token(0.15) * 50_000_000 + picos_per_token(0.6) * 30_000_000 == picos("25.50")


@given(st.decimals(0, 10**6, places=12))
def test_there_and_back(amount: Decimal) -> None:
    assert to_decimal(picos(amount)) == amount


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        ("25.50", "25.50 USD"),
        ("3000", "3,000.00 USD"),
        ("0.00042", "0.0004 USD"),
        ("0", "0.00 USD"),
        ("1234567.891", "1,234,567.89 USD"),
    ],
)
def test_text_for_people(amount: str, text: str) -> None:
    assert to_text(picos(amount), "USD") == text


def test_amounts_that_were_divided() -> None:
    assert shown(3.6574074074074074, "USD") == "3.66 USD"
    assert shown(0.0) == "0.00"
    assert shown(0.00004) == "0.00004"
    assert shown(1e-15) == "0.00"
    assert shown(1234567.0, "EUR") == "1,234,567.00 EUR"
