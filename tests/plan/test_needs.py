"""The needs of each model in `plan` and `plan --json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.model_folders import LLAMA, model
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.text import GIB
from launcher.config.schema import Config, Engine, Memory, Model
from launcher.models.reader import read_profile
from launcher.plan.needs import needs_json, needs_text
from launcher.plan.plan import Plan
from launcher.plan.plan_text import plan_json, to_text

MACHINE = Machine(cores=64, node_bytes=768 * GIB)
GEMMA3 = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
}  # fmt: skip


def plan_of(folder: Path, config: dict[str, Any], *args: str, kv_cache: str = "auto", **keys: Any) -> Plan:
    path = model(folder, config)
    asked = Config(
        models=(Model(name="m", path=path, **keys),),
        engine=Engine(args=args),
        memory=Memory(kv_cache=kv_cache),
    )
    return make_plan(MACHINE.topology(), asked, {"m": read_profile(path)})


def test_json(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, GEMMA3)
    (its,) = plan_json(plan)["models"]
    assert plan.violations == ()
    assert its == {
        "name": "m", "heads": 8, "latent": False, "quantization": None, "max_model_len": 131072,
        "kv_bytes_per_token": 34 * 2 * 4 * 256 * 2, "state_bytes": 0, "weights_bytes": 64,
        # one group of 5 full layers, six of sliding ones
        "request_bytes": (1024 + 6 * 25) * 5 * 128 * 2 * 4 * 256 * 2,
        "layers": [
            {"kind": "full", "count": 5, "kv_heads": 4, "head_size": 256, "window": None},
            {"kind": "sliding", "count": 29, "kv_heads": 4, "head_size": 256, "window": 1024},
        ],
        "sources": ["config", "defaults"],
    }  # fmt: skip


def test_latents_states_and_types(tmp_path: Path) -> None:
    latent = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    its = needs_json(plan_of(tmp_path / "a", latent).needs[0])
    assert its["latent"]
    assert its["layers"] == [{"kind": "latent", "count": 32, "kv_heads": 1, "head_size": 576, "window": None}]
    hybrid = needs_json(
        plan_of(tmp_path / "b", {"model_type": "qwen3_next", "num_hidden_layers": 4}).needs[0]
    )
    state = hybrid["layers"][1]
    assert state == {"kind": "state", "count": 3, "kv_heads": None, "head_size": None, "window": None}
    assert hybrid["state_bytes"] > 0
    (whole,) = plan_of(tmp_path / "c", LLAMA).needs
    (half,) = plan_of(tmp_path / "c", LLAMA, "--kv-cache-dtype", "fp8").needs
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.request_bytes * 2 == whole.request_bytes
    (ranks,) = plan_of(tmp_path / "c", LLAMA, tensor_parallel_size=2).needs
    assert ranks.request_bytes == whole.request_bytes, "over all ranks"


def test_a_model_that_does_not_fit_is_shown_as_well(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA | {"max_position_embeddings": 2**27})
    shown = plan_json(plan)
    assert "out-of-memory" in {finding["code"] for finding in shown["violations"]}
    assert shown["models"][0]["max_model_len"] == 2**27
    assert [set(finding) for finding in shown["findings"]] == [
        {"severity", "code", "message", "remedy"}
    ] * len(plan.findings)
    assert shown["findings"][0]["severity"] == "violation"


def test_text(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, GEMMA3)
    lines = needs_text(plan.needs[0])
    assert lines == [
        "model m: 8 attention heads, weights 64 B, by config, defaults",
        "  layers: 5 full of 4 KV heads x 256, 29 sliding of 4 KV heads x 256 within 1024 tokens",
        "  one request of 131072 tokens: 2.87 GiB of KV cache (139264 B a token)",
    ]
    assert "\n".join(lines) in to_text(plan, MACHINE.topology())


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    unread = {"model_type": "of-remote-code", "hidden_size": 64}
    plan = plan_of(tmp_path, unread)
    (finding,) = plan.violations
    assert finding.code == "memory-unknown"
    assert "config.json has no num_hidden_layers" in finding.message
    assert finding.remedy == 'set memory.kv_cache to a size such as "4GiB"'
    assert plan.needs == ()
    explicit = plan_of(tmp_path, unread, kv_cache="4GiB")
    assert explicit.violations == ()
    assert [warning.code for warning in explicit.warnings] == ["memory-unchecked", "engine-not-asked"]
    assert "config.json has no num_hidden_layers" in explicit.warnings[0].message


def test_an_explicit_kv_cache_is_enough_where_sizes_are_guessed(tmp_path: Path) -> None:
    guessed = {
        "model_type": "of-remote-code", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    plan = plan_of(tmp_path, guessed, kv_cache="40GiB")
    assert plan.violations == ()
    assert {"kv-too-small", "assumed-size"} <= {warning.code for warning in plan.warnings}
    known = plan_of(tmp_path, guessed | {"num_key_value_heads": 64, "head_dim": 128}, kv_cache="40GiB")
    assert [violation.code for violation in known.violations] == ["kv-too-small"]
