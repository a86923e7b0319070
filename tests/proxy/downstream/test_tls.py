"""TLS: the right certificate for each handshake, and what becomes of bad files."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.certificates import ECDSA, certify
from support.fakes import looked

from launcher.base.errors import LauncherError
from launcher.base.watched_file import RETRY_S
from launcher.proxy.downstream.tls import ServerTls

RSA = ("-newkey", "rsa:2048")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates a (ECDSA), b (RSA), c (ECDSA)."""
    folder = tmp_path_factory.mktemp("tls")
    certify(folder, "a")
    certify(folder, "b", RSA)
    certify(folder, "c")
    return folder


class Shelf:
    """The two files that a configuration names, and what is put there."""

    def __init__(self, store: Path, folder: Path) -> None:
        self._store = store
        self.chain = folder / "chain.pem"
        self.key = folder / "key.pem"

    def put(self, name: str, key_of: str | None = None) -> None:
        shutil.copy(self._store / f"{name}.pem", self.chain)
        shutil.copy(self._store / f"{key_of or name}.key", self.key)


@pytest.fixture
def shelf(store: Path, tmp_path: Path) -> Shelf:
    made = Shelf(store, tmp_path)
    made.put("a")
    return made


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A listener under a ServerTls."""

    def __init__(self, tls: ServerTls, clock: Clock, store: Path) -> None:
        self.tls = tls
        self.clock = clock
        self.store = store
        self.port = 0

    async def shown(
        self, *, later: bool = False, name: str | None = "localhost", **limits: object
    ) -> tuple[str, ...]:
        """Subject of the certificate that a client sees, protocol and ALPN; `later`: a second has passed."""
        if later:
            self.clock.now += 1.1
            assert self.tls.end  # looks for a change
            await asyncio.to_thread(looked)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])
        for key, value in limits.items():
            setattr(context, key, value)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname=name or ""
        )
        found = writer.get_extra_info("ssl_object")
        shown = ssl.DER_cert_to_PEM_cert(found.getpeercert(binary_form=True))
        (made,) = (path.stem for path in self.store.glob("*.pem") if path.read_text() == shown)
        assert await reader.read() == b"hello"
        writer.close()
        await asyncio.to_thread(looked)
        return made, found.version(), found.selected_alpn_protocol()


@pytest.fixture
async def server(shelf: Shelf, store: Path) -> AsyncIterator[Server]:
    clock = Clock()
    made = Server(ServerTls(str(shelf.chain), str(shelf.key), clock=clock), clock, store)

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0, ssl=made.tls.context) as listening:
        made.port = listening.sockets[0].getsockname()[1]
        yield made


async def test_a_handshake(server: Server) -> None:
    assert await server.shown() == ("a", "TLSv1.3", "http/1.1")
    assert await server.shown(maximum_version=ssl.TLSVersion.TLSv1_2) == ("a", "TLSv1.2", "http/1.1")
    assert (await server.shown(name=None))[0] == "a"


@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated")
async def test_old_versions_are_refused(server: Server) -> None:
    with pytest.raises((ssl.SSLError, OSError)):
        await server.shown(minimum_version=ssl.TLSVersion.TLSv1_1, maximum_version=ssl.TLSVersion.TLSv1_1)


async def test_new_files_are_taken_without_a_restart(server: Server, shelf: Shelf) -> None:
    assert (await server.shown())[0] == "a"
    shelf.put("b")
    assert (await server.shown())[0] == "a"  # the files are looked at twice a second
    assert (await server.shown(later=True))[0] == "b"
    assert (await server.shown(name=None))[0] == "b"
    shelf.put("c")
    assert (await server.shown(later=True))[0] == "c"  # ECDSA after RSA
    # No client is served the one before for its kind of key.
    assert (await server.shown(maximum_version=ssl.TLSVersion.TLSv1_2))[0] == "c"


async def test_bad_files_leave_the_old_certificate(
    server: Server, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.put("b", key_of="a")  # half of a renewal
    for _ in range(2):
        server.clock.now += RETRY_S
        assert (await server.shown(later=True))[0] == "a"
    shelf.key.unlink()
    assert (await server.shown(later=True))[0] == "a"
    errors = [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR]
    assert [error.count("keeping the TLS certificate read before") for error in errors] == [1, 1]
    assert "the key is not that of the certificate" in errors[0]
    shelf.put("b")
    assert (await server.shown(later=True))[0] == "b"


def test_one_file_may_hold_both(shelf: Shelf) -> None:
    shelf.chain.write_bytes(shelf.chain.read_bytes() + shelf.key.read_bytes())
    shelf.key.unlink()
    assert ServerTls(str(shelf.chain)).end


def test_errors_at_start(shelf: Shelf, store: Path, tmp_path: Path) -> None:
    def error(certificate: Path, key: Path | None) -> str:
        with pytest.raises(LauncherError) as caught:
            ServerTls(str(certificate), None if key is None else str(key))
        return caught.value.message

    assert (
        error(tmp_path / "no", shelf.key)
        == f"cannot read the TLS file '{tmp_path}/no': no such file or directory"
    )
    assert error(shelf.chain, tmp_path / "no").endswith("no': no such file or directory")
    assert error(tmp_path, None).endswith("is a directory")
    assert error(shelf.chain, store / "b.key").endswith("the key is not that of the certificate")
    assert error(shelf.key, shelf.key).startswith(f"cannot use the TLS certificate '{shelf.key}'")
    empty = tmp_path / "empty"
    empty.touch()
    assert error(empty, shelf.key).startswith(f"cannot use the TLS certificate '{empty}': ")
    chain, key = certify(tmp_path, "locked", ECDSA, "-passout", "pass:secret")
    assert error(chain, key) == f"cannot use the TLS key '{key}': it is encrypted"


def test_a_key_readable_by_others_is_logged(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    shelf.key.chmod(0o644)
    ServerTls(str(shelf.chain), str(shelf.key))
    assert "has mode 0644: other users can read it" in caplog.text
    caplog.clear()
    shelf.key.chmod(0o640)
    ServerTls(str(shelf.chain), str(shelf.key))
    assert not caplog.text
