"""A real daemon whose engines play scenes, and the clients as npm installed them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tools
from support.client_runs import Product


@pytest.fixture(scope="session")
def packages() -> Path:
    """The folder with the clients' node_modules."""
    wanted = Path(__file__).with_name("package-lock.json").read_text()
    installed = tools.NODE_CLIENTS / "installed.json"
    assert installed.exists(), f"no {installed}: `scripts/test clients` installs the clients"
    assert installed.read_text() == wanted, "other versions are pinned: `scripts/test clients` installs them"
    return tools.NODE_CLIENTS


@pytest.fixture(scope="session")
def node() -> str:
    """Node.js of the extra test-clients."""
    program = Path(sys.executable).with_name("node")
    assert program.exists(), f"no {program}: `scripts/test clients` installs it"
    return str(program)


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """For scenes under which no engine dies."""
    yield from _started(tmp_path_factory.mktemp("product"))


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """For the scene `killed`. A short path: sockets of instances lie in it."""
    yield from _started(tmp_path_factory.mktemp("mortal"))


def _started(folder: Path) -> Iterator[Product]:
    product = Product(folder)
    try:
        product.daemon.wait_ready(2)
        yield product
    finally:
        product.daemon.end()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder
