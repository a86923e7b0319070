"""Certificates for a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

ECDSA = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def certify(
    folder: Path,
    name: str,
    kind: tuple[str, ...] = ECDSA,
    *more: str,
    days: int = 2,
    hosts: str = "DNS:localhost,IP:127.0.0.1",
) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", *kind, *(more or ("-nodes",)), "-days", str(days), "-subj", f"/CN={name}",
         "-addext", f"subjectAltName={hosts}", "-keyout", key, "-out", chain],
        check=True, capture_output=True,
    )  # fmt: skip
    return chain, key
