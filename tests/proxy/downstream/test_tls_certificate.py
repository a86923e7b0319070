"""The end of a certificate chain."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.certificates import certify

from launcher.proxy.downstream.tls import validity

DAY_S = 86_400


def texts(folder: Path, days: int) -> tuple[str, str]:
    """A certificate and its key."""
    chain, key = certify(folder, str(days), days=days)
    return chain.read_text(), key.read_text()


@pytest.mark.parametrize("days", [2, 36_500])  # the second ends after 2049: GeneralizedTime
def test_end(tmp_path: Path, days: int) -> None:
    found = validity(texts(tmp_path, days)[0])
    assert found is not None
    begin, end = found
    assert begin == pytest.approx(time.time(), abs=600)
    assert end == pytest.approx(time.time() + days * DAY_S, abs=600)


def test_the_earliest_of_the_chain_counts(tmp_path: Path) -> None:
    found = validity(texts(tmp_path, 90)[0] + "".join(texts(tmp_path, 3)))
    assert found is not None
    assert found[1] == pytest.approx(time.time() + 3 * DAY_S, abs=600)


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAo=\n-----END CERTIFICATE-----"]
)
def test_what_cannot_be_read(text: str) -> None:
    assert validity(text) is None
