"""From configuration to an engine."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.asked_engine import ANSWER, answering_vllm
from support.model_folders import model

from launcher.base import disk
from launcher.base.errors import LauncherError, PassingError
from launcher.base.text import GIB
from launcher.config.schema import Config, Engine, EngineKind, Model, Runtime, Supervision
from launcher.engines.base import Asking
from launcher.engines.command import CommandEngine
from launcher.engines.make import (
    cache_dir,
    engine_type,
    free_loopback_port,
    make_engine,
    probe_stack,
    read_token,
)
from launcher.engines.numactl import Binding, MemPolicy
from launcher.engines.software import Stack
from launcher.engines.vllm import needs
from launcher.engines.vllm.launch import VllmEngine
from launcher.models.weight_files import read_model_json
from launcher.plan.plan import Slot

MakeSlot = Callable[..., Slot]

BINDING = Binding(MemPolicy.MEMBIND, numactl="numactl")
STACK = Stack(command=("/venv/bin/vllm",), vllm="0.32.0", tcmalloc="/lib/libtcmalloc_minimal.so.4")


def config(path: str = "org/model", **engine: object) -> Config:
    return Config(
        models=(Model(name="m", path=path),),
        engine=Engine(**engine),  # type: ignore[arg-type]
        supervision=Supervision(stop_timeout_s=40.0),
    )


def test_vllm_is_configured_from_all_tables(
    tmp_path: Path, make_slot: MakeSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    token = tmp_path / "token"
    token.write_text("hf_x\n")
    chosen = config("tiny", args=("--enforce-eager",), hf_token_file=str(token), cache_dir="/c")
    engine = make_engine(chosen, STACK, BINDING, Path("/run/nl"))
    assert isinstance(engine, VllmEngine)
    launch = engine.launch(make_slot(path="tiny"), 1)
    assert str(tmp_path / "tiny") in launch.argv
    assert launch.argv[-1] == "--enforce-eager"
    assert "--shutdown-timeout 20" in " ".join(launch.argv)
    assert launch.env["LD_PRELOAD"] == "/lib/libtcmalloc_minimal.so.4"
    assert launch.env["HF_TOKEN"] == "hf_x"
    assert launch.env["VLLM_CACHE_ROOT"] == "/c/vllm0.32.0/slot0/vllm"


def test_what_is_preloaded_already_stays(monkeypatch: pytest.MonkeyPatch, make_slot: MakeSlot) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/opt/libiomp5.so")
    engine = make_engine(config(), STACK, BINDING, Path("/run/nl"))
    assert engine.launch(make_slot(), 1).env["LD_PRELOAD"] == "/lib/libtcmalloc_minimal.so.4:/opt/libiomp5.so"


def test_command_template_is_checked_at_once() -> None:
    bad = config(kind=EngineKind.COMMAND, command=("srv",))
    with pytest.raises(LauncherError, match=r"neither \{uds\} nor \{port\}"):
        make_engine(bad, Stack(command=("srv",)), BINDING, Path("/run/nl"))
    good = config(kind=EngineKind.COMMAND, command=("srv", "{port}"), args=("--threads", "{slot}"))
    engine = make_engine(good, Stack(command=("/bin/srv", "{port}")), BINDING, Path("/run/nl"), lambda: 7)
    assert isinstance(engine, CommandEngine)
    assert engine.template == ("/bin/srv", "{port}", "--threads", "{slot}")


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_loopback_port()))


def test_socket_paths_must_fit() -> None:
    with pytest.raises(LauncherError, match="UNIX sockets allow 107"):
        make_engine(config(), STACK, BINDING, Path("/" + "x" * 100))


@pytest.mark.parametrize("text", ["", "two words", "a\nb"])
def test_a_token_file_holds_one_token(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(LauncherError, match="must contain exactly one token") as bad:
        read_token(path)
    assert "words" not in bad.value.message


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PassingError, match=r"cannot read engine\.hf_token_file"):
        read_token(tmp_path / "none")


def test_where_compile_caches_live(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir("/x") == Path("/x")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/unit:/other")
    assert cache_dir(None) == Path("/var/cache/unit")
    monkeypatch.delenv("CACHE_DIRECTORY")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/x/.cache")
    assert cache_dir(None) == Path("/home/x/.cache/numa-launcher")


def test_a_container_has_all_that_its_engine_reads_and_writes(
    tmp_path: Path, make_slot: MakeSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's snapshots are links into a folder of blobs."""
    monkeypatch.setenv("LD_PRELOAD", "/only/outside.so")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    setting = config(str(snapshot), runtime=Runtime.PODMAN, image="i", cache_dir=str(tmp_path / "cache"))
    binding = Binding.of_container(binds_memory=True)
    stack = Stack(command=("vllm",), client="/bin/podman", image="sha256:0123456789abcdef")
    words = make_engine(setting, stack, binding, tmp_path).launch(make_slot(path=str(snapshot)), 1).argv
    assert [word for word in words if word.startswith("--volume=")] == [
        f"--volume={tmp_path}:{tmp_path}",
        f"--volume={blobs}:{blobs}:ro",
        f"--volume={snapshot}:{snapshot}:ro",
        f"--volume={tmp_path}/cache:{tmp_path}/cache",
    ]
    assert f"--env=VLLM_CACHE_ROOT={tmp_path}/cache/image0123456789ab/slot0/vllm" in words
    assert not any("LD_PRELOAD" in word for word in words)


def test_a_container_gets_no_folder_because_of_a_link_that_an_instance_may_have_made(
    tmp_path: Path, make_slot: MakeSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All instances write to the hub's folder; it is mounted as a whole for the model that is named."""
    hub, secret = tmp_path / "hub", tmp_path / "root"
    snapshot, beside = hub / "snapshots" / "1", tmp_path / "beside"
    for folder in (snapshot, secret, beside):
        folder.mkdir(parents=True)
    (secret / "id_rsa").write_text("secret")
    (snapshot / "model.safetensors").symlink_to(secret / "id_rsa")
    (beside / "config.json").symlink_to(snapshot / "config.json")
    (tmp_path / "link").symlink_to(snapshot)
    monkeypatch.setenv("HF_HOME", str(hub))
    local = (snapshot, beside, tmp_path / "link")
    models = tuple(Model(name=str(path), path=str(path)) for path in (*local, "org/model"))
    engine = Engine(runtime=Runtime.PODMAN, image="i", cache_dir="/srv/cache")
    setting, run = Config(models=models, engine=engine), tmp_path / "run"
    stack = Stack(command=("vllm",), client="/bin/podman")
    made = make_engine(setting, stack, Binding.of_container(binds_memory=True), run)
    words = made.launch(make_slot(path=str(snapshot)), 1).argv
    assert {word.partition(":")[2] for word in words if word.startswith("--volume=")} == {
        str(run), f"{beside}:ro", f"{tmp_path}/link:ro", "/srv/cache", str(hub),
    }  # fmt: skip


def test_a_container_shares_the_hosts_downloads(
    tmp_path: Path, make_slot: MakeSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/srv/hub")
    engine = make_engine(
        config(runtime=Runtime.DOCKER, image="i"),
        Stack(command=("vllm",)),
        Binding.of_container(binds_memory=True),
        tmp_path,
    )
    words = engine.launch(make_slot(path="org/model"), 1).argv
    assert words[0] == "docker", "another machine's"
    assert {"--volume=/srv/hub:/srv/hub", "--env=HF_HOME=/srv/hub"} <= set(words)


def test_only_an_engine_that_can_tell_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's answer goes before the figures of the files; a custom server with the same program is not asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    program, folder = answering_vllm(tmp_path, ANSWER), model(tmp_path / "m")
    for kind, weights in ((EngineKind.VLLM, 4 * GIB), (EngineKind.COMMAND, None)):
        engine = Engine(kind=kind, command=(program, "{uds}"), tcmalloc="off")
        setting = Config(models=(Model(name="m", path=folder),), engine=engine)
        profiles = engine_type(EngineKind.VLLM).profiles(setting, read_model_json)
        stack = probe_stack(Engine(command=(program,), tcmalloc="off"))
        told = engine_type(kind).answered(setting, profiles, stack, frozenset(), Asking(60.0))
        assert (told["m"].weights_bytes == weights) is (weights is not None), kind
        assert engine_type(kind).has_answers() is (kind is EngineKind.VLLM)
        assert (told is profiles) is (kind is EngineKind.COMMAND)
    assert (tmp_path / "asked").read_text() == "."


def test_answers_on_a_disk_that_hangs_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setattr(disk, "DISK_S", 0.1)
    hangs = threading.Event()
    monkeypatch.setattr(needs.Answers, "get", lambda *_: hangs.wait())
    program, folder = answering_vllm(tmp_path, ANSWER), model(tmp_path / "m")
    setting = Config(
        models=(Model(name="m", path=folder),), engine=Engine(command=(program,), tcmalloc="off")
    )
    profiles = engine_type(EngineKind.VLLM).profiles(setting, read_model_json)
    of_files = profiles["m"].weights_bytes
    # A start (the first) does not ask the engine each time; an operator may.
    for asking, weights in ((Asking(60.0), of_files), (Asking(60.0, again=True), 4 * GIB)):
        told = needs.answered(setting, profiles, probe_stack(setting.engine), frozenset(), asking)
        assert told["m"].weights_bytes == weights
    assert caplog.text.count(f"cannot read answers of engines in '{tmp_path}/state/engine-answers'") == 2
    assert not (tmp_path / "state").exists()  # nor written
    hangs.set()


def test_models_of_one_question_ask_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their contexts differ, which decides neither layers nor weights."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    program, folder = answering_vllm(tmp_path, ANSWER), model(tmp_path / "m")
    models = tuple(
        Model(name=name, path=folder, max_model_len=length) for name, length in (("a", 64), ("b", 128))
    )
    setting = Config(models=models, engine=Engine(command=(program,), tcmalloc="off"))
    profiles = engine_type(EngineKind.VLLM).profiles(setting, read_model_json)
    told = needs.answered(setting, profiles, probe_stack(setting.engine), frozenset(), Asking(60.0))
    assert (told["a"].weights_bytes, told["b"].weights_bytes) == (4 * GIB, 4 * GIB)
    assert (tmp_path / "asked").read_text() == "."


@pytest.mark.parametrize("kind", EngineKind)
@pytest.mark.parametrize("runtime", [Runtime.HOST, Runtime.PODMAN])
def test_the_load_generator_of_a_measurement_is_the_vllm_of_this_host(
    kind: EngineKind, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = answering_vllm(tmp_path, ANSWER)
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\necho sha256:abc\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    image = None if runtime is Runtime.HOST else "i"
    engine = Engine(kind=kind, command=(program, "{uds}"), runtime=runtime, image=image, tcmalloc="off")
    own = (program, "{uds}") if (kind, runtime) == (EngineKind.VLLM, Runtime.HOST) else ()
    assert probe_stack(engine).load_generator == own
