"""`numa-launcher bundle`: one archive for a bug report, without secrets."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import gzip
import importlib.metadata
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

import launcher
from launcher.base.errors import LauncherError, reason
from launcher.base.redaction import Redactor, secret_parts
from launcher.base.text import printable_lines
from launcher.base.text_files import read_toml
from launcher.cli import options, why
from launcher.cli import status as status_table
from launcher.config.loading import load_config, secret_values, shown
from launcher.config.schema import Config, Engine
from launcher.control.client import ControlClient
from launcher.daemon.deployment import build_deployment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE",
        help='write the archive (tar.gz) to FILE; "-" is standard output (default: ./numa-launcher-bundle-TIME.tar.gz)',
    )  # fmt: skip
    parser.add_argument(
        "-n", "--lines", type=options.count, default=2000, metavar="N",
        help="include the last N lines of each log (default: 2000)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write the archive and print its contents. Works without a daemon, too."""
    now = time.time()
    name = args.output or time.strftime("numa-launcher-bundle-%Y%m%d-%H%M%S.tar.gz", time.localtime(now))
    if name != "-":
        _check_free(Path(name))
    bundle = collect(_client(args), args.config or options.default_config(), args.lines, now)
    data = bundle.pack(now)
    if name == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        _write(Path(name), data)
    print(to_text(bundle, name, len(data)), file=sys.stderr if name == "-" else sys.stdout)
    return 0


def _client(args: argparse.Namespace) -> ControlClient:
    """An unusable configuration must not prevent a bundle."""
    try:
        return options.client_of(argparse.Namespace(**vars(args), json=True))
    except LauncherError:
        return options.client_of(argparse.Namespace(socket=options.default_socket(), json=True))


def _check_free(file: Path) -> None:
    if file.exists():
        raise LauncherError(f"cannot write '{file}': the file exists", "choose another file with -o")


def _write(file: Path, data: bytes) -> None:
    try:
        # Mode 0600 and never overwriting a file: a bundle contains log lines.
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as opened:
                opened.write(data)
        except OSError:  # remove an incomplete bundle
            file.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LauncherError(
            f"cannot write '{file}': {reason(error)}",
            "choose a file with -o in an existing, writable folder with free space",
        ) from None


def to_text(bundle: Bundle, name: str, size: int) -> str:
    from launcher.base.text import (  # noqa: PLC0415
        counted,
        format_size,
        table,
    )

    rows = [("FILE", "SIZE", "CONTENT")]
    rows += [(part.name, format_size(len(part.data)), part.what) for part in bundle.parts]
    lines = [*table(rows), ""]
    lines += [f"missing: {name}: {why}" for name, why in bundle.missing]
    lines.append(f"masked: {counted(bundle.masked, 'place')} that contained or looked like a secret")
    lines += [f"warning: {note}" for note in bundle.notes]
    lines += ["", f"wrote {'standard output' if name == '-' else name}: {format_size(size)}"]
    if name != "-":
        lines += [
            "Review it before you send it: names of models, users and files, and addresses are not masked.",
            f"    mkdir look && tar -xzf {name} -C look && less look/*/*.txt",
        ]
    return "\n".join(lines)


# --- The parts of a bundle, collected from the daemon where it answers, else from this host. ---
#
# Every text passes a `Redactor` that knows the secrets of the configuration. Answers of the daemon have already passed the
# daemon's own Redactor, which can read files that this user cannot.

# Time for one answer of the daemon, which may be hung.
ANSWER_S: Final = 10.0
# Size of one part; of a longer part the end is kept.
MAX_PART_BYTES: Final = 8 * 1024**2
JOURNAL_S: Final = 20.0
# The daemon's unit and those of its instances.
_UNITS: Final = ("numa-launcher.service", "numa-launcher-slot*.service")
# A directory while systemd runs: sd_booted(3).
SYSTEMD_RUNS: Final = Path("/run/systemd/system")
_DISTRIBUTIONS: Final = ("aiohttp", "dbus-fast", "msgspec", "numpy", "psutil", "systemd-python", "uvloop")


class Part(Struct, frozen=True):
    name: str
    what: str
    data: bytes


class Bundle(Struct):
    parts: list[Part] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(part, why)"""
    notes: list[str] = field(default_factory=list)
    redactor: Redactor = field(default_factory=Redactor)

    @property
    def masked(self) -> int:
        return sum(part.data.count(b"<redacted>") for part in self.parts)

    def add(self, name: str, what: str, make: Callable[[], Any]) -> None:
        """Add a part of bytes, text, or a value to encode as JSON. A part that fails is listed as missing."""
        try:
            made = make()
        except LauncherError as error:
            self.missing.append((name, self.redactor.text(f"{error.message}; {error.remedy}")))
            return
        except Exception as error:  # one failing part must not prevent the bundle
            self.missing.append((name, self.redactor.text(f"{type(error).__name__}: {error}")))
            return
        if isinstance(made, str):
            made = printable_lines(self.redactor.text(made)).encode()[-MAX_PART_BYTES:]
        elif not isinstance(made, bytes):
            made = json.dumps(self.redactor.tree(made), indent=1).encode() + b"\n"
        self.parts.append(Part(name, what, made))

    def pack(self, now: float) -> bytes:
        """A tar.gz with one folder; it names neither user nor host."""
        folder = time.strftime("numa-launcher-bundle-%Y%m%d-%H%M%S", time.localtime(now))
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for part in (self._contents(now), *self.parts):
                info = tarfile.TarInfo(f"{folder}/{part.name}")
                info.size, info.mtime, info.mode = len(part.data), int(now), 0o600
                tar.addfile(info, io.BytesIO(part.data))
        return gzip.compress(raw.getvalue(), mtime=int(now))

    def _contents(self, now: float) -> Part:
        at = dt.datetime.fromtimestamp(now, tz=dt.UTC).isoformat(timespec="seconds")
        lines = [f"numa-launcher {launcher.__version__}: bundle for a bug report, created {at}", ""]
        lines += [f"{part.name}: {part.what}" for part in self.parts]
        lines += ["", *(f"missing: {name}: {why}" for name, why in self.missing)]
        lines += [f"warning: {note}" for note in self.notes]
        return Part("README.txt", "list of contents", ("\n".join(lines) + "\n").encode())


def collect(client: ControlClient, path: Path, lines: int, now: float) -> Bundle:
    """All parts. `path`: the configuration file to use when the daemon does not answer."""
    bundle = Bundle()
    config = _config(bundle, path)
    bundle.add("versions.json", "versions of numa-launcher, Python, kernel and libraries", _versions)
    bundle.add("doctor.txt", "output of `doctor`", lambda: _doctor(config))
    bundle.add("topology.txt", "output of `topology`", _topology)
    what = "snapshot of the machine, for `plan --snapshot FILE`"
    bundle.add("topology-snapshot.tar.gz", what, lambda: _snapshot(now))
    status = _from_daemon(bundle, client, lines, now)
    if status is None and config is not None:
        _from_file(bundle, config, path)
    if config is None and path.exists():
        read = partial(read_toml, path, "configuration")
        bundle.add("config-file.json", f"content of {path}, secrets masked", read)
    bundle.add("journal.txt", "latest journal lines of the daemon and its instances", lambda: _journal(lines))
    return bundle


def _config(bundle: Bundle, path: Path) -> Config | None:
    """Load the configuration, and give the Redactor the secrets that this user can read."""
    values = [part for name, value in os.environ.items() for part in secret_parts(name, value)]
    unread: list[str] = []
    try:
        config = load_config(path, environ=os.environ)
    except LauncherError as error:
        why_not = Redactor().text(error.message)
        bundle.notes.append(
            f"{why_not}: in parts that are not from the daemon, secrets are recognised by their form only"
        )
        config = None
    if config is not None:
        values, unread = secret_values(config, os.environ)
    bundle.notes += [
        f"cannot read '{name}': secrets in it are recognised by their form only" for name in unread
    ]
    bundle.redactor = Redactor(values)
    return config


def _from_daemon(bundle: Bundle, client: ControlClient, lines: int, now: float) -> dict[str, Any] | None:
    try:
        status = client.get("/status?redact=1", ANSWER_S)
    except LauncherError as error:
        parts = "status, running plan and configuration, events, causes, metrics, logs of the instances"
        bundle.missing.append((parts, error.message))
        return None
    slots = [slot["slot"] for slot in status["slots"]]

    def ask(path: str) -> dict[str, Any]:
        return client.get(path, ANSWER_S)

    bundle.add("status.txt", "output of `status`", lambda: status_table.to_text(status, now, None) + "\n")
    bundle.add("status.json", "output of `status --json`", lambda: status)
    for name, what, path in (
        ("config.json", "effective configuration of the daemon, secrets masked", "/config?redact=1"),
        ("plan.json", "current plan of the daemon", "/plan?redact=1"),
        ("reload.json", "state of the latest reload", "/reload?redact=1"),
        ("events.json", "actions of the daemon and commands of operators", "/events?tail=1000&redact=1"),
    ):
        bundle.add(name, what, partial(ask, path))
    bundle.add("metrics.txt", "metrics page", lambda: client.text("/metrics?redact=1", ANSWER_S))
    logs: dict[int, list[dict[str, Any]]] = {}

    def log_of(slot: int) -> str:
        logs[slot] = ask(f"/slots/{slot}/logs?tail={lines}&redact=1")["lines"]
        return "".join(map(_line, logs[slot]))

    for slot in slots:
        bundle.add(f"logs/slot-{slot}.txt", "latest log lines of the instance", partial(log_of, slot))
    bundle.add("causes.txt", "output of `why` for each slot", lambda: _causes(status, logs, now))
    return status


def _line(line: dict[str, Any]) -> str:
    at = dt.datetime.fromtimestamp(line["time"], tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{at} g{line['generation']} | {line['text']}\n"


def _causes(status: dict[str, Any], logs: dict[int, list[dict[str, Any]]], now: float) -> str:
    def of(slot: dict[str, Any]) -> Iterator[dict[str, Any]]:
        found = logs.get(slot["slot"], [])
        return (line for line in found if line["generation"] == slot["last_cause_generation"])

    return "\n\n".join(why.to_text(slot, list(of(slot))[-50:], now) for slot in status["slots"]) + "\n"


def _versions() -> dict[str, Any]:
    uname = platform.uname()  # `node`, the host's name, is left out
    found: dict[str, Any] = {
        "numa-launcher": launcher.__version__,
        "python": sys.version,
        "kernel": f"{uname.system} {uname.release} {uname.version} {uname.machine}",
        "libc": " ".join(platform.libc_ver()),
    }
    with contextlib.suppress(OSError):
        found["os"] = platform.freedesktop_os_release().get("PRETTY_NAME")
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _doctor(config: Config | None) -> str:
    from launcher.doctor.checks import examine  # noqa: PLC0415  heavy
    from launcher.doctor.gather import gather  # noqa: PLC0415  heavy
    from launcher.doctor.rows import to_text  # noqa: PLC0415  heavy
    from launcher.engines.make import engine_type  # noqa: PLC0415  heavy

    engine = Engine() if config is None else config.engine
    facts = gather(engine, proxy=None if config is None else config.proxy)
    return to_text(examine(facts, engine_type(engine.kind).checks())) + "\n"


def _topology() -> str:
    from launcher.machine import sysfs, topology_text  # noqa: PLC0415  heavy

    return topology_text.to_text(sysfs.read()) + "\n"


def _snapshot(now: float) -> bytes:
    from launcher.machine import snapshot  # noqa: PLC0415  heavy

    today = dt.datetime.fromtimestamp(now, tz=dt.UTC).date().isoformat()
    return snapshot.capture(Path("/"), date=today, version=launcher.__version__).data


def _from_file(bundle: Bundle, config: Config, path: Path) -> None:
    what = f"effective configuration from {path}, secrets masked"
    bundle.add("config.json", what, lambda: shown(config, bundle.redactor))
    bundle.add("plan.json", "output of `plan --json`", lambda: build_deployment(config).to_json())


def _journal(lines: int) -> str:
    program = shutil.which("journalctl")
    if program is None or not SYSTEMD_RUNS.is_dir():
        raise LauncherError("cannot read the journal: systemd is not running", "add the output of the daemon")
    units = [word for unit in _UNITS for word in ("--unit", unit)]
    done = subprocess.run(
        [program, *units, f"--lines={lines}", "--no-pager", "--no-hostname", "--utc", "--output=short-iso"],
        capture_output=True, text=True, errors="replace", timeout=JOURNAL_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise LauncherError(
            f"cannot read the journal: journalctl exited with {done.returncode}: {done.stderr.strip()[:200]}",
            "run it by hand: journalctl -u numa-launcher",
        )
    return done.stdout
