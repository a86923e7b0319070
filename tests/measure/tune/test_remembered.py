"""The sentence of `plan` and `status`, and which verdict it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.verdicts import BEST, FINGERPRINT, HARDWARE, MODEL, SOFTWARE

from launcher.measure.tune.identity import Fingerprint
from launcher.measure.tune.remembered import (
    BestLayout,
    Limits,
    MeasuredLayout,
    choose,
    cpus_of,
    judge,
    recall,
    remember,
)

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=None)


def of(
    best: BestLayout = BEST,
    cpus: tuple[str, ...] = BEST.cpus,
    limits: Limits = LIMITS,
    now: Any = FINGERPRINT,
) -> MeasuredLayout:
    return judge(best, now, cpus, [limits])


def test_in_use() -> None:
    found = of()
    assert found.text == "layout measured best here on 2026-11-20, 1.31 (1.27–1.36) × the default"
    assert (found.in_use, found.stale) == (True, ())
    assert found.layout == {
        "strategy": "interleaved", "instances_per_socket": 4, "reserve_cores": 2, "span_nodes": False
    }  # fmt: skip


def test_another_layout_is_in_use() -> None:
    found = of(cpus=("0,1", "2,3"))
    assert found.text == (
        "layout measured best here on 2026-11-20, 1.31 (1.27–1.36) × the default: interleaved × 4, 2 cores reserved; "
        "not the layout in use: numa-launcher tune --apply"
    )
    assert not found.in_use


@pytest.mark.parametrize(
    ("tuned", "in_use"), [({}, True), ({"max_num_seqs": 64}, True), ({"max_num_seqs": 128}, False),
                          ({"max_num_batched_tokens": 4096}, False)],
)  # fmt: skip
def test_limits_are_part_of_the_layout_where_they_were_tuned(tuned: dict[str, int], in_use: bool) -> None:
    assert of(replace(BEST, layout=replace(BEST.layout, **tuned))).in_use is in_use


def test_another_stack_is_not_in_use() -> None:
    assert not of(replace(BEST, layout=replace(BEST.layout, stack="vllm"))).in_use


def test_nothing_differed_from_the_default() -> None:
    found = of(replace(BEST, different=False, ratio_to_default=1.0), cpus=("0,1", "2,3"))
    assert found.text == "layouts measured here on 2026-11-20: none differs from the default"


def test_without_a_ratio_none_is_named() -> None:
    found = of(replace(BEST, ratio_to_default=None, interval=None))
    assert found.text == "layout measured best here on 2026-11-20"


def test_stale() -> None:
    found = of(now=replace(FINGERPRINT, software=replace(SOFTWARE, vllm="0.33.0")))
    assert found.text == (
        "layout measured here on 2026-11-20 (interleaved × 4, 2 cores reserved) is stale: vllm 0.32.0 → 0.33.0; "
        "run numa-launcher tune again"
    )
    assert found.stale == ("vllm 0.32.0 → 0.33.0",)


def test_the_sentence_names_three_changes_and_the_list_all() -> None:
    changed = replace(HARDWARE, governor="powersave", boost=False, smt=False, sockets=2)
    found = of(now=replace(FINGERPRINT, hardware=changed))
    assert "sockets 1 → 2; SMT on → off; governor performance → powersave and 1 more;" in found.text
    assert len(found.stale) == 4


def test_the_verdict_for_the_models_served_now_has_precedence() -> None:
    other = replace(FINGERPRINT, models=(replace(MODEL, path="/m"),))
    newer = replace(BEST, measured_at="2026-11-21T00:00:00+00:00", fingerprint=other)
    assert choose([BEST, newer], FINGERPRINT) is BEST
    assert choose([BEST, newer], other) is newer
    assert choose([BEST, newer], replace(FINGERPRINT, models=())) is newer
    assert choose([], FINGERPRINT) is None


def test_cpus_of_a_plan() -> None:
    assert cpus_of({"slots": [{"slot": 0, "cpus": "0-3"}, {"slot": 1, "cpus": "4-7"}]}) == ("0-3", "4-7")


LLAMA_CPP = Fingerprint(
    hardware=HARDWARE,
    software=replace(
        SOFTWARE, engine="llama.cpp", vllm=None, torch=None, zentorch=None, engine_version="11549"
    ),
    models=(replace(MODEL, path="/srv/models/llama.gguf"),),
)  # fmt: skip
RACED = replace(
    BEST, layout=replace(BEST.layout, stack="llama.cpp"), fingerprint=LLAMA_CPP, configured=FINGERPRINT
)


def test_a_verdict_for_another_engine_holds_before_and_after_the_switch() -> None:
    before, after = of(RACED), of(RACED, now=LLAMA_CPP)
    assert (before.stale, before.in_use, before.layout["stack"]) == ((), False, "llama.cpp")
    assert "tune --apply" in before.text
    assert (after.stale, after.in_use) == ((), True)
    assert "stack" not in after.layout
    assert not of(RACED, cpus=("0,1", "2,3"), now=LLAMA_CPP).in_use
    other = replace(LLAMA_CPP, software=replace(LLAMA_CPP.software, engine_version="11600"))
    assert of(RACED, now=other).stale == ("llama.cpp 11549 → 11600",)
    other = replace(other, models=(replace(LLAMA_CPP.models[0], config_sha256="x", weights_bytes=1 << 30),))
    file, weights, build = of(RACED, now=other).stale
    assert file == "config.json of /srv/models/llama.gguf"
    assert weights.startswith("weights of /srv/models/llama.gguf ")
    assert build == "llama.cpp 11549 → 11600"


def test_another_image_of_the_engine_that_won_is_no_other_engine() -> None:
    won, configured, now = (
        replace(LLAMA_CPP, software=replace(SOFTWARE, engine=f"{engine} in image {image}"))
        for engine, image in (("sglang", "0a1b"), ("vllm", "2c3d"), ("sglang", "4e5f"))
    )
    best = replace(RACED, fingerprint=won, configured=configured)
    assert of(best, now=now).stale == ("engine sglang in image 0a1b → sglang in image 4e5f",)


def test_a_verdict_for_another_engine_is_that_of_both_models(tmp_path: Path) -> None:
    newer = replace(
        BEST, measured_at="2026-11-21T00:00:00+00:00", fingerprint=replace(FINGERPRINT, models=())
    )
    for now in (FINGERPRINT, LLAMA_CPP):
        assert choose([RACED, newer], now) is RACED
    remember(tmp_path, BEST)
    remember(tmp_path, RACED)
    assert recall(tmp_path) == (RACED,), "the verdict before was about the same configuration"
