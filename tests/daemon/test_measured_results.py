"""The newest results that the daemon can read."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path

import msgspec
import pytest
from support.bench_results import point, result
from support.fakes import SOON_S, until
from support.verdicts import BEST

from launcher.base.errors import LauncherError
from launcher.daemon import measured as measurements
from launcher.daemon.measured import MAX_RESULTS, Measurements
from launcher.measure.bench.figures import LATENCIES, OUTPUT_TOKENS, by_load
from launcher.measure.bench.result import BenchResult, ClientCost
from launcher.measure.bench.store import save
from launcher.measure.tune.remembered import remember


def stored(state: Path, *results: BenchResult) -> None:
    (state / "bench").mkdir(exist_ok=True)
    for each in results:
        save(state / "bench", each)


def named(name: str, found: BenchResult, started_at: str = "2026-11-01T10:00:00+00:00") -> BenchResult:
    return msgspec.structs.replace(found, id=name, started_at=started_at)


async def test_figures_are_those_of_bench_list_at_the_fastest_load(tmp_path: Path) -> None:
    measured = named("20261101-100000-chat", result(concurrencies=(1, 16, 4)))
    stored(tmp_path, measured)
    (found,) = await Measurements(lambda: tmp_path).newest()
    fastest = max(by_load(measured.points), key=lambda runs: runs.value(OUTPUT_TOKENS) or 0.0)
    assert found.output_tokens_per_s == fastest.value(OUTPUT_TOKENS)
    assert found.ttft_p99_s == fastest.value(LATENCIES["TTFT p99"])
    assert (found.kind, found.id, found.model) == ("bench", measured.id, measured.model)
    assert found.what == f"{measured.model}, {measured.workload}, {fastest.label}"
    assert found.time == dt.datetime(2026, 11, 1, 10, tzinfo=dt.UTC).timestamp()
    assert found.complete


async def test_figures_of_the_client_are_not_shown(tmp_path: Path) -> None:
    limited = point(client=ClientCost(cpu_s=1.0, share=1.0, limited=True))
    stored(tmp_path, msgspec.structs.replace(named("1", result()), points=[limited]))
    (found,) = await Measurements(lambda: tmp_path).newest()
    assert (found.output_tokens_per_s, found.ttft_p99_s) == (None, None)


async def test_tune_and_bench_newest_first(tmp_path: Path) -> None:
    remember(tmp_path, BEST)
    stored(
        tmp_path,
        named("old", result(), "2020-01-01T00:00:00+00:00"),
        named("new", result(), "2099-01-01T00:00:00+00:00"),
    )
    new, tune, old = await Measurements(lambda: tmp_path).newest()
    assert (new.id, tune.kind, tune.id, old.id) == ("new", "tune", BEST.run, "old")
    assert BEST.label in tune.what


async def test_a_result_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    of_file = measurements._of_file
    monkeypatch.setattr(measurements, "_of_file", lambda file: read.append(file.name) or of_file(file))
    stored(tmp_path, named("a", result()))
    newest = Measurements(lambda: tmp_path)
    first = await newest.newest()
    assert (await newest.newest(), read) == (first, ["a.json"])
    stored(tmp_path, named("a", result(concurrencies=(1, 2))), named("b", result()))
    assert len(await newest.newest()) == 2
    assert sorted(read) == ["a.json", "a.json", "b.json"]


async def test_files_that_are_no_results_are_left_out(tmp_path: Path) -> None:
    stored(tmp_path, *(named(f"{number:03}", result(runs=1)) for number in range(MAX_RESULTS + 3)))
    (tmp_path / "bench" / "999.json").write_text("{")
    (tmp_path / "bench" / "998.json").write_bytes(b" " * (measurements.MAX_BYTES + 1))
    (tmp_path / "bench" / "997.json").mkdir()
    assert len(await Measurements(lambda: tmp_path).newest()) == MAX_RESULTS - 3


async def test_a_state_folder_that_hangs_takes_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    goes_on = threading.Event()

    def hang() -> Path:
        asked.append(tmp_path)
        goes_on.wait(60)
        return tmp_path

    stored(tmp_path, named("a", result()))
    measured = Measurements(hang)
    with monkeypatch.context() as soon:
        soon.setattr(measurements, "READ_S", 0.02)
        assert await measured.newest() == []
        await until(lambda: asked)
        assert [await measured.newest() for _ in range(3)] == [[], [], []]
    assert asked == [tmp_path]
    goes_on.set()
    monkeypatch.setattr(measurements, "READ_S", SOON_S)
    assert [each.id for each in await measured.newest()] == ["a"]


async def test_without_a_state_folder_there_are_none(tmp_path: Path) -> None:
    def homeless() -> Path:
        raise LauncherError("cannot find the state folder", "set HOME")

    assert await Measurements(homeless).newest() == []
    assert await Measurements(lambda: tmp_path / "missing").newest() == []
