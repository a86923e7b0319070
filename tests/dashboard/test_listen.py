"""Where the dashboard may listen, and what it says where it may not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launcher.base.address import Address, TcpAddress, UnixAddress, in_url
from launcher.base.errors import LauncherError
from launcher.dashboard.listen import bind, link, parse


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8430", TcpAddress("127.0.0.1", 8430)), ("localhost:1", TcpAddress("127.0.0.1", 1)),
        ("127.8.0.1:0", TcpAddress("127.8.0.1", 0)), ("[::1]:8430", TcpAddress("::1", 8430)),
        ("unix:/run/x.sock", UnixAddress("/run/x.sock")),
    ],
)  # fmt: skip
def test_addresses(text: str, address: Address) -> None:
    assert parse(text) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.0.0.0:8430", "other machines could reach it"), ("192.0.2.7:80", "other machines could reach it"),
        ("[::]:8430", "other machines could reach it"), ("example.com:80", "not a loopback address"),
        ("8430", "not an address with a port"), ("127.0.0.1", "not an address with a port"),
        ("127.0.0.1:x", "not an address with a port"), ("127.0.0.1:65536", "not an address with a port"),
        ("127.0.0.1:٣", "not an address with a port"), (":8430", "not a loopback address"), ("unix:", "the path is missing"),
    ],
)  # fmt: skip
def test_addresses_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(LauncherError, match=why) as caught:
        parse(text)
    assert f"'{text}'" in caught.value.message
    assert "127.0.0.1:PORT" in caught.value.remedy


def test_a_port_in_use_is_named() -> None:
    with bind(TcpAddress("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            LauncherError, match=f"cannot listen on '127.0.0.1:{port}': address already in use"
        ) as caught:
            bind(TcpAddress("127.0.0.1", port))
    assert "127.0.0.1:0 takes a free port" in caught.value.remedy


def test_a_socket_is_for_its_group(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    before = os.umask(0o022)
    try:
        with bind(UnixAddress(str(path))) as sock:
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert link(sock, None) == f"unix:{path}"
            with pytest.raises(LauncherError, match="another process answers there"):
                bind(UnixAddress(str(path)))
        with bind(UnixAddress(str(path))):  # left by a dashboard that was killed
            pass
    finally:
        os.umask(before)


def test_other_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(LauncherError, match="address already in use"):
        bind(UnixAddress(str(path)))
    assert path.read_text() == "mine"
    with pytest.raises(LauncherError, match="no such file or directory") as caught:
        bind(UnixAddress(str(tmp_path / "none" / "d.sock")))
    assert "a folder that exists" in caught.value.remedy


def test_the_token_is_in_the_fragment() -> None:
    with bind(TcpAddress("127.0.0.1", 0)) as sock:
        assert link(sock, "abc") == f"http://127.0.0.1:{sock.getsockname()[1]}/#token=abc"


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_addresses_in_a_link(host: str, shown: str) -> None:
    """Not bound: a container may have no IPv6."""
    assert in_url(host) == shown
