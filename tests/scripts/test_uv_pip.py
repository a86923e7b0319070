"""pip's configuration as uv's options."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def uv_pip() -> ModuleType:
    spec = importlib.util.spec_from_file_location("uv_pip", ROOT / "scripts" / "uv_pip.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("settings", "options", "variables"),
    [
        ([], [], {}),
        (
            ["global.index-url='https://packages.test/simple'"],
            ["--index-url", "https://packages.test/simple"],
            {},
        ),
        # The environment comes first in pip's list, and wins.
        ([":env:.index-url='https://a.test'", "global.index-url='https://b.test'"], ["--index-url", "https://a.test"], {}),
        (
            ["global.extra-index-url='file:///a\\nfile:///b'", ":env:.find-links='/w /v'", "global.find-links='/w'"],
            ["--extra-index-url", "file:///a", "--extra-index-url", "file:///b", "--find-links", "/w", "--find-links", "/v"],
            {},
        ),
        (["global.extra-index-url='x y'"], ["--extra-index-url", "x", "--extra-index-url", "y"], {}),
        (["install.no-index='true'", "global.constraint='/c.txt'"], ["--no-index", "--constraint", "/c.txt"], {}),
        (["global.no-index='false'"], [], {}),
        (["global.proxy='http://u:p@proxy.test:3128'"], [], {"ALL_PROXY": "http://u:p@proxy.test:3128"}),
        (
            [":env:.cert='/ca.crt'", "global.cert='/other.crt'", "global.timeout='60'"],
            [],
            {"SSL_CERT_FILE": "/ca.crt", "UV_HTTP_TIMEOUT": "60"},
        ),
        (["global.cache-dir='/c'", ":env:.disable-pip-version-check='1'", "download.platform='any'"], [], {}),
    ],
)  # fmt: skip
def test_settings_become_options(
    uv_pip: ModuleType, settings: list[str], options: list[str], variables: dict[str, str]
) -> None:
    assert uv_pip.translated(settings) == (options, variables)


@pytest.mark.parametrize("setting", ["install.pre='true'", "global.client-cert='/c'"])
def test_a_setting_without_a_counterpart_is_left_to_pip(uv_pip: ModuleType, setting: str) -> None:
    with pytest.raises(uv_pip.UnsuitableError, match="has no counterpart"):
        uv_pip.translated([setting])


def test_a_variable_that_is_set_goes_before_pips_setting(uv_pip: ModuleType) -> None:
    variables = {"SSL_CERT_FILE": "/pip.crt", "UV_HTTP_TIMEOUT": "60"}
    own = {"SSL_CERT_FILE": "/own.crt", "https_proxy": "http://own.test"}
    assert uv_pip.environment(variables, own) == own | {"UV_HTTP_TIMEOUT": "60"}


@pytest.mark.parametrize("name", ["ALL_PROXY", "all_proxy", "https_proxy", "HTTP_PROXY", "NO_PROXY"])
def test_pips_proxy_goes_before_the_environments(uv_pip: ModuleType, name: str) -> None:
    """As pip has it (pip/_internal/cli/index_command.py: trust_env)."""
    found = uv_pip.environment({"ALL_PROXY": "http://pip.test"}, {name: "http://own.test", "HOME": "/h"})
    assert found == {"ALL_PROXY": "http://pip.test", "HOME": "/h"}


def test_an_empty_proxy_of_pips_leaves_the_environments(uv_pip: ModuleType) -> None:
    _, variables = uv_pip.translated([":env:.proxy=''", "global.proxy='http://pip.test'"])
    own = {"https_proxy": "http://own.test", "all_proxy": "http://own.test", "NO_PROXY": "a.test"}
    assert uv_pip.environment(variables, own) == own


@pytest.mark.parametrize("own", [{}, {"https_proxy": "http://127.0.0.1:1", "NO_PROXY": "index.test"}])
def test_uv_asks_the_proxy_of_pips_configuration(tmp_path: Path, own: dict[str, str]) -> None:
    """One that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        asked = threading.Thread(target=lambda: tmp_path.joinpath("asked").write_bytes(_refuse(proxy)))
        asked.start()
        settings = f"[global]\nproxy = http://127.0.0.1:{proxy.getsockname()[1]}\nindex-url = https://index.test/simple\n"
        (tmp_path / "pip.conf").write_text(settings)
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts/uv_pip.py"), "--target", str(tmp_path / "t"), "nothing"],
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
                 "UV_HTTP_RETRIES": "0", **own},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        asked.join()
    assert (tmp_path / "asked").read_bytes().startswith(b"CONNECT index.test:443 "), done.stderr
    assert "has no counterpart" not in done.stderr
    assert done.returncode not in {0, 3}


def _refuse(proxy: socket.socket) -> bytes:
    """The beginning of the first request; b"" without one."""
    proxy.settimeout(60)
    try:
        connection, _ = proxy.accept()
    except TimeoutError:
        return b""
    with connection:
        request = connection.recv(4096)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        return request


def test_without_uv_nothing_is_installed(tmp_path: Path) -> None:
    """This interpreter's folder has no uv of its own where it is reached by a link."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    done = subprocess.run(
        [str(python), str(ROOT / "scripts/uv_pip.py"), "nothing"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"there is no {tmp_path}/uv\n"
