"""The wheel's server, as far as it can be judged without the wheel; tests/engine/llama_server runs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launcher.engines.llama_cpp.wheel_server import RELEASES, why_not

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
sys.path = [path for path in sys.path if "-packages" not in path]
from launcher.engines.llama_cpp.wheel_server import main
sys.exit(main())
"""


def test_only_known_releases_are_started() -> None:
    """Their symbols and structures are private: of another release they would be guessed."""
    (known,) = RELEASES
    assert why_not(known) is None
    for found in (None, "2099.1.1"):
        refused = why_not(found)
        assert refused is not None
        assert refused[1] == "pip install 'numa-launcher[llama-cpp]'"
    assert why_not("2099.1.1") == (
        f"xllamacpp 2099.1.1 is installed, but only {known} is known",
        "pip install 'numa-launcher[llama-cpp]'",
    )


def test_the_extra_pins_a_known_release() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (pinned,) = tomllib.loads(text)["project"]["optional-dependencies"]["llama-cpp"]
    assert pinned.removeprefix("xllamacpp==") in RELEASES


@pytest.mark.parametrize("argument", ["--version", "--model"])
def test_without_the_wheel_it_says_so(argument: str) -> None:
    """-S: without any installed package."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT, argument],
        capture_output=True, text=True, check=False, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "cannot start llama.cpp's server: the package xllamacpp is not installed",
        "pip install 'numa-launcher[llama-cpp]'",
    ]
