"""`audit verify`: every change of a trail is found, at the right line."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.audit_trails import BEGAN, DAY_S, Clock, a_writer, an_entry, last_file, stop, write, write_trail

from launcher.accounts.audit_chain import GENESIS, Anchor, Link, of_request, sealed
from launcher.accounts.audit_verify import HEAD, Report, verify


@cache
def a_trail() -> tuple[tuple[str, bytes], ...]:
    """Names and contents of three files; the third is being written."""
    with tempfile.TemporaryDirectory() as folder:
        write_trail(Path(folder) / "trail")
        paths = sorted((Path(folder) / "trail").iterdir())
        return tuple((path.name, path.read_bytes()) for path in paths)


NAMES = [name for name, _ in a_trail() if name != HEAD]


@contextmanager
def copied() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        for name, content in a_trail():
            (folder / name).write_bytes(content)
        yield folder
    finally:
        shutil.rmtree(folder)


def wrong_place(report: Report) -> str:
    assert report.wrong is not None, "nothing was found"
    return str(report.wrong.place)


def line_at(content: bytes, offset: int) -> int:
    return content[:offset].count(b"\n") + 1


FILES = st.sampled_from(NAMES)


def test_a_trail_without_a_change_is_right() -> None:
    with copied() as folder:
        report = verify(folder)
        assert report.wrong is None
        assert report.notes == ()
        assert report.kinds == {"file": 3, "start": 2, "request": 12, "control": 3, "stop": 1}
        assert (report.first, report.last.n) == (1, 21)
        assert (report.lost, report.torn_bytes, report.crashes) == (0, 0, 0)


@given(FILES, st.data())
def test_any_changed_byte(name: str, data: st.DataObject) -> None:
    with copied() as folder:
        content = bytearray((folder / name).read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255).filter(lambda value: value != content[at]))
        line = line_at(dict(a_trail())[name], at)
        (folder / name).write_bytes(content)
        assert wrong_place(verify(folder)) == f"{name}:{line}"


@given(FILES, st.data())
def test_any_removed_line(name: str, data: st.DataObject) -> None:
    with copied() as folder:
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        gone = data.draw(st.integers(0, len(lines) - 1))
        del lines[gone]
        (folder / name).write_bytes(b"".join(lines))
        assert wrong_place(verify(folder)) == f"{name}:{gone + 1}"


@given(FILES, FILES, st.data())
def test_any_two_lines_swapped(name: str, other: str, data: st.DataObject) -> None:
    with copied() as folder:
        contents = {file: (folder / file).read_bytes().splitlines(keepends=True) for file in NAMES}
        a = data.draw(st.integers(0, len(contents[name]) - 1))
        b = data.draw(st.integers(0, len(contents[other]) - 1).filter(lambda b: (name, a) != (other, b)))
        contents[name][a], contents[other][b] = contents[other][b], contents[name][a]
        for file, lines in contents.items():
            (folder / file).write_bytes(b"".join(lines))
        first = min((name, a), (other, b))
        assert wrong_place(verify(folder)) == f"{first[0]}:{first[1] + 1}"


@given(FILES, FILES, st.data())
def test_any_line_put_in_again(name: str, source: str, data: st.DataObject) -> None:
    with copied() as folder:
        line = data.draw(st.sampled_from((folder / source).read_bytes().splitlines(keepends=True)))
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        at = data.draw(st.integers(0, len(lines)))
        copy = (
            name == source and at < len(lines) and lines[at] == line
        )  # the second of two equal lines is the wrong one
        lines.insert(at, line)
        (folder / name).write_bytes(b"".join(lines))
        assert wrong_place(verify(folder)) == f"{name}:{at + 1 + copy}"


@given(FILES, st.data())
def test_truncated_at_any_byte(name: str, data: st.DataObject) -> None:
    with copied() as folder:
        content = (folder / name).read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        (folder / name).write_bytes(content[:at])
        assert wrong_place(verify(folder)) == f"{name}:{line_at(content, at)}"


@given(FILES, FILES)
def test_any_file_exchanged(name: str, other: str) -> None:
    with copied() as folder:
        (folder / name).write_bytes(dict(a_trail())[other])
        report = verify(folder)
        assert (report.wrong is None) if name == other else (wrong_place(report) == f"{name}:1")


@given(FILES, st.binary(min_size=1, max_size=2000), st.data())
def test_any_bytes_put_in(name: str, extra: bytes, data: st.DataObject) -> None:
    """The first line that they touch, or the next where they repeat its beginning."""
    with copied() as folder:
        content = (folder / name).read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        (folder / name).write_bytes(content[:at] + extra + content[at:])
        assert wrong_place(verify(folder)).rpartition(":")[0] == name


@pytest.mark.parametrize("gone", NAMES)
def test_a_removed_file(gone: str) -> None:
    with copied() as folder:
        (folder / gone).unlink()
        report = verify(folder)
        named = {NAMES[0]: NAMES[1], NAMES[1]: NAMES[2], NAMES[2]: NAMES[2]}[gone]
        assert wrong_place(report) == named
        assert report.wrong is not None
        assert "missing" in report.wrong.what


def test_a_file_of_another_day_put_in_between() -> None:
    with copied() as folder:
        (folder / "audit-2026-09-22-000004.jsonl").write_bytes((folder / NAMES[0]).read_bytes())
        assert wrong_place(verify(folder)) == "audit-2026-09-22-000004.jsonl:1"
    with copied() as folder:
        (folder / "audit-2026-09-25-000002.jsonl").write_bytes((folder / NAMES[0]).read_bytes())
        report = verify(folder)
        assert report.wrong is not None
        assert "000002" in wrong_place(report)


def test_a_file_of_another_trail() -> None:
    with copied() as folder, tempfile.TemporaryDirectory() as other:
        write_trail(Path(other) / "trail", requests=3)
        shutil.copy(Path(other) / "trail" / NAMES[1], folder / NAMES[1])
        assert wrong_place(verify(folder)).startswith((NAMES[0], NAMES[1]))


def test_a_line_that_was_replaced_with_its_hash_recomputed() -> None:
    with copied() as folder:
        path = folder / NAMES[1]
        lines = path.read_bytes().splitlines(keepends=True)
        _, before = lines[2][:-1].rsplit(b'"hash":"', 1)
        lines[3] = sealed(of_request(11, before[:64].decode(), an_entry(999)))
        path.write_bytes(b"".join(lines))
        assert wrong_place(verify(folder)) == f"{NAMES[1]}:4"


def forged_tail(folder: Path) -> Link:
    """Writes the last file again from its last line but one on, with right hashes, and a head that fits."""
    shutil.rmtree(folder)
    clock = Clock()
    writer = a_writer(folder, clock)
    write(writer, range(3))
    honest = writer.last
    assert honest is not None
    writer.close()
    shutil.rmtree(folder)
    writer = a_writer(folder, Clock())
    write(writer, (0, 1, 99))
    writer.close()
    return honest


def test_a_trail_written_again_is_found_by_an_anchor_only() -> None:
    with copied() as folder:
        anchor = forged_tail(folder)
        assert verify(folder).wrong is None
        report = verify(folder, [Anchor(anchor.n, anchor.hash)])
        assert wrong_place(report) == f"{last_file(folder).name}:{anchor.n}"
        assert wrong_place(verify(folder, [Anchor(None, anchor.hash)])) == "anchor"


def test_a_tail_cut_with_its_head_is_found_by_an_anchor() -> None:
    with copied() as folder:
        end = verify(folder).last
        shutil.rmtree(folder)
        write_trail(folder, days=2)
        assert verify(folder).wrong is None
        report = verify(folder, [Anchor(end.n, end.hash)])
        lines = last_file(folder).read_bytes().count(b"\n")
        assert wrong_place(report) == f"{last_file(folder).name}:{lines + 1}"


def test_anchors_of_the_trail_are_found() -> None:
    with copied() as folder:
        last = verify(folder).last
        assert verify(folder, [Anchor(last.n, last.hash), Anchor(None, last.hash)]).wrong is None


def test_a_removed_head_is_found() -> None:
    with copied() as folder:
        (folder / HEAD).unlink()
        assert wrong_place(verify(folder)) == HEAD


def test_a_removed_head_is_found_after_a_restart_too() -> None:
    with copied() as folder:
        (folder / HEAD).unlink()
        path = last_file(folder)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
        clock = Clock()
        clock.now += 3 * DAY_S
        stop(a_writer(folder, clock))
        report = verify(folder)
        assert report.wrong is not None
        assert HEAD in report.wrong.what


def test_a_tail_cut_before_a_restart_is_found_after_it() -> None:
    with copied() as folder:
        path = last_file(folder)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-2]))
        clock = Clock()
        clock.now += 3 * DAY_S
        stop(a_writer(folder, clock))
        assert wrong_place(verify(folder)) == f"{path.name}:{len(lines) - 1}"


def pruned_trail(folder: Path) -> None:
    clock = Clock()
    writer = a_writer(folder, clock, keep_days=2)
    for _ in range(6):
        write(writer, range(2))
        clock.now += DAY_S
    writer.turn()
    stop(writer)


def test_files_removed_by_keep_days_are_right(tmp_path: Path) -> None:
    pruned_trail(tmp_path / "trail")
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert report.first > 1
    assert [name.number for name in report.files] == [5, 6, 7]


def test_one_more_file_removed_is_not(tmp_path: Path) -> None:
    pruned_trail(tmp_path / "trail")
    oldest = min((tmp_path / "trail").glob("audit-*.jsonl"))
    oldest.unlink()
    report = verify(tmp_path / "trail")
    assert report.wrong is not None
    assert "no line records" in report.wrong.what


def test_an_anchor_of_a_removed_file_is_not_compared(tmp_path: Path) -> None:
    pruned_trail(tmp_path / "trail")
    report = verify(tmp_path / "trail", [Anchor(1, "a" * 64), Anchor(None, "b" * 64)])
    assert report.wrong is None
    assert len(report.notes) == 2


def test_an_incomplete_last_line_of_a_killed_daemon_is_noted() -> None:
    with copied() as folder:
        with last_file(folder).open("ab") as file:
            file.write(b'{"kind":"request","n":22,')
        report = verify(folder)
        assert report.wrong is None
        assert len(report.notes) == 1


def test_bytes_behind_the_last_line_of_a_stopped_daemon_are_wrong(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "trail", Clock())
    stop(writer)
    with last_file(tmp_path / "trail").open("ab") as file:
        file.write(b"x")
    assert wrong_place(verify(tmp_path / "trail")).endswith(":4")


@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=300_000).filter(lambda torn: not torn.startswith(b'{"kind"')))
def test_torn_bytes_of_any_kind_are_marked_and_passed_over(torn: bytes) -> None:
    with copied() as folder:
        with last_file(folder).open("ab") as file:
            file.write(torn)
        clock = Clock()
        clock.now = BEGAN + 2 * DAY_S
        stop(a_writer(folder, clock))
        report = verify(folder)
        assert report.wrong is None
        assert (report.torn_bytes, report.crashes) == (len(torn), 1)


@given(st.data())
def test_a_changed_byte_within_torn_bytes(data: st.DataObject) -> None:
    with copied() as folder:
        path = last_file(folder)
        line = path.read_bytes().count(b"\n") + 1
        start = path.stat().st_size
        with path.open("ab") as file:
            file.write(b'{"kind":"request","n":22,"prev":"')
        clock = Clock()
        clock.now = BEGAN + 2 * DAY_S
        stop(a_writer(folder, clock))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(start, start + 33))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        assert wrong_place(verify(folder)) == f"{path.name}:{line}"


def test_the_first_link_is_the_same_for_every_trail() -> None:
    assert GENESIS == (0, "0" * 64)
