"""The clock's last reading on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.clock import Clock, Reading, load_reading, store_reading

READING = Reading(10.5, 1.8e9, 1.7e9, 3.25)


def test_it_is_found_until_the_machine_starts_again(tmp_path: Path) -> None:
    path, boot = tmp_path / "usage" / "usage.db.clock", tmp_path / "boot_id"
    boot.write_text("one\n")
    assert load_reading(path, boot) is None
    store_reading(path, READING, boot)
    assert load_reading(path, boot) == READING
    boot.write_text("two\n")
    assert load_reading(path, boot) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"boot": "x", "reading": [1]}', b"\xff"])
def test_what_is_no_reading(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "usage.db.clock"
    path.write_bytes(content)
    assert load_reading(path) is None


def test_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "usage.db.clock"
    clock = Clock()
    store_reading(path, clock.reading)
    assert not Clock(last=load_reading(path)).now().was_set
