"""Runs `uv pip install` as this machine's pip would install: a fifth of pip's time for vLLM and torch.

    python scripts/uv_pip.py ARGUMENT...

uv does not read pip's configuration, so that its settings are handed over as options. Where one has no counterpart,
and where uv is not in this environment, it exits with 3 and installs nothing: then pip is to be used.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

UNSUITABLE: Final = 3
# pip's settings that uv has an option for; a setting of several words is several options.
OPTIONS: Final = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
FLAGS: Final = {"no-index": "--no-index"}
VARIABLES: Final = {
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
PROXIES: Final = frozenset({"all_proxy", "http_proxy", "https_proxy", "no_proxy"})
# They change how pip talks, caches or compiles, and not which release it installs; the settings in a config-file are listed.
WITHOUT_EFFECT: Final = {
    "break-system-packages", "cache-dir", "config-file", "disable-pip-version-check", "log", "no-cache-dir", "no-color",
    "no-compile", "no-input", "no-python-version-warning", "no-warn-script-location", "prefer-binary", "progress-bar",
    "quiet", "require-virtualenv", "resume-retries", "retries", "root-user-action", "verbose",
}  # fmt: skip
# As pip does: the best version of all indexes, not the first index that knows the package.
ALWAYS: Final = ("--index-strategy", "unsafe-best-match", "--no-progress", "--no-config")


class UnsuitableError(Exception):
    """A setting of pip's that uv cannot be told."""


def translated(settings: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """uv's options and environment for the lines of `pip config list`, e.g. "global.index-url='https://…'".

    Of a setting that stands in several files and in the environment each value counts where it can be given several
    times; of others the environment's, which pip lists first, as pip has it."""
    options: list[str] = []
    variables: dict[str, str] = {}
    seen: set[str] = set()
    for line in settings:
        key, _, quoted = line.partition("=")
        name = key.rpartition(".")[2]
        value = str(ast.literal_eval(quoted))
        if key.startswith(("download.", "list.", "freeze.", "wheel.")) or name in WITHOUT_EFFECT:
            continue
        if name in VARIABLES:
            variables.setdefault(VARIABLES[name], value)
        elif name in FLAGS:
            if value.lower() in {"1", "true", "yes", "on"}:
                options.append(FLAGS[name])
        elif name not in OPTIONS:
            raise UnsuitableError(f"pip's setting {key} has no counterpart in uv")
        elif name != "index-url" or name not in seen:
            for each in value.split():
                if (OPTIONS[name], each) not in pairwise(options):
                    options += [OPTIONS[name], each]
        seen.add(name)
    return options, variables


def environment(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """uv's environment: a variable that is set already stays. But pip ignores those for proxies where it has a `proxy` of
    its own that is not empty, and uv would take https_proxy before ALL_PROXY."""
    ignored = PROXIES if variables.get("ALL_PROXY") else frozenset()
    own = {name: value for name, value in variables.items() if value or name != "ALL_PROXY"}
    return {**own, **{name: value for name, value in environ.items() if name.lower() not in ignored}}


def main(arguments: list[str]) -> int:
    """The exit code of uv, or 3."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        print(f"there is no {uv}", file=sys.stderr)
        return UNSUITABLE
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    try:
        options, variables = translated(listed.splitlines())
    except UnsuitableError as error:
        print(error, file=sys.stderr)
        return UNSUITABLE
    if "--index-url" in arguments and "--index-url" in options:
        at = options.index("--index-url")
        del options[at : at + 2]
    command = [str(uv), "pip", "install", "--python", sys.executable, *ALWAYS, *options, *arguments]
    return subprocess.run(command, env=environment(variables, os.environ), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
