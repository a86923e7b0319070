"""The program of `kind = "llama.cpp"` where there is none in PATH, and what `doctor` says of a build."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.config.schema import Engine, EngineKind
from launcher.engines.checks import Tier, Verdict
from launcher.engines.llama_cpp import build, wheel_server
from launcher.engines.llama_cpp.build import WHEEL, build_rows, examined, parse_build, wheel_version
from launcher.engines.llama_cpp.launch import probe
from launcher.engines.software import Stack

# llama-server 11434 at verbosity 4, and the wheel's --version.
NATIVE = """\
0.00.004.101 T cmn  common_param: device_info:
0.00.004.110 T   - CPU     : AMD EPYC 9755 (24105 MiB, 24105 MiB free)
0.00.004.120 T   - ZenDNN  : ZenDNN: AMD optimized primitives backend for GGML (0 MiB, 0 MiB free)
0.00.004.130 T system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | \
AVX512 = 1 | AVX512_VNNI = 1 | AVX512_BF16 = 1 | LLAMAFILE = 1 | REPACK = 1 |
0.00.004.140 E srv    load_model: failed to load model
"""
WHEELS = """\
version: 11549 (xllamacpp 2026.10.11549)
built with GNU 10.2.1 for Linux x86_64
system_info: CPU : SSE3 = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | SVE_CNT = 0 | OPENMP = 1 |
"""
ZEN_5 = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni"})


def stack_of(text: str) -> Stack:
    found = parse_build(text)
    assert found is not None
    return Stack(command=("/x",), instruction_sets=found.features, backends=found.devices)


def test_a_wide_build_lacks_little() -> None:
    found = parse_build(NATIVE)
    assert found is not None
    assert found.devices == ("ZenDNN",)
    assert {"AVX512", "AVX512_BF16"} <= found.features
    (row,) = build_rows(stack_of(NATIVE), ZEN_5 - {"avx_vnni"})
    assert (row.check, row.verdict, row.tier) == ("llama.cpp-build", Verdict.OK, Tier.OPTIMISED)
    assert row.fact == (
        "built for AVX2, FMA, F16C, AVX-512, AVX-512 VNNI, AVX-512 BF16; backends: CPU, ZenDNN"
    )


def test_a_build_for_older_processors_is_slower_than_possible() -> None:
    (row,) = build_rows(stack_of(WHEELS), ZEN_5)
    assert (row.verdict, row.tier) == (Verdict.WARN, Tier.DEGRADED)
    assert row.fact == (
        "built for AVX2, FMA, F16C; backends: CPU (without ZenDNN); this CPU also has "
        "AVX-VNNI, AVX-512, AVX-512 VNNI, AVX-512 BF16"
    )
    assert "scripts/build-llama-server" in row.remedy


def test_a_processor_without_more_is_served_well() -> None:
    (row,) = build_rows(stack_of(WHEELS), frozenset({"avx2", "fma", "f16c"}))
    assert row.verdict is Verdict.OK
    assert "SVE" not in row.fact


def test_an_unknown_build_has_no_row() -> None:
    assert parse_build("error: invalid argument: -lv\n") is None
    assert [*build_rows(Stack(command=("/x",)), ZEN_5)] == []


def test_a_program_is_examined_with_a_model_that_does_not_exist(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\ncat >&2 <<EOF\n{NATIVE}EOF\nexit 1\n')
    program.chmod(0o755)
    stack = examined(Stack(command=(str(program),), version="11434"), {})
    assert stack.version == "11434"
    assert stack.backends == ("ZenDNN",)
    words = (tmp_path / "words").read_text().split()
    model = words[words.index("--model") + 1]
    assert not Path(model).exists()
    assert Path(words[words.index("--host") + 1]).parent == Path(model).parent


def test_a_program_that_does_not_run_stays_unknown() -> None:
    stack = Stack(command=("/no/such/program",))
    assert examined(stack, {}) == stack


def test_the_wheel_is_used_where_no_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release that a metadata folder in the path of this test's own says."""
    (release,) = wheel_server.RELEASES
    info = tmp_path / f"xllamacpp-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: xllamacpp\nVersion: {release}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    version = f"{release.split('.')[-1]} (xllamacpp {release})"
    assert wheel_version(("llama-server",)) == version
    assert wheel_version(("/opt/llama-server",)) is None
    found = probe(Engine(kind=EngineKind.LLAMA_CPP))
    assert (found.command, found.version) == (WHEEL, version)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('no libgomp.so.1')\n")
    started = examined(found, {})
    assert (started.version, started.version_trouble) == (None, "ImportError: no libgomp.so.1")
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 1' >&2\n")
    program.chmod(0o755)
    assert probe(Engine(kind=EngineKind.LLAMA_CPP)).command == (str(program),)
    assert program.name == build.PROGRAM


def test_a_release_of_the_wheel_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "xllamacpp-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherError, match=r"xllamacpp 1\.0 is installed, but only") as caught:
        probe(Engine(kind=EngineKind.LLAMA_CPP))
    assert "numa-launcher[llama-cpp]" in caught.value.remedy
