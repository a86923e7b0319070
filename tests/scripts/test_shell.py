"""The shell scripts: clean by shellcheck, and a wrong word is answered before anything is touched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("#!/usr/bin/env bash", "#!/bin/bash", "#!/bin/sh", "# Shared by scripts/")


def sh(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=240, stdin=subprocess.DEVNULL
    )


def lib(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` with lib.sh sourced, with its files in `cwd`."""
    head = f"set -euo pipefail; root={cwd}; state={cwd}; source {ROOT}/scripts/lib.sh; "
    return sh("bash", "-c", head + script, cwd=cwd)


def test_shellcheck() -> None:
    assert shutil.which("shellcheck"), "scripts/test installs shellcheck"
    files = [
        path
        for folder in ("scripts", ".ci", "tests/support")
        for path in (ROOT / folder).iterdir()
        if path.is_file()
    ]
    scripts = [str(path.relative_to(ROOT)) for path in files if path.read_text().startswith(SHELL)]
    assert {"scripts/quickstart", "scripts/test", "scripts/lib.sh", ".ci/run"} <= set(scripts)
    done = sh("shellcheck", "-x", *sorted(scripts))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test", "sudo scripts/fleet-trial"])
def test_help(script: str) -> None:
    done = sh(script.removeprefix("sudo "), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {script}")


def test_a_machine_without_python_gets_all_of_it(tmp_path: Path) -> None:
    done = lib('find_python() { return 1; }; missing 2 "$RUN_NEEDS"', tmp_path)
    assert {"python3", "python3-venv", "python3-dev"} <= set(done.stdout.split())


def test_fleet_trial_refuses() -> None:
    done = sh("scripts/fleet-trial", "--twice")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cannot run the trial: unknown argument '--twice'\n  what to do: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modle", "x"], "unknown argument '--modle'"),
        (["--port", "99999"], "--port '99999' is not a number from 1 to 65535"),
        (["--port=0"], "--port '0' is not"),
        (["--instances", "two"], "--instances 'two' is not a number"),
        (["--instances"], "--instances needs a value"),
        (["--model", "/nowhere/model"], "there is no directory '/nowhere/model'"),
        (["--model", "/etc"], "it has no config.json"),
        (["--model", ""], "--model needs a directory, a file or a name"),
        (
            ["--model", "x.gguf"],
            "'x.gguf' is a GGUF file, which vLLM does not read\n  what to do: add --engine llama.cpp",
        ),
        (
            ["--engine", "llamacpp"],
            "--engine 'llamacpp' is no engine of quickstart\n  what to do: choose --engine vllm or",
        ),
        (["--engine"], "--engine needs a value"),
        (["--engine=llama.cpp", "--model", "Qwen/Qwen3-0.6B"], "there is no file 'Qwen/Qwen3-0.6B'"),
        (["--engine=llama.cpp", "--model", "/etc"], "'/etc' has no *.gguf file"),
        (["--engine=llama.cpp", "--model", "README.md"], "'README.md' is no GGUF file"),
    ],
)
def test_quickstart_refuses(arguments: list[str], said: str) -> None:
    done = sh("scripts/quickstart", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "what to do:" in done.stderr
    assert done.stdout == ""


def test_unknown_lane() -> None:
    done = sh("scripts/test", "unti")
    assert done.returncode == 2
    assert "'unti'" in done.stderr


def test_missing_packages_are_named_once(tmp_path: Path) -> None:
    needs = "has_command sh|dash|dash\nhas_command no-such-program|left|right\n"
    assert lib(f"missing 2 '{needs}'; missing 3 '{needs}'", tmp_path).stdout.split() == ["left", "right"]


def test_without_apt_the_packages_are_listed(tmp_path: Path) -> None:
    hidden = "has_command() { return 1; }; step packages; install_packages 'has_command x|left|right'"
    done = lib(hidden, tmp_path)
    assert done.returncode == 1
    assert 'step "packages" failed' in done.stderr
    assert "dnf install right" in done.stderr


def test_a_failing_command_shows_its_log_and_the_step(tmp_path: Path) -> None:
    script = "step 'try'; quietly log 'trying' sh -c 'echo because; exit 3' || { tail_of log; die 'cannot try' 'rest'; }"
    done = lib(script, tmp_path)
    assert done.returncode == 1
    assert "trying" in done.stdout
    assert "failed" in done.stdout
    assert "because" in done.stderr
    assert 'step "try" failed: cannot try' in done.stderr
    assert "what to do: rest" in done.stderr


def test_an_unforeseen_failure_names_the_step(tmp_path: Path) -> None:
    done = lib("step 'walk'; false", tmp_path)
    assert done.returncode == 1
    assert 'step "walk" failed unexpectedly' in done.stderr


def test_an_installation_counts_until_its_recipe_changes(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("pyproject.toml", "scripts/lib.sh", "scripts/torch_cpu.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    check = "is_installed vllm && echo yes || echo no"
    mark = 'fingerprint vllm >"$venv/.installed-vllm"; '
    assert lib(check, tmp_path).stdout == "no\n"
    assert lib(mark + check, tmp_path).stdout == "yes\n"
    assert lib("is_installed vllm test && echo yes || echo no", tmp_path).stdout == "no\n"
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert lib(check, tmp_path).stdout == "no\n"


def test_a_copy_is_made_again_when_the_source_changes(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "launcher").mkdir()
    for name in ("pyproject.toml", "scripts/lib.sh", "scripts/torch_cpu.py", "launcher/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    prints: list[list[str]] = []
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "launcher" / "__init__.py").write_text(text)
        prints.append([lib(f"editable={kind}; fingerprint vllm", tmp_path).stdout for kind in ("yes", "no")])
    (link, copy), (same_link, other_copy) = prints
    assert link == same_link
    assert copy != other_copy


def test_an_interrupt_ends_the_command_and_names_the_step(tmp_path: Path) -> None:
    script = f"root={tmp_path}; state={tmp_path}; source {ROOT}/scripts/lib.sh; step wait; quietly log waiting sleep 50"
    done = sh("timeout", "--signal=INT", "4", "bash", "-c", f"set -euo pipefail; {script}", cwd=tmp_path)
    assert done.returncode == 124  # timeout's own
    assert 'interrupted in step "wait"' in done.stderr


def test_prometheus_that_cannot_be_fetched_is_said_with_a_remedy(tmp_path: Path) -> None:
    nowhere = (
        f"export NUMA_LAUNCHER_TEST_PROMETHEUS={tmp_path}/none; has_command() {{ [[ $1 != prom* ]]; }}; "
    )
    done = lib(nowhere + "apt-get() { echo no network; return 1; }; step x; fetch_prometheus", tmp_path)
    assert done.returncode == 1
    assert "cannot unpack Prometheus" in done.stderr
    assert "no network" in done.stderr
    assert "put prometheus and promtool on PATH" in done.stderr
    done = lib(nowhere + "has_command() { false; }; step x; fetch_prometheus", tmp_path)
    assert "this system has no apt-get" in done.stderr


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    for name in ("prometheus", "promtool"):
        (tmp_path / "usr/bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "usr/bin" / name).touch(mode=0o755)
    there = f"export NUMA_LAUNCHER_TEST_PROMETHEUS={tmp_path}; apt-get() {{ return 1; }}; "
    assert lib(there + "fetch_prometheus", tmp_path).returncode == 0


def packaged_checkout(tmp_path: Path) -> Path:
    """A checkout with one file of each packaged kind."""
    checkout = tmp_path / "checkout"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for name in (
        "scripts/lib.sh", "scripts/torch_cpu.py", "scripts/compile", "scripts/compile_modules.py", "launcher/__init__.py",
        "launcher/fleet/haproxy.cfg", "launcher/accounts/references.toml", "launcher/dashboard/static/index.html",
    ):  # fmt: skip
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    return checkout


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "changed",
    [
        "launcher/__init__.py", "launcher/fleet/haproxy.cfg", "launcher/accounts/references.toml",
        "launcher/dashboard/static/index.html", "pyproject.toml", "README.md", "scripts/compile_modules.py",
    ],
)  # fmt: skip
def test_a_change_of_any_packaged_file_is_installed(tmp_path: Path, changed: str) -> None:
    checkout = packaged_checkout(tmp_path)
    ask = "editable=no; fingerprint command"
    before = lib(ask, checkout).stdout
    assert before == lib(ask, checkout).stdout
    assert len(before.strip()) == 64
    with (checkout / changed).open("a") as file:
        file.write("\n# changed\n")
    assert lib(ask, checkout).stdout != before


def test_what_python_leaves_in_a_checkout_is_no_change(tmp_path: Path) -> None:
    checkout = packaged_checkout(tmp_path)
    before = lib("editable=no; fingerprint command", checkout).stdout
    (checkout / "launcher/__pycache__").mkdir()
    (checkout / "launcher/__pycache__/__init__.cpython-311.pyc").write_bytes(b"x")
    (checkout / "launcher/core.cpython-311-x86_64-linux-gnu.so").write_bytes(b"x")
    (checkout / "launcher/compiled.sha256").write_bytes(b"x")
    assert lib("editable=no; fingerprint command", checkout).stdout == before


def test_an_installation_leaves_the_checkout_as_it_was(tmp_path: Path) -> None:
    """setuptools builds inside the folder that pip is given: an installation as root gives it a copy."""
    checkout = packaged_checkout(tmp_path)
    (checkout / "build" / "lib").mkdir(parents=True)
    (checkout / "build" / "lib" / "old.py").touch()
    before = files_of(checkout)
    pip = tmp_path / "python"
    # A pip that leaves in the folder that it installs from what setuptools leaves there.
    pip.write_text(
        "#!/bin/sh\n"
        'for word; do last=$word; done\ncase $last in *"[command]") from=${last%"[command]"};; *) exit 0;; esac\n'
        f'mkdir -p "$from/build/lib" "$from/numa_launcher.egg-info"; touch "$from/build/lib/new.py"\n'
        f'ls -R "$from" >{tmp_path}/seen\n'
    )
    pip.chmod(0o755)
    (tmp_path / "venv").mkdir()
    done = lib(
        f"editable=no; venv={tmp_path}/venv; state={tmp_path}; python={pip}; make_venv() {{ :; }}; check_disk() {{ :; }}; "
        "install_launcher command",
        checkout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = (tmp_path / "seen").read_text()
    assert "haproxy.cfg" in seen
    assert "new.py" in seen
    assert "old.py" not in seen, "setuptools would install modules that are no more"
    assert files_of(checkout) == before
