"""Secrets stay secret, and what is printed can be pasted."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launcher.base.address import UnixAddress
from launcher.engines.base import Launch, secret_names, shell_lines


def test_printed_lines_make_the_folder_that_the_engine_needs(tmp_path: Path) -> None:
    folder = tmp_path / "run of mine" / "slot0"
    launch = Launch(("test", "-d", str(folder)), {}, frozenset(), UnixAddress("/x"), scratch=str(folder))
    subprocess.run(["sh", "-c", shell_lines(launch)], check=True)


def test_which_names_are_secret() -> None:
    names = ("HF_TOKEN", "MY_API_KEY", "DB_PASSWORD", "TOKENIZERS_PARALLELISM", "VLLM_CACHE_ROOT")
    assert secret_names(dict.fromkeys(names, "")) == {"HF_TOKEN", "MY_API_KEY", "DB_PASSWORD"}


def test_printed_lines_run_in_a_shell_and_hold_no_secret(tmp_path: object) -> None:
    token = f"{tmp_path}/it's here"
    with open(token, "w") as file:  # noqa: PTH123 - the path is text here
        file.write("hf_secret\n")
    env = {"TZ": "two words", "LANG": "$HOME 'x'", "HF_TOKEN": "hf_secret", "OTHER_TOKEN": "hidden"}
    script = 'printf "%s\\n" "$TZ" "$LANG" "$HF_TOKEN" "$OTHER_TOKEN" "$1"'
    launch = Launch(("sh", "-c", script, "sh", "an arg"), env, secret_names(env), UnixAddress("/x"))
    lines = shell_lines(launch, token)
    assert "hf_secret" not in lines
    assert "hidden" not in lines
    done = subprocess.run(
        ["sh", "-c", lines],
        capture_output=True,
        text=True,
        check=True,
        env={"OTHER_TOKEN": "set", "PATH": "/bin"},
    )
    assert done.stdout.splitlines() == ["two words", "$HOME 'x'", "hf_secret", "set", "an arg"]
    unset = subprocess.run(
        ["sh", "-c", lines], capture_output=True, text=True, check=False, env={"PATH": "/bin"}
    )
    assert "OTHER_TOKEN: set it first" in unset.stderr


def test_a_variable_that_is_not_known_to_be_harmless_is_asked_of_the_shell() -> None:
    """Under its own name: what is printed can be pasted where the variables are set."""
    env = {"SLACK_WEBHOOK_URL": "https://hooks.example/T1", "OMP_NUM_THREADS": "8"}
    lines = shell_lines(Launch(("env",), env, secret_names(env), UnixAddress("/x")))
    assert (
        lines == 'SLACK_WEBHOOK_URL="${SLACK_WEBHOOK_URL:?set it first}" \\\n  OMP_NUM_THREADS=8 \\\n  env\n'
    )


def test_a_password_in_a_url_makes_a_variable_secret() -> None:
    env = {
        "https_proxy": "http://me:hush@proxy:3128",
        "no_proxy": "localhost",
        "INDEX": "https://t0ken@host/",
    }
    assert secret_names(env) == {"https_proxy", "INDEX"}


def test_secrets_of_arguments_are_asked_of_the_shell() -> None:
    argv = ("printf", "%s\n", "--hf-token", "hush", "--index=https://u:hush@h/$x", "--port", "80")
    lines = shell_lines(Launch(argv, {}, frozenset(), UnixAddress("/x")))
    assert "hush" not in lines
    environ = {"SECRET_1": "one", "SECRET_2": "u:two", "PATH": "/bin"}
    done = subprocess.run(["sh", "-c", lines], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.splitlines() == ["--hf-token", "one", "--index=https://u:two@h/$x", "--port", "80"]
    unset = subprocess.run(
        ["sh", "-c", lines], capture_output=True, text=True, check=False, env={"PATH": "/bin"}
    )
    assert "SECRET_1: set it first" in unset.stderr
