"""Claude Code on /v1/messages, as a script runs it: `claude -p`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.engine import AFTER_TOOL, REFUSAL, WORDS
from support.client_runs import Product, Ran

Claude = Callable[..., tuple[dict[str, Any], Ran]]


@pytest.fixture
def claude(packages: Path, node: str, home: Path) -> Claude:
    """Its result, and how it ran."""

    def run(product: Product, scene: str, key: str | None = None) -> tuple[dict[str, Any], Ran]:
        argv = [
            node, str(packages / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"), "-p", "--output-format", "json",
            "--allowed-tools", "Bash", "--", f"scene:{scene}",
        ]  # fmt: skip
        environ = {
            "CLAUDE_CONFIG_DIR": str(home / "claude"), "ANTHROPIC_BASE_URL": product.daemon.url,
            "ANTHROPIC_API_KEY": key or product.key, "ANTHROPIC_MODEL": "fake", "ANTHROPIC_SMALL_FAST_MODEL": "fake",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
        }  # fmt: skip
        ran = product.run(argv, home, environ)
        return json.loads(ran.printed), ran

    return run


def test_an_answer(product: Product, claude: Claude) -> None:
    result, ran = claude(product, "answer")
    assert (ran.exit_code, result["is_error"], result["result"]) == (0, False, "".join(WORDS)), ran
    assert ran.requests == {"accepted": 1, "completed": 1}


def test_a_tool_call_after_a_long_silence(product: Product, claude: Claude) -> None:
    result, ran = claude(product, "held")
    assert (ran.exit_code, result["is_error"], result["result"]) == (0, False, "".join(AFTER_TOOL)), ran
    assert (result["num_turns"], ran.requests) == (2, {"accepted": 2, "completed": 2})


def test_an_engines_400_after_comments(product: Product, claude: Claude) -> None:
    """It asks four times, each time with fewer of its extras, and each time once more without a stream."""
    result, ran = claude(product, "refused")
    assert (ran.exit_code, result["is_error"]) == (1, True), ran
    assert REFUSAL in result["result"]
    assert ran.requests == {"accepted": 8, "refused": 8}


def test_an_engine_that_is_killed(mortal: Product, claude: Claude) -> None:
    """It asks again without a stream."""
    result, ran = claude(mortal, "killed")
    assert (ran.exit_code, result["is_error"], result["result"]) == (0, False, "".join(WORDS)), ran
    assert ran.requests == {"accepted": 2, "failed": 1, "completed": 1}


def test_a_wrong_key(product: Product, claude: Claude) -> None:
    """Once: without X-Should-Retry it repeats 401 for three minutes."""
    result, ran = claude(product, "answer", "wrong")
    assert (ran.exit_code, result["is_error"], result["api_error_status"]) == (1, True, 401), ran
    assert "incorrect API key provided" in result["result"]
    assert ran.requests == {"unauthorized": 1}
