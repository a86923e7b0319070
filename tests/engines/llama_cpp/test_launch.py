"""Command line, program and checks of `kind = "llama.cpp"`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.gguf_headers import write_gguf

from launcher.base.address import UnixAddress
from launcher.base.errors import LauncherError, PassingError
from launcher.base.text import GIB, MIB
from launcher.config.schema import Config, Engine, EngineKind, Model
from launcher.engines.causes import Retry
from launcher.engines.checks import Installed, Trouble, Verdict
from launcher.engines.llama_cpp.launch import LlamaCppEngine, checks, probe, read_profiles, version_in
from launcher.engines.make import engine_type, make_engine, probe_stack
from launcher.engines.numactl import Binding, MemPolicy
from launcher.engines.software import Stack
from launcher.models.profile import NO_ADDED_FILES
from launcher.models.weight_files import read_model_json
from launcher.plan.plan import Slot

MakeSlot = Callable[..., Slot]
BINDING = Binding(MemPolicy.MEMBIND, numactl="numactl")
STACK = Stack(command=("/bin/llama-server",))


def config(path: str = "/m.gguf", **engine: object) -> Config:
    its = Engine(**{"kind": EngineKind.LLAMA_CPP} | engine)  # type: ignore[arg-type]
    return Config(models=(Model(name="m", path=path),), engine=its)


def engine(*args: str, path: str = "/m.gguf", **more: object) -> LlamaCppEngine:
    made = make_engine(config(path, args=args, **more), STACK, BINDING, Path("/run/nl"))
    assert isinstance(made, LlamaCppEngine)
    return made


def test_the_whole_command_line(make_slot: MakeSlot) -> None:
    slot = make_slot(
        id=2, cpus="0-3,8-11", path="/m.gguf", aliases=("n",), max_model_len=1000, max_num_seqs=4
    )
    launch = engine().launch(slot, 7)
    assert launch.argv == (
        "numactl", "--physcpubind=0-3,8-11", "--membind=0", "/bin/llama-server",
        "--model", "/m.gguf", "--alias", "tiny", "--host", "/run/nl/slot2-7.sock", "--threads", "8",
        "--threads-batch", "8", "--parallel", "4", "--ctx-size", "4096", "--load-mode", "none", "--metrics",
        "--sse-ping-interval", "1", "--offline", "--no-webui", "--cache-ram", "1024",
    )  # fmt: skip
    assert launch.address == UnixAddress("/run/nl/slot2-7.sock")
    assert launch.env == {}
    assert launch.expected.binds_memory


@pytest.mark.parametrize(
    ("args", "there", "not_there"),
    [
        (("-t", "3"), "-t 3", "--threads 8"),
        (("--load_mode", "mmap"), "--load_mode mmap", "--load-mode none"),
        (("-cram", "0"), "-cram 0", "--cache-ram 1024"),
        (("--ui",), "--ui", "--no-webui"),
        (("--no-ui",), "--no-ui", "--no-webui"),
        (("-b", "64"), "-b 64", "--batch-size"),
        (("--embedding", "-ub", "4096"), "--embedding -ub 4096", "--ubatch-size"),
    ],
)
def test_options_of_the_operator_replace_the_launchers(
    args: tuple[str, ...], there: str, not_there: str, make_slot: MakeSlot
) -> None:
    line = " ".join(engine(*args).launch(make_slot(cpus="0-7", max_num_seqs=4), 1).argv)
    assert line.endswith(there)
    assert not_there not in line


def test_a_step_and_the_prompt_cache(make_slot: MakeSlot) -> None:
    slot = make_slot(max_num_seqs=2, max_num_batched_tokens=1024, kv=64 * GIB)
    argv = engine().launch(slot, 1).argv
    assert argv[argv.index("--batch-size") + 1] == "1024"
    assert argv[argv.index("--cache-ram") + 1] == str(8 * GIB // MIB)
    by_env = engine(env={"LLAMA_ARG_CACHE_RAM": "7"}).launch(slot, 1)
    assert "--cache-ram" not in by_env.argv
    assert by_env.env == {"LLAMA_ARG_CACHE_RAM": "7"}


def test_variables_of_the_daemon_do_not_reach_the_instances() -> None:
    (unwanted,) = engine().unwanted
    assert unwanted.fits("LLAMA_ARG_CTX_SIZE", "1")
    assert unwanted.fits("LLAMA_API_KEY", "x")
    assert not unwanted.fits("LLAMA_CACHE", "/x")


@pytest.mark.parametrize(
    ("args", "env", "completes"),
    [
        ((), {}, True),
        (("--embeddings",), {}, False),
        (("--reranking",), {}, False),
        ((), {"LLAMA_ARG_EMBEDDINGS": "1"}, False),
        ((), {"LLAMA_ARG_RERANKING": "0"}, True),
    ],
)
def test_only_a_server_that_completes_is_probed_by_a_completion(
    args: tuple[str, ...], env: dict[str, str], completes: bool
) -> None:
    assert engine(*args, env=env).wants_completion_probe is completes


def test_a_directory_is_given_to_the_server_as_its_first_file(tmp_path: Path, make_slot: MakeSlot) -> None:
    for number in (1, 2):
        write_gguf(tmp_path / f"m-0000{number}-of-00002.gguf", (f"blk.{number}.w", (32, 2), 0))
    argv = engine(path=str(tmp_path)).launch(make_slot(path=str(tmp_path)), 1).argv
    assert argv[argv.index("--model") + 1] == str(tmp_path / "m-00001-of-00002.gguf")
    assert read_profiles(config(str(tmp_path)), read_model_json)["m"].weights_bytes == 2 * 64 * 4


def test_a_command_template_is_refused() -> None:
    for command in (("llama-server", "--host", "{uds}"), ("/opt/other", "--host")):
        with pytest.raises(LauncherError, match=r"cannot use '--host' in engine\.command") as refused:
            engine(command=command)
        assert 'kind = "command"' in refused.value.remedy
    engine(command=("nice", "-n", "5", "/opt/llama-server"))


def test_the_program_and_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the wheel is not installed."""
    without = [path for path in sys.path if not any(Path(path).glob("xllamacpp-*.dist-info"))]
    monkeypatch.setattr(sys, "path", without)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(
        LauncherError, match=r"cannot find llama\.cpp's server: no command 'llama-server'"
    ) as refused:
        probe_stack(config().engine)
    assert "install llama.cpp" in refused.value.remedy
    with pytest.raises(PassingError, match="/mnt/llama-server"):
        probe(Engine(kind=EngineKind.LLAMA_CPP, command=("/mnt/llama-server",)))
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 11434 (1a2b3c4)' >&2\necho 'built with GNU' >&2\n")
    program.chmod(0o755)
    stack = probe_stack(config().engine)
    assert (stack.command, stack.version) == ((str(program),), "11434 (1a2b3c4)")


@pytest.mark.parametrize(
    ("script", "env", "version", "trouble"),
    [
        (
            'echo first >&2; echo "no $LIB here" >&2; exit 127',
            {"LIB": "libggml.so"},
            None,
            "no libggml.so here",
        ),
        ("exit 3", {}, None, "exit code 3"),
        ("true", {}, None, None),
        ('[ "$LIB" = x ] && echo version: 11434', {"LIB": "x"}, "11434", None),
    ],
)
def test_a_program_without_a_version_says_why_in_the_environment_of_the_instances(
    script: str, env: dict[str, str], version: str | None, trouble: str | None, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    stack = probe(Engine(kind=EngineKind.LLAMA_CPP, command=(str(program),), env=env))
    assert (stack.version, stack.version_trouble) == (version, trouble)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("version: 11434 (abc)\nbuilt with", "11434 (abc)"),
        ("version: v0.9.1\n", "v0.9.1"),
        ("usage: x", None),
    ],
)
def test_both_forms_of_a_version(text: str, version: str | None) -> None:
    assert version_in(text) == version


@pytest.mark.parametrize(
    ("software", "verdict", "fact"),
    [
        (Installed(stack=Stack(command=("/x",), version="v0.9.1")), Verdict.OK, "v0.9.1 (/x)"),
        (Installed(stack=Stack(command=("/x",))), Verdict.WARN, "/x: --version prints no version"),
        (
            Installed(stack=Stack(command=("/x",), version_trouble="no libggml.so")),
            Verdict.WARN,
            "/x: --version prints no version: no libggml.so",
        ),
        (Installed(trouble=Trouble("cannot find it", "install it")), Verdict.FAIL, "cannot find it"),
    ],
)
def test_rows_of_doctor(software: Installed, verdict: Verdict, fact: str) -> None:
    (check,) = engine_type("llama.cpp").checks()
    assert check is checks
    *_, row = check(software, None, None)  # type: ignore[arg-type]
    assert (row.verdict, row.fact) == (verdict, fact)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("error: invalid argument: --no-mmap", "bad-argument"),
        ('error while handling argument "--threads": stoi', "bad-argument"),
        ("llama_model_load: error loading model: unknown model architecture: 'new'", "unsupported-version"),
        (
            "gguf_init_from_reader: tensor 'w' has invalid ggml type 99. should be in [0, 42)",
            "unsupported-version",
        ),
        (
            "llama_init_from_model: model does not support different K (q8_0) and V (f16) cache types",
            "bad-argument",
        ),
        ("gguf_init_from_file: failed to open GGUF file '/a b/m.gguf' (Permission denied)", "not-permitted"),
        (
            "gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)",
            "model-not-found",
        ),
        (
            "tensor 'output.weight' data is not within the file bounds, model is corrupted or incomplete",
            "model-damaged",
        ),
        ("check_tensor_dims: tensor 'output_norm.weight' not found", "model-damaged"),
        ("gguf_init_from_reader: failed to read key-value pairs", "model-damaged"),
        ("srv          init: init: chat template parsing error: std::exception", "bad-chat-template"),
        ("error: the supplied chat template is not supported: {{", "bad-chat-template"),
        ("failed to allocate buffer for kv cache", "node-oom"),
        ("llama_model_load: error loading model: unable to allocate CPU buffer", "node-oom"),
        ("ggml_aligned_malloc: insufficient memory (attempted to allocate 881.92 MB)", "node-oom"),
        ("ggml_gallocr_reserve_n_impl: failed to allocate CPU buffer of size 924764192", "node-oom"),
        (
            "llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers",
            "node-oom",
        ),
        ("output_reserve: failed to allocate output buffer of size 12.00 MiB", "node-oom"),
        ("numactl: execution of `/opt/llama-server': No such file or directory", "command-not-found"),
    ],
)
def test_causes_of_an_end(line: str, name: str) -> None:
    found = (cause for cause in engine().log.causes if cause.pattern is not None)
    assert next(cause for cause in found if cause.pattern and cause.pattern.search(line)).name == name


def test_a_file_that_cannot_be_opened_is_tried_again_only_where_it_may_come() -> None:
    causes = {cause.name: cause for cause in reversed(engine().log.causes)}
    assert causes["not-permitted"].retry is Retry.NEVER
    assert "user" in causes["not-permitted"].remedy
    assert causes["model-not-found"].retry is Retry.BACKOFF
    assert "mount" in causes["model-not-found"].remedy


def test_phases_of_a_start() -> None:
    log = engine().log
    assert log.phase_of("0.00.010.802 I srv    load_model: loading model '/m.gguf'") == "loading weights"
    assert (
        log.phase_of("0.02.406.545 I cmn          init: llama threadpool init, n_threads = 2") == "warming up"
    )


def test_an_input_that_is_embedded_is_one_ubatch(make_slot: MakeSlot) -> None:
    slot = make_slot(cpus="0-7")
    slot = replace(slot, effective=replace(slot.effective, step_tokens=4096))
    line = " ".join(engine("--embedding").launch(slot, 1).argv)
    assert "--batch-size 4096 --ubatch-size 4096" in line


def test_files_that_arguments_add_are_counted(tmp_path: Path) -> None:
    """A draft model has a KV cache of its own; a file that is not here is named."""
    model = write_gguf(tmp_path / "m.gguf", ("blk.0.w", (32, 2), 0))
    encoder, adapter = (tmp_path / name for name in ("mmproj.gguf", "a.gguf"))
    encoder.write_bytes(bytes(1000))
    adapter.write_bytes(bytes(500))
    args = (
        "-mm",
        str(encoder),
        "--lora-scaled",
        f"{adapter}:0.5,{adapter}:1",
        "-hfd",
        "org/draft",
        "--lora",
        "/no/b",
    )
    its = config(str(model), args=args, env={"LLAMA_ARG_SPEC_DRAFT_MODEL": str(model)})
    added = read_profiles(its, read_model_json)["m"].added
    assert added.size_bytes == 1000 + 2 * 500 + model.stat().st_size
    assert added.token_bytes == 2 * 2 * 64 * 2 * 2
    assert added.unknown == ("--spec-draft-hf", "--lora /no/b")
    assert added.names[0] == f"1000 B of --mmproj {encoder}"
    assert added.encoder
    assert read_profiles(config(str(model)), read_model_json)["m"].added == NO_ADDED_FILES
