"""What a fleet reports of other hosts: what counts, what does not and why, what is refused."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from launcher.accounts.spending import Report, SpentElsewhere, amounts, read_report
from launcher.base.errors import LauncherError
from launcher.base.money import PICOS


class Budget(NamedTuple):
    text: str = "20k-tokens/month"
    is_money: bool = False
    begins: str = "B"


HELD = {"ann": Budget(), "bob": Budget("5-eur/day", is_money=True)}


def said(
    key: str = "ann", budget: str = "20k-tokens/month", begins: str = "B", amount: int | str = 7
) -> Report:
    return Report((SpentElsewhere(key, budget, begins, amount),))


def test_tokens_and_money() -> None:
    body = (
        b'{"spent": [{"key": "ann", "budget": "20k-tokens/month", "begins": "B", "amount": 7},'
        b'{"key": "bob", "budget": "5-eur/day", "begins": "B", "amount": "1.5"}]}'
    )
    assert amounts(read_report(body), HELD) == ({"ann": 7, "bob": 3 * PICOS // 2}, [])
    assert amounts(read_report(b'{"spent": []}'), HELD) == ({}, [])


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (said("cid"), "cid: it has no budget here"),
        (said(budget="9-tokens/day"), "ann: its budget here is 20k-tokens/month, not 9-tokens/day"),
        (said(begins="C"), "ann: its period here began at B, not at C"),
    ],
)
def test_what_does_not_count_here(report: Report, why: str) -> None:
    assert amounts(report, HELD) == ({}, [why])


@pytest.mark.parametrize(
    "report",
    [
        said(amount="7"),
        said(amount=-1),
        *(said("bob", "5-eur/day", amount=text) for text in ("x", "-1", "NaN")),
    ],
)
def test_what_is_no_amount(report: Report) -> None:
    with pytest.raises(LauncherError, match="is no amount of its budget"):
        amounts(report, HELD)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"x", b'{"spent": [{"key": "ann"}]}', b'{"spent": [{"key": 1}]}', b"\xff"]
)
def test_what_is_no_report(body: bytes) -> None:
    with pytest.raises(LauncherError, match="cannot read what was spent elsewhere"):
        read_report(body)
