"""docs/planning.md: its worked example, and its list of codes."""

from __future__ import annotations

import re
from pathlib import Path

from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.text import GIB
from launcher.config.schema import Config, Layout, Model
from launcher.engines.llama_cpp import arguments as llama_arguments
from launcher.engines.llama_cpp import planning as llama_planning
from launcher.engines.vllm import rules_binding, rules_model
from launcher.engines.vllm import rules_host as vllm_rules_host
from launcher.engines.vllm.demand import pool_for
from launcher.engines.vllm.settings import effective_config
from launcher.models.layers import KvLayers, LayerKind
from launcher.models.profile import ModelProfile
from launcher.plan import rules_host, rules_placement

TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
LLAMA_8B = ModelProfile(
    weights_bytes=16_060_522_496, kv_bytes_per_token=131_072, max_model_len=131_072, num_attention_heads=32,
    num_kv_heads=8, layers=(KvLayers(LayerKind.FULL, 32, heads=8, head_bytes=2 * 128 * 2),), hidden_size=4096,
    intermediate_size=14_336, vocab_size=128_256, head_bytes=128_256 * 4096 * 2, file_bytes=4_976_698_672,
)  # fmt: skip


def test_the_worked_example() -> None:
    model = Model(name="m", path="/m", max_model_len=8192, max_num_seqs=64)
    config = Config(models=(model,), layout=Layout(instances_per_socket=2, reserve_cores=0))
    topology = Machine(cores=64, node_bytes=384 * GIB).topology()
    plan = make_plan(topology, config, {"m": LLAMA_8B})
    (row,) = plan.ledger
    pool = pool_for(LLAMA_8B, effective_config(model, config, LLAMA_8B, topology.cpu), 1)
    kv = plan.slots[0].kv_cache_bytes
    assert kv is not None
    figures = {
        "the quoted formula": 8192 * 64 * 4096 * 2,
        "one token": pool.block_bytes // 128,
        "one block of 128 tokens": pool.block_bytes,
        "64 requests of 64 blocks, and one block": pool.bytes_for(64, 8192),
        "in steps of 128 MiB": kv,
        "weights of one instance": row.weights_bytes // 2,
        "peak": row.peak_bytes // 2,
        "overhead": row.overhead_bytes // 2,
        "reserve": row.reserve_bytes,
        "page cache": row.page_cache_bytes,
        "left of the node": row.left_bytes,
    }
    example = TEXT[TEXT.index("### A worked example") : TEXT.index("## Order of starts")]
    said = dict(re.findall(r"^\| ([a-z0-9][^:|]*?)(?:: [^|]*)? \| ([\d,]+) \|$", example, re.MULTILINE))
    assert said == {name: f"{size:,}" for name, size in figures.items()}
    assert figures["64 requests of 64 blocks, and one block"] // figures["the quoted formula"] == 16


RULES_OF = (
    llama_arguments, llama_planning, rules_binding, rules_host, rules_model, rules_placement, vllm_rules_host,
)  # fmt: skip


def test_every_code_of_the_rules_is_listed() -> None:
    sources = "".join(Path(str(module.__file__)).read_text() for module in RULES_OF)
    codes = set(re.findall(r'(?:violation|warning)\)?\(\s*"([a-z0-9-]+)",', sources))
    assert len(codes) > 25
    assert {code for code in codes if f"`{code}`" not in TEXT} == set()
