"""Compile caches on a real file system: who may start from whose copy."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from launcher.base.address import UnixAddress
from launcher.engines.base import Launch
from launcher.engines.vllm.launch import cache_of
from launcher.instances.cache_files import FORGOTTEN_S, SHARED, STAMP
from launcher.instances.compile_cache import CompileCaches


def launch(root: Path, slot: int, *more: str, stack: str = "vllm1", cpus: str = "0-3") -> Launch:
    folder = root / stack / f"slot{slot}"
    argv = (
        "numactl", f"--physcpubind={cpus}", f"--membind={slot}", "vllm", "serve", "/m", "--uds", f"/run/{slot}.sock", *more,
    )  # fmt: skip
    env = {
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
    }
    return Launch(
        argv=argv, env=env, secrets=frozenset(), address=UnixAddress("/x"), cache=cache_of(argv[3:], env)
    )


def folder_of(launch: Launch) -> Path:
    return Path(launch.env["TORCHINDUCTOR_CACHE_DIR"])


def compile_into(of: Launch, text: str = "code", name: str = "x") -> Path:
    file = folder_of(of) / "aa" / f"{name}.so"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def kernels(of: Launch) -> dict[str, str]:
    return {file.stem: file.read_text() for file in folder_of(of).glob("aa/*.so")}


def shared_folders(root: Path) -> list[Path]:
    return sorted((root / "vllm1").glob(f"{SHARED}-*"))


def test_the_second_starts_from_a_copy_of_the_first(tmp_path: Path) -> None:
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1, cpus="4-7")
    caches.prepare(0, first)
    compile_into(first)
    caches.keep(0, first)
    caches.prepare(1, second)
    assert kernels(second) == {"x": "code"}
    assert sorted(path.name for path in (tmp_path / "vllm1").iterdir()) == ["slot0", "slot1"]
    compile_into(second, "another")
    assert kernels(first) == {"x": "code"}


def test_those_that_start_with_nothing_compile_together_and_keep_a_copy_each(tmp_path: Path) -> None:
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1, cpus="4-7")
    caches.prepare(0, first)
    caches.prepare(1, second)
    compile_into(first, "by the first", "a")
    compile_into(second, "by the second", "b")
    both = {"a": "by the first", "b": "by the second"}
    assert kernels(first) == kernels(second) == both
    assert first.env["VLLM_CACHE_ROOT"] != second.env["VLLM_CACHE_ROOT"]
    caches.keep(0, first)
    caches.keep(0, first)
    compile_into(second, "later", "c")
    assert kernels(first) == both, "it has left"
    assert len(shared_folders(tmp_path)) == 1, "the second still compiles"
    caches.keep(1, second)
    assert shared_folders(tmp_path) == []
    assert kernels(second) == both | {"c": "later"}
    compile_into(second, "own", "d")
    assert kernels(first) == both


@pytest.mark.parametrize("other", [{"cpus": "4-6"}, {"stack": "vllm2"}, {"more": ("--max-num-seqs", "8")}])
def test_another_number_of_threads_stack_or_setting_compiles_for_itself(
    tmp_path: Path, other: dict[str, str]
) -> None:
    more = other.pop("more", ())
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1, *more, **other)
    caches.prepare(0, first)
    compile_into(first)
    caches.prepare(1, second)
    assert kernels(second) == {}
    caches.keep(0, first)
    caches.prepare(2, third := launch(tmp_path, 2, *more, **other))
    assert kernels(third) == {}


def test_no_shared_folder_without_compilation(tmp_path: Path) -> None:
    CompileCaches().prepare(1, launch(tmp_path, 1, "--enforce-eager"))
    assert list(tmp_path.iterdir()) == []


def test_a_crash_during_compilation_delays_no_sibling_and_loses_nothing(tmp_path: Path) -> None:
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1)
    caches.prepare(0, first)
    caches.prepare(1, second)
    compile_into(first)
    CompileCaches().prepare(0, first)  # after a crash, of the daemon too
    assert kernels(first) == {"x": "code"}
    caches.keep(1, second)
    caches.prepare(0, first)
    assert kernels(first) == {"x": "code"}
    assert not folder_of(first).is_symlink(), "there is one to copy now"
    assert shared_folders(tmp_path) == []


def test_later_starts_avoid_a_shared_folder_with_a_broken_file(tmp_path: Path) -> None:
    caches = CompileCaches()
    first, second, third = (launch(tmp_path, slot) for slot in range(3))
    caches.prepare(0, first)
    caches.prepare(1, second)
    compile_into(first, "half a")
    caches.purge(0, first)
    assert kernels(second) == {"x": "half a"}, "who compiles there goes on"
    for slot, other in ((0, first), (2, third)):
        caches.prepare(slot, other)
        assert kernels(other) == {}
    compile_into(third, "whole")
    assert kernels(first) == {"x": "whole"}
    caches.purge(1, second)
    assert len(shared_folders(tmp_path)) == 1
    shutil.rmtree(shared_folders(tmp_path)[0])
    caches.purge(0, first)
    assert not folder_of(first).is_symlink()


def test_a_kernel_that_another_one_compiles_at_this_moment_is_not_copied(tmp_path: Path) -> None:
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1)
    caches.prepare(0, first)
    caches.prepare(1, second)
    compile_into(first, name="ready")
    compile_into(second, "ha", name="half")
    locks = folder_of(second) / "locks"
    locks.mkdir()
    for name in ("ready", "half"):
        (locks / f"{name}.lock").touch()
    with (locks / "half.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        caches.keep(0, first)
    assert kernels(first) == {"ready": "code"}
    caches.keep(1, second)
    assert kernels(second) == {"ready": "code", "half": "ha"}


def test_what_was_compiled_for_something_else_is_emptied(tmp_path: Path) -> None:
    caches, first = CompileCaches(), launch(tmp_path, 0)
    file = compile_into(first)
    caches.keep(0, first)
    caches.prepare(0, first)
    assert file.exists()
    caches.prepare(0, launch(tmp_path, 0, "--quantization", "awq"))
    assert not file.exists()


def test_purge(tmp_path: Path) -> None:
    caches, first = CompileCaches(), launch(tmp_path, 0)
    file = compile_into(first)
    caches.purge(0, first)
    caches.purge(0, first)
    assert not file.exists()


def test_old_stacks_are_forgotten(tmp_path: Path) -> None:
    caches, old = CompileCaches(), launch(tmp_path, 0, stack="vllm0")
    compile_into(old)
    caches.keep(0, old)
    (tmp_path / "somebody's").mkdir()
    caches.prepare(0, launch(tmp_path, 0))
    assert (tmp_path / "vllm0").exists()
    long_ago = (tmp_path / "vllm0" / "slot0" / STAMP).stat().st_mtime - FORGOTTEN_S - 10
    os.utime(tmp_path / "vllm0" / "slot0" / STAMP, (long_ago, long_ago))
    caches.prepare(0, launch(tmp_path, 0))
    assert not (tmp_path / "vllm0").exists()
    assert (tmp_path / "somebody's").exists()


def test_a_damaged_stamp_is_none(tmp_path: Path) -> None:
    caches, first = CompileCaches(), launch(tmp_path, 0)
    compile_into(first)
    for slot, text in enumerate(("", "[]", json.dumps({"time": 1})), start=1):
        (tmp_path / "vllm1" / "slot0" / STAMP).write_text(text)
        caches.prepare(slot, other := launch(tmp_path, slot))
        assert kernels(other) == {}


def test_an_engine_with_no_cache_of_ours(tmp_path: Path) -> None:
    caches = CompileCaches()
    for env in ({}, {"VLLM_CACHE_ROOT": f"{tmp_path}/a/v", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/b/i"}):
        plain = Launch(
            argv=("x",), env=env, secrets=frozenset(), address=UnixAddress("/x"), cache=cache_of(("x",), env)
        )
        caches.prepare(0, plain)
        caches.keep(0, plain)
        caches.purge(0, plain)
    caches.keep(0, launch(tmp_path, 0))
    assert list(tmp_path.iterdir()) == [], "nothing was compiled, so nothing is stamped"


def test_a_full_disk_only_costs_the_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1)
    compile_into(first)
    caches.keep(0, first)
    (tmp_path / "vllm1" / f".slot1.{os.getpid()}").write_text("in the way")
    caches.prepare(1, second)
    assert "cannot copy a compile cache" in caplog.text
