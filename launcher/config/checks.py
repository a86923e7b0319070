"""Rules on `[proxy]` and models' names that types cannot express."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from typing import Final
from urllib.parse import urlsplit

from launcher.base.errors import LauncherError
from launcher.base.money import picos, picos_per_token
from launcher.config.schema import Config, Overflow, Runtime, SpawnerKind, Usage
from launcher.config.usage_schema import Cost, Telemetry

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
    _check_endpoints(config, origin_of)


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


def _check_endpoints(config: Config, origin_of: Callable[[str], str]) -> None:
    endpoints, models = config.proxy.overflow, {model.name for model in config.models}
    names: set[str] = set()
    for number, overflow in enumerate(endpoints):
        at = "proxy.overflow" if len(endpoints) == 1 else f"proxy.overflow[{number}]"
        _check_overflow(overflow, at, models, origin_of)
        _check_prices(overflow, at, config.usage, origin_of)
        name = overflow.endpoint
        if name in names:
            raise LauncherError(
                f"cannot use {origin_of(at)}: two [[proxy.overflow]] have the name '{name}'",
                "give each endpoint a different name; without one it has that of its host",
            )
        names.add(name)


def _check_overflow(overflow: Overflow, at: str, models: set[str], origin_of: Callable[[str], str]) -> None:
    try:
        named = _BASE_URL.fullmatch(overflow.url) is not None and bool(overflow.endpoint)
    except ValueError:
        named = False
    if not named:
        raise LauncherError(
            f"cannot use {origin_of(f'{at}.url')}: {at}.url = '{overflow.url}' is not a base URL",
            'write "https://host/v1", without user, query and fragment; put the API key into the file named by api_key_file',
        )
    for name in overflow.models:
        if name not in models:
            raise LauncherError(
                f"cannot use {origin_of(f'{at}.models')}: {at}.models names '{name}', which is not a configured model",
                f"use the names of [[models]]: {', '.join(sorted(models))}",
            )
    try:
        overflow.predicted_s  # noqa: B018
    except ValueError:
        raise LauncherError(
            f"cannot use {origin_of(f'{at}.when')}: {at}.when = '{overflow.when}' is no condition",
            'write "full", or "predicted_ttft > 4s" (s or ms)',
        ) from None


def _check_prices(overflow: Overflow, at: str, usage: Usage, origin_of: Callable[[str], str]) -> None:
    prices = {"input": overflow.input, "output": overflow.output, "cached": overflow.cached}
    for key, price in (*prices.items(), ("max_per_day", overflow.max_per_day)):
        try:
            if price is not None:
                (picos if key == "max_per_day" else picos_per_token)(price)
        except ValueError as error:
            raise LauncherError(
                f"cannot use {origin_of(f'{at}.{key}')}: {at}.{key}: {error}",
                "write it with 12 decimals at most"
                if key == "max_per_day"
                else "write it with 6 decimals at most",
            ) from None
    given = [key for key, price in prices.items() if price is not None]
    missing = [key for key in ("input", "output") if prices[key] is None]
    if missing and (given or overflow.max_per_day is not None):
        wanted = "max_per_day" if overflow.max_per_day is not None else given[0]
        raise LauncherError(
            f"cannot use {origin_of(f'{at}.{wanted}')}: {at}.{wanted} without the price {' and '.join(missing)}",
            "set input and output, the endpoint's prices of a million prompt and output tokens",
        )
    if overflow.max_per_day is not None and not usage.enabled:
        raise LauncherError(
            f"cannot use {origin_of(f'{at}.max_per_day')}: {at}.max_per_day without the usage ledger",
            "set usage.enabled = true: the ledger knows what was spent before a restart",
        )


# --- Rules on `[cost]` that types cannot express: amounts that can be counted exactly, energy that has a price,
# dates.

MAX: Final = 10**12
"""Of an amount, in the currency's unit."""
Origin = Callable[[str], str]


def check_cost(cost: Cost, origin_of: Origin) -> None:
    """Raises LauncherError. `origin_of` says where a key was set."""
    for key, value, read in (*_amounts(cost), *_prices(cost)):
        try:
            if read(value) > picos(MAX):
                raise ValueError(f"{value:g} is too much")
        except ValueError as error:
            raise LauncherError(
                f"cannot use {origin_of(key)}: {key}: {error}", "write an amount such as 0.79"
            ) from None
    if cost.watts is not None and cost.price_per_kwh is None:
        raise _unpaired(origin_of, "watts", "price_per_kwh", "0.30")
    if cost.price_per_kwh is not None and cost.watts is None:
        raise _unpaired(origin_of, "price_per_kwh", "watts", '800, or "measured"')
    for number, reference in enumerate(cost.reference):
        if reference.date is not None:
            _check_date(reference.date, f"cost.reference.{number}.date", origin_of)


Amount = tuple[str, float, Callable[[float], int]]


def _amounts(cost: Cost) -> Iterator[Amount]:
    for key in ("hourly", "purchase", "price_per_kwh"):
        value = getattr(cost, key)
        if value is not None:
            yield f"cost.{key}", value, picos


def _prices(cost: Cost) -> Iterator[Amount]:
    tables = {f"cost.reference.{number}": each for number, each in enumerate(cost.reference)}
    for table, prices in (*tables.items(), *([] if cost.price is None else [("cost.price", cost.price)])):
        for key in ("input", "cached", "output"):
            value = getattr(prices, key)
            if value is not None:
                yield f"{table}.{key}", value, picos_per_token


def _unpaired(origin_of: Origin, given: str, missing: str, example: str) -> LauncherError:
    return LauncherError(
        f"cannot use {origin_of(f'cost.{given}')}: cost.{given} without cost.{missing}",
        f"set {missing} = {example}, or remove {given}",
    )


def _check_date(text: str, key: str, origin_of: Origin) -> None:
    try:
        dt.date.fromisoformat(text)
    except ValueError as error:
        raise LauncherError(
            f"cannot use {origin_of(key)}: {key} = '{text}': {error}", "write a day such as 2026-01-31"
        ) from None


# --- Rules on `engine.runtime`, `engine.image` and `engine.runtime_args` that types cannot express. ---

# Options that only the launcher sets -> remedy.
_RESERVED: Final = {
    "--name": "remove it: the launcher names a container after its slot and finds it by that name",
    "--rm": "remove it: the launcher removes a container after it has read why it exited",
    "--detach": "remove it: the launcher reads output and exit status from the client, which must keep running",
    "-d": "remove it: the launcher reads output and exit status from the client, which must keep running",
    "--init": "remove it: the launcher sets it already",
    "--cpuset-cpus": "remove it: the plan sets it; see [layout]",
    "--cpuset-mems": "remove it: the plan sets it; see [layout]",
    "--entrypoint": "set engine.command instead",
    "--sig-proxy": "remove it: SIGTERM must reach the engine",
    "--pid": "remove it: the launcher finds an instance's main process as the first of its pid namespace",
}


def check_runtime(config: Config, origin_of: Callable[[str], str]) -> None:
    """Raises LauncherError. `origin_of` says where a key was set."""
    engine = config.engine
    if not engine.command:
        raise LauncherError(
            f"cannot use {origin_of('engine.kind')}: engine.kind = '{engine.kind}' without engine.command",
            'set it to the whole command line, for example command = ["my-server", "--port", "{port}", "{model}"]',
        )
    if engine.host_only and engine.runtime is not Runtime.HOST:
        raise LauncherError(
            f"cannot use {origin_of('engine.runtime')}: engine.runtime = '{engine.runtime}' with engine.kind = "
            f"'{engine.kind}': its instances run on the host only",
            'set engine.runtime = "host", or engine.kind = "command" with the whole command line',
        )
    if engine.runtime is Runtime.HOST:
        for key, value in (("image", engine.image), ("runtime_args", engine.runtime_args)):
            if value:
                raise LauncherError(
                    f"cannot use {origin_of(f'engine.{key}')}: engine.{key} applies to containers "
                    "only, and engine.runtime = 'host'",
                    f'set engine.runtime = "podman" or "docker", or remove {key}',
                )
        return
    if engine.image is None:
        raise LauncherError(
            f"cannot use {origin_of('engine.runtime')}: engine.runtime = '{engine.runtime}' without engine.image",
            'set it, for example image = "docker.io/vllm/vllm-openai-cpu:v0.32.0-x86_64"',
        )
    if config.supervision.spawner is SpawnerKind.SYSTEMD:
        raise LauncherError(
            f"cannot use {origin_of('supervision.spawner')}: supervision.spawner = 'systemd' cannot be "
            f"combined with engine.runtime = '{engine.runtime}': a unit's limits and signals would reach the client only",
            'set supervision.spawner = "auto" or "direct"',
        )
    for argument in engine.runtime_args:
        flag = argument.partition("=")[0]
        if flag in _RESERVED:
            raise LauncherError(
                f"cannot use {origin_of('engine.runtime_args')}: engine.runtime_args: the launcher sets '{flag}'",
                _RESERVED[flag],
            )


# --- Rules of `[telemetry]` that the schema cannot express. ---

_URL: Final = re.compile(r"https?://[^\s/?#@]+(?:/[^\s?#]*)?")


def check_telemetry(telemetry: Telemetry, origin_of: Callable[[str], str]) -> None:
    """Raises LauncherError."""
    endpoint, key = telemetry.otlp_endpoint, "telemetry.otlp_endpoint"
    if not endpoint:
        return
    try:
        url = urlsplit(endpoint)
        good = _URL.fullmatch(endpoint) is not None and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise LauncherError(
            f"cannot use {origin_of(key)}: {key} = '{endpoint}' is not a base URL",
            'write "http://127.0.0.1:4318", the collector\'s address of OTLP over HTTP, without user, query and fragment',
        )
