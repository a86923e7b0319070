"""The measured layout beside a deployment: in use, replaced, stale, of other models."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.gguf_headers import write_gguf
from support.verdicts import BEST

from launcher.config.schema import Config, Control, Engine, EngineKind, Layout, Model
from launcher.daemon import measured
from launcher.daemon.deployment import Deployment, build_deployment
from launcher.daemon.measured import fingerprint_of, model_fingerprint, software_of, with_measured_layout
from launcher.engines.software import Stack
from launcher.machine.named import find_topology
from launcher.measure.tune.remembered import BestLayout, best_file, cpus_of, remember


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(b"x" * 1000)
    (folder / "model-2.safetensors").write_bytes(b"x" * 500)
    (folder / "README.md").write_text("x")
    return folder


def deployment_of(model: Path, instances: int = 2) -> Deployment:
    config = Config(
        models=(Model(name="m", path=str(model)),), layout=Layout(instances_per_socket=instances),
        engine=Engine(kind=EngineKind.COMMAND, command=("server", "--port", "{port}")),
        control=Control(socket=str(model.parent / "c.sock")),
    )  # fmt: skip
    return build_deployment(config, machine=find_topology("epyc-9755-1p"), cpus_only=True)


def verdict(deployment: Deployment) -> BestLayout:
    cpus = cpus_of(deployment.to_json())
    return replace(BEST, fingerprint=fingerprint_of(deployment), cpus=cpus)


def test_from_the_verdict_to_plan_and_status(model: Path, tmp_path: Path) -> None:
    environ = {"STATE_DIRECTORY": str(tmp_path / "state")}
    two, four = deployment_of(model), deployment_of(model, 4)
    assert with_measured_layout(two, environ).measured is None
    remember(tmp_path / "state", verdict(four))
    used, other = with_measured_layout(four, environ).measured, with_measured_layout(two, environ).measured
    assert used is not None
    assert other is not None
    assert (used.in_use, other.in_use) == (True, False)
    assert (used.stale, other.stale) == ((), ())
    shown = with_measured_layout(four, environ).to_json()["measured_layout"]
    assert (shown["text"], shown["ratio_to_default"]) == (used.text, 1.312)
    assert two.to_json()["measured_layout"] is None


def test_other_weights_make_it_stale(model: Path, tmp_path: Path) -> None:
    environ = {"STATE_DIRECTORY": str(tmp_path / "state")}
    deployment = deployment_of(model)
    remember(tmp_path / "state", verdict(deployment))
    (model / "model-2.safetensors").write_bytes(b"x" * 4000)
    found = with_measured_layout(deployment, environ).measured
    assert found is not None
    assert found.stale == (f"weights of {model} 1.46 KiB → 4.88 KiB",)


def test_a_file_that_hangs_is_no_verdict(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measured, "DISK_S", 0.1)
    file = best_file(tmp_path / "state")
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    assert (
        with_measured_layout(deployment_of(model), {"STATE_DIRECTORY": str(tmp_path / "state")}).measured
        is None
    )
    assert f"cannot read the measured layout '{file}'" in caplog.text
    file.write_text("")  # the thread ends


def test_a_user_without_a_home_folder_has_no_verdict(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242424)
    assert with_measured_layout(deployment_of(model), {}).measured is None


def test_a_model_in_a_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    found = model_fingerprint(str(tmp_path / "link"))
    assert found == model_fingerprint(str(model))
    assert (found.path, found.weights_bytes) == (str(model), 1500)
    assert found.config_sha256 == hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize("path", ["org/none-such-model", "/nowhere/at/all"])
def test_a_model_that_is_not_here(path: str) -> None:
    found = model_fingerprint(path)
    assert (found.path, found.config_sha256, found.weights_bytes) == (path, None, None)


def test_a_pipe_in_place_of_config_json_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert model_fingerprint(str(tmp_path)).config_sha256 is None


def test_software(model: Path) -> None:
    deployment = deployment_of(model)
    assert software_of(deployment).engine == "server"
    image = Stack(command=("vllm",), image="sha256:0123456789abcdef", vllm="0.32.0", python_version="3.12.3")
    found = software_of(replace(deployment, stack=image, config=Config(models=deployment.config.models)))
    assert (found.engine, found.vllm, found.python) == ("vllm in image 0123456789ab", "0.32.0", "3.12.3")


# --- A model in GGUF. ---


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = write_gguf(tmp_path / "m.gguf", ("blk.0.w", (32, 2), 0))
    file.write_bytes(file.read_bytes() + bytes(3 * 1024**2))
    return file


def test_a_gguf_file_that_was_replaced_is_another_model(gguf: Path) -> None:
    """Of the same name and size, with other weights."""
    before = model_fingerprint(str(gguf))
    assert before.weights_bytes == gguf.stat().st_size
    assert before == model_fingerprint(str(gguf))
    os.utime(gguf, (1, 1))
    assert before == model_fingerprint(str(gguf)), "a copy of the file is the same model"
    with gguf.open("r+b") as stream:
        stream.seek(2 * 1024**2)
        stream.write(os.urandom(1024**2))
    after = model_fingerprint(str(gguf))
    assert (after.path, after.weights_bytes) == (before.path, before.weights_bytes)
    assert after.config_sha256 != before.config_sha256


def test_a_folder_with_a_gguf_model_is_known_by_its_file(gguf: Path, tmp_path: Path) -> None:
    assert model_fingerprint(str(tmp_path)).config_sha256 == model_fingerprint(str(gguf)).config_sha256
    (tmp_path / "config.json").write_text("{}")
    beside = model_fingerprint(str(tmp_path), gguf=True)
    assert (beside.config_sha256, beside.digest_of) == (
        model_fingerprint(str(gguf)).config_sha256,
        "contents",
    )
    assert model_fingerprint(str(tmp_path)).digest_of == "config.json"
    bare = gguf.rename(tmp_path / "model")
    assert model_fingerprint(str(bare)).digest_of == "contents"
    unknown = model_fingerprint(str(tmp_path / "gone.gguf"))
    assert (unknown.config_sha256, unknown.weights_bytes) == (None, None)


def test_a_measurement_of_another_build_or_file_is_stale(gguf: Path, tmp_path: Path) -> None:
    environ = {"STATE_DIRECTORY": str(tmp_path / "state")}
    its = deployment_of(gguf)
    build = replace(its, stack=replace(its.stack, version="11434"))
    remember(tmp_path / "state", verdict(build))
    used = with_measured_layout(build, environ).measured
    assert used is not None
    assert used.stale == ()
    newer = replace(its, stack=replace(its.stack, version="11549"))
    stale = with_measured_layout(newer, environ).measured
    assert stale is not None
    assert stale.stale == ("server 11434 → 11549",)
    gguf.write_bytes(gguf.read_bytes()[:-1] + b"x")
    changed = with_measured_layout(build, environ).measured
    assert changed is not None
    assert changed.stale == (f"contents of {gguf}",)
