"""A daemon whose engines play the scenes of tests/clients/engine.py, and clients that can talk to nobody but it."""

from __future__ import annotations

import contextlib
import json
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support import keys
from support.daemon_process import SOON_S, DaemonProcess, eventually

ENGINE = Path(__file__).parents[1] / "clients" / "engine.py"
# A tenth of the defaults, and less: `held` is silent for a tenth of 90 s, longer than each of them.
HELD_S = 9.0
LIMITS = {
    "KEEPALIVE_COMMENT_S": "1", "HUNG_TIMEOUT_S": "6", "IDLE_TIMEOUT_S": "3", "FIRST_TOKEN_TIMEOUT_S": "3",
    "FIRST_TOKEN_TIMEOUT_PER_1K_S": "0.01",
}  # fmt: skip
COUNTED = re.compile(
    r'^numa_launcher_requests_(accepted|ended|unauthorized)_total(?:\{outcome="(\w+)"\})? (\S+)$',
    re.MULTILINE,
)


@dataclass(frozen=True)
class Ran:
    """A client that has ended."""

    exit_code: int
    printed: str
    errors: str
    requests: Mapping[str, int]
    """That it sent: `accepted`, the same by outcome, and `unauthorized`."""


class Product:
    """The daemon, and its one API key."""

    def __init__(self, folder: Path) -> None:
        self.key, record = keys.make("app")
        keys.put(folder / "keys", record)
        command = [
            sys.executable, str(ENGINE), "--uds", "{uds}", "--model", "{name}", "--folder", str(folder),
            "--held-s", str(HELD_S),
        ]  # fmt: skip
        environ = {f"NUMA_LAUNCHER_PROXY__{name}": value for name, value in LIMITS.items()}
        self.daemon = DaemonProcess(
            folder,
            f"""
[[models]]
name = "fake"
path = "fake"
max_num_seqs = 8
[layout]
instances_per_socket = 2
[engine]
kind = "command"
command = {json.dumps(command)}
""",
            environ | {"NUMA_LAUNCHER_PROXY__API_KEYS_FILE": str(folder / "keys")},
        )

    def run(self, argv: list[str], home: Path, environ: Mapping[str, str]) -> Ran:
        """Runs a client to its end, in an empty folder of its home."""
        folder = home / "work"
        folder.mkdir()
        before = self.sums()
        with nobody_else() as proxy:
            done = subprocess.run(
                argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=2 * SOON_S,
                env={
                    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8",
                    "HTTP_PROXY": proxy.url, "HTTPS_PROXY": proxy.url, "NO_PROXY": "127.0.0.1", **environ,
                },
            )  # fmt: skip
        assert proxy.asked == [], "the client asked others than the product"
        return Ran(done.returncode, done.stdout, done.stderr, self._sent_since(before))

    def sums(self) -> dict[str, int]:
        """The counters of its page that are above 0."""
        found = COUNTED.findall(self.daemon.metrics())
        return {outcome or name: int(float(value)) for name, outcome, value in found if float(value)}

    def _sent_since(self, before: Mapping[str, int]) -> dict[str, int]:
        """Once each request has ended."""

        def ended() -> dict[str, int] | None:
            now = self.sums()
            sent = {
                name: value - before.get(name, 0)
                for name, value in now.items()
                if value > before.get(name, 0)
            }
            outcomes = sum(sent.values()) - sent.get("accepted", 0) - sent.get("unauthorized", 0)
            return sent if sent and sent.get("accepted", 0) == outcomes else None

        sent: dict[str, int] = eventually(ended)
        return sent


class Proxy(socketserver.ThreadingTCPServer):
    """What a client that wants to speak with anybody but the product gets: it notes that, and closes the connection."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        super().__init__(("127.0.0.1", 0), Asked)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Asked(socketserver.StreamRequestHandler):
    server: Proxy

    def handle(self) -> None:
        self.server.asked.append(self.rfile.readline(1024))


@contextlib.contextmanager
def nobody_else() -> Iterator[Proxy]:
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
