"""The configuration with secrets masked, and the secrets that it refers to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from launcher.config.schema import Config
from launcher.redaction import Redactor, secret_arguments, secret_parts

# Far more than a token or a PEM file has; the rest is not read.
MAX_SECRET_BYTES: Final = 64 * 1024


def shown(config: Config, redactor: Redactor) -> dict[str, Any]:
    """Every key with its effective value; secrets masked."""
    tree: dict[str, Any] = redactor.tree(msgspec.to_builtins(config))
    return tree


def secret_values(config: Config, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Values that must not leave the host, and the secret files that could not be read.

    The values are those of secret-looking environment variables and arguments of this process and the instances, and the
    contents of files with a token, an API key of another endpoint or a private key. The API keys file has only hashes.
    """
    variables = (*environ.items(), *config.engine.env.items())
    values = [part for name, value in variables for part in secret_parts(name, value)]
    values += secret_arguments((*config.engine.command, *config.engine.args))
    for overflow in config.proxy.overflow:
        values += secret_parts("url", overflow.url)
    unread = []
    for path in _files(config):
        try:
            with path.open("rb") as file:
                values.append(file.read(MAX_SECRET_BYTES).decode(errors="replace"))
        except FileNotFoundError:
            continue
        except OSError:
            unread.append(str(path))
    return values, unread


def _files(config: Config) -> Iterator[Path]:
    proxy = config.proxy
    named = (
        config.engine.hf_token_file,
        proxy.tls_key,
        proxy.tls_certificate if proxy.tls_key is None else None,  # which then contains the key
        *(overflow.api_key_file for overflow in proxy.overflow),
    )
    for name in named:
        if name is not None:
            yield Path(name)
