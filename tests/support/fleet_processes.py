"""An ingress, HAProxy and daemons as real processes, and a load on them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.daemon_process import DaemonProcess, eventually
from support.forked_launcher import begin
from support.ports import free_port

from launcher.fleet.members import Member, MemberList, MemberState, write_members

PATIENT = str(Path(__file__).with_name("patient_ingress.py"))
LIMIT = 4  # requests that an instance runs at once
TOKENS = 40
CHOSEN = re.compile(r"request (\S+): Choice\(host='(\w+)', slot=(\d+)\)")
SERVED = re.compile(r"slot=(\d+) .* ms \w+ (\S+)")


Where = tuple[str, int]
"""Host and slot."""


class IngressProcess:
    """The ingress, and HAProxy."""

    def __init__(self, folder: Path, *program: str) -> None:
        """`program`: the words after Python's own name, for another program than `numa-launcher`."""
        self._program = program
        self.folder = folder / "i"
        self.folder.mkdir(mode=0o700)
        self.log = folder / "ingress.log"
        self.port, picker = free_port(), free_port(3)
        self.config = folder / "fleet.toml"
        self.config.write_text(
            f'state = "{self.folder}"\n[ingress]\nhosts = ["127.0.0.1"]\nlisten = "127.0.0.1:{self.port}"\n'
            f"picker_port = {picker}\n[hosts]\nmost = 8\n"
        )
        self.start()

    def start(self) -> None:
        words = ("fleet", "ingress", "--debug", "-c", str(self.config))
        with self.log.open("ab") as log:
            self.process = begin(words, log, program=self._program)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def status(self) -> dict[str, Any]:
        """{} where nobody answers."""
        with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError):
            link.connect(str(self.folder / "ingress.sock"))
            return json.loads(b"".join(iter(lambda: link.recv(65536), b"")))
        return {}

    def wait_open(self, hosts: int) -> None:
        def is_open() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            status = self.status()
            shown, servers = status.get("hosts", {}).values(), (status.get("servers") or {}).values()
            known = sum(not host["draining"] and not host["lost"] for host in shown)
            return (
                known
                == hosts
                == sum(one["up"] and not one["unused"] and not one["draining"] for one in servers)
            )

        eventually(is_open, what=f"{hosts} hosts, see {self.log}")

    def wait_lost(self, host: str) -> None:
        eventually(lambda: self.status()["hosts"][host]["lost"], what=f"{host} lost")

    @property
    def haproxy(self) -> int:
        """Its process; 0 while it makes its file."""
        return int((self.folder / "haproxy.pid").read_text() or 0)

    def chosen(self) -> dict[str, Where]:
        """The same as `Fleet.served`, as the picker chose."""
        return {id_: (host, int(slot)) for id_, host, slot in CHOSEN.findall(self.log.read_text())}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.haproxy, signal.SIGTERM)


@dataclass
class Tally:
    """What clients got."""

    whole: list[str] = field(default_factory=list)
    """Ids of requests."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by id; by a number where there was none."""
    dishonest: list[str] = field(default_factory=list)
    """A stream that ended in [DONE] without all of its tokens."""
    sent: dict[str, float] = field(default_factory=dict)
    """When, by id or number; time.monotonic()."""

    def whole_since(self, since: float) -> list[str]:
        """Ids of the requests that were sent after this time."""
        return [id_ for id_ in self.whole if self.sent[id_] > since]


@dataclass
class Fleet:
    ingress: IngressProcess
    daemons: dict[str, DaemonProcess]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ingress.port}"

    def members(self, version: int, **states: MemberState) -> None:
        members = tuple(
            Member(host=host, address=f"127.0.0.1:{daemon.port}", state=states.get(host, MemberState.READY))
            for host, daemon in self.daemons.items()
        )
        write_members(
            self.ingress.folder / "members.json", MemberList(epoch=1, version=version, members=members)
        )

    def served(self) -> dict[str, Where]:
        """Which instance had a request, by its id, as the daemons' access logs tell."""
        return {
            id_: (host, int(slot))
            for host, daemon in self.daemons.items()
            for slot, id_ in SERVED.findall(daemon.log.read_text())
        }

    def logged(self, tally: Tally) -> dict[str, Where]:
        """`served`, once it has all that was whole."""
        return eventually(lambda: (s := self.served()) and s.keys() >= set(tally.whole) and s, what="logs")
