"""Each rule says what it should, and nothing on a clean plan."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.plans import make_plan
from support.synthetic import EPYC, Machine

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Config, Engine, EngineKind, Layout, Memory, Model
from launcher.engines.vllm.rules_model import doubts_of
from launcher.machine.topology import CpuInfo
from launcher.models.layers import KvLayers, LayerKind
from launcher.models.profile import ModelProfile
from launcher.plan.plan import NO_FACTS, Facts, Finding

PROFILE = ModelProfile(
    weights_bytes=2**20, kv_bytes_per_token=1024, max_model_len=4096, num_attention_heads=12, num_kv_heads=4
)
LATENT = replace(PROFILE, mla=True, num_kv_heads=1, layers=(KvLayers(LayerKind.FULL, 2, head_bytes=576 * 2),))
FULL = KvLayers(LayerKind.FULL, 1, heads=4, head_bytes=256)
SLIDING = KvLayers(LayerKind.SLIDING, 5, heads=4, head_bytes=256, window=512)
HYBRID = replace(PROFILE, layers=(FULL, SLIDING), sliding_window=512)
TIED = replace(PROFILE, tied_embeddings=True)
PREPACK = "VLLM_ZENTORCH_WEIGHT_PREPACK"
INTEL = CpuInfo("GenuineIntel", "Xeon 6", 6, frozenset({"avx2", "avx512f", "avx512_bf16", "amx_tile"}))
SKYLAKE = CpuInfo("GenuineIntel", "Xeon Gold", 6, frozenset({"avx2", "avx512f"}))
OLD = CpuInfo("GenuineIntel", "Xeon E5", 6, frozenset({"sse2", "avx2"}))
OLDER = CpuInfo("GenuineIntel", "", 6, frozenset({"sse2"}))
GOOD = Facts(
    transparent_hugepages="always", numa_balancing=False, governors=frozenset({"performance"}),
    ld_preload="/lib/libtcmalloc_minimal.so.4",
    engine={"vllm": "0.32.0", "torch": "2.13.0", "zentorch": "2.13.0.1"},
)  # fmt: skip
OLD_VLLM = replace(GOOD, engine={**GOOD.engine, "vllm": "0.17.1"})
"""It takes a KV cache in whole GiB only."""
NODES = Machine(nodes=2, cores=8)


def facts_of(**engine: str) -> Facts:
    return replace(GOOD, engine={**GOOD.engine, **engine})


def findings(
    *,
    machine: Machine | None = None,
    cpu: CpuInfo = EPYC,
    profile: ModelProfile = PROFILE,
    env: dict[str, str] | None = None,
    args: tuple[str, ...] = (),
    facts: Facts = GOOD,
    kv_cache: str = "auto",
    **model: Any,
) -> list[tuple[str, str]]:
    config = Config(
        models=(Model(name="m", path="/m", **model),),
        engine=Engine(env=env or {}, args=args),
        memory=Memory(kv_cache=kv_cache),
    )
    topology = replace(machine or Machine(cores=8), cpu=cpu).topology()
    plan = make_plan(topology, config, {"m": profile}, facts)
    assert all(finding.remedy for finding in plan.findings)
    assert all(finding.message.startswith("cannot ") for finding in plan.violations)
    return [(finding.severity, finding.code) for finding in plan.findings]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"facts": NO_FACTS},
        {"block_size": 64, "max_model_len": 4096, "dtype": "float32"},
        {"cpu": CpuInfo("ARM", "", 8, frozenset({"asimd"}))},
        {"cpu": SKYLAKE, "dtype": "float16"},
        {"cpu": INTEL, "args": ("--kv-cache-dtype", "fp8")},
        {"cpu": INTEL, "profile": LATENT, "block_size": 64},
        {"cpu": INTEL, "profile": replace(PROFILE, quantization="fp8")},
        {"profile": HYBRID},
        {"args": ("--kv-cache-dtype", "auto", "--max-model-len", "2k", "--dtype", "bfloat16")},
        {"args": ("--dtype", "float32", "--no-enable-prefix-caching")},
        {"args": ("--disable-hybrid-kv-cache-manager",)},
        {"args": ("--tensor-parallel-size", "1", "--data-parallel-size=1")},
        {"env": {"VLLM_USE_AOT_COMPILE": "1", "TORCHINDUCTOR_FREEZING": "0"}},
        {"env": {"VLLM_USE_AOT_COMPILE": "1"}, "args": ("--enforce-eager",)},
        {"env": {"VLLM_USE_AOT_COMPILE": "0"}},
        {"facts": replace(GOOD, numa_balancing=True)},
        {"facts": OLD_VLLM},
        {"facts": OLD_VLLM, "kv_cache": "2GiB"},
        {"env": {"LD_PRELOAD": "libgomp.so"}, "facts": replace(GOOD, ld_preload="libiomp5.so")},
        {"args": ("--kv-cache-dtype", "fp8"), "cpu": SKYLAKE, "dtype": "float32"},
        {"args": ("--kv-cache-dtype", "fp8"), "facts": NO_FACTS},
        {"args": ("--kv-cache-dtype", "bfloat16"), "profile": replace(PROFILE, kv_cache_dtype="fp8")},
        {"weight_prepack": False},
        {"weight_prepack": False, "profile": TIED, "cpu": SKYLAKE, "dtype": "float16"},
        {"weight_prepack": True, "profile": TIED, "facts": facts_of(**{PREPACK: "0"})},
        {"weight_prepack": False, "profile": TIED, "env": {PREPACK: "1"}},
        {"profile": TIED, "env": {PREPACK: "no number"}},
        {"profile": TIED, "facts": facts_of(**{PREPACK: "1"})},
        {"profile": replace(PROFILE, sources=("config", "defaults"))},
        {"profile": replace(PROFILE, sources=("config",)), "facts": facts_of(vllm="0.33.1")},
        {"profile": replace(PROFILE, assumed=("max_position_embeddings",)), "max_model_len": 2048},
        {"profile": replace(LATENT, architecture="DeepseekV4ForCausalLM", layers=(FULL,))},
    ],
    ids=lambda case: ",".join(case) or "defaults",
)
def test_a_clean_plan_has_no_findings(case: dict[str, Any]) -> None:
    assert findings(**case) == []


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"block_size": 48}, ("violation", "block-size")),
        ({"args": ("--block-size", "16")}, ("violation", "block-size")),
        ({"profile": LATENT}, ("warning", "latent-reference")),
        (
            {"profile": replace(LATENT, layers=(KvLayers(LayerKind.FULL, 2, head_bytes=320 * 2),))},
            ("violation", "latent-width"),
        ),
        (
            {
                "profile": replace(
                    PROFILE, layers=(KvLayers(LayerKind.FULL, 2, heads=4, head_bytes=2 * 16 * 2),)
                )
            },
            ("violation", "head-size"),
        ),
        ({"profile": replace(LATENT, architecture="DeepseekV3ForCausalLM")}, ("warning", "latent-reference")),
        ({"profile": replace(PROFILE, cpu_gap="sparse attention")}, ("warning", "cpu-backend")),
        (
            {
                "profile": replace(PROFILE, sources=("config", "defaults")),
                "facts": facts_of(vllm="0.33.1"),
            },
            ("warning", "class-defaults"),
        ),
        ({"profile": replace(PROFILE, assumed=("num_key_value_heads",))}, ("warning", "assumed-size")),
        (
            {"profile": replace(PROFILE, assumed=("max_position_embeddings",), max_model_len=None)},
            ("warning", "assumed-size"),
        ),
        ({"dtype": "float16"}, ("violation", "float16-on-zen")),
        ({"tensor_parallel_size": 5}, ("violation", "tensor-parallel-heads")),
        ({"tensor_parallel_size": 6}, ("violation", "tensor-parallel-heads")),
        ({"tensor_parallel_size": 2}, ("warning", "ranks-share-node")),
        ({"max_model_len": 8192}, ("violation", "max-model-len")),
        ({"args": ("--max-model-len", "8K")}, ("violation", "max-model-len")),
        (
            {"quantization": "awq", "profile": replace(PROFILE, quantization="gptq")},
            ("violation", "quantization-differs"),
        ),
        ({"profile": replace(PROFILE, quantization="fp8")}, ("warning", "quantization-cpu")),
        ({"profile": replace(PROFILE, file_format="gguf")}, ("warning", "gguf")),
        ({"args": ("--kv-cache-dtype", "nvfp4")}, ("violation", "kv-cache-dtype")),
        ({"args": ("--kv-cache-dtype", "fp8"), "profile": LATENT}, ("violation", "kv-cache-dtype")),
        ({"args": ("--kv-cache-dtype", "fp8")}, ("violation", "kv-fp8-on-zentorch")),
        ({"args": ("--kv-cache-dtype=fp8_e4m3",)}, ("violation", "kv-fp8-on-zentorch")),
        ({"profile": replace(PROFILE, kv_cache_dtype="fp8")}, ("violation", "kv-fp8-on-zentorch")),
        (
            {"profile": replace(PROFILE, kv_cache_dtype="fp8"), "args": ("--kv-cache-dtype", "auto")},
            ("violation", "kv-fp8-on-zentorch"),
        ),
        ({"weight_prepack": False, "profile": TIED}, ("violation", "tied-without-prepack")),
        ({"env": {PREPACK: "0"}, "profile": TIED}, ("violation", "tied-without-prepack")),
        (
            {"env": {PREPACK: "00"}, "profile": TIED, "weight_prepack": True},
            ("violation", "tied-without-prepack"),
        ),
        (
            {"facts": facts_of(**{PREPACK: "0"}), "profile": TIED},
            ("violation", "tied-without-prepack"),
        ),
        ({"facts": OLD_VLLM, "kv_cache": "1.5GiB"}, ("warning", "kv-not-whole-gib")),
        (
            {"args": ("--disable-hybrid-kv-cache-manager",), "profile": HYBRID},
            ("warning", "sliding-window-full"),
        ),
        (
            {"profile": replace(PROFILE, layers=(FULL, KvLayers(LayerKind.STATE, 4)))},
            ("warning", "state-unknown"),
        ),
        ({"cpu": OLD}, ("warning", "no-avx512")),
        ({"cpu": OLDER}, ("warning", "no-avx2")),
        ({"cpu": SKYLAKE}, ("warning", "no-avx512-bf16")),
        ({"cpu": INTEL, "dtype": "float32"}, ("warning", "amx-unused")),
        ({"cpu": INTEL, "args": ("--enforce-eager",)}, ("warning", "amx-eager")),
        ({"facts": replace(GOOD, engine={"vllm": "0.32.0"})}, ("warning", "no-zentorch")),
        ({"facts": replace(GOOD, transparent_hugepages="never")}, ("warning", "no-hugepages")),
        ({"facts": replace(GOOD, transparent_hugepages="madvise")}, ("warning", "no-hugepages")),
        ({"facts": replace(GOOD, numa_balancing=True), "machine": NODES}, ("warning", "numa-balancing")),
        ({"facts": replace(GOOD, governors=frozenset({"schedutil"}))}, ("warning", "governor")),
        ({"env": {"OMP_NUM_THREADS": "4"}}, ("warning", "openmp-environment")),
        ({"env": {"VLLM_CPU_OMP_THREADS_BIND": "auto"}}, ("warning", "binding-overridden")),
        ({"env": {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}}, ("warning", "binding-overridden")),
        ({"env": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}}, ("warning", "reserve-ignored")),
        ({"env": {"LD_PRELOAD": "libgomp.so:libiomp5.so"}}, ("violation", "two-openmp")),
        ({"facts": replace(GOOD, ld_preload="libgomp.so:libomp.so")}, ("violation", "two-openmp")),
        ({"env": {"VLLM_USE_AOT_COMPILE": "1"}}, ("violation", "freezing-with-aot")),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "0.5"}}, ("violation", "kv-cache-space")),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, ("warning", "kv-cache-space")),
        ({"args": ("-tp", "2")}, ("warning", "ranks-share-node")),
        ({"args": ("-tp=5",)}, ("violation", "tensor-parallel-heads")),
        ({"args": ("-dp", "2")}, ("violation", "ranks-contradict")),
        ({"args": ("--data-parallel-size=2",)}, ("violation", "ranks-contradict")),
        ({"args": ("-pcp", "2")}, ("violation", "ranks-contradict")),
        ({"args": ("--dtype", "half")}, ("violation", "float16-on-zen")),
        ({"cpu": INTEL, "args": ("--dtype", "float32")}, ("warning", "amx-unused")),
        (
            {"args": ("-q", "awq"), "profile": replace(PROFILE, quantization="gptq")},
            ("violation", "quantization-differs"),
        ),
        ({"args": ("--hf-token", "hush")}, ("warning", "secret-argument")),
        ({"args": ("--index=https://me:hush@host/",)}, ("warning", "secret-argument")),
        ({"machine": Machine(cores=8, allowed=CpuSet.parse("0-5"))}, ("warning", "cpuset-narrow")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_rules(case: dict[str, Any], expected: tuple[str, str]) -> None:
    assert expected in findings(**case)


def test_auto_binding_and_smt() -> None:
    config = Config(
        models=(Model(name="m", path="/m"),), engine=Engine(env={"VLLM_CPU_OMP_THREADS_BIND": "auto"})
    )
    plan = make_plan(Machine(cores=8, smt=2).topology(), config, {"m": PROFILE})
    assert "the last SMT sibling" in plan.warnings[0].message


def test_a_part_that_was_asked_for_is_no_narrow_cpuset() -> None:
    config = Config(models=(Model(name="m", path="/m"),), layout=Layout(cpus="0-3"))
    assert make_plan(Machine(cores=8).topology(), config, {"m": PROFILE}).findings == ()


def test_names_must_differ() -> None:
    models = (Model(name="m", path="/a"), Model(name="m", path="/b"))
    plan = make_plan(Machine(cores=8).topology(), Config(models=models), {"m": PROFILE})
    assert "duplicate-model" in [finding.code for finding in plan.violations]


EMBEDS = ("llama-server", "-t", "4", "--host", "{uds}")


@pytest.mark.parametrize(
    ("words", "length", "size"),
    [
        (("--embedding",), 4096, 512), (("--rerank", "-ub", "1024"), 4096, 1024),
        (("--embedding", "-ub", "8192"), 4096, 2048),
        (("--embedding", "-ub", "4096", "-b", "4096"), 4096, None), (("--embedding",), 512, None),
        (("--embedding",), None, None), (("--embedding", "--pooling", "last"), 4096, None), ((), 4096, None),
        (("--embedding", "-ub", "many", "-b", "4096"), 4096, None),
    ],
)  # fmt: skip
def test_inputs_that_a_command_would_refuse_are_said(
    words: tuple[str, ...], length: int | None, size: int | None
) -> None:
    def findings(*more: str, length: int | None = length) -> list[Finding]:
        engine = Engine(kind=EngineKind.COMMAND, command=(*EMBEDS, *words, *more))
        its = Config(models=(Model(name="m", path="/m", max_model_len=length),), engine=engine)
        return list(make_plan(Machine(cores=8).topology(), its, {}).findings)

    found = findings()
    assert [finding.code for finding in found] == ([] if size is None else ["inputs-refused"])
    if size is not None:
        assert f"of {size} tokens" in found[0].message
        assert not findings("--batch-size", str(length), "--ubatch-size", str(length)), "the remedy helps"
        assert not findings(length=size), "so does the other"


def test_vllm_rules_do_not_judge_a_command() -> None:
    config = Config(
        models=(Model(name="m", path="/m", block_size=48),),
        engine=Engine(kind=EngineKind.COMMAND, command=("x",), env={"OMP_NUM_THREADS": "4"}),
    )
    assert make_plan(Machine(cores=8, cpu=OLD).topology(), config, {}).findings == ()


@pytest.mark.parametrize(
    ("command", "env", "codes"),
    [
        (("llama-server", "--host", "{uds}", "--threads", "{threads}"), {}, []),
        (("llama-server", "--host", "{uds}", "-t", "{threads}"), {}, []),
        (("llama-server", "--host", "{uds}"), {"LLAMA_ARG_THREADS": "4"}, []),
        (("my-server", "{uds}", "numa"), {}, []),
        (("llama-server", "-t", "4", "--numa", "numactl", "{uds}"), {}, ["numa-argument"]),
        (("/opt/run-it", "--numa=distribute", "{uds}"), {}, ["numa-argument"]),
        (("/opt/run-it", "{uds}"), {"LLAMA_ARG_NUMA": "isolate"}, ["numa-argument"]),
        (("nice", "/usr/bin/llama-server", "{uds}"), {}, ["threads-not-told"]),
        ((*EMBEDS, "--embeddings", "-np", "4"), {}, ["inputs-mixed"]),
        ((*EMBEDS, "--rerank", "-np", "4"), {}, ["inputs-mixed"]),
        ((*EMBEDS, "--rerank", "-np", "4", "--pooling", "last"), {}, ["inputs-mixed"]),
        (EMBEDS, {"LLAMA_ARG_EMBEDDINGS": "1", "LLAMA_ARG_N_PARALLEL": "2"}, ["inputs-mixed"]),
        ((*EMBEDS, "--embedding", "-np", "4", "-kvu", "-no-kvu"), {}, ["inputs-mixed"]),
        # One at a time, one pool for all (also by default), the last token's vector, and no vectors.
        ((*EMBEDS, "--embedding", "-np", "1"), {}, []),
        ((*EMBEDS, "--embedding"), {}, []),
        ((*EMBEDS, "--embedding", "-np", "4", "-kvu"), {}, []),
        ((*EMBEDS, "--embedding", "-np", "4"), {"LLAMA_ARG_KV_UNIFIED": "1"}, []),
        ((*EMBEDS, "--embedding", "-np", "4", "--pooling", "last"), {}, []),
        ((*EMBEDS, "--embedding", "-np", "4"), {"LLAMA_ARG_POOLING": "last"}, []),
        ((*EMBEDS, "-np", "4"), {}, []),
        (("/opt/run-it", "{uds}", "--embedding", "-np", "4"), {}, []),
    ],
)
def test_a_commands_arguments_are_judged(
    command: tuple[str, ...], env: dict[str, str], codes: list[str]
) -> None:
    engine = Engine(kind=EngineKind.COMMAND, command=command, env=env)
    plan = make_plan(
        Machine(cores=8).topology(), Config(models=(Model(name="m", path="/m"),), engine=engine), {}
    )
    assert [finding.code for finding in plan.findings] == codes


@pytest.mark.parametrize(
    ("its", "guess"),
    [
        ({"assumed": ("num_key_value_heads",)}, "the usual num_key_value_heads is assumed"),
        ({"class_gap": "config.json has no model_type"}, "config.json has no model_type"),
        ({"unread": "no hidden_size", "kv_bytes_per_token": None}, "not understood (no hidden_size)"),
        ({"cpu_gap": "sparse attention"}, "whether the CPU backend has its kernels"),
        ({"quantization": "modelopt"}, "whether the CPU backend has its kernels"),
        ({"layers": (KvLayers(LayerKind.STATE, 2),)}, "the size of its recurrent states"),
    ],
)
def test_guesses_about_a_model_are_said_where_the_engine_was_not_asked(
    its: dict[str, Any], guess: str
) -> None:
    def said(**more: Any) -> list[Finding]:
        model = Model(name="m", path="/m")
        config = Config(models=(model,), memory=Memory(kv_cache="4GiB"))
        plan = make_plan(Machine().topology(), config, {"m": replace(PROFILE, **its, **more)})
        return [finding for finding in plan.findings if finding.code == "engine-not-asked"]

    (finding,) = said()
    assert finding.severity == "warning"
    assert guess in finding.message
    assert "plan --ask-engine" in finding.remedy
    for answer in ({"sources": ("engine",)}, {"engine_refusal": "no"}, {"engine_trouble": "late"}):
        assert said(**answer) == []


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (
            "vLLM 0.32.0: ValidationError: Value error, The repository /m contains custom code which must be",
            "models.trust_remote_code = true",
        ),
        ("vLLM 0.32.0: ValueError: no", "expect the start to end with this"),
    ],
)
def test_a_refusal_of_the_engine_has_the_remedy_that_helps(refusal: str, remedy: str) -> None:
    (finding,) = doubts_of("m", replace(PROFILE, engine_refusal=refusal))
    assert refusal in finding.message
    assert remedy in finding.remedy


def test_a_guess_is_never_a_violation() -> None:
    odd = (KvLayers(LayerKind.FULL, 2, heads=4, head_bytes=2 * 168 * 2, head_size=168),)
    guessed = replace(PROFILE, layers=odd, assumed=("num_key_value_heads", "head_dim"))
    assert findings(profile=guessed, tensor_parallel_size=6) == [
        ("warning", "ranks-share-node"),
        ("warning", "head-size"),
        ("warning", "tensor-parallel-heads"),
        ("warning", "assumed-size"),
        ("warning", "engine-not-asked"),
    ]
    known = replace(PROFILE, layers=odd)
    assert ("violation", "head-size") in findings(profile=known)
