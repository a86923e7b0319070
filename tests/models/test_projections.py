"""Widths of projections from headers, and what they correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.model_folders import LLAMA, model

from launcher.models.projections import Projection, projections_of
from launcher.models.reader import read_profile
from launcher.models.weight_files import Tensor

SMALL = {
    "architectures": ["X"], "model_type": "of-remote-code", "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 3, "max_position_embeddings": 64,
}  # fmt: skip


def tensor(name: str, rows: int) -> Tensor:
    return Tensor(name, rows * 64, rows * 128, 2, floating=True, rows=rows)


def layers(*rows: tuple[int, int] | None, prefix: str = "model.layers") -> dict[str, Any]:
    """Key and value projections of each layer, as safetensors."""
    found: dict[str, Any] = {"model.embed_tokens.weight": ("BF16", [100, 64])}
    for index, its in enumerate(rows):
        if its is not None:
            found[f"{prefix}.{index}.self_attn.k_proj.weight"] = ("BF16", [its[0], 64])
            found[f"{prefix}.{index}.self_attn.v_proj.weight"] = ("BF16", [its[1], 64])
    return found


def test_names_of_the_language_model_only() -> None:
    found = projections_of([
        tensor("language_model.model.layers.0.self_attn.k_proj.weight", 32),
        tensor("language_model.model.layers.0.self_attn.v_proj.weight", 16),
        tensor("language_model.model.layers.1.self_attn.k_proj.weight", 32),
        tensor("vision_tower.encoder.layers.0.self_attn.k_proj.weight", 99),
        tensor("model.layers.0.self_attn.indexer.wk.weight", 99),
        tensor("mtp.layers.0.self_attn.k_proj.weight", 99),
        tensor("model.layers.0.mlp.up_proj.weight", 99),
    ])  # fmt: skip
    assert found == {0: Projection(key=32, value=16), 1: Projection(key=32)}
    assert projections_of([tensor("layers.2.attention.wk.weight", 8)]) == {2: Projection(key=8)}
    assert projections_of([tensor("blk.2.attn_kv_a_mqa.weight", 576)]) == {2: Projection(latent=576)}


def test_heads_that_the_file_leaves_out(tmp_path: Path) -> None:
    profile = read_profile(model(tmp_path, SMALL, **layers((16, 16), (16, 16), (16, 16))))
    assert profile.kv_bytes_per_token == 3 * 2 * 16 * 2
    assert profile.num_kv_heads == 1
    assert profile.sources == ("config", "headers")
    assert profile.assumed == ()


def test_heads_without_headers_are_assumed(tmp_path: Path) -> None:
    profile = read_profile(model(tmp_path, SMALL))
    assert profile.kv_bytes_per_token == 3 * 2 * 64 * 2
    assert profile.assumed == ("num_key_value_heads", "head_dim")
    assert profile.sources == ("config", "assumed")


def test_headers_go_before_the_description(tmp_path: Path) -> None:
    config = SMALL | {"num_key_value_heads": 4, "head_dim": 16}
    profile = read_profile(model(tmp_path, config, **layers((32, 32), (64, 48), None)))
    assert [(its.count, its.heads, its.head_bytes) for its in profile.layers] == [
        (1, 2, 2 * 16 * 2),
        (1, 4, (16 + 12) * 2),
    ]


def test_another_head_size(tmp_path: Path) -> None:
    config = SMALL | {"num_key_value_heads": 4, "head_dim": 16}
    (found,) = read_profile(model(tmp_path, config, **layers((40, 40), (40, 40), (40, 40)))).layers
    assert (found.heads, found.head_size) == (4, 10)


def test_packed_weights_show_no_width(tmp_path: Path) -> None:
    packed = {f"model.layers.{i}.self_attn.k_proj.weight": ("I32", [8, 64]) for i in range(32)}
    profile = read_profile(model(tmp_path, LLAMA, **packed))
    assert profile.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert "headers" not in profile.sources
