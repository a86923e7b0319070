"""Rules on `[proxy]` and models' names that types cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import ip_network
from typing import Final

from launcher.config.schema import Config, Overflow
from launcher.errors import LauncherError

# As browsers send it: scheme, host and port only (RFC 6454 section 6.1).
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/,?#@]+/?")
_BASE_URL: Final = re.compile(r"https?://[^\s/?#@]+(?:/[^\s?#]*)?")


def check_proxy(config: Config, origin_of: Callable[[str], str]) -> None:
    _check_names(config, origin_of)
    proxy = config.proxy
    if proxy.tls_key is not None and proxy.tls_certificate is None:
        raise LauncherError(
            f"cannot use {origin_of('proxy.tls_key')}: proxy.tls_key = '{proxy.tls_key}' without tls_certificate",
            "set tls_certificate to the certificate chain",
        )
    for origin in proxy.cors_origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise LauncherError(
                f"cannot use {origin_of('proxy.cors_origins')}: proxy.cors_origins: '{origin}' is not an origin",
                'write "https://host" or "https://host:port", without a path, or "*"',
            )
    _check_trusted(proxy.trusted_proxies, origin_of)
    if proxy.upload_max_bytes < proxy.max_body_bytes:
        raise LauncherError(
            f"cannot use {origin_of('proxy.upload_max_bytes')}: proxy.upload_max_bytes = {proxy.upload_max_bytes} is "
            f"less than max_body_bytes = {proxy.max_body_bytes}",
            "raise upload_max_bytes to max_body_bytes or more",
        )
    if proxy.overflow is not None:
        _check_overflow(proxy.overflow, {model.name for model in config.models}, origin_of)


def _check_names(config: Config, origin_of: Callable[[str], str]) -> None:
    owners = {model.name: model.name for model in config.models}
    for model in config.models:
        for alias in model.aliases:
            owner = owners.setdefault(alias, model.name)
            if owner != model.name or alias == model.name or not alias:
                raise LauncherError(
                    f"cannot use {origin_of('models')}: alias '{alias}' of '{model.name}' is "
                    + (f"already a name of '{owner}'" if alias else "empty"),
                    "give each model different names",
                )


def _check_trusted(entries: tuple[str, ...], origin_of: Callable[[str], str]) -> None:
    for entry in entries:
        try:
            if entry != "unix":
                ip_network(entry)
        except ValueError as error:
            raise LauncherError(
                f"cannot use {origin_of('proxy.trusted_proxies')}: proxy.trusted_proxies: '{entry}' is not a network: "
                f"{error}",
                'write an address, a network such as "10.0.0.0/8", or "unix" for clients on UNIX sockets',
            ) from None


def _check_overflow(overflow: Overflow, names: set[str], origin_of: Callable[[str], str]) -> None:
    if _BASE_URL.fullmatch(overflow.url) is None:
        raise LauncherError(
            f"cannot use {origin_of('proxy.overflow.url')}: proxy.overflow.url = '{overflow.url}' is not a base URL",
            'write "https://host/v1", without user, query and fragment; put the API key into the file named by api_key_file',
        )
    for name in overflow.models:
        if name not in names:
            raise LauncherError(
                f"cannot use {origin_of('proxy.overflow.models')}: proxy.overflow.models names '{name}', "
                "which is not a configured model",
                f"use the names of [[models]]: {', '.join(sorted(names))}",
            )
