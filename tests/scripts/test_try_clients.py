"""scripts/try-clients reads the proxy's counters, and says how to install a missing client."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "try-clients"
PAGE = b"""# TYPE numa_launcher_requests_accepted_total counter
numa_launcher_requests_accepted_total 3.0
numa_launcher_requests_ended_total{outcome="completed"} 3.0
numa_launcher_requests_ended_total{outcome="client_aborted"} 0.0
numa_launcher_key_requests_ended_total{key="x",outcome="completed"} 9.0
"""


class Page(http.server.BaseHTTPRequestHandler):
    """A proxy that serves its counters only."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_words: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_a_client_that_is_missing(url: str, tmp_path: Path) -> None:
    done = run(f"{url}/v1", "--model", "m", "--tokenizer", "/t", "--only", "aiperf", cache=tmp_path)
    assert done.returncode == 1
    assert "cannot run: not installed: scripts/try-clients --install aiperf" in done.stdout


def test_the_accounts(url: str, tmp_path: Path) -> None:
    """A client that does nothing leaves the accounts as they were: nothing was accepted."""
    idle = tmp_path / "numa-launcher" / "clients" / "llm-comply" / "bin" / "llm-comply"
    idle.parent.mkdir(parents=True)
    idle.write_text(
        '#!/bin/sh\necho \'{"results": [{"id": "a", "status": "failed", "errors": ["no answer"]}]}\'\nexit 1\n'
    )
    idle.chmod(0o755)
    done = run(url, "--model", "m", "--tokenizer", "/t", "--only", "llm-comply, openai", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1].split() == [
        "llm-comply,",
        "openai-chat",
        "?",
        "1",
        "1",
        "0",
        "0",
        "0.0",
    ]
    assert "a: no answer" in done.stdout


def test_what_is_needed(tmp_path: Path) -> None:
    done = run(cache=tmp_path)
    assert done.returncode == 2
    assert "an endpoint's URL is needed" in done.stderr
