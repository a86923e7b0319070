"""Environments of instances: which names are secret, and how a person would type it all. No effects."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from launcher.engines.base import Launch
from launcher.redaction import is_secret_name


def secret_names(env: Mapping[str, str]) -> frozenset[str]:
    """Names in `env` whose values must never be printed."""
    return frozenset(name for name in env if is_secret_name(name))


def shell_lines(launch: Launch, token_file: str | None = None) -> str:
    """The environment and command of one instance, as a person could paste them into a shell.

    Its folder for sockets is made first. HF_TOKEN is read from `token_file` by the shell; other secrets are expected in
    the shell's own environment. Values of secrets never appear.
    """
    words = [] if launch.scratch is None else [f"mkdir -p {shlex.quote(launch.scratch)} &&"]
    for name, value in launch.own_env.items():
        if name not in launch.secrets:
            words.append(f"{name}={shlex.quote(value)}")
        elif name == "HF_TOKEN" and token_file is not None:
            words.append(f'{name}="$(cat {shlex.quote(token_file)})"')
        else:
            words.append(f'{name}="${{{name}:?set it first}}"')
    words.append(shlex.join(launch.argv))
    return " \\\n  ".join(words) + "\n"
