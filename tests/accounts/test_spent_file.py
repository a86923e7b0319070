"""The sums of budgets and caps across SIGKILL, and on files that were cut or overwritten."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.accounts.spent_file import SLOT_BYTES, SpentFile

KEY = ("key", "ann", "tokens/month")
BEGIN = 1_793_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "usage.spent"


def stored(path: Path, *words: str, begin: int = BEGIN) -> int | None:
    """What a new daemon finds."""
    file = SpentFile(path)
    found = file.slot(*(words or KEY)).amount(begin)
    file.close()
    return found


def test_a_sum_is_found_again_for_its_period_alone(path: Path) -> None:
    file = SpentFile(path)
    slot = file.slot(*KEY)
    assert slot is file.slot(*KEY)
    assert slot.amount(BEGIN) is None
    slot.store(BEGIN, 5)
    slot.store(BEGIN, 7)
    file.slot("overflow", "ann", "usd/day").store(BEGIN, 10**18)
    assert stored(path) == 7  # the first daemon has not closed it
    assert stored(path, "overflow", "ann", "usd/day") == 10**18
    assert stored(path, begin=BEGIN + 86400) is None
    assert stored(path, "key", "bob", "tokens/month") is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == 3 * SLOT_BYTES


def test_without_a_slot_there_is_no_file(path: Path) -> None:
    SpentFile(path).close()
    assert not path.parent.exists()


def test_the_slots_of_many_names(path: Path) -> None:
    file = SpentFile(path)
    names = [f"{'é' * 60}{n}" for n in range(500)]
    for n, name in enumerate(names):
        file.slot("key", name, "tokens/day").store(BEGIN, n)
    file.close()
    again = SpentFile(path)
    assert [again.slot("key", name, "tokens/day").amount(BEGIN) for name in names] == list(range(500))
    again.slot("key", "new", "tokens/day").store(BEGIN, 9)
    again.close()
    assert stored(path, "key", "new", "tokens/day") == 9
    assert stored(path, "key", names[-1], "tokens/day") == 499


@given(damage=st.binary(min_size=1, max_size=2 * SLOT_BYTES), at=st.integers(0, 4 * SLOT_BYTES))
def test_damage_never_gives_a_wrong_sum(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes, at: int
) -> None:
    path = tmp_path_factory.mktemp("spent") / "f"
    file = SpentFile(path)
    slots = [("key", name, "tokens/day") for name in "abc"]
    for n, words in enumerate(slots):
        file.slot(*words).store(BEGIN, 100 + n)
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    found = [stored(path, *words) for words in slots]
    assert all(amount in {None, 100 + n} for n, amount in enumerate(found))
    touched = range(at, at + len(damage))
    if damage != whole[at : at + len(damage)] and touched.start >= SLOT_BYTES:
        intact = [n for n in range(3) if (n + 2) * SLOT_BYTES <= touched.start]
        assert all(found[n] == 100 + n for n in intact)


@given(length=st.integers(0, 4 * SLOT_BYTES))
def test_a_file_that_was_cut(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("spent") / "f"
    file = SpentFile(path)
    for name in "abc":
        file.slot("key", name, "t").store(BEGIN, 5)
    file.close()
    os.truncate(path, length)
    kept = max(0, length // SLOT_BYTES - 1)
    assert [stored(path, "key", name, "t") for name in "abc"] == [5] * kept + [None] * (3 - kept)
    file = SpentFile(path)
    file.slot("key", "c", "t").store(BEGIN, 6)
    file.close()
    assert stored(path, "key", "c", "t") == 6


def test_another_version_is_not_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = SpentFile(path)
    file.slot(*KEY).store(BEGIN, 5)
    file.close()
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    assert stored(path) is None
    assert "the usage ledger alone counts" in caplog.text
    assert path.stat().st_size == SLOT_BYTES


@pytest.mark.parametrize("what", ["a folder", "a link"])
def test_a_path_that_cannot_be_used_is_said_once(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "f"
    if what == "a folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    file = SpentFile(path)
    for n in range(3):
        file.slot(*KEY).store(BEGIN, n)
        assert not file.usable
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"cannot store the sums of budgets in {path}" in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_is_said_once_and_when_it_is_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = SpentFile(path)
    slot = file.slot(*KEY)
    slot.store(BEGIN, 1)
    own = file._descriptor
    full = os.open("/dev/full", os.O_WRONLY)
    file._descriptor = full
    slot.store(BEGIN, 2)
    slot.store(BEGIN, 3)
    assert not file.usable
    file._descriptor = own
    slot.store(BEGIN, 4)
    os.close(full)
    assert file.usable
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    file.close()
    assert stored(path) == 4


COUNTING = """
import os
import sys
from pathlib import Path
from launcher.accounts.spent_file import SpentFile
slot = SpentFile(Path(sys.argv[1])).slot("key", "ann", "tokens/month")
amount = slot.amount(1) or 0
while True:
    amount += 1
    slot.store(1, amount)
    os.write(1, b"%19d\\n" % amount)
"""


def test_sigkill_loses_no_store_that_was_reported(path: Path) -> None:
    """A process that stores and then reports each sum is killed at random moments."""
    chance = random.Random(5)  # noqa: S311
    reported = 0
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", COUNTING, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            first = int(process.stdout.readline())
            assert reported <= first - 1 <= reported + 1
            time.sleep(chance.random() / 20)
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines()
        reported = int(rest[-1]) if rest else first
        assert stored(path, begin=1) in {reported, reported + 1}
    assert reported > 5
