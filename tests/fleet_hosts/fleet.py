"""The programs of a fleet on the hosts: daemons with engines of tests/chaos or real vLLM, ingresses, Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from fleet_hosts import real_engine
from fleet_hosts.hosts import Host, make_network
from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient
from launcher.fleet.members import Member, MemberList, read_members, write_members

TESTS: Final = Path(__file__).resolve().parents[1]
HOSTS: Final = 4
INGRESSES: Final = 2
INSTANCES: Final = 2
MAX_NUM_SEQS: Final = 8
DAEMON_PORT: Final = 8001
INGRESS_PORT: Final = 8000
FIRST_S: Final = 0.15  # an engine's time to the first token
# Generous: a real vLLM starts in 20 s, in minutes where other programs keep the cores busy.
SOON_S: Final = 300.0
WELL_S: Final = 180.0
ENVIRON: Final = {
    "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PYTHONUNBUFFERED": "1",
    # The daemon's ledger is on the host's own disk.
    "STATE_DIRECTORY": "/run/disk/state",
    # Ray's head remembers nodes and actors over its restart.
    "RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": "/run/disk/gcs", "RAY_AUTH_MODE": "token",
}  # fmt: skip

STAND_INS = """
[[models]]
name = "chaos"
path = "chaos"
max_num_seqs = {max_num_seqs}
[layout]
instances_per_socket = {instances}
[engine]
kind = "command"
command = {command}
[engine.env]
PYTHONPATH = "{path}"
"""
# vLLM 0.32 ends in SIGILL with bfloat16 without compilation, on CPUs with AMX. One core: two that wait for each other on a
# busy machine take much longer.
VLLM = """
[[models]]
name = "chaos"
path = "{model}"
dtype = "float32"
max_model_len = 512
max_num_seqs = {max_num_seqs}
[layout]
instances_per_socket = 1
reserve_cores = 0
cpus = "{cpu}"
[engine]
command = ["{vllm}"]
args = ["--enforce-eager", "--middleware", "fleet_hosts.engine_header.EngineHeader"]
cache_dir = "{cache}"
[engine.env]
PYTHONPATH = "{path}"
FLEET_HOST = "{host}"
"""
DAEMON = """
[proxy]
trusted_proxies = ["10.77.0.1/32", "10.77.0.2/32"]
first_token_timeout_s = 20
idle_timeout_s = 20
park_timeout_s = 120
access_log = "errors"
[control]
socket = "/run/c.sock"
[supervision]
drain_timeout_s = 60
stop_timeout_s = 2
backoff_initial_s = 0.2
backoff_max_s = 0.5
crash_limit = 1000000
[logging]
level = "info"
"""

FLEET = """
name = "drill"
ray = "10.77.0.1:6379"
state = "/run/disk/fleet"
[ingress]
hosts = ["10.77.0.1", "10.77.0.2"]
listen = "0.0.0.0:8000"
{start_ingress}
[hosts]
most = 8
control = "/run/c.sock"
keys = "/run/disk/api-keys"
upgrade = {upgrade}
start = {start}
"""
STATE: Final = "disk/fleet"  # in a host's folder
RAY_PORT: Final = 6379


def eventually(check: Callable[[], Any], what: str, within_s: float = SOON_S) -> Any:
    """Polls `check` and returns its first true value. Raises RuntimeError."""
    deadline = time.monotonic() + within_s
    while not (value := check()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)
    return value


class Fleet:
    """The first two hosts have an ingress, the first Ray's head, the last two real vLLM."""

    def __init__(
        self, folder: Path, token_s: float, *, with_ray: bool = True, with_vllm: bool = True, hosts: int = HOSTS,
        start: Sequence[str] | None = None, start_ingress: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """`folder`: for logs and the hosts' disks; its path must be short, sockets are in it. `start`, `start_ingress`: what
        `fleet up` runs where a daemon or an ingress is missing."""
        self.folder = folder
        self.token_s = token_s
        self.with_ray = with_ray
        self.model = folder / "tiny"
        # Ray of all hosts, and those who ask it, find the token there.
        self.environ = ENVIRON | {"HOME": str(folder / "home")}
        (folder / "home" / ".ray").mkdir(parents=True)
        (folder / "home" / ".ray" / "auth_token").write_text(secrets.token_hex(32))
        self.config = folder / "fleet.toml"
        self.config.write_text(
            FLEET.format(
                upgrade=json.dumps(self.restart_command("daemon")),
                start=json.dumps(start or self.restart_command("daemon")),
                start_ingress=f"start = {json.dumps(start_ingress)}" if start_ingress else "",
            )
        )
        make_network()
        self.hosts = [Host(number, folder) for number in range(1, hosts + 1)]
        self.real = self.hosts[INGRESSES:] if with_vllm else []

    @property
    def ingresses(self) -> list[Host]:
        return self.hosts[:INGRESSES]

    def addresses(self) -> list[str]:
        """Where clients may ask."""
        return [f"{host.address}:{INGRESS_PORT}" for host in self.ingresses]

    def start(self) -> None:
        """Everything on all hosts; returns when all instances are ready."""
        if self.real:
            real_engine.make_model(self.model)
        for host in reversed(self.hosts):
            host.power_on()
            self.start_daemon(host)
        if self.with_ray:
            self.start_ray(self.hosts[0])
            eventually(lambda: self.listens(RAY_PORT), "Ray's head listens")
            for host in self.hosts[1:]:
                self.start_ray(host)
            eventually(lambda: all(map(self.has_ray, self.hosts)), f"{HOSTS} nodes of Ray")
        for host in self.ingresses:
            self.start_ingress(host)
        for host in self.hosts:
            self.wait_ready(host)
        if self.with_ray:
            print(self.cli("up"), end="", flush=True)
        self.wait_known()

    def learn(self) -> real_engine.Spoke:
        """What vLLM answers; empty without it."""
        if not self.real:
            return {}
        return asyncio.run(real_engine.learn(f"{self.real[0].address}:{DAEMON_PORT}"))

    @staticmethod
    def has_ray(host: Host) -> bool:
        """Whether `ray start` has said that it runs."""
        log = host.folder / "ray.log"
        return log.exists() and "Ray runtime started" in log.read_text()

    def listens(self, port: int) -> bool:
        """Whether the first host takes connections on it."""
        with contextlib.suppress(OSError):
            socket.create_connection((self.hosts[0].address, port), 1).close()
            return True
        return False

    def cli(self, *words: str) -> str:
        """What `numa-launcher fleet WORDS` prints on the first host. Raises RuntimeError where it fails."""
        code, said = self.run(self.hosts[0], *words)
        if code:
            raise RuntimeError(f"fleet {' '.join(words)}: {said}")
        return said

    def run(self, host: Host, *words: str) -> tuple[int, str]:
        """Exit code and output of `numa-launcher fleet WORDS` on a host."""
        verb, *rest = words
        environ = (f"{name}={value}" for name, value in self.environ.items())
        line = (sys.executable, "-m", "launcher", "fleet", verb, "-c", str(self.config), *rest)
        done = subprocess.run(
            host.inside("env", *environ, *line), check=False, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    def try_status(self) -> str:
        """What `fleet status` prints, well or not."""
        try:
            return self.cli("status")
        except RuntimeError as error:
            return str(error)

    def wait_well(self) -> None:
        """Until `fleet status` finds nothing wrong."""
        last = ""

        def well() -> bool:
            nonlocal last
            try:
                last = self.cli("status")
            except RuntimeError as error:
                last = str(error)
                return False
            count = len(self.hosts)
            return last.startswith(f"OK {count}/{count} hosts serving")

        try:
            eventually(well, "fleet status is well", WELL_S)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {last}") from None

    def members(self, host: Host) -> MemberList:
        """The list that its ingress follows."""
        return read_members(host.folder / STATE / "members.json")

    def picker(self, host: Host) -> list[psutil.Process]:
        return host.processes_of("-m launcher fleet ingress")

    @contextlib.contextmanager
    def stopped(self, host: Host, unit: str) -> Iterator[None]:
        """The service is not restarted meanwhile."""
        holder = self.unit_of(host, unit)
        holder.suspend()
        try:
            yield
        finally:
            holder.resume()
            # nsenter, its parent, stops with it, and would never take note of its end: the host could not go off.
            for parent in holder.parents()[:1]:
                parent.resume()

    @staticmethod
    def unit_of(host: Host, name: str) -> psutil.Process:
        """The process that restarts a service; its descendants are the service. Raises RuntimeError."""
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if (
                    "fleet_hosts.unit" in words
                    and ["run", name] == words[words.index("--") - 2 : words.index("--")]
                ):
                    return process
        raise RuntimeError(f"there is no service {name} on {host.name}")

    def start_ray(self, host: Host) -> None:
        """As its systemd unit does (docs/fleet.md)."""
        head = self.hosts[0]
        where = [f"--address={head.address}:{RAY_PORT}"]
        if host is head:
            where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        self.unit(
            host, "ray", str(Path(sys.executable).with_name("ray")), "start", "--block", *where,
            f"--node-ip-address={host.address}", f"--node-name={host.name}", "--num-cpus=0", '--resources={"numa_host": 1}',
            "--disable-usage-stats", "--include-log-monitor=false", "--object-store-memory=80000000", "--temp-dir=/run/ray",
        )  # fmt: skip

    def start_host(self, host: Host) -> None:
        """What systemd starts on a host whose power came back."""
        self.start_daemon(host)
        if self.with_ray:
            self.start_ray(host)
        if host in self.ingresses:
            self.start_ingress(host)
        self.wait_ready(host)

    def restart_command(self, unit: str) -> list[str]:
        """As `systemctl restart UNIT`, on the host."""
        # nsenter passes this process's environment on.
        return [
            "env",
            f"PYTHONPATH={ENVIRON['PYTHONPATH']}",
            sys.executable,
            "-m",
            "fleet_hosts.unit",
            "restart",
            unit,
        ]

    def daemon(self, host: Host) -> psutil.Process:
        """Raises RuntimeError if there is none, or more than one."""
        (found,) = host.processes_of("-m launcher serve") or [None]
        if found is None:
            raise RuntimeError(f"no daemon on {host.name}")
        return found

    def unit(self, host: Host, name: str, *command: str, listen: str = "") -> None:
        """Starts a service of the host, as systemd would."""
        more = ["--listen", listen] if listen else []
        host.start(
            name, [sys.executable, "-m", "fleet_hosts.unit", *more, "run", name, "--", *command], self.environ
        )

    def instances(self, host: Host) -> int:
        return 1 if host in self.real else INSTANCES

    def start_daemon(self, host: Host) -> None:
        config = host.folder / "daemon.toml"
        config.write_text((self._vllm(host) if host in self.real else self._stand_ins(host)) + DAEMON)
        self.unit(
            host, "daemon", sys.executable, "-m", "launcher", "serve", "-c", str(config),
            listen=f"{host.address}:{DAEMON_PORT}",
        )  # fmt: skip

    def _vllm(self, host: Host) -> str:
        cpus = sorted(os.sched_getaffinity(0))
        return VLLM.format(
            model=self.model, max_num_seqs=MAX_NUM_SEQS, cpu=cpus[host.number % len(cpus)], vllm=real_engine.vllm(),
            cache=host.folder / "cache", path=f"{TESTS}:{TESTS.parent}", host=host.name,
        )  # fmt: skip

    def _stand_ins(self, host: Host) -> str:
        engine = [
            sys.executable, "-m", "chaos.engine", "--uds", "{uds}", "--model", "{name}", "--tag", f"{host.name}-",
            "--log", str(host.folder / "faults.jsonl"), "--seed", host.name, "--faults", "0", "--token-s", str(self.token_s),
            "--first-s", str(FIRST_S),
        ]  # fmt: skip
        return STAND_INS.format(
            command=json.dumps(engine), path=TESTS, max_num_seqs=MAX_NUM_SEQS, instances=INSTANCES
        )

    def start_ingress(self, host: Host) -> None:
        if not self.with_ray:
            folder = host.folder / STATE
            folder.mkdir(parents=True, exist_ok=True)
            members = (
                Member(host=one.name, address=f"{one.address}:{DAEMON_PORT}") for one in self.hosts if one.on
            )
            write_members(folder / "members.json", MemberList(epoch=1, members=tuple(members)))
        self.unit(
            host, "ingress", sys.executable, "-m", "launcher", "fleet", "ingress", "-c", str(self.config)
        )

    def wait_ready(self, host: Host) -> dict[str, Any]:
        """The host's status once all its instances are ready."""

        wanted = self.instances(host)

        def ready() -> dict[str, Any] | None:
            status = self.status(host)
            return status if status.get("ready") == wanted else None

        found: dict[str, Any] = eventually(ready, f"{wanted} instances of {host.name} are ready")
        return found

    def status(self, host: Host) -> dict[str, Any]:
        """`status` of the host's daemon; {} while it does not answer."""
        main = host.processes_of("-m launcher serve")
        if not main:
            return {}
        try:
            # The host's own files, seen from outside.
            answer: dict[str, Any] = ControlClient(f"/proc/{main[0].pid}/root/run/c.sock").get("/status")
        except LauncherError:
            return {}
        return answer

    def ask_haproxy(self, host: Host, line: str) -> str:
        """What HAProxy's admin socket on this host answers; nothing while there is none."""
        path = host.folder / STATE / "admin.sock"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(path))
            sock.sendall(line.encode() + b"\n")
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
            return answer.decode()
        return ""

    def servers(self, ingress: Host) -> dict[str, dict[str, str]]:
        """HAProxy's statistics of each server in use, by the address that it has."""
        lines = self.ask_haproxy(ingress, "show stat -1 4 -1").splitlines()
        if not lines:
            return {}
        names = lines[0].removeprefix("# ").split(",")
        rows = (dict(zip(names, line.split(","), strict=False)) for line in lines[1:] if line)
        return {row["addr"]: row for row in rows if row.get("pxname") == "hosts" and row["status"] != "MAINT"}

    def wait_known(self) -> None:
        """Until both ingresses send to all hosts that are on."""
        wanted = {f"{host.address}:{DAEMON_PORT}" for host in self.hosts if host.on}

        def known() -> bool:
            return all(
                {address for address, row in self.servers(ingress).items() if row["status"].startswith("UP")}
                >= wanted
                for ingress in self.ingresses
            )

        eventually(known, "both ingresses send to all hosts")

    def engines(self, host: Host) -> Iterator[psutil.Process]:
        """The main process of each instance."""
        words = "vllm serve" if host in self.real else "-m chaos.engine --uds"
        for one in host.processes_of(words):
            with contextlib.suppress(psutil.Error):
                if "shim.py" not in " ".join(one.cmdline()):
                    yield one

    def asked(self, ingress: Host) -> int:
        """How often its picker was asked so far; 0 where there is none."""
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1)
            sock.connect(str(ingress.folder / STATE / "ingress.sock"))
            return int(json.loads(b"".join(iter(lambda: sock.recv(65536), b"")))["asked"])
        return 0

    def slow(self, engines: Iterable[psutil.Process]) -> None:
        """Ten times as slow, or as fast again (tests/chaos/engine.py)."""
        for engine in engines:
            engine.send_signal(signal.SIGUSR2)

    @staticmethod
    def kill(*processes: psutil.Process) -> int:
        """How many there were."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return len(processes)
