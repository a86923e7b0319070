"""Options that several verbs share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from launcher.errors import LauncherError

if TYPE_CHECKING:
    from launcher.config.schema import Config
    from launcher.control.client import ControlClient

DEFAULT_CONFIG: Final = Path("/etc/numa-launcher/config.toml")
DEFAULT_SOCKET: Final = "/run/numa-launcher/control.sock"
# Flags that are short for `--set KEY=VALUE`.
_SHORT_FOR: Final = {
    "strategy": "layout.strategy",
    "instances_per_socket": "layout.instances_per_socket",
    "reserve_cores": "layout.reserve_cores",
    "kv_cache": "memory.kv_cache",
}


def add_config(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-c", "--config", type=Path, metavar="FILE",
        help=f"use this configuration file (default: {DEFAULT_CONFIG})",
    )  # fmt: skip
    add(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
        help="override one configuration key; can be repeated",
    )  # fmt: skip
    add("--model", metavar="DIR|NAME", help="serve this model; replaces the configuration file")
    for name, key in _SHORT_FOR.items():
        add(f"--{name.replace('_', '-')}", metavar="VALUE", help=f"set {key}; same as --set {key}=VALUE")


def config_of(args: argparse.Namespace, base: dict[str, Any] | None = None) -> Config:
    """The configuration that the options select; `base` when they name neither a file nor a model. Raises LauncherError."""
    from launcher.config.load import load_config  # noqa: PLC0415  heavy

    overrides = [
        f"{key}={getattr(args, name)}" for name, key in _SHORT_FOR.items() if getattr(args, name) is not None
    ]
    path: Path | None = args.config
    if path is None and args.model is not None:
        base = {"models": [{"name": Path(args.model).name, "path": args.model}]}
    elif args.model is not None:
        raise LauncherError(
            "cannot use --model with -c: the file has its own models", "use --set models.0.path=DIR"
        )
    elif path is not None or base is None:
        path, base = path or DEFAULT_CONFIG, None
    return load_config(path, base=base, environ=os.environ, overrides=[*overrides, *args.overrides])


def configured(path: Path | None) -> Config | None:
    """The configuration of -c, else the default one; None where neither is there."""
    if path is None and not DEFAULT_CONFIG.exists():
        return None
    from launcher.config.load import load_config  # noqa: PLC0415  heavy

    return load_config(path or DEFAULT_CONFIG, environ=os.environ)


def add_socket(parser: argparse.ArgumentParser) -> None:
    """--socket and -c, which select the daemon."""
    parser.add_argument(
        "--socket", metavar="PATH", help=f"connect to this control socket (default: {DEFAULT_SOCKET})"
    )
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE", help="use the control socket of this configuration file"
    )


def client_of(args: argparse.Namespace) -> ControlClient:
    """A client of the daemon at `socket_of`. Control characters in its answers are escaped, except with --json."""
    from launcher.control.client import ControlClient  # noqa: PLC0415  heavy

    return ControlClient(socket_of(args), exact=bool(getattr(args, "json", False)))


def socket_of(args: argparse.Namespace) -> str:
    """--socket, the socket of -c, $NUMA_LAUNCHER_SOCKET or the default path, in this order."""
    path: str | None = args.socket
    if path is None and args.config is not None:
        from launcher.config.load import load_config  # noqa: PLC0415  heavy

        path = load_config(args.config, environ=os.environ).control.socket
    return path or os.environ.get("NUMA_LAUNCHER_SOCKET") or DEFAULT_SOCKET


class Value:
    """An argparse type with a description of valid values: the remedy of its errors is "give WANTED"."""

    def __init__(self, wanted: str, read: Callable[[str], Any]) -> None:
        """`read` raises ValueError for an invalid value."""
        self.wanted = wanted
        self._read = read

    def __call__(self, text: str) -> Any:
        try:
            return self._read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not {self.wanted}") from None


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number within bounds. Only digits are accepted; int() accepts much more."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least or (most and int(text) > most):
            raise ValueError
        return int(text)

    return read


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError
    return value


_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _ago(text: str) -> float:
    if text[-1:] not in _UNITS:
        raise ValueError
    return float(whole(0)(text[:-1]) * _UNITS[text[-1]])


slot_number: Final = Value("a slot number", whole(0))
count: Final = Value("a number of 0 or more", whole(0))
seconds: Final = Value("a number of seconds", _seconds)
since: Final = Value("a time such as 90s, 10m, 2h or 1d", _ago)
"""How many seconds ago."""
