"""Shows that the gate sees faults: takes single lines out of copies of the launcher, and runs the tests that mirror them.

    PYTHONPATH=tests .venv/bin/python -m support.planted_faults

Prints a line for each fault; exits with 1 if the tests pass with one of them. Those tests are part of the lanes `unit` and
`compiled`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TREE: Final = (
    "launcher",
    "tests",
    "docs",
    "configs",
    "scripts",
    "systemd",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
)


@dataclass(frozen=True)
class Fault:
    """A line of a module, which is there once, and where its tests are."""

    module: str
    line: str
    tests: tuple[str, ...]


FAULTS: Final = (
    Fault("proxy/request/retry_policy.py", "failures.rounds += 1", ("tests/proxy/request",)),
    Fault("plan/strategies.py", "groups = even_out(groups, sizes)", ("tests/plan",)),
    Fault("instances/lifecycle.py", "slot = replace(slot, intent=Intent.DRAIN, restarting=False)", ("tests/instances",)),
    Fault(
        "proxy/http1/requests.py", 'raise _bad_framing("it has both Content-Length and Transfer-Encoding")',
        ("tests/proxy/http1", "tests/proxy/end_to_end"),
    ),
    Fault("base/writer.py", "self.refused += 1", ("tests/base",)),
    Fault("accounts/ledger_file.py", "self._last += len(rows)", ("tests/accounts",)),
    Fault("dashboard/server.py", '"Cross-Origin-Resource-Policy": "same-origin",', ("tests/dashboard",)),
)  # fmt: skip


def plant(tree: Path, fault: Fault) -> None:
    """Comments the line out. Raises ValueError if it is not there once."""
    file = tree / "launcher" / fault.module
    lines = file.read_text(encoding="utf-8").splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.strip() == fault.line)
    indent = lines[at][: -len(lines[at].lstrip())]
    lines[at] = f"{indent}# {fault.line}" if fault.line.endswith(",") else f"{indent}pass  # {fault.line}"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def first_failure(tree: Path, tests: tuple[str, ...]) -> str | None:
    """The first of the gate's tests that fails; None if all pass."""
    gate = "not budget and not release and not long"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--processes", "2", "-p", "no:cacheprovider", "-m", gate, *tests],
        cwd=tree, check=False, capture_output=True, text=True,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    if done.returncode and not found:
        raise RuntimeError(done.stdout + done.stderr)
    return found[0].split(" - ")[0] if found else None


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of what the tests need."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in TREE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        yield tree


def main() -> int:
    """Plant each fault in a copy of its own; before, the tests pass without one."""
    with copied() as tree:
        every = tuple(dict.fromkeys(test for fault in FAULTS for test in fault.tests))
        if failed := first_failure(tree, every):
            print(f"without a fault: {failed}")
            return 1
    unseen = 0
    for fault in FAULTS:
        with copied() as tree:
            plant(tree, fault)
            failed = first_failure(tree, fault.tests)
        unseen += failed is None
        print(f"{fault.module}: {fault.line}\n    {failed or 'NOT SEEN: all tests pass'}", flush=True)
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
