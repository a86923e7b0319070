"""Environments of instances: secret names, and shell commands for a person. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from launcher.engines.base import Launch
from launcher.redaction import MASK, is_secret, is_secret_name, masked_arguments


def secret_names(env: Mapping[str, str]) -> frozenset[str]:
    """Names in `env` whose values must not be printed, including an http_proxy with a password."""
    return frozenset(name for name, value in env.items() if is_secret_name(name) or is_secret(name, value))


def shell_lines(launch: Launch, token_file: str | None = None) -> str:
    """Shell commands with the environment and command line of one instance.

    They first create its folder for sockets. The shell reads HF_TOKEN from `token_file`; other secrets must be in the
    shell's environment, those of arguments as SECRET_1, SECRET_2, ... Values of secrets never appear."""
    words = [] if launch.scratch is None else [f"mkdir -p {shlex.quote(launch.scratch)} &&"]
    for name, value in launch.own_env.items():
        if name not in launch.secrets:
            words.append(f"{name}={shlex.quote(value)}")
        elif name == "HF_TOKEN" and token_file is not None:
            words.append(f'{name}="$(cat {shlex.quote(token_file)})"')
        else:
            words.append(f'{name}="${{{name}:?set it first}}"')
    words.append(" ".join(_shell_words(launch.argv)))
    return " \\\n  ".join(words) + "\n"


def _shell_words(argv: Sequence[str]) -> Iterator[str]:
    count = 0
    for word, shown in zip(argv, masked_arguments(argv), strict=True):
        if word == shown:
            yield shlex.quote(word)
            continue
        first, *rest = (shlex.quote(part) if part else "" for part in shown.split(MASK))
        for part in rest:
            count += 1
            first += f'"${{SECRET_{count}:?set it first}}"{part}'
        yield first
