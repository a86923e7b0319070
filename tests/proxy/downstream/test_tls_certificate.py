"""The end of a certificate chain."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from launcher.proxy.downstream.tls import validity

DAY_S = 86_400


def certify(folder: Path, days: int) -> str:
    chain = folder / f"{days}.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", str(days), "-subj", "/CN=x", "-keyout", folder / "k", "-out", chain],
        check=True, capture_output=True,
    )  # fmt: skip
    return chain.read_text()


@pytest.mark.parametrize("days", [2, 36_500])  # the second ends after 2049: GeneralizedTime
def test_end(tmp_path: Path, days: int) -> None:
    found = validity(certify(tmp_path, days))
    assert found is not None
    begin, end = found
    assert begin == pytest.approx(time.time(), abs=600)
    assert end == pytest.approx(time.time() + days * DAY_S, abs=600)


def test_the_earliest_of_the_chain_counts(tmp_path: Path) -> None:
    found = validity(certify(tmp_path, 90) + certify(tmp_path, 3) + (tmp_path / "k").read_text())
    assert found is not None
    assert found[1] == pytest.approx(time.time() + 3 * DAY_S, abs=600)


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAo=\n-----END CERTIFICATE-----"]
)
def test_what_cannot_be_read(text: str) -> None:
    assert validity(text) is None
