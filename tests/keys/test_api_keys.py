"""The keys in force, and their file on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Barrier, Thread
from zoneinfo import ZoneInfo

import msgspec
import pytest
from support import fakes
from support.hand_clock import HandClock
from support.keys import Fields, head_with, make, put
from support.stored_sums import StoredSums

from launcher.accounts.budgets import Budgets, Past, Rules
from launcher.base.api_errors import HttpError
from launcher.base.errors import LauncherError
from launcher.base.watched_file import RETRY_S
from launcher.keys import key_file
from launcher.keys.api_keys import ApiKeys, KeyEntry
from launcher.keys.key_record import KeyRecord


def refused(
    keys: ApiKeys, authorization: str | None, x_api_key: str | None = None, now: float = 0.0
) -> HttpError:
    looked(keys, now)
    with pytest.raises(HttpError) as caught:
        keys.check(head_with(authorization, x_api_key), now)
    assert caught.value.status == 401
    return caught.value


def looked(keys: ApiKeys, now: float) -> None:
    """Changes until now have been read."""
    keys.look(now)
    fakes.looked()


def entry(
    keys: ApiKeys, authorization: str | None, x_api_key: str | None = None, now: float = 0.0
) -> KeyEntry:
    looked(keys, now)
    found = keys.check(head_with(authorization, x_api_key), now)
    assert found is not None
    return found


def test_without_a_file_no_key_is_needed() -> None:
    keys = ApiKeys(None)
    assert not keys.required
    assert keys.check(Fields(), 0.0) is None
    assert keys.check(head_with("Bearer whatever"), 0.0) is None


def test_a_valid_key_is_accepted(path: Path) -> None:
    ann, ann_record = make("ann")
    bob, bob_record = make("bob", local_only=True)
    put(path, ann_record, bob_record)
    keys = ApiKeys(str(path))
    assert keys.required
    assert len(keys._entries) == 2
    assert entry(keys, f"Bearer {ann}").record.name == "ann"
    assert entry(keys, f"bearer  {bob} ").record.name == "bob"
    assert entry(keys, None, ann).record.name == "ann"  # Anthropic's clients
    assert not entry(keys, f"Bearer {ann}").record.local_only
    assert entry(keys, f"Bearer {bob}").record.local_only
    assert keys.unauthorized == 0
    assert {found.record.name for found in keys} == {"ann", "bob"}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic QQ=="])
def test_no_key(path: Path, header: str | None) -> None:
    put(path, make("ann")[1])
    refusal = refused(ApiKeys(str(path)), header)
    assert refusal.headers["WWW-Authenticate"] == 'Bearer realm="numa-launcher"'


def test_wrong_keys(path: Path) -> None:
    ann, record = make("ann")
    zed, _ = make("zed")
    put(path, record)
    keys = ApiKeys(str(path))
    for wrong in (zed, ann[:-1], ann + "a", ann.upper(), "x", "\udc80", "é", ann[:11] + zed[11:]):
        refusal = refused(keys, f"Bearer {wrong}", wrong)
        assert 'error="invalid_token"' in refusal.headers["WWW-Authenticate"]
        assert wrong not in refusal.message or wrong == "x"
    assert keys.unauthorized == 8


FOREIGN = (
    "Basic Ym9iOnB3",
    'Digest username="bob"',
    "Negotiate YII=",
    "NTLM TlRM",
    "Bearer sk-ant-oat01-abc",
    "x",
    "",
)


@pytest.mark.parametrize("field", ["x-api-key", "api-key"])
@pytest.mark.parametrize("authorization", FOREIGN)
def test_credentials_of_another_server_do_not_hide_the_key(
    path: Path, authorization: str, field: str
) -> None:
    ann, record = make("ann")
    put(path, record)
    keys = ApiKeys(str(path))
    found = keys.check(Fields(("authorization", authorization), (field, ann)), 0.0)
    assert found is not None
    assert keys.unauthorized == 0


def test_the_key_in_force_counts_wherever_it_is(path: Path) -> None:
    ann, record = make("ann")
    bob, bob_record = make("bob")
    put(path, record, bob_record)
    keys = ApiKeys(str(path))
    for sent in (
        [("authorization", "Basic Ym9iOnB3"), ("authorization", f"Bearer {ann}")],
        [("authorization", f"Bearer {ann}"), ("x-api-key", "sk-ant-old")],
        [("authorization", f"Bearer {ann}"), ("x-api-key", bob)],  # the first one
        [("x-api-key", "sk-ant-old"), ("x-api-key", ann)],
        [("x-api-key", "sk-ant-old"), ("api-key", ann)],
    ):
        found = keys.check(Fields(*sent), 0.0)
        assert found is not None
        assert found.record.name == "ann"
    revoked = make("ann", revoked="2026-11-21T10:00:00Z")[1]
    put(path, revoked, bob_record)
    looked(keys, 5.0)
    found = keys.check(Fields(("authorization", f"Bearer {ann}"), ("x-api-key", bob)), 5.0)
    assert found is not None
    assert found.record.name == "bob"


def test_a_refusal_says_how_to_send_a_key(path: Path) -> None:
    put(path, make("ann")[1])
    keys = ApiKeys(str(path))
    nothing = "you did not provide an API key: send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
    assert refused(keys, None).message == nothing
    assert (
        refused(keys, "Basic Ym9iOnB3").message == f"{nothing}; the Authorization that came has no Bearer key"
    )
    assert refused(keys, "Basic Ym9iOnB3", "sk-x").message == "incorrect API key provided"


def test_an_empty_file_admits_no_key(path: Path) -> None:
    put(path)
    refused(ApiKeys(str(path)), "Bearer " + make("ann")[0])


def test_changes_are_seen_within_a_second(path: Path) -> None:
    ann, record = make("ann", requests_per_minute=2)
    put(path, record)
    keys = ApiKeys(str(path))
    entry(keys, f"Bearer {ann}", now=10.0).limits.begin(10.0)
    bob, bob_record = make("bob")
    put(path, record, bob_record)
    refused(keys, f"Bearer {bob}", now=10.4)
    assert entry(keys, f"Bearer {bob}", now=10.5).record.name == "bob"
    spent = entry(keys, f"Bearer {ann}", now=10.5).limits
    assert spent.in_flight == 1  # what is spent outlives the reload
    spent.sums.accepted += 3
    spent.sums.ended["completed"] += 2
    assert spent.sums.in_flight == 1
    put(path, make("ann", revoked="2026-11-21T10:00:00Z")[1], bob_record)
    refused(keys, f"Bearer {ann}", now=11.0)
    assert keys.sums["ann"].accepted == 3  # and sums outlive the key


def test_a_request_ends_under_the_name_that_it_began_under(path: Path) -> None:
    ann, record = make("ann", concurrency=1)
    put(path, record)
    keys = ApiKeys(str(path))
    before = entry(keys, f"Bearer {ann}")
    before.sums.accepted += 1
    grant = before.limits.begin(0.0)
    grant.charge((), 0.0, 10)
    put(path, msgspec.structs.replace(record, name="bea"))
    after = entry(keys, f"Bearer {ann}", now=2.0)
    assert (after.record.name, after.limits.in_flight) == ("bea", 1)  # it is the same key
    before.sums.ended["completed"] += 1
    grant.finish(7, 3.0)
    assert after.limits.in_flight == 0
    assert (keys.sums["ann"].in_flight, keys.sums["ann"].tokens) == (0, 7)
    assert (keys.sums["bea"].in_flight, keys.sums["bea"].tokens) == (0, 0)


def test_a_broken_file_keeps_the_old_keys(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ann, record = make("ann")
    put(path, record)
    keys = ApiKeys(str(path))
    path.write_text("{")
    looked(keys, 1.0)
    looked(keys, 1.0 + RETRY_S)
    path.write_text("")  # an editor has begun to write it
    looked(keys, 2.0 + RETRY_S)
    path.unlink()
    assert entry(keys, f"Bearer {ann}", now=3.0 + RETRY_S).record.name == "ann"
    errors = [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR]
    assert len(errors) == 3  # each complaint once
    assert "keeping the API keys read before" in errors[0]
    assert "the file is empty" in errors[1]
    assert "no such file" in errors[2]


def test_a_missing_file_is_an_error_at_start(path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot read API keys .*no such file") as caught:
        ApiKeys(str(path))
    assert caught.value.remedy == f"numa-launcher key add NAME --file {path}"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o440])
def test_good_modes(path: Path, mode: int) -> None:
    put(path, make("ann")[1])
    path.chmod(mode)
    assert len(ApiKeys(str(path))._entries) == 1


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o666, 0o755])
def test_open_modes_are_refused(path: Path, mode: int) -> None:
    put(path, make("ann")[1])
    path.chmod(mode)
    with pytest.raises(LauncherError, match=f"mode {mode:04o} lets other users") as caught:
        ApiKeys(str(path))
    assert caught.value.remedy == f"chmod 640 {path}"


def test_a_byte_order_mark_is_skipped(path: Path) -> None:
    """As Notepad and PowerShell write it; the next change takes it away."""
    _, record = make("ann")
    put(path, record)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert key_file.read(str(path)) == (record,)
    key_file.update(str(path), lambda records: records)
    assert path.read_bytes().startswith(b"{")


def test_invalid_key_files(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(LauncherError, match=r"not UTF-8"):
        key_file.read(str(path))
    with pytest.raises(LauncherError, match=r"is a directory"):
        key_file.read(str(tmp_path))


def test_a_write_keeps_mode_and_never_shows_half_a_file(path: Path) -> None:
    put(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    before = path.stat().st_ino
    put(path, make("ann")[1])
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_ino != before
    assert [file.name for file in path.parent.iterdir()] == ["keys"]


def test_a_symlink_is_kept(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    put(real)
    path.symlink_to(real)
    put(path, make("ann")[1])
    assert path.is_symlink()
    assert len(key_file.read(str(real))) == 1


def test_a_change_that_fails_leaves_the_file(path: Path) -> None:
    put(path, make("ann")[1])

    def fail(_: Iterable[KeyRecord]) -> list[KeyRecord]:
        raise LauncherError("cannot", "do")

    with pytest.raises(LauncherError, match=r"^cannot$"):
        key_file.update(str(path), fail)
    assert len(key_file.read(str(path))) == 1
    assert len(list(path.parent.iterdir())) == 1


def test_writers_wait_for_each_other(path: Path) -> None:
    """Each adds one; none is lost."""
    barrier = Barrier(4)

    def add(worker: int) -> None:
        barrier.wait()
        for number in range(10):
            key_file.update(str(path), lambda old: [*old, make(f"{worker}{number}")[1]])  # noqa: B023

    threads = [Thread(target=add, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(key_file.read(str(path))) == 40
    assert os.listdir(path.parent) == ["keys"]  # noqa: PTH208


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot write API keys .*no such file"):
        key_file.update(str(tmp_path / "no" / "keys"), lambda old: old)


def holding(tmp_path: Path, **rules: object) -> Budgets:
    held = Budgets(
        Rules(**rules),  # type: ignore[arg-type]
        ZoneInfo("UTC"),
        HandClock(1_795_168_800.0),
        StoredSums().slot,
    )
    held.learn(Past())
    return held


def test_budgets_follow_the_file(path: Path, tmp_path: Path) -> None:
    ann, record = make("ann", budget="100-tokens/day")
    revoked = make("bob", budget="1-gbp/day", revoked="2026-11-21T10:00:00Z")[1]
    put(path, record, revoked, make("cid")[1])
    held = holding(tmp_path)
    keys = ApiKeys(str(path), held)
    assert [(state.key, state.budget) for state in held.states()] == [("ann", "100-tokens/day")]
    put(path, msgspec.structs.replace(record, budget="2k-tokens/day"))
    entry(keys, f"Bearer {ann}", now=2.0)
    assert [(state.key, state.limit) for state in held.states()] == [("ann", 2000)]
    put(path, msgspec.structs.replace(record, budget="3k-tokens/day"))
    looked(keys, 4.0)
    keys.look(4.0)  # without a request
    assert [(state.key, state.limit) for state in held.states()] == [("ann", 3000)]


def test_a_budget_that_cannot_be_held(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ann, record = make("ann")
    put(path, record)
    held = holding(tmp_path, currency="EUR")
    keys = ApiKeys(str(path), held)
    put(path, msgspec.structs.replace(record, budget="1-usd/day"))
    entry(keys, f"Bearer {ann}", now=2.0)
    why = f"cannot use API keys '{path}': key 'ann': cannot hold budget '1-usd/day': amounts are in EUR"
    assert why in caplog.text
    assert not held.states()  # the keys read before stay
    with pytest.raises(LauncherError, match="amounts are in EUR"):
        ApiKeys(str(path), held)
