"""The proxy alone, built and logged as `numa-launcher serve` does, with upstreams that run already."""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import signal
from collections.abc import Callable
from pathlib import Path

import uvloop

from launcher.balancing.cost_model import CostModel
from launcher.base import log_lines
from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.config.schema import Audit, Config, Model, Policy, Proxy, Telemetry, Usage
from launcher.daemon import process
from launcher.daemon.accounts import Accounts
from launcher.proxy.dispatch.registry import RequestRegistry
from launcher.proxy.server import ProxyServer


def put_in_place(owner: type, name: str, function: Callable[..., object]) -> None:
    """Give all objects of a class another method of this name. Raises AttributeError where it has none: nothing would
    change, and nobody would know."""
    getattr(owner, name)
    setattr(owner, name, function)


def _address(text: str) -> Address:
    if text.startswith("/"):
        return UnixAddress(text)
    host, port = text.rsplit(":", 1)
    return TcpAddress(host, int(port))


async def _serve(args: argparse.Namespace) -> None:
    proxy = Proxy(
        listen=(args.listen,),
        policy=Policy(args.policy),
        access_log=args.access_log,
        trusted_proxies=tuple(args.trusted_proxies),
    )
    accounts = Accounts(
        Config(
            models=(Model(name="m", path="/m"),),
            proxy=proxy,
            usage=Usage(enabled=args.ledger is not None, path=str(args.ledger) if args.ledger else None),
            audit=Audit(path=str(args.audit) if args.audit else None),
            telemetry=Telemetry(history=False, otlp_endpoint=args.traces or "", otlp_sampling=args.sampling),
        )
    )
    server = ProxyServer(
        proxy,
        models=(Model(name="m", path="/m"),),
        on_idle=lambda *_: None,
        on_suspect=lambda *_: None,
        accounting=accounts.accounting,
    )
    await accounts.start(server.readings.occupancy)
    await server.start()
    for slot, upstream in enumerate(args.upstreams):
        server.add_upstream(slot, 1, "m", _address(upstream), args.max_num_seqs, token_ids=args.token_ids)
    process.settle()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await server.stop(0)
    await accounts.stop()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.ours", description=__doc__)
    parser.add_argument("--listen", required=True, help="HOST:PORT or unix:/path")
    parser.add_argument("--policy", default=Policy.PREFIX_AWARE.value)
    parser.add_argument("--access-log", default="all", choices=["all", "errors", "off"])
    parser.add_argument("--trusted-proxies", nargs=1, default=[], metavar="NETWORK")
    parser.add_argument("--max-num-seqs", type=int, default=4096)
    parser.add_argument(
        "--token-ids",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for them, as of vLLM",
    )
    parser.add_argument(
        "--late-binding",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let requests wait for the prefill of earlier ones (Python sources only)",
    )
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="keep the usage ledger there")
    parser.add_argument(
        "--audit", type=Path, metavar="FOLDER", help="keep the audit trail there, beside the ledger"
    )
    parser.add_argument("--traces", metavar="URL", help="send traces of requests to this collector")
    parser.add_argument("--sampling", type=float, default=0.1, help="share of requests that are traced")
    parser.add_argument(
        "--no-entries", action="store_true", help="make no entry of a request (Python sources only)"
    )
    parser.add_argument("--profile", help="write what cProfile saw to this file")
    parser.add_argument("upstreams", nargs="+", help="/path of a UNIX socket, or HOST:PORT")
    args = parser.parse_args()
    if not args.late_binding:
        put_in_place(CostModel, "prefills_enough", lambda *_: False)
    if args.no_entries:
        put_in_place(RequestRegistry, "_tell", lambda *_: None)
    log_lines.set_up("info", "text")
    profile = cProfile.Profile() if args.profile else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profile:
            profile.enable()
        runner.run(_serve(args))
    if profile:
        profile.disable()
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
