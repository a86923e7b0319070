"""One API keys file for all hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.local_hosts import LocalHosts

from launcher.base.errors import LauncherError, RefusedError
from launcher.fleet.hosts import spread
from launcher.keys import key_file, key_record

HOSTS = dict.fromkeys(("h1", "h2", "h3"), "")


def record(name: str) -> str:
    """A line of the file."""
    key = key_record.compose_key(name.encode().ljust(5)[:5], bytes(32))
    salt = bytes(16)
    fields = {
        "id": key_record.id_of(key), "name": name, "hash": key_record.hash_of(key, salt).hex(), "salt": salt.hex(),
        "created": "2026-11-01T00:00:00Z",
    }  # fmt: skip
    return key_record.to_text([key_record.make(fields)])


@pytest.fixture
def hosts(tmp_path: Path) -> LocalHosts:
    return LocalHosts(HOSTS, tmp_path)


def texts(hosts: LocalHosts) -> list[str]:
    return [hosts.key_file(name) for name in HOSTS]


def names(text: str) -> list[str]:
    return [record.name for record in key_record.parse(text, "test")]


def test_a_file_is_stored_and_a_daemon_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert key_file.stamp_of(str(path)) == key_file.NONE
    text = key_file.stamped(record("ann"), 1)
    assert key_file.stored(str(path), text) == text == path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in key_file.read(str(path))] == ["ann"]
    assert key_file.version(key_file.stamp_of(str(path))) == 1


def test_a_changed_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(record("ann"))
    path.chmod(0o640)
    key_file.stored(str(path), key_file.stamped(record("bob"), 1))
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_damaged_file_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key_file.stored(str(path), key_file.stamped(record("ann"), 1))
    with pytest.raises(LauncherError):
        key_file.stored(str(path), key_file.stamped("no record", 2))
    assert names(path.read_text()) == ["ann"]


def test_of_two_changes_at_once_the_second_is_refused(tmp_path: Path) -> None:
    """Whatever the hashes of the two are."""
    path = str(tmp_path / "keys")
    key_file.stored(path, key_file.stamped(record("ann"), 1))
    for name in ("bob", "cal", "dan", "eve"):
        with pytest.raises(RefusedError):
            key_file.stored(path, key_file.stamped(record(name), 1))
    key_file.stored(path, key_file.stamped(record("ann"), 1))  # the same again


def test_a_host_that_was_away_gets_the_file(hosts: LocalHosts) -> None:
    hosts.key_file("h1", key_file.stamped(record("ann"), 1))
    hosts.away = {"h3"}
    assert list(spread(hosts)) == ["h3"]
    hosts.away = set()
    assert not spread(hosts)
    assert len(set(texts(hosts))) == 1
    assert names(texts(hosts)[2]) == ["ann"]


def test_a_host_with_an_older_file_does_not_bring_a_revoked_key_back(hosts: LocalHosts) -> None:
    for name in HOSTS:
        hosts.key_file(name, key_file.stamped(record("ann") + record("bob"), 1))
    hosts.away = {"h3"}
    for name in ("h1", "h2"):
        hosts.key_file(name, key_file.stamped(record("ann"), 2))
    hosts.away = set()
    assert not spread(hosts)
    assert [names(text) for text in texts(hosts)] == [["ann"]] * 3


def test_changes_on_both_sides_of_a_partition_end_in_one_file(hosts: LocalHosts) -> None:
    hosts.key_file("h1", key_file.stamped(record("ann"), 3))
    hosts.key_file("h2", key_file.stamped(record("bob"), 3))
    assert not spread(hosts)
    assert len(set(texts(hosts))) == 1
    assert names(texts(hosts)[0]) in (["ann"], ["bob"])
    assert key_file.version(hosts.key_stamp("h3")) == 4


def test_a_damaged_file_is_kept_in_a_copy(hosts: LocalHosts, tmp_path: Path) -> None:
    hosts.key_file("h1", key_file.stamped(record("ann"), 5))
    (tmp_path / "h2.keys").write_text("# fleet 4\nno record\n")
    (tmp_path / "h2.keys").chmod(0o600)
    assert not spread(hosts)
    assert (tmp_path / "h2.keys.before-fleet").read_text() == "# fleet 4\nno record\n"


@pytest.mark.parametrize("version", [2, 9])
def test_keys_of_another_fleet_or_of_one_side_of_a_partition_are_kept_in_a_copy(
    hosts: LocalHosts, tmp_path: Path, version: int
) -> None:
    """Whichever file is the newer one. A key that was revoked or changed is in both."""
    for name in ("h1", "h2"):
        hosts.key_file(name, key_file.stamped(record("ann"), 5))
    hosts.key_file("h3", key_file.stamped(record("bob"), version))
    assert not spread(hosts)
    copies = {path.name: names(path.read_text()) for path in tmp_path.glob("*.before-fleet")}
    other = {"h1.keys.before-fleet": ["ann"], "h2.keys.before-fleet": ["ann"]}
    assert copies == ({"h3.keys.before-fleet": ["bob"]} if version < 5 else other)
    changed = key_file.unstamped(hosts.key_file("h1")).replace('"created"', '"concurrency":3,"created"')
    hosts.key_file("h1", key_file.stamped(changed, 20))
    assert not spread(hosts)
    assert len(list(tmp_path.glob("*.before-fleet*"))) == len(copies)


def test_files_that_are_not_the_fleets_stay(hosts: LocalHosts, tmp_path: Path) -> None:
    (tmp_path / "h1.keys").write_text(record("ann"))
    (tmp_path / "h1.keys").chmod(0o600)
    assert not spread(hosts)
    assert texts(hosts) == [record("ann"), "", ""]


def test_a_local_change_is_replaced_by_the_fleets_file(hosts: LocalHosts, tmp_path: Path) -> None:
    keys_of_fleet = key_file.stamped(record("ann"), 5)
    for name in HOSTS:
        hosts.key_file(name, keys_of_fleet)
    (tmp_path / "h2.keys").write_text(record("bob"))  # an editor, which also removed the first line
    assert not spread(hosts)
    assert texts(hosts) == [keys_of_fleet] * 3
    assert names((tmp_path / "h2.keys.before-fleet").read_text()) == ["bob"]


def test_a_host_that_joins_keeps_a_copy_of_its_own_keys(hosts: LocalHosts, tmp_path: Path) -> None:
    """Their clients get 401 from now on: whoever put it into the fleet needs the records."""
    hosts.key_file("h1", key_file.stamped(record("ann"), 2))
    (tmp_path / "h2.keys").write_text(record("ann"))  # nothing that the fleet's lacks
    (tmp_path / "h2.keys").chmod(0o600)
    own, copy = tmp_path / "h3.keys", tmp_path / "h3.keys.before-fleet"
    own.write_text(record("bob"))
    own.chmod(0o640)
    assert not spread(hosts)
    assert names(own.read_text()) == ["ann"]
    assert (copy.read_text(), copy.stat().st_mode & 0o777) == (record("bob"), 0o640)
    hosts.key_file("h1", key_file.stamped(record("ann") + record("cal"), 3))
    assert not spread(hosts)
    assert copy.read_text() == record("bob")
    own.write_text(record("dan"))  # it had left, and joins again
    assert not spread(hosts)
    assert (copy.read_text(), names(Path(f"{copy}.2").read_text())) == (record("bob"), ["dan"])
    assert not list(tmp_path.glob("h1.keys.*")) + list(tmp_path.glob("h2.keys.*"))
