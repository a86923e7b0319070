"""The configuration as others may see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.redaction import MASK, Redactor
from launcher.config.loading import MAX_SECRET_BYTES, parse_config, secret_values, shown


def test_every_key_and_no_secret() -> None:
    config = parse_config(
        {
            "models": [{"name": "m", "path": "/m"}],
            "engine": {"env": {"HF_TOKEN": "hush", "NOTE": "x", "LANG": "C"}, "args": ["--api-key", "hush"]},
        },
        origin="test",
    )
    tree = shown(config, Redactor())
    assert tree["models"][0]["name"] == "m"
    assert tree["engine"]["env"] == {"HF_TOKEN": MASK, "NOTE": MASK, "LANG": "C"}
    assert tree["engine"]["args"] == ["--api-key", MASK]
    assert tree["supervision"]["stall_timeout_s"] == 120.0, "defaults are shown, too"
    assert "hush" not in str(tree)


def test_the_secrets_that_it_leads_to(tmp_path: Path) -> None:
    for name in ("hf", "key", "up"):
        (tmp_path / name).write_text(f"{name}-secret\n")
    (tmp_path / "up").write_text("x" * (MAX_SECRET_BYTES + 9))
    config = parse_config(
        {
            "models": [{"name": "m", "path": "/m"}],
            "engine": {"env": {"MY_API_KEY": "in-config", "NOTE": "x"}, "hf_token_file": str(tmp_path / "hf")},
            "proxy": {
                "tls_certificate": str(tmp_path / "none.pem"), "tls_key": str(tmp_path / "key"),
                "overflow": {"url": "http://h", "models": {"m": "n"}, "api_key_file": str(tmp_path / "up")},
            },
        },
        origin="test",
    )  # fmt: skip
    values, unread = secret_values(config, {"HF_TOKEN": "in-environ", "HOME": "/root"})
    assert values == ["in-environ", "in-config", "hf-secret\n", "key-secret\n", "x" * MAX_SECRET_BYTES]
    assert unread == []


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cert").mkdir()  # opening a folder fails for root, too
    config = parse_config(
        {"models": [{"name": "m", "path": "/m"}], "proxy": {"tls_certificate": str(tmp_path / "cert")}},
        origin="test",
    )
    assert secret_values(config, {}) == ([], [str(tmp_path / "cert")])
