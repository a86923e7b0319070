"""The exact command that puts an instance into a container."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from launcher.base.address import UnixAddress
from launcher.config.schema import Runtime
from launcher.engines.base import Launch, secret_names, shell_lines
from launcher.engines.command import CommandEngine
from launcher.engines.containers import OOM_LINE, ContainedEngine, Volume, Wrapping
from launcher.engines.numactl import Binding
from launcher.engines.software import Stack
from launcher.engines.vllm.launch import VllmEngine
from launcher.plan.plan import Slot

MakeSlot = Callable[..., Slot]
IMAGE = "docker.io/vllm/vllm-openai-cpu:v0.32.0-x86_64"
NAME = "numa-launcher-slot2-b526ebba"


def wrapping(runtime: Runtime = Runtime.PODMAN, **fields: object) -> Wrapping:
    values: dict[str, object] = {
        "runtime": runtime,
        "client": f"/usr/bin/{runtime}",
        "image": IMAGE,
        "socket_dir": "/run/nl",
        "binds_memory": True,
    }
    return Wrapping(**(values | fields))  # type: ignore[arg-type]


def bare(**env: str) -> Launch:
    return Launch(("vllm", "serve", "/m"), env, secret_names(env), UnixAddress("/run/nl/slot2-7.sock"))


def test_vllm_as_its_guide_runs_it(make_slot: MakeSlot) -> None:
    """Every word: what `plan --shell` prints."""
    inner = VllmEngine(
        stack=Stack(command=("vllm",)),
        binding=Binding.of_container(binds_memory=True),
        socket_dir="/run/nl",
        cache_dir="/var/cache/nl",
        hf_token="hf_secret",
        user_env={"TZ": "b c"},
        local_models={"/models/tiny": "/models/tiny"},
    )
    volumes = (Volume("/models/tiny"), Volume("/var/cache/nl", writable=True))
    engine = ContainedEngine(inner, wrapping(volumes=volumes, args=("--memory=64g",)))
    launch = engine.launch(make_slot(id=2, cpus="0-3,8-11", nodes="0"), 7)
    assert launch.container is not None
    name = launch.container.remove[-1]
    assert launch.argv == (
        "/usr/bin/podman", "run", f"--name={name}", "--label=numa-launcher=/run/nl",
        "--init", "--pull=never", "--log-driver=none", "--network=host",
        "--security-opt=seccomp=unconfined", "--security-opt=label=disable", "--cap-add=SYS_NICE", "--pids-limit=-1",
        "--shm-size=4g", "--cpuset-cpus=0-3,8-11", "--cpuset-mems=0",
        "--volume=/run/nl:/run/nl", "--volume=/models/tiny:/models/tiny:ro", "--volume=/var/cache/nl:/var/cache/nl",
        "--env=VLLM_CPU_OMP_THREADS_BIND=0-2",
        "--env=VLLM_CACHE_ROOT=/var/cache/nl/unknown/slot2/vllm",
        "--env=TORCHINDUCTOR_CACHE_DIR=/var/cache/nl/unknown/slot2/inductor",
        "--env=VLLM_ENGINE_READY_TIMEOUT_S=1800", "--env=VLLM_NO_USAGE_STATS=1", "--env=DO_NOT_TRACK=1",
        "--env=PYTHONFAULTHANDLER=1", "--env=TORCHINDUCTOR_FREEZING=1", "--env=VLLM_USE_AOT_COMPILE=0",
        "--env=TORCHINDUCTOR_FX_GRAPH_CACHE=0", "--env=HF_HUB_OFFLINE=1", "--env=HF_TOKEN",
        "--env=VLLM_RPC_BASE_PATH=/run/nl/slot2", "--env=TZ=b c",
        "--env=NUMA_LAUNCHER_INSTANCE",
        "--memory=64g", "--entrypoint=vllm", IMAGE, "serve", "/models/tiny",
        "--served-model-name", "tiny", "--uds", "/run/nl/slot2-7.sock", "--dtype", "bfloat16",
        "--max-num-seqs", "64", "--kv-cache-memory-bytes", "4294967296", "--shutdown-timeout", "15",
    )  # fmt: skip
    assert launch.address == UnixAddress("/run/nl/slot2-7.sock")
    assert launch.container.folders == ("/run/nl", "/var/cache/nl")


def test_a_secret_is_in_no_command_line(make_slot: MakeSlot) -> None:
    launch = wrapping().wrap(bare(HF_TOKEN="hf_secret", LD_PRELOAD="/inside.so"), make_slot())
    assert "hf_secret" not in json.dumps(launch.argv)
    assert launch.own_env == {"HF_TOKEN": "hf_secret"}, "and the client itself preloads nothing"
    assert shell_lines(launch, "/run/token").startswith(
        'HF_TOKEN="$(cat /run/token)" \\\n  /usr/bin/podman run '
    )


def test_a_slot_has_one_name_and_other_daemons_have_others(make_slot: MakeSlot) -> None:
    engine = ContainedEngine(
        CommandEngine(("srv", "{uds}"), Binding.of_container(binds_memory=False), "/run/nl", lambda: 1),
        wrapping(),
    )
    launches = [engine.launch(make_slot(id=2), generation) for generation in (1, 2)]
    assert launches[0].argv != launches[1].argv, "what runs inside differs by its socket"
    assert [each.container.remove[-1] for each in launches if each.container] == [NAME, NAME]
    other = wrapping(socket_dir="/run/other").wrap(bare(), make_slot(id=2)).container
    assert other is not None
    assert other.remove[-1] != NAME


def test_what_is_done_beside_the_client(make_slot: MakeSlot) -> None:
    podman, docker = (
        wrapping(runtime).wrap(bare(), make_slot(id=2)).container
        for runtime in (Runtime.PODMAN, Runtime.DOCKER)
    )
    assert podman is not None
    assert docker is not None
    assert podman.remove == ("/usr/bin/podman", "rm", "--force", "--volumes", "--ignore", "--time=0", NAME)
    assert docker.remove == ("/usr/bin/docker", "rm", "--force", "--volumes", NAME)
    assert docker.last_word == (
        "/usr/bin/docker", "inspect", "--type=container", "--format={{if .State.OOMKilled}}" + OOM_LINE + "{{end}}", NAME,
    )  # fmt: skip
    assert docker.left_over == (
        "/usr/bin/docker",
        "ps",
        "--all",
        "--quiet",
        "--filter=label=numa-launcher=/run/nl",
    )


def test_another_shared_memory_takes_no_size(make_slot: MakeSlot) -> None:
    words = wrapping(args=("--ipc=host",)).wrap(bare(), make_slot()).argv
    assert "--ipc=host" in words
    assert not any(word.startswith("--shm-size") for word in words)


@pytest.mark.parametrize(("binds", "nodes"), [(False, "0"), (True, "")])
def test_memory_is_bound_where_it_can_be(make_slot: MakeSlot, binds: bool, nodes: str) -> None:
    words = wrapping(binds_memory=binds).wrap(bare(), make_slot(nodes=nodes)).argv
    assert not any(word.startswith("--cpuset-mems") for word in words)


def test_the_engines_own_word_on_a_variable_wins(make_slot: MakeSlot) -> None:
    launch = wrapping(env={"HF_HOME": "/ours"}).wrap(bare(HF_HOME="/theirs"), make_slot())
    assert [word for word in launch.argv if "HF_HOME" in word] == ["--env=HF_HOME=/theirs"]
