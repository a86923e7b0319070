"""The hosts of scripts/fleet-trial, which runs this in namespaces of its own: network, mounts and processes.

Descriptor 9 is the network namespace of the machine, 8 its /proc. Process 1 of the namespaces is this one: when it ends,
the kernel ends all others.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient

NETWORK: Final = "10.79.0"
MACHINE: Final = f"{NETWORK}.254"
LINK: Final = "fleet-trial"  # in the machine's network
HOSTS: Final = (1, 2, 3)
INGRESS: Final = (1, 2)
CPUS: Final = 4
"""Of a host, at most: the model is tiny."""
READY_S: Final = 600.0
RAY_S: Final = 120.0
ANSWER_S: Final = 120.0
POLL_S: Final = 0.5
PROGRAMS: Final = Path(sys.executable).parent
START: Final = """
hostname "$1"
mount -t tmpfs run /run; mkdir -p /run/numa-launcher /run/home /run/tmp
mount -t tmpfs shm /dev/shm
ip link set lo up
touch "$2"
while :; do sleep 1000 & wait $!; done
"""
HOST: Final = (
    "unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
    "bash", "-euc", START, "host",
)  # fmt: skip
DAEMON: Final = """\
[[models]]
name = "tiny"
path = {model}
dtype = "float32"
max_model_len = 2048
max_num_seqs = 16
[layout]
cpus = "{cpus}"
instances_per_socket = 1
reserve_cores = 0
[memory]
kv_cache = "256MiB"
[engine]
args = ["--enforce-eager"]            # starts sooner
cache_dir = {cache}
[proxy]
listen = ["{address}:8001"]           # where the ingress hosts reach this daemon
trusted_proxies = {ingress}           # they choose the instance
[usage]
path = {usage}
[supervision]
spawner = "direct"
"""
FLEET: Final = """\
ray = "{head}:6379"                   # Ray's head
state = "/run/fleet"
[ingress]
hosts = {ingress}
listen = "0.0.0.0:8000"               # clients connect to these
[hosts]
most = 8
"""
RAY: Final = (
    "--node-manager-port=6380", "--object-manager-port=6381", "--min-worker-port=6400", "--max-worker-port=6499",
    "--num-cpus=0", '--resources={"numa_host": 1}', "--object-store-memory=80000000", "--include-log-monitor=false",
    "--disable-usage-stats", "--temp-dir=/run/ray",
)  # fmt: skip


def address(number: int) -> str:
    return f"{NETWORK}.{number}"


class Host:
    """One host: namespaces with the machine's files, but with /run and /dev/shm of its own."""

    def __init__(self, number: int, folder: Path, token: str) -> None:
        self.number, self.name, self.address = number, f"host{number}", address(number)
        self.folder = folder / self.name
        self.folder.mkdir(parents=True)
        ready = self.folder / "ready"
        first = subprocess.Popen([*HOST, self.name, str(ready)], stdin=subprocess.DEVNULL)
        wait(ready.exists, f"start {self.name}", READY_S, first)
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text(encoding="ascii")
        self.pid = int(children.split()[0])
        # Without it every user of the machine could run programs through Ray.
        of_ray = Path(f"/proc/{self.pid}/root/run/home/.ray")
        of_ray.mkdir(mode=0o700)
        (of_ray / "auth_token").touch(mode=0o600)
        (of_ray / "auth_token").write_text(token)
        sh("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        sh("ip", "link", "set", self.name, "master", "fleet", "up")
        self.do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")
        cpus = sorted(os.sched_getaffinity(0))
        own = cpus[number - 1 :: len(HOSTS)][:CPUS] or [cpus[number % len(cpus)]]
        self._cpus = ",".join(map(str, own))

    def inside(self, *words: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--", *words]

    def do(self, *words: str) -> None:
        sh(*self.inside(*words))

    def start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        """Starts a program of the host and prints its command line. Its output goes to `log` in the host's folder."""
        print(f"   {self.name}$ {shlex.join(words)}", flush=True)
        line = (str(PROGRAMS / words[0]), *words[1:])
        with (self.folder / log).open("wb") as out:
            # Ctrl-C reaches this process only: it ends all others.
            return subprocess.Popen(
                self.inside(*line), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def start_daemon(self, model: Path) -> subprocess.Popen[bytes]:
        config = self.folder / "config.toml"
        config.write_text(
            DAEMON.format(
                address=self.address,
                cpus=self._cpus, model=json.dumps(str(model)), cache=json.dumps(str(self.folder / "cache")),
                usage=json.dumps(str(self.folder / "usage.db")), ingress=json.dumps(list(map(address, INGRESS))),
            )
        )  # fmt: skip
        return self.start("daemon.log", "numa-launcher", "serve", "-c", str(config))

    def start_ray(self) -> subprocess.Popen[bytes]:
        head = ("--head", "--port=6379", "--include-dashboard=false")
        where = head if self.number == HOSTS[0] else (f"--address={address(HOSTS[0])}:6379",)
        own = (f"--node-ip-address={self.address}", f"--node-name={self.name}")
        return self.start("ray.log", "ray", "start", "--block", *where, *own, *RAY)

    def ready(self) -> bool:
        """Whether its instance is. Raises LauncherError once that cannot start."""
        try:
            found: dict[str, Any] = ControlClient(
                f"/proc/{self.pid}/root/run/numa-launcher/control.sock"
            ).get("/status")
        except LauncherError:
            return False
        for slot in found["slots"]:
            if slot["state"] in {"failed", "backoff"}:
                cause = slot["last_cause"]
                raise LauncherError(f"cannot start vLLM on {self.name}: {cause['message']}", cause["remedy"])
        return bool(found["slots"]) and found["ready"] == len(found["slots"])

    def has_ray(self) -> bool:
        return "Ray runtime started" in (self.folder / "ray.log").read_text(errors="replace")


def sh(*words: str) -> None:
    """Raises LauncherError."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LauncherError(
            f"cannot run `{shlex.join(words)}`: {done.stderr.strip() or f'exit code {done.returncode}'}",
            "the trial needs a machine, or a container with the capabilities NET_ADMIN and SYS_ADMIN",
        )


def wait(
    check: Callable[[], bool],
    what: str,
    within_s: float,
    *needed: subprocess.Popen[bytes],
    log: Path | None = None,
) -> None:
    """Until `check` is true. `needed`: programs that must not end meanwhile. Raises LauncherError with the end of `log`."""
    began = time.monotonic()
    while not check():
        ended = any(program.poll() is not None for program in needed)
        if ended or time.monotonic() - began > within_s:
            why = "it ended" if ended else f"not within {within_s:g} s"
            if log is not None:
                said = "\n".join(f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-8:])
                raise LauncherError(f"cannot {what}: {why}\n{said}", f"the whole log: {log}")
            raise LauncherError(f"cannot {what}: {why}", "run this again")
        time.sleep(POLL_S)


def make_network() -> None:
    """A bridge for the hosts, and a wire from it to the machine's own network, so that clients there reach the hosts."""
    machine = ("nsenter", "--net=/proc/self/fd/9")
    taken = subprocess.run(
        [*machine, "ip", "-4", "route", "show", "to", "root", f"{NETWORK}.0/24"],
        check=False, capture_output=True, text=True, pass_fds=[9],
    ).stdout.strip()  # fmt: skip
    if taken:
        raise LauncherError(
            f"cannot use the network {NETWORK}.0/24: this machine has it: {taken}",
            "end the other trial, or remove the route for the time of this one",
        )
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "fleet", "type", "bridge")
    sh("ip", "link", "set", "fleet", "up")
    for words in (
        ("link", "add", LINK, "type", "veth", "peer", "name", "machine", "netns", "1"),
        ("addr", "add", f"{MACHINE}/24", "dev", LINK),
        ("link", "set", LINK, "up"),
    ):
        done = subprocess.run(
            [*machine, "ip", *words], check=False, capture_output=True, text=True, pass_fds=[9]
        )
        if done.returncode:
            raise LauncherError(
                f"cannot connect the hosts to this machine: {done.stderr.strip()}",
                "the trial needs a machine, or a container with the capabilities NET_ADMIN and SYS_ADMIN",
            )
    sh("ip", "link", "set", "machine", "master", "fleet", "up")
    # For the chat below.
    sh("ip", "addr", "add", f"{NETWORK}.253/24", "dev", "fleet")


def outside(pid: int) -> str:
    """Process 1 of a host as the machine numbers it."""
    own = os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115  no path
    for process in Path("/proc/self/fd/8").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns" / "pid") == own and "\t1\n" in (process / "status").read_text():  # noqa: PTH115
                return process.name
    return "PID"


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def chat(host: str) -> None:
    """Prints an answer and who gave it. Raises LauncherError."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    connection = http.client.HTTPConnection(host, 8000, timeout=ANSWER_S)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise LauncherError(
            f"cannot get an answer from http://{host}:8000: {error}", "run this again"
        ) from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise LauncherError(
            f"cannot get an answer from http://{host}:8000: {answer.status} {text[:300]}", "run this again"
        )
    print(f"   user: Hello\n   tiny: {json.loads(text)['choices'][0]['message']['content']!r}", flush=True)


def answers(host: str) -> bool:
    """Whether the ingress there serves all hosts."""
    connection = http.client.HTTPConnection(host, 8000, timeout=ANSWER_S)
    try:
        connection.request("GET", "/health")
        return bool(json.loads(connection.getresponse().read()).get("hosts") == len(HOSTS))
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def play(model: Path, folder: Path, *, once: bool) -> None:
    """Raises LauncherError."""
    step(f"Three hosts: {', '.join(map(address, HOSTS))} (their files and logs: {folder})")
    make_network()
    token = secrets.token_hex(32)
    hosts = [Host(number, folder, token) for number in HOSTS]
    config = folder / "fleet.toml"
    config.write_text(FLEET.format(head=address(HOSTS[0]), ingress=json.dumps(list(map(address, INGRESS)))))
    step("The daemon on each host, as `systemctl start numa-launcher` does; the ingress on two")
    daemons = [host.start_daemon(model) for host in hosts]
    for number in INGRESS:
        hosts[number - 1].start("ingress.log", "numa-launcher", "fleet", "ingress", "-c", str(config))
    step("Ray on each host: the first command")
    for host in hosts:
        ray = host.start_ray()
        wait(host.has_ray, f"start Ray on {host.name}", RAY_S, ray, log=host.folder / "ray.log")
    print("   waiting for vLLM on the hosts ...", flush=True)
    for host, daemon in zip(hosts, daemons, strict=True):
        wait(host.ready, f"start {host.name}", READY_S, daemon, log=host.folder / "daemon.log")
    step("The fleet: the second command, on any host")
    words = ("numa-launcher", "fleet", "up", "-c", str(config))
    print(f"   {hosts[0].name}$ {shlex.join(words)}", flush=True)
    if subprocess.run(hosts[0].inside(str(PROGRAMS / words[0]), *words[1:]), check=False).returncode:
        raise LauncherError("cannot set up the fleet: see above", f"read the logs in {folder}")
    step("A chat completion from each ingress host")
    for number in INGRESS:
        host = hosts[number - 1]
        wait(
            partial(answers, host.address),
            f"reach the hosts through the ingress of {host.name}",
            ANSWER_S,
            log=host.folder / "ingress.log",
        )
        chat(host.address)
    print("   (the model has random weights: the text is random)")
    command = PROGRAMS / "numa-launcher"
    shell = f"sudo nsenter --all --target {outside(hosts[0].pid)} env HOME=/run/home"
    print(
        f"""
   endpoint   http://{address(1)}:8000/v1 or http://{address(2)}:8000/v1   (model "tiny")
   try        curl http://{address(1)}:8000/v1/chat/completions -H 'Content-Type: application/json' \\
                -d '{{"model": "tiny", "messages": [{{"role": "user", "content": "Hello"}}]}}'
   look       {shell} {command} fleet status -c {config}
   a host     {shell} bash""",
        flush=True,
    )
    if not once:
        print("\nPress Ctrl-C to stop everything.", flush=True)
        signal.pause()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    os.environ |= {
        "PATH": f"{PROGRAMS}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin", "PYTHONUNBUFFERED": "1",
        "HOME": "/run/home", "TMPDIR": "/run/tmp", "RAY_AUTH_MODE": "token",
    }  # fmt: skip
    os.environ.pop("XDG_CACHE_HOME", None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        play(args.model, args.folder, once=args.once)
    except KeyboardInterrupt:
        pass
    except LauncherError as error:
        print(f"\n{error.message}\n  {error.remedy}", file=sys.stderr)
        return 1
    print("\nstopped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
