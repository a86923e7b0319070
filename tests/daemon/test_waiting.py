"""The control socket of a daemon that waits."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.daemon_process import eventually

from launcher.base.errors import BusyError, PassingError
from launcher.config.schema import Config, Control, Model, Overflow, Proxy
from launcher.control.client import ControlClient, UnreachableError
from launcher.daemon.waiting import StandbyServer, require
from launcher.proxy.downstream import listener


def away(what: str) -> PassingError:
    return PassingError(f"cannot read model '{what}': no such directory", "mount it")


def refusal(client: ControlClient, *, change: bool = False) -> BusyError | None:
    try:
        client.post("/reload") if change else client.get("/status")
    except UnreachableError:
        return None
    except BusyError as error:
        return error
    raise AssertionError("a daemon that waits has no answer")


def test_it_says_what_it_waits_for(tmp_path: Path) -> None:
    path, told = tmp_path / "c.sock", list[str]()
    client = ControlClient(str(path))
    with StandbyServer(Control(socket=str(path)), told.append) as standby:
        assert not path.exists(), "nothing is waited for"
        standby.tell(away("/a"))
        found = eventually(lambda: refusal(client), what="an answer")
        assert (
            found.message == "cannot answer yet, the daemon waits: cannot read model '/a': no such directory"
        )
        assert found.remedy == "mount it"
        assert found.exit_code == 3, "neither yes nor no"
        standby.tell(away("/b"))
        assert "'/b'" in str(refusal(client))
        assert "the daemon waits" in str(refusal(client, change=True))
    assert told == [
        f"cannot read model '{name}': no such directory; waiting for it (mount it)" for name in ("/a", "/b")
    ]
    assert not path.exists(), "the daemon makes its own"


def test_systemds_socket_stays_open_for_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(path))
        control.listen()
        control.setblocking(False)
        monkeypatch.setattr(listener, "sockets", lambda: {listener.CONTROL: [control]})
        with StandbyServer(Control(socket=str(path)), lambda _: None) as standby:
            standby.tell(away("/a"))
            assert "'/a'" in str(refusal(ControlClient(str(path))))
        assert path.exists()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            control.setblocking(True)
            control.accept()[0].close()


def test_another_daemon_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with StandbyServer(Control(socket=str(path)), lambda _: None) as standby:
            standby.tell(away("/a"))
            assert eventually(
                lambda: "another numa-launcher answers there" in caplog.text, what="the warning"
            )
        assert path.exists()


def test_a_group_that_is_not_there_does_not_end_the_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Control(socket=str(tmp_path / "c.sock"), group="no-such-group")
    with StandbyServer(settings, lambda _: None) as standby:
        standby.tell(away("/a"))
        assert eventually(lambda: "no such group" in caplog.text, what="the warning")


# --- what is required ---


@pytest.mark.parametrize("key", ["tls_certificate", "tls_key", "api_keys_file", "overflow.0.api_key_file"])
def test_a_file_of_the_proxy_that_is_not_there_is_waited_for(key: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    names = {name: str(tmp_path / "there") for name in ("tls_certificate", "tls_key", "api_keys_file")}
    where = {name: str(tmp_path / "mount" / "file") if name == key else path for name, path in names.items()}
    other = str(tmp_path / ("there" if key in names else "mount/file"))

    def config() -> Config:
        overflow = Overflow(name="o", url="https://h/v1", models={"m": "m"}, api_key_file=other)
        return Config(models=(Model(name="m", path="/m"),), proxy=Proxy(overflow=(overflow,), **where))

    with pytest.raises(PassingError) as caught:
        require(config())
    assert (
        caught.value.message == f"cannot read proxy.{key} '{tmp_path}/mount/file': no such file or directory"
    )
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "file").write_text("")
    require(config())


def test_a_name_that_cannot_be_looked_up_now_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a boot before the network; not with systemd's sockets, which are bound."""

    def asked(*_args: object, **_more: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    config = Config(models=(Model(name="m", path="/m"),), proxy=Proxy(listen=("llm.example:8000",)))
    with pytest.raises(PassingError, match=r"'llm\.example:8000': temporary failure in name resolution"):
        require(config)
    with socket.socket() as bound:
        monkeypatch.setattr(listener, "sockets", lambda: {listener.HTTP: [bound]})
        require(config)
