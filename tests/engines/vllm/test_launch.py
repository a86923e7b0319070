"""What exactly is started for a slot, word by word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.base.address import UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.engines.base import Expected
from launcher.engines.numactl import Binding, MemPolicy
from launcher.engines.software import Stack
from launcher.engines.vllm.launch import VllmEngine, expected_of
from launcher.plan.plan import Slot

MakeSlot = Callable[..., Slot]

STACK = Stack(command=("/venv/bin/vllm",), vllm="0.32.0+cpu", torch="2.13.0+cpu")
BINDING = Binding(MemPolicy.MEMBIND, numactl="numactl")


def engine(**fields: Any) -> VllmEngine:
    defaults: dict[str, Any] = {
        "stack": STACK,
        "binding": BINDING,
        "socket_dir": "/run/nl",
        "cache_dir": "/cache",
    }
    return VllmEngine(**(defaults | fields))


def test_one_epyc_9755_socket_starts_as_amd_published_it(make_slot: MakeSlot) -> None:
    evens = ",".join(str(cpu) for cpu in range(0, 127, 2))  # $(seq -s, 0 2 127)
    omp = ",".join(str(cpu) for cpu in range(0, 125, 2))
    slot = make_slot(cpus=evens, omp=(omp,), kv=40 * GIB, name="llama", path="meta-llama/Llama-3.1-8B")
    launch = engine(stack=Stack(command=("vllm",), vllm="0.32.0", torch="2.13.0+cpu")).launch(slot, 1)
    assert launch.argv == (
        "numactl", f"--physcpubind={evens}", "--membind=0",
        "vllm", "serve", "meta-llama/Llama-3.1-8B", "--served-model-name", "llama",
        "--uds", "/run/nl/slot0-1.sock", "--dtype", "bfloat16", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(40 * GIB), "--shutdown-timeout", "15",
    )  # fmt: skip
    assert launch.env == {
        "VLLM_CPU_OMP_THREADS_BIND": omp,
        "VLLM_CACHE_ROOT": "/cache/vllm0.32.0-torch2.13.0+cpu/slot0/vllm",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/vllm0.32.0-torch2.13.0+cpu/slot0/inductor",
        "TORCHINDUCTOR_FREEZING": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "VLLM_RPC_BASE_PATH": "/run/nl/slot0",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    assert launch.address == UnixAddress("/run/nl/slot0-1.sock")
    assert launch.secrets == frozenset()


def test_each_life_of_a_slot_has_its_own_socket(make_slot: MakeSlot) -> None:
    lives = [engine().launch(make_slot(id=3), generation).address for generation in (1, 2)]
    assert lives == [UnixAddress("/run/nl/slot3-1.sock"), UnixAddress("/run/nl/slot3-2.sock")]


def test_its_own_sockets_are_in_a_folder_of_the_slot_where_their_names_are_short_enough(
    make_slot: MakeSlot,
) -> None:
    long = "/" + "r" * 64
    for socket_dir, folder in (("/run/nl", "/run/nl/slot0"), (long[:64], f"{long[:64]}/slot0"), (long, None)):
        launch = engine(socket_dir=socket_dir).launch(make_slot(), 1)
        assert launch.scratch == launch.env.get("VLLM_RPC_BASE_PATH") == folder
    launch = engine(user_env={"VLLM_RPC_BASE_PATH": "/mine"}).launch(make_slot(), 1)
    assert (launch.scratch, launch.env["VLLM_RPC_BASE_PATH"]) == (None, "/mine")


def test_documented_options_become_flags(make_slot: MakeSlot) -> None:
    slot = make_slot(
        max_model_len=4096, max_num_batched_tokens=2048, block_size=64, quantization="awq",
        tensor_parallel_size=2, weight_prepack=False, trust_remote_code=True, dtype="float32",
        omp=("0-1", "2"),
    )  # fmt: skip
    launch = engine().launch(slot, 1)
    argv = " ".join(launch.argv)
    for flag in (
        "--max-model-len 4096", "--max-num-batched-tokens 2048", "--block-size 64", "--quantization awq",
        "--tensor-parallel-size 2", "--trust-remote-code", "--dtype float32",
    ):  # fmt: skip
        assert flag in argv
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2"
    assert launch.env["VLLM_ZENTORCH_WEIGHT_PREPACK"] == "0"


def test_a_length_that_the_plan_assumes_is_told(make_slot: MakeSlot) -> None:
    slot = make_slot()
    assert "--max-model-len" not in engine().launch(slot, 1).argv, "its own"
    assumed = replace(slot, effective=replace(slot.effective, max_model_len=2048, assumes_length=True))
    argv = engine().launch(assumed, 1).argv
    assert argv[argv.index("--max-model-len") + 1] == "2048"
    other = engine(args=("--max-model-len", "1k")).launch(assumed, 1).argv
    assert other[other.index("--max-model-len") + 1] == "1k"
    assert other.count("--max-model-len") == 1


@pytest.mark.parametrize("args", [("--dtype", "float32"), ("--dtype=float32",)])
def test_engine_args_replace_ours(make_slot: MakeSlot, args: tuple[str, ...]) -> None:
    argv = engine(args=args).launch(make_slot(), 1).argv
    assert argv[-len(args) :] == args
    assert "bfloat16" not in argv


def test_a_negated_flag_replaces_ours(make_slot: MakeSlot) -> None:
    argv = engine(args=("--no-trust-remote-code",)).launch(make_slot(trust_remote_code=True), 1).argv
    assert "--trust-remote-code" not in argv
    assert argv[-1] == "--no-trust-remote-code"


def test_eager_execution_needs_no_freezing(make_slot: MakeSlot) -> None:
    env = engine(args=("--enforce-eager",)).launch(make_slot(), 1).env
    assert "TORCHINDUCTOR_FREEZING" not in env
    assert "VLLM_USE_AOT_COMPILE" not in env
    assert "TORCHINDUCTOR_FX_GRAPH_CACHE" not in env


def test_engine_env_wins(make_slot: MakeSlot) -> None:
    own = {"TORCHINDUCTOR_FREEZING": "0", "LD_PRELOAD": "/opt/mine.so"}
    env = engine(user_env=own, ld_preload="/lib/tc.so").launch(make_slot(), 1).env
    assert {name: env[name] for name in own} == own


def test_the_users_kv_space_variable_replaces_our_flag(make_slot: MakeSlot) -> None:
    launch = engine(user_env={"VLLM_CPU_KVCACHE_SPACE": "40"}).launch(make_slot(), 1)
    assert "--kv-cache-memory-bytes" not in launch.argv
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "40"


def test_cached_tokens_are_told_where_the_ledger_wants_them(make_slot: MakeSlot) -> None:
    flag, stack = "--enable-prompt-tokens-details", Stack(command=("vllm",), vllm="0.32.0")
    told = engine(stack=stack, tells_cached_tokens=True)
    assert told.launch(make_slot(), 1).argv.count(flag) == 1
    assert flag not in engine(stack=stack).launch(make_slot(), 1).argv
    refused = engine(stack=stack, tells_cached_tokens=True, args=(f"--no-{flag[2:]}",))
    assert flag not in refused.launch(make_slot(), 1).argv
    old = engine(stack=Stack(command=("vllm",), vllm="0.8.5"), tells_cached_tokens=True)
    assert flag not in old.launch(make_slot(), 1).argv


def test_old_vllm_gets_what_it_knows(make_slot: MakeSlot) -> None:
    launch = engine(stack=Stack(command=("vllm",), vllm="0.11.0")).launch(make_slot(kv=5 * GIB + 1), 1)
    assert "--shutdown-timeout" not in launch.argv
    assert "--kv-cache-memory-bytes" not in launch.argv
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "5"
    assert "VLLM_USE_AOT_COMPILE" not in launch.env


def test_local_models_are_never_looked_up_in_the_hub(make_slot: MakeSlot) -> None:
    local = engine(local_models={"models/tiny": "/srv/models/tiny"}).launch(make_slot(path="models/tiny"), 1)
    assert local.argv[5] == "/srv/models/tiny"
    assert local.env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine().launch(make_slot(path="org/model"), 1).env


def test_the_token_is_in_the_environment_only_and_marked_secret(make_slot: MakeSlot) -> None:
    launch = engine(hf_token="hf_secret").launch(make_slot(), 1)
    assert launch.env["HF_TOKEN"] == "hf_secret"
    assert launch.secrets == {"HF_TOKEN"}
    assert not any("hf_secret" in word for word in launch.argv)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("vllm", "serve"), ("vllm", "serve", "/models/tiny")),
        (("py", "-m", "vllm.entrypoints.openai.api_server"),
         ("py", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/tiny")),
    ],
)  # fmt: skip
def test_other_ways_to_start_vllm(
    make_slot: MakeSlot, command: tuple[str, ...], words: tuple[str, ...]
) -> None:
    argv = engine(stack=Stack(command=command)).launch(make_slot(), 1).argv
    assert argv[3 : 3 + len(words)] == words


def test_pooling_models_are_not_asked_for_a_completion() -> None:
    assert engine().wants_completion_probe
    assert not engine(args=("--runner=pooling",)).wants_completion_probe


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--port", "80"), "cannot set '--port' in engine.args"),
        (("--api_key=x",), "cannot set '--api_key=x' in engine.args"),
        (("--dtype float32",), "flag and value in one argument"),
        (("my-model",), "it is not an option"),
    ],
)
def test_refused_arguments_say_why(make_slot: MakeSlot, args: tuple[str, ...], said: str) -> None:
    with pytest.raises(LauncherError, match=said) as refused:
        engine(args=args).launch(make_slot(), 1)
    assert refused.value.remedy


def test_an_instance_without_memory_of_its_own_node_is_told_where_to_bind(
    make_slot: Callable[..., Slot],
) -> None:
    slot = make_slot(nodes="2")
    assert "CPU_VISIBLE_MEMORY_NODES" not in engine().launch(slot, 1).env
    remote = replace(slot, placement=replace(slot.placement, remote=True))
    assert engine().launch(remote, 1).env["CPU_VISIBLE_MEMORY_NODES"] == "2"
    both = replace(slot, placement=replace(slot.placement, remote=True, membind=CpuSet.parse("0-2")))
    assert engine().launch(both, 1).env["CPU_VISIBLE_MEMORY_NODES"] == "0,1,2"


@pytest.mark.parametrize(
    ("env", "lists", "libraries"),
    [
        ({}, "", 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "", 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "", 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-2|4-6"}, "0-2|4-6", 1),
        ({"LD_PRELOAD": "/lib/libtcmalloc_minimal.so.4"}, "", 1),
        ({"LD_PRELOAD": "/lib/libother.so"}, "", 0),
    ],
)
def test_what_a_launch_expects(env: dict[str, str], lists: str, libraries: int) -> None:
    expected = expected_of(env, binds_memory=True)
    assert "|".join(map(str, expected.omp_cpus)) == lists
    assert len(expected.libraries) == libraries
    assert expected.binds_memory
    assert expected.while_starting == Expected(binds_memory=True)
