"""Options that several verbs share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

from launcher.base.errors import LauncherError
from launcher.cli.streams import OutputError

if TYPE_CHECKING:
    from launcher.config.schema import Config
    from launcher.control.client import ControlClient
    from launcher.machine.topology import Topology

DEFAULT_CONFIG: Final = Path("/etc/numa-launcher/config.toml")
DEFAULT_SOCKET: Final = "/run/numa-launcher/control.sock"
CONFIG_VARIABLE: Final = "NUMA_LAUNCHER_CONFIG"
SOCKET_VARIABLE: Final = "NUMA_LAUNCHER_SOCKET"
# Flags that are short for `--set KEY=VALUE`.
_SHORT_FOR: Final = {
    "strategy": "layout.strategy",
    "instances_per_socket": "layout.instances_per_socket",
    "reserve_cores": "layout.reserve_cores",
    "kv_cache": "memory.kv_cache",
}


def default_config() -> Path:
    """The configuration file of verbs without -c: $NUMA_LAUNCHER_CONFIG, else the service's."""
    return Path(os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG)


def default_socket() -> str:
    """The control socket of verbs without --socket and -c: $NUMA_LAUNCHER_SOCKET, else the service's."""
    return os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET


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
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy

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
        path, base = path or default_config(), None
    return load_config(path, base=base, environ=os.environ, overrides=[*overrides, *args.overrides])


def configured(path: Path | None) -> Config | None:
    """The configuration of -c, else the default one; None where neither is there."""
    if path is None and not default_config().exists():
        return None
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy

    return load_config(path or default_config(), environ=os.environ)


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
        from launcher.config.loading import load_config  # noqa: PLC0415  heavy

        path = load_config(args.config, environ=os.environ).control.socket
    return path or default_socket()


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


# --- The command line's parser: its errors have two lines, message and remedy, like all others. ---

_CHOICE: Final = re.compile(r"argument [A-Z]+: invalid choice: '(?P<word>[^']*)'")
_ARGUMENT: Final = re.compile(r"argument (?P<name>[^:]+): (?P<why>.*)", re.DOTALL)
_MISSING: Final = re.compile(r"the following arguments are required: (?P<names>.*)")


class Parser(argparse.ArgumentParser):
    """Also used for each verb: argparse creates subparsers of the same class."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As parse_args, with a suggestion for an unknown argument. Exits with 2."""
        args: argparse.Namespace
        args, unknown = self.parse_known_args(arguments)
        if unknown:
            parser = self
            while (inner := parser._choice()) is not None and getattr(args, inner.dest) is not None:
                parser = inner.choices[getattr(args, inner.dest)]
            parser.refuse_word(unknown[0])
        return args

    # argparse calls this for the words of a verb, too.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def _choice(self) -> argparse._SubParsersAction[Parser] | None:
        return next(
            (action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None
        )

    def refuse_word(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        known = list(self._option_string_actions)
        self._refuse(
            f"run {self._what}: unknown argument '{word}'", _close(option, known) or f"{self.prog} --help"
        )

    def error(self, message: str) -> NoReturn:
        branch = self._choice()
        if branch is not None and (choice := _CHOICE.match(message)) is not None:
            word = choice["word"]
            near = _close(word, branch.choices)
            if not near:
                self._refuse_misspelled_option()
            what = f"{self.prog} {word}".partition(" ")[2]
            self._refuse(f"run '{what}': unknown verb", near or f"{self.prog} --help")
        if (missing := _MISSING.match(message)) is not None:
            if missing["names"] == "VERB":
                self.print_help(sys.stderr)
                self.exit(2)
            names = missing["names"]
            wanted = names if branch is None else f"{names}: {', '.join(branch.choices)}"
            be = "are" if ", " in names else "is"
            self._refuse(f"run {self._what}: {names} {be} missing", f"give {wanted}; {self.prog} --help")
        if (argument := _ARGUMENT.match(message)) is not None:
            self._refuse_value(**argument.groupdict())
        self._refuse(f"run {self._what}: {message}", f"{self.prog} --help")

    def _refuse_misspelled_option(self) -> None:
        """`bench --requets 1`: argparse takes the value for an action, and complains of that."""
        options = (word for word in self._words if word.startswith("--") and len(word) > 2)
        for word in options:
            if word.partition("=")[0] not in self._option_string_actions:
                self.refuse_word(word)

    def _refuse_value(self, name: str, why: str) -> NoReturn:
        action = next(its for its in self._actions if argparse._get_action_name(its) == name)
        wanted = getattr(action.type, "wanted", action.metavar or "a value")
        remedy = f"give {wanted}"
        if action.choices is not None:
            remedy = f"choose one of {', '.join(map(str, action.choices))}"
            why = why.partition(" (choose from")[0]
        elif why.startswith("not allowed with"):
            remedy = "remove one of the two"
        elif why.startswith("expected"):
            why = "its value is missing"
        self._refuse(f"run {self._what}: {name}: {why}", f"{remedy}; {self.prog} --help")

    @property
    def _what(self) -> str:
        """The verb and its subcommand: `key add`."""
        return self.prog.partition(" ")[2] or self.prog

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        self.exit(2, f"cannot {what}\n{remedy}\n")


def _close(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{found[0]}'?" if found else ""


# --- Options that select another machine than this one. ---


def add_machine(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--root", type=Path, metavar="DIR", help="read /sys and /proc of another machine under DIR"
    )
    which.add_argument(
        "--snapshot", type=Path, metavar="FILE",
        help="read the machine that `topology snapshot` saved in FILE",
    )  # fmt: skip
    which.add_argument(
        "--machine",
        metavar="NAME",
        help="use a built-in machine such as epyc-9755-2p, or a .toml file that describes one",
    )


def machine_of(args: argparse.Namespace) -> Topology | None:
    """The machine that the options select; None for this one. Raises LauncherError."""
    if args.machine is not None:
        from launcher.machine.named import find_topology  # noqa: PLC0415  heavy

        return find_topology(args.machine)
    if args.snapshot is not None:
        from launcher.machine.snapshot import read_snapshot  # noqa: PLC0415  heavy

        return read_snapshot(args.snapshot)
    if args.root is None or args.root == Path("/"):
        return None
    from launcher.machine import sysfs  # noqa: PLC0415  heavy

    return sysfs.read(args.root)


_CLEAR: Final = "\r\x1b[K"


class Output:
    """Lines for a person. One that nobody reads any longer ends no run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._terminal = stream.isatty()

    def show(self, text: str) -> None:
        """On a terminal: a line that the next one replaces."""
        if self._terminal:
            self._write(f"{_CLEAR}{text}")

    def print(self, *lines: str) -> None:
        self._write((_CLEAR if self._terminal else "") + "\n".join(lines) + "\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, OutputError):
            self._stream.write(text)
            self._stream.flush()
