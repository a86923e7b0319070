"""Codex CLI on /v1/responses, as a script runs it: `codex exec`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.engine import AFTER_TOOL, REFUSAL, WORDS
from support.client_runs import Product, Ran

CONFIG = """
model = "fake"
model_provider = "numa-launcher"
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
apps = false
plugins = false
[model_providers.numa-launcher]
name = "numa-launcher"
base_url = "{url}/v1"
env_key = "NUMA_LAUNCHER_KEY"
wire_api = "responses"
"""
Codex = Callable[..., Ran]


@pytest.fixture
def codex(packages: Path, node: str, home: Path) -> Codex:
    def run(product: Product, scene: str, key: str | None = None) -> Ran:
        (home / "config.toml").write_text(CONFIG.format(url=product.daemon.url))
        argv = [
            node, str(packages / "node_modules/@openai/codex/bin/codex.js"), "exec", "--json", "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox", f"scene:{scene}",
        ]  # fmt: skip
        return product.run(argv, home, {"CODEX_HOME": str(home), "NUMA_LAUNCHER_KEY": key or product.key})

    return run


def events(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.printed.splitlines()]


def items(ran: Ran, type_: str) -> list[dict[str, Any]]:
    done = [event["item"] for event in events(ran) if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == type_]


def said(ran: Ran) -> str:
    return "".join(item["text"] for item in items(ran, "agent_message"))


def repeats(ran: Ran) -> list[str]:
    told = [event["message"] for event in events(ran) if event["type"] == "error"]
    return [message for message in told if message.startswith("Reconnecting")]


def test_an_answer(product: Product, codex: Codex) -> None:
    ran = codex(product, "answer")
    assert (ran.exit_code, said(ran)) == (0, "".join(WORDS)), ran
    assert ran.requests == {"accepted": 1, "completed": 1}


def test_a_tool_call_after_a_long_silence(product: Product, codex: Codex) -> None:
    ran = codex(product, "held")
    assert (ran.exit_code, said(ran)) == (0, "".join(AFTER_TOOL)), ran
    (command,) = items(ran, "command_execution")
    assert (command["exit_code"], command["aggregated_output"]) == (0, "from the tool\n")
    assert (repeats(ran), ran.requests) == ([], {"accepted": 2, "completed": 2})


def test_an_engines_400_after_comments(product: Product, codex: Codex) -> None:
    ran = codex(product, "refused")
    assert (ran.exit_code, said(ran)) == (1, ""), ran
    assert events(ran)[-1] == {"type": "turn.failed", "error": {"message": REFUSAL}}
    assert (repeats(ran), ran.requests) == ([], {"accepted": 1, "refused": 1})


def test_an_engine_that_is_killed(mortal: Product, codex: Codex) -> None:
    ran = codex(mortal, "killed")
    assert (ran.exit_code, said(ran)) == (0, "".join(WORDS)), ran
    assert len(repeats(ran)) == 1
    assert "the response broke off: " in repeats(ran)[0]
    assert ran.requests == {"accepted": 2, "failed": 1, "completed": 1}


def test_a_wrong_key(product: Product, codex: Codex) -> None:
    """Codex repeats every status but 400 and 429 five times; `stream_max_retries` of its configuration says how often."""
    ran = codex(product, "answer", "wrong")
    assert (ran.exit_code, said(ran)) == (1, ""), ran
    assert "401 Unauthorized: incorrect API key provided" in events(ran)[-1]["error"]["message"]
    assert ran.requests == {"unauthorized": 6}
