"""Looking at this host, and at files as other hosts have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.certificates import certify
from support.verbs import run_verb

from launcher.base.errors import TimedOutError
from launcher.base.watched_file import FileCondition
from launcher.config.schema import Engine, EngineKind, Overflow, Proxy
from launcher.doctor.facts import Kernel
from launcher.doctor.gather import find_compiler, find_software, gather, read_files, read_kernel
from launcher.engines.checks import Compiler


def test_this_host() -> None:
    facts = gather(Engine())
    assert facts.host.vendor
    assert facts.topology.online
    assert facts.software.compiler is not None, "scripts/test installs g++"
    assert facts.kernel.seccomp is not None


def test_a_host_without_numactl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    facts = gather(Engine())
    assert facts.binding is None
    assert facts.binding_trouble is not None
    assert "no command 'numactl'" in facts.binding_trouble.message
    assert facts.software.compiler is None


def test_the_files_of_a_configuration(tmp_path: Path) -> None:
    """As the daemon reads them: certificate and key that do not belong together, keys that others may write, no key."""
    chain, _ = certify(tmp_path, "a")
    _, key = certify(tmp_path, "b")
    keys = tmp_path / "keys"
    keys.write_text("")
    keys.chmod(0o666)
    endpoint = Overflow(url="https://x/v1", models={"m": "big"}, api_key_file=str(tmp_path / "none"))
    proxy = Proxy(tls_certificate=str(chain), tls_key=str(key), api_keys_file=str(keys), overflow=(endpoint,))
    states = list(read_files(proxy, 5.0))
    assert [(state.what, state.state, state.since) for state in states] == [
        ("TLS certificate", FileCondition.UNUSABLE, 5.0),
        ("API keys", FileCondition.UNUSABLE, 5.0),
        ("key of the overflow endpoint x", FileCondition.UNUSABLE, 5.0),
    ]
    for state, why in zip(states, ("not that of the certificate", "mode 0666", "no such file"), strict=True):
        assert why in state.why
        assert state.remedy
    keys.chmod(0o600)
    good = Proxy(tls_certificate=str(chain), tls_key=str(tmp_path / "a.key"), api_keys_file=str(keys))
    assert {state.state for state in read_files(good, 5.0)} == {FileCondition.IN_USE}
    assert list(read_files(Proxy(), 5.0)) == []


def put(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_settings_of_the_kernel(tmp_path: Path) -> None:
    put(
        tmp_path,
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
        proc__sys__kernel__numa_balancing="1\n",
        sys__devices__system__cpu__cpufreq__policy0__scaling_governor="powersave\n",
        sys__devices__system__cpu__cpufreq__policy1__scaling_governor="performance\n",
        proc__self__status="Name:\tx\nCapEff:\t0000000000800000\nSeccomp:\t2\n",
    )
    assert read_kernel(tmp_path) == Kernel(
        "madvise", True, frozenset({"powersave", "performance"}), True, True, None
    )


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert read_kernel(tmp_path) == Kernel()


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("run__systemd__container", "lxc\n", "lxc"),
        (".dockerenv", "", "docker"),
        ("run__.containerenv", "", "podman"),
        ("proc__1__environ", "A=b\0container=systemd-nspawn\0", "systemd-nspawn"),
        ("proc__1__environ", "A=b\0", None),
    ],
)
def test_containers(tmp_path: Path, file: str, text: str, kind: str | None) -> None:
    assert read_kernel(put(tmp_path, **{file: text})).container == kind


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_compilers(tmp_path: Path) -> None:
    good = script(tmp_path / "good", "echo 13.2.0")
    broken = script(tmp_path / "broken", "exit 1")
    no_program = tmp_path / "none"
    no_program.write_text("no program")
    no_program.chmod(0o755)
    assert find_compiler((str(broken), str(no_program), "no-such-compiler", str(good))) == Compiler(
        str(good), "13.2.0"
    )
    assert find_compiler((str(broken),)) is None


def test_a_compiler_that_does_not_answer_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.doctor.gather.PROBE_TIMEOUT_S", 0.05)
    with pytest.raises(TimedOutError, match=r"no answer within 0\.05 s"):
        find_compiler((str(script(tmp_path / "slow", "exec sleep 30")),))


def environment(tmp_path: Path) -> Path:
    """A Python environment with a vLLM that was never run."""
    packages = tmp_path / "lib/python3.11/site-packages"
    (packages / "torch/lib").mkdir(parents=True)
    (packages / "torch/lib/libgomp.so.1").write_text("")
    for name, version in (("vllm", "0.32.0"), ("torch", "2.13.0+cpu"), ("zentorch", "2.13.0.1")):
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    said = json.dumps(["3.11.9", [str(packages)]])
    python = script(binaries / "python", f"echo '{said}'")
    vllm = script(binaries / "vllm", "")
    vllm.write_text(f"#!{python}\n")
    return vllm


def test_versions_and_libraries_of_the_engine(tmp_path: Path) -> None:
    vllm = environment(tmp_path)
    found = find_software(Engine(command=(str(vllm),), tcmalloc="off"))
    assert found.stack is not None
    assert (found.stack.vllm, found.stack.torch, found.stack.zentorch) == ("0.32.0", "2.13.0+cpu", "2.13.0.1")
    assert (found.trouble, found.tcmalloc, found.tcmalloc_off) == (None, None, True)
    assert found.openmp[0].endswith("torch/lib/libgomp.so.1")


def test_an_engine_that_is_not_there() -> None:
    found = find_software(Engine(command=("/no/such/vllm",)))
    assert found.trouble is not None
    assert "no command '/no/such/vllm'" in found.trouble.message
    own = find_software(Engine(kind=EngineKind.COMMAND, command=("/no/such/server", "{uds}")))
    assert own.tcmalloc is None
    assert own.trouble is not None


def test_a_command_of_ones_own() -> None:
    found = find_software(Engine(kind=EngineKind.COMMAND, command=("true", "{uds}")))
    assert found.stack is not None
    assert found.stack.command == (shutil.which("true"), "{uds}")
    assert (found.trouble, found.compiler) == (None, None), "it compiles nothing"


def test_the_verb(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    text = '[[models]]\nname = "m"\npath = "m"\n[engine]\nkind = "command"\ncommand = ["{}", "{{uds}}"]\n'
    config.write_text(text.format("/no/such/server"))
    refused = run_verb("doctor", "-c", str(config), "--json")
    report = json.loads(refused.stdout)
    assert (refused.returncode, report["failed"], report["tier"]) == (1, True, "fallback")
    assert "engine" in report["limited_by"]
    config.write_text(text.format("true"))
    fine = run_verb("doctor", "-c", str(config))
    assert "\nperformance: " in fine.stdout
    assert "custom command: " in fine.stdout
