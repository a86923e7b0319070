"""How each proxy is installed and started, at its best: nothing limits it, and it asks the engines what it wants to know."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.processes import FailedError

SCRIPTS: Final = Path(__file__).resolve().parents[1]
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "numa-launcher" / "rivals"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a proxy is told."""

    folder: Path  # for its files
    port: int  # to listen on
    spare: int  # another free port, for those that insist on one for metrics
    ports: tuple[int, ...]  # of the engines
    uds: tuple[str, ...]  # of the same engines
    speed: float = 1.0  # engine seconds in a second: how much faster intervals should be

    @property
    def urls(self) -> list[str]:
        """The engines' URLs."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]


@dataclass(frozen=True, slots=True)
class Rival:
    """One proxy in one setting."""

    name: str
    what: str  # for the table's footnote
    argv: Callable[[Setting], Sequence[str]]
    ready: str = "/v1/models"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    package: str | None = None  # of Debian
    requirement: str | None = None  # of the Python package index; installed in its own venv

    def missing(self) -> str | None:
        """How to get what is not installed; None when it can start."""
        if self.package and not shutil.which(self.package):
            return f"apt-get install -y {self.package}"
        if self.requirement and not (venv_of(self.requirement) / "bin" / "python").exists():
            return f"scripts/bench-proxy --install --only {self.name}"
        return None

    def version(self) -> str:
        """As its own package says."""
        if self.package:
            done = subprocess.run([self.package, "-v"], capture_output=True, text=True, check=False)
            text = (done.stdout + done.stderr).split("\n")[0]
            words = text.replace("/", " ").split()
            return next((word for word in words if word[:1].isdigit()), "?").split("-")[0]
        if self.requirement:
            found = list(venv_of(self.requirement).glob("lib/python*/site-packages/*.dist-info"))
            stem = self.requirement.split("==")[0].replace("-", "_")
            return next((one.stem.split("-")[1] for one in found if one.stem.split("-")[0] == stem), "?")
        if self.name == "aiohttp":
            import aiohttp  # noqa: PLC0415

            return aiohttp.__version__
        return ""


def venv_of(requirement: str) -> Path:
    """Where a package of the Python index is installed."""
    return CACHE / requirement.split("==", maxsplit=1)[0]


def install(rival: Rival) -> None:
    """Install it: Debian packages need root. Raises FailedError."""
    steps: list[list[str]] = []
    if rival.package:
        steps.append(["apt-get", "install", "-y", rival.package])
    if rival.requirement:
        venv = venv_of(rival.requirement)
        steps.append([sys.executable, "-m", "venv", str(venv)])
        steps.append([str(venv / "bin" / "pip"), "install", "--quiet", rival.requirement])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FailedError(f"{' '.join(step)}: {done.stderr.strip()[-500:]}")


# --- nginx and HAProxy ------------------------------------------------------------------------

_NGINX: Final = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr; worker_rlimit_nofile 65536; {user}
events {{ worker_connections 16384; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 64m; client_body_buffer_size 256k; keepalive_requests 1000000000; keepalive_timeout 600s;
  upstream engines {{ {balance} {servers} keepalive 2048; keepalive_requests 1000000000; keepalive_timeout 600s; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 3600s; {retries}
    }}
  }}
}}
"""


def nginx(
    balance: str, *, unix: bool = False, fails_over: bool = False
) -> Callable[[Setting], Sequence[str]]:
    """`fails_over`: an engine that fails gets nothing for 10 s, and its request goes to another, as by default."""

    def argv(to: Setting) -> Sequence[str]:
        engines = [f"unix:{path}" for path in to.uds] if unix else [f"127.0.0.1:{port}" for port in to.ports]
        text = _NGINX.format(
            folder=to.folder,
            port=to.port,
            balance=balance,
            servers=" ".join(f"server {engine}{'' if fails_over else ' max_fails=0'};" for engine in engines),
            retries="" if fails_over else "proxy_next_upstream off;",
            user="user root;" if os.geteuid() == 0 else "",
        )
        (to.folder / "nginx.conf").write_text(text)
        return ["nginx", "-e", "stderr", "-p", str(to.folder), "-c", str(to.folder / "nginx.conf")]

    return argv


_HAPROXY: Final = """
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  option http-no-delay
  option http-keep-alive
  http-reuse always
  timeout connect 5s
  timeout client 3600s
  timeout server 3600s
  timeout http-keep-alive 600s
frontend proxy
  bind 127.0.0.1:{port} backlog 4096
  default_backend engines
backend engines
  balance leastconn
{servers}
"""


def _haproxy(to: Setting) -> Sequence[str]:
    servers = "\n".join(
        f"  server e{n} 127.0.0.1:{port} pool-max-conn 4096" for n, port in enumerate(to.ports)
    )
    (to.folder / "haproxy.cfg").write_text(_HAPROXY.format(port=to.port, servers=servers))
    return ["haproxy", "-db", "-f", str(to.folder / "haproxy.cfg")]


def _fleet(*more: str) -> Callable[[Setting], Sequence[str]]:
    def argv(to: Setting) -> Sequence[str]:
        ports = ("--port", str(to.port), "--picker-port", str(to.spare), "--folder", str(to.folder))
        return [sys.executable, "-m", "bench.fleet_ingress", *ports, *more, *map(str, to.ports)]

    return argv


# --- the routers ------------------------------------------------------------------------------


def _router(requirement: str, module: str, *more: str) -> Callable[[Setting], Sequence[str]]:
    def argv(to: Setting) -> Sequence[str]:
        python = str(venv_of(requirement) / "bin" / "python")
        return [
            python,
            *("-m", module),
            *("--host", "127.0.0.1", "--port", str(to.port), "--prometheus-port", str(to.spare)),
            *("--worker-urls", *to.urls),
            *("--log-level", "warn" if requirement != VLLM_ROUTER else "warning"),
            *("--request-timeout-secs", "3600", "--disable-retries", "--disable-circuit-breaker"),
            *more,
        ]

    return argv


VLLM_ROUTER: Final = "vllm-router==0.1.17"
SGLANG_ROUTER: Final = "sglang-router==0.3.2"
SMG: Final = "smg==1.13.0"


def _vllm(policy: str, *extra: str) -> Callable[[Setting], Sequence[str]]:
    more = ("--policy", policy, "--max-concurrent-requests", "16384", *extra)
    return _router(VLLM_ROUTER, "vllm_router.launch_router", *more)


def _sglang(policy: str, *extra: str) -> Callable[[Setting], Sequence[str]]:
    more = ("--policy", policy, "--max-concurrent-requests", "16384", *extra)
    return _router(SGLANG_ROUTER, "sglang_router.launch_router", *more)


def _smg(policy: str) -> Callable[[Setting], Sequence[str]]:
    def argv(to: Setting) -> Sequence[str]:
        more = ("--policy", policy, "--max-concurrent-requests", "16384")
        pace = ("--load-monitor-interval", "1") if to.speed > 1 else ()
        return _router(SMG, "smg.launch_router", *more, *pace)(to)

    return argv


# --- Python -----------------------------------------------------------------------------------


def _aiohttp(to: Setting) -> Sequence[str]:
    return [sys.executable, "-m", "bench.plain_aiohttp", "--port", str(to.port), *to.urls]


def _bare(to: Setting) -> Sequence[str]:
    return [sys.executable, "-m", "bench.bare", "--port", str(to.port), *to.uds]


def ours(*more: str, unix: bool = True) -> Callable[[Setting], Sequence[str]]:
    """numa-launcher's proxy; `more` are arguments of bench.ours."""

    def argv(to: Setting) -> Sequence[str]:
        engines = to.uds if unix else [f"127.0.0.1:{port}" for port in to.ports]
        listen = f"127.0.0.1:{to.port}"
        return [sys.executable, "-m", "bench.ours", "--listen", listen, *more, *engines]

    return argv


_PATHS: Final = {"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parent}"}

OURS: Final = "ours"
BEFORE: Final = "before"
NGINX: Final = "nginx"
DIRECT: Final = "direct"

RIVALS: Final[Mapping[str, Rival]] = {
    rival.name: rival
    for rival in (
        Rival(
            NGINX,
            "one worker, proxy_buffering off, kept connections, least_conn, access log",
            nginx("least_conn;"),
            package="nginx",
        ),
        Rival(
            "nginx-unix",
            "nginx over UNIX sockets to the engines",
            nginx("least_conn;", unix=True),
            package="nginx",
        ),
        Rival(
            "haproxy",
            "one thread, option http-no-delay, http-reuse always, leastconn, no log",
            _haproxy,
            package="haproxy",
        ),
        Rival(
            "fleet",
            "the ingress of a fleet: HAProxy as configured for it, and the picker, for two hosts of one instance",
            _fleet(),
            env=_PATHS,
            package="haproxy",
        ),
        Rival(
            "fleet-haproxy",
            "the same without the CPU time of the picker's process",
            _fleet("--apart"),
            env=_PATHS,
            package="haproxy",
        ),
        Rival(
            "vllm-router", "its default policy, cache_aware", _vllm("cache_aware"), requirement=VLLM_ROUTER
        ),
        Rival("vllm-router-rr", "vllm-router, round_robin", _vllm("round_robin"), requirement=VLLM_ROUTER),
        Rival(
            "sglang-router",
            "its default policy, cache_aware",
            _sglang("cache_aware"),
            requirement=SGLANG_ROUTER,
        ),
        Rival("smg", "its default policy, cache_aware", _smg("cache_aware"), requirement=SMG),
        Rival(
            "aiohttp",
            "a plain reverse proxy of aiohttp's server and client on uvloop, no log",
            _aiohttp,
            env=_PATHS,
        ),
        Rival(
            "bare",
            "lower bound for Python: bytes copied between connections on uvloop, not parsed",
            _bare,
            env=_PATHS,
        ),
        Rival(
            OURS,
            "numa-launcher: prefix-aware, access log, UNIX sockets to the engines",
            ours(),
            env=_PATHS,
        ),
        Rival("ours-tcp", "numa-launcher over loopback TCP to the engines", ours(unix=False), env=_PATHS),
        Rival(
            "ours-no-ids",
            "numa-launcher without asking the engines for token ids",
            ours("--no-token-ids"),
            env=_PATHS,
        ),
        Rival(
            "ours-traced",
            "numa-launcher that sends the traces of 10 % of all requests to a collector",
            lambda to: ours("--traces", f"http://127.0.0.1:{to.ports[0]}")(to),
            env=_PATHS,
        ),
        Rival(
            "ours-early",
            "numa-launcher without late binding",
            ours("--no-late-binding"),
            env=_PATHS,
        ),
    )
}


def another_version(checkout: Path) -> Rival:
    """The proxy of another checkout of this project, started by that checkout's own bench.ours."""
    paths = {"PYTHONPATH": f"{checkout / 'scripts'}:{checkout}", "PYTHONSAFEPATH": "1"}
    return Rival(BEFORE, "another checkout of this project, set up as ours", ours(), env=paths)


# Balancing, compared: proxies with a policy each.


_ours_balancing: Final = ours("--max-num-seqs", "32", "--access-log", "off")


def _live_fleet(to: Setting) -> Sequence[str]:
    where = ("--listen", str(to.port), "--folder", str(to.folder / "fleet"))
    return [sys.executable, "-m", "bench.live_fleet", *where, *to.uds]


# Their default of 64 requests lets one engine of 32 sequences fill up while others idle.
_TIGHT: Final = ("--balance-abs-threshold", "8", "--balance-rel-threshold", "1.1")

SETTINGS: Final[Mapping[str, Rival]] = {
    setting.name: setting
    for setting in (
        Rival("nginx-lc", "nginx, least_conn", nginx("least_conn;"), package="nginx"),
        Rival("nginx-rr", "nginx, round robin", nginx(""), package="nginx"),
        Rival("vllm-cache", "vllm-router, cache_aware", _vllm("cache_aware"), requirement=VLLM_ROUTER),
        Rival("vllm-p2c", "vllm-router, power_of_two", _vllm("power_of_two"), requirement=VLLM_ROUTER),
        Rival(
            "sglang-cache", "sglang-router, cache_aware", _sglang("cache_aware"), requirement=SGLANG_ROUTER
        ),
        Rival(
            "vllm-cache-8",
            "vllm-router, cache_aware, balancing by load from a difference of 8 requests and 10 %",
            _vllm("cache_aware", *_TIGHT),
            requirement=VLLM_ROUTER,
        ),
        Rival(
            "sglang-cache-8",
            "sglang-router, cache_aware, balancing by load from a difference of 8 requests and 10 %",
            _sglang("cache_aware", *_TIGHT),
            requirement=SGLANG_ROUTER,
        ),
        Rival("smg-p2c", "smg, power_of_two", _smg("power_of_two"), requirement=SMG),
        Rival(OURS, "numa-launcher, prefix-aware", _ours_balancing, env=_PATHS),
        Rival(
            "fleet",
            "four hosts with a share of the engines each, HAProxy and the fleet's picker",
            _live_fleet,
            package="haproxy",
            env=_PATHS,
        ),
    )
}
