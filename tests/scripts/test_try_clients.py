"""scripts/try-clients reads the proxy's counters, and says how to install a missing client."""

from __future__ import annotations

import contextlib
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

    page = PAGE

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_words: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def serving(page: type[Page]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Page) as url:
        yield url


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
    done = run(f"{url}/v1", "--model", "m", "--tokenizer", "/", "--only", "aiperf", cache=tmp_path)
    assert done.returncode == 1
    assert "cannot run: not installed: scripts/try-clients --install aiperf" in done.stdout


def test_the_accounts(url: str, tmp_path: Path) -> None:
    """A client that does nothing leaves the accounts as they were: nothing was accepted."""
    environment = tmp_path / "numa-launcher" / "clients" / "llm-comply"
    package = environment / "lib" / "python3.11" / "site-packages" / "llm_comply-0.5.0.dist-info" / "METADATA"
    package.parent.mkdir(parents=True)
    package.write_text("Metadata-Version: 2.1\nName: llm-comply\nVersion: 0.5.0\n")
    idle = environment / "bin" / "llm-comply"
    idle.parent.mkdir()
    idle.write_text(
        '#!/bin/sh\necho \'{"results": [{"id": "a", "status": "failed", "errors": ["no answer"]}]}\'\nexit 1\n'
    )
    idle.chmod(0o755)
    done = run(url, "--model", "m", "--tokenizer", "/", "--only", "llm-comply, openai", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1].split() == [
        "llm-comply,",
        "openai-chat",
        "0.5.0",
        "1",
        "1",
        "0",
        "0",
        "0.0",
    ]
    assert "a: no answer" in done.stdout


def test_the_errors_of_a_library(url: str, tmp_path: Path) -> None:
    """Its own Python gets the program, the library's name and the endpoint."""
    python = tmp_path / "numa-launcher" / "clients" / "langchain-openai" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nshift\necho "{\\"sent\\": 2, \\"errors\\": [\\"$*\\"]}"\n')
    python.chmod(0o755)
    done = run(url, "--model", "m", "--tokenizer", "/", "--only", "langchain", cache=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[1].split()[:6] == ["langchain-openai", "?", "2", "1", "0", "0"]
    assert f"    langchain-openai {url} m none\n" in done.stdout


def test_what_is_needed(tmp_path: Path) -> None:
    done = run(cache=tmp_path)
    assert done.returncode == 2
    assert "an endpoint's URL is needed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["localhost", "--tokenizer", "/"], "cannot try clients: 'localhost' is no URL\n  what to do: name"),
        (["http://127.0.0.1:9", "--tokenizer", "/nowhere"], "there is no folder '/nowhere'\n  what to do: "),
        (["http://127.0.0.1:9", "--tokenizer", "/", "--only", "curl"], "no client's name contains 'curl'\n"),
        (
            ["http://127.0.0.1:9", "--tokenizer", "/"],
            "Connection refused>\n  what to do: start numa-launcher",
        ),
    ],
)
def test_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(*arguments, "--model", "m", cache=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_another_server(tmp_path: Path) -> None:
    class Other(Page):
        page = b"vllm:num_requests_running 0\n"

    with serving(Other) as url:
        done = run(url, "--tokenizer", "/", "--model", "m", cache=tmp_path)
    assert done.returncode == 2
    assert f"{url}/metrics has no counters of numa-launcher" in done.stderr
