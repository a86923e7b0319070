"""Whom an instance takes for the client: its own word counts only behind a trusted proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.fakes import SOON_S
from support.proxy_under_test import Build, ProxyUnderTest

from launcher.base.errors import LauncherError
from launcher.config.loading import load_config

CLAIMS = (
    ("X-Forwarded-For", "203.0.113.9"),
    ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Host", "evil.example"),
    ("x-forwarded-port", "443"),
    ("X-Forwarded-Prefix", "/x"),
    ("Forwarded", "for=203.0.113.9;proto=https"),
    ("X-Real-IP", "203.0.113.9"),
)
NAMES = {name.lower() for name, _ in CLAIMS}


async def ask(
    proxy: ProxyUnderTest, *fields: tuple[str, str], path: str | None = None
) -> dict[str, list[str]]:
    """Send a request with these fields; those of them that the instance gets."""
    engine = await proxy.engine(0)
    body = b'{"model":"m"}'
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\n{lines}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    if path is None:
        reader, writer = await proxy.raw(head.encode() + body)
    else:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(head.encode() + body)
    async with asyncio.timeout(SOON_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    got: dict[str, list[str]] = {}
    for name, value in engine.calls[-1].headers:
        if name.lower() in NAMES:
            got.setdefault(name.lower(), []).append(value)
    return got


@pytest.mark.parametrize("trusted", [(), ("10.0.0.0/8", "unix")])
async def test_forwarded_fields_of_an_untrusted_client_are_removed(
    build: Build, trusted: tuple[str, ...]
) -> None:
    proxy = await build(trusted_proxies=trusted)
    assert await ask(proxy, *CLAIMS) == {}


async def test_forwarded_fields_of_a_trusted_proxy_pass_with_its_address(build: Build) -> None:
    proxy = await build(trusted_proxies=("127.0.0.0/8",))
    got = await ask(proxy, *CLAIMS)
    assert got == {
        "x-forwarded-for": ["203.0.113.9, 127.0.0.1"],
        "x-forwarded-proto": ["https"],
        "x-forwarded-host": ["evil.example"],
        "x-forwarded-port": ["443"],
        "x-forwarded-prefix": ["/x"],
        "forwarded": ["for=203.0.113.9;proto=https, for=127.0.0.1"],
        "x-real-ip": ["203.0.113.9"],
    }


async def test_the_access_log_has_no_address(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "launcher.access")
    proxy = await build(trusted_proxies=("127.0.0.0/8",))
    await ask(proxy, *CLAIMS)
    (record,) = [record for record in caplog.records if record.name == "launcher.access"]
    said = f"{record.getMessage()} {record.__dict__}"
    assert "127.0.0.1" not in said
    assert "203.0.113.9" not in said


@pytest.mark.parametrize("trusted", [False, True])
async def test_proxies_on_a_unix_socket(build: Build, tmp_path: Path, trusted: bool) -> None:
    path = str(tmp_path / "front.sock")
    proxy = await build(listen=(f"unix:{path}",), trusted_proxies=("unix",) if trusted else ("127.0.0.1",))
    got = await ask(proxy, ("X-Forwarded-For", "203.0.113.9"), path=path)
    assert got == ({"x-forwarded-for": ["203.0.113.9"]} if trusted else {})


@pytest.mark.parametrize("entry", ["nonsense", "10.0.0.1/8", "10.0.0.0/33", "", "unix:/run/x"])
def test_invalid_trusted_proxies(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[[models]]\nname = "m"\npath = "/m"\n[proxy]\ntrusted_proxies = ["{entry}"]\n')
    with pytest.raises(LauncherError, match=r"proxy\.trusted_proxies") as caught:
        load_config(path, environ={})
    assert f"'{entry}'" in caught.value.message
    assert "unix" in caught.value.remedy
