"""Secrets of files, also of one whose disk hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.base.errors import BusyError
from launcher.config.proxy_schema import Proxy
from launcher.config.schema import Config, Model
from launcher.daemon import secrets
from launcher.daemon.secrets import Secrets

PEM = "-----BEGIN PRIVATE KEY----- abcdefghijkl"


def config_of(key: Path) -> Config:
    proxy = Proxy(tls_certificate=str(key.with_name("cert.pem")), tls_key=str(key))
    return Config(models=(Model(name="m", path="/models/m"),), proxy=proxy)


async def test_a_file_that_hangs_holds_up_no_answer_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control socket of a reader masks its answers, `status` among them."""
    first, second = tmp_path / "first.pem", tmp_path / "second.pem"
    first.write_text(PEM)
    in_force = config_of(first)
    masked = Secrets(lambda: in_force)
    assert PEM not in (await masked.redactor()).text(f"key {PEM}")
    monkeypatch.setattr(secrets, "DISK_S", 0.1)
    first.unlink()
    os.mkfifo(first)  # opening it waits for a writer
    for _ in range(2):
        assert PEM not in (await masked.redactor()).text(f"key {PEM}")
    second.write_text("another secret of a file")
    in_force = config_of(second)
    with pytest.raises(BusyError, match=r"cannot mask secrets: their files were not read within 0\.1 s"):
        await masked.redactor()
    first.write_text("")  # the thread ends
    monkeypatch.setattr(secrets, "DISK_S", 60.0)
    redactor = await masked.redactor()
    assert redactor.text(f"{PEM} another secret of a file").count("secret") == 0
    assert PEM not in redactor.text(PEM)
