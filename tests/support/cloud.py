"""Starts cloud_endpoint.py, and asks it for its bill."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.certificates import certify

PROGRAM = Path(__file__).parent / "cloud_endpoint.py"


class Bill(NamedTuple):
    prompt: int
    output: int
    requests: int
    streams_with_usage: int


class Certificate(NamedTuple):
    """Self-signed, for localhost; to be trusted by SSL_CERT_FILE."""

    path: Path
    key: Path


def make_certificate(folder: Path, days: int = 2) -> Certificate:
    return Certificate(*certify(folder, "cloud", days=days, hosts="DNS:localhost"))


@dataclass
class CloudProcess:
    port: int
    certificate: Certificate
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/v1"

    def bill(self) -> Bill:
        return Bill(**json.loads(self._ask("GET")))

    def begin_bill(self) -> None:
        self._ask("POST")

    def _ask(self, method: str) -> bytes:
        request = urllib.request.Request(f"https://localhost:{self.port}/bill", method=method)
        context = ssl.create_default_context(cafile=str(self.certificate.path))
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            said: bytes = answer.read()
        return said


@contextmanager
def cloud_process(certificate: Certificate) -> Iterator[CloudProcess]:
    command = [
        sys.executable, str(PROGRAM), "--certificate", str(certificate.path), "--key", str(certificate.key),
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield CloudProcess(int(process.stdout.readline()), certificate, process)
        finally:
            process.kill()
