"""llama-server's command line: options and variables that only the launcher sets, those of the operator merged with the
launcher's, and those in a command template that contradict the plan. Pure.

Options are those of build 11434 (common/arg.cpp). Its parser takes no abbreviations and no `--option=value`, and reads
underscores in long options as hyphens. Arguments go before variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Final

from launcher.base.errors import LauncherError
from launcher.engines import options
from launcher.plan.plan import Finding, Rule, Subject, warning

DEFAULT_BATCH: Final = 2048
"""--batch-size: tokens of one step (common/common.h)."""
DEFAULT_UBATCH: Final = 512
"""--ubatch-size: tokens that are computed together (common/common.h)."""
_LLAMA_SERVER: Final = "llama-server"
_PARALLEL_ENV: Final = "LLAMA_ARG_N_PARALLEL"
# Other names of options that the launcher passes or reads, to the one used here.
_SAME: Final = {
    "-t": "--threads", "-tb": "--threads-batch", "-np": "--parallel", "-c": "--ctx-size", "-b": "--batch-size",
    "-ub": "--ubatch-size", "-m": "--model", "-a": "--alias", "-lm": "--load-mode", "-cram": "--cache-ram",
    "-ctk": "--cache-type-k", "-ctv": "--cache-type-v", "-kvu": "--kv-unified", "-no-kvu": "--no-kv-unified",
    "--embeddings": "--embedding", "--reranking": "--rerank", "--no-webui": "--no-ui", "--webui": "--ui",
    "-ctxcp": "--ctx-checkpoints", "--swa-checkpoints": "--ctx-checkpoints", "-fa": "--flash-attn",
    "-mm": "--mmproj", "-md": "--spec-draft-model", "--model-draft": "--spec-draft-model", "-mmu": "--mmproj-url",
    "-nr": "--no-repack", "-hfd": "--spec-draft-hf", "-hfrd": "--spec-draft-hf", "--hf-repo-draft": "--spec-draft-hf",
}  # fmt: skip
# Options that replace others, to the others' names.
_OPPOSITES: Final = {"--ui": "--no-ui"}

Refusal = tuple[str, str]
"""The reason, and the remedy."""
_SET: Final = "the launcher sets it"
_ADDRESS: Final = (
    _SET,
    "remove it: clients connect to proxy.listen; instances accept connections of the launcher only",
)
_SOURCE: Final = (_SET, "set `path` in [[models]] to a GGUF file instead: an instance serves one local model")
_NAMES: Final = (_SET, "set `name` and `aliases` in [[models]] instead")
_CONTEXT: Final = (
    _SET, "set max_model_len and max_num_seqs in [[models]]: the plan sizes the context of an instance by them",
)  # fmt: skip
_POOL: Final = (
    "in one pool for all requests, the request that finds it full ends all others with an error",
    "remove it, and set max_model_len and max_num_seqs in [[models]]",
)
_SHELL: Final = ("with it, requests can run commands and read files on this host", "remove it")
# Names of options and variables that are refused.
_RESERVED: Final[dict[str, Refusal]] = {
    name: refusal
    for refusal, names in {
        _ADDRESS: (
            "--host", "--port", "--reuse-port", "--api-prefix", "--ssl-key-file", "--ssl-cert-file", "--api-key",
            "--api-key-file", "LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_REUSE_PORT", "LLAMA_ARG_API_PREFIX",
            "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE", "LLAMA_ARG_API_KEY_FILE", "LLAMA_API_KEY",
        ),
        _SOURCE: (
            "--model", "-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file",
            "--models-dir", "--models-preset", "--models-max", "--models-autoload", "LLAMA_ARG_MODEL",
            "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_HF_FILE",
            "LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET",
        ),
        _NAMES: ("--alias", "LLAMA_ARG_ALIAS"),
        _CONTEXT: ("--ctx-size", "--parallel", "LLAMA_ARG_CTX_SIZE", _PARALLEL_ENV),
        _POOL: (
            "--kv-unified", "--kv-unified-per-slot", "LLAMA_ARG_KV_UNIFIED", "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
        ),
        _SHELL: (
            "--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json", "--ui-mcp-proxy",
            "--webui-mcp-proxy", "-ag", "--agent", "LLAMA_ARG_TOOLS", "LLAMA_ARG_TOOLS_RUNTIME",
            "LLAMA_ARG_MCP_SERVERS_CONFIG", "LLAMA_ARG_MCP_SERVERS_JSON", "LLAMA_ARG_UI_MCP_PROXY", "LLAMA_ARG_AGENT",
        ),
    }.items()
    for name in names
}  # fmt: skip
# Options for everything at once: they set a repository, a port and a context.
_PRESET: Final = re.compile(r"--(?:embd|fim|gpt-oss|vision)-.*")
# Keys of [[models]] that the launcher passes on, and the options of engine.args that override them.
_KEYS: Final = {"max_num_batched_tokens": "--batch-size"}


# --- `kind = "llama.cpp"`: engine.args and engine.env. ---


def option_of(argument: str) -> str | None:
    """The usual name of the option that an argument is; None for a value."""
    if options.is_value(argument):
        return None
    word = argument.partition("=")[0]
    word = word.replace("_", "-") if word.startswith("--") else word
    return _SAME.get(word, word)


def check_arguments(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises LauncherError for an option in engine.args, or a variable in engine.env, that only the launcher sets or that
    breaks supervision or the plan; for an argument before the first option, and for one with option and value in one."""
    for index, argument in enumerate(arguments):
        option = option_of(argument)
        if option is None:
            if index == 0:
                raise LauncherError(
                    f"cannot use {argument!r} in engine.args: it is not an option",
                    'options start with "-"; the model is set by `path` in [[models]]',
                )
            continue
        name, separator, value = argument.partition("=" if "=" in argument else " ")
        if separator:
            raise LauncherError(
                f"cannot use {argument!r} in engine.args: llama-server takes option and value as two arguments",
                f'write two: "{name}", "{value.strip()}"',
            )
        refusal = _SOURCE if _PRESET.fullmatch(option) else _RESERVED.get(option)
        if refusal is not None:
            raise LauncherError(f"cannot use {argument!r} in engine.args: {refusal[0]}", refusal[1])
    for variable in env:
        if variable in _RESERVED:
            why, remedy = _RESERVED[variable]
            raise LauncherError(f"cannot use {variable} in engine.env: {why}", remedy)


def merge(ours: Sequence[tuple[str, ...]], theirs: Sequence[str]) -> tuple[str, ...]:
    """The launcher's options (option and values each) without those that `theirs` sets, then `theirs` unchanged."""
    return options.merge(ours, theirs, option_of, _OPPOSITES)


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """The value of the last option of this (usual) name; None without one, or where an option follows instead."""
    return options.value_of(arguments, name, option_of)


def count_of(arguments: Sequence[str], env: Mapping[str, str], name: str, variable: str) -> int | None:
    """The number that an option, else a variable, gives; None without both. Raises LauncherError for another text."""
    given = any(option_of(word) == name for word in arguments)
    if not given and variable not in env:
        return None
    text = value_of(arguments, name) if given else env[variable]
    where = f"{name} in engine.args" if given else f"{variable} in engine.env"
    if text is None or not (text.isascii() and text.isdecimal()):
        raise LauncherError(
            f"cannot use {where}: {'it has no value' if text is None else f'{text!r} is no whole number from 0 on'}",
            "write a whole number from 0 on, or remove it",
        )
    return int(text)


def embeds_or_ranks(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the server embeds or ranks, and completes nothing."""
    return ranks(arguments, env) or _has(arguments, env, "--embedding", "LLAMA_ARG_EMBEDDINGS")


def ranks(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the server ranks."""
    return _has(arguments, env, "--rerank", "LLAMA_ARG_RERANKING")


def keeps_all(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Sliding layers keep all tokens of a request, not those of their window alone."""
    return _has(arguments, env, "--swa-full", "LLAMA_ARG_SWA_FULL")


def pooling_of(arguments: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The pooling that the server is told; scores have one of their own."""
    if ranks(arguments, env):
        return "rank"
    return value_of(arguments, "--pooling") or env.get("LLAMA_ARG_POOLING")


def _has(arguments: Sequence[str], env: Mapping[str, str], option: str, variable: str) -> bool:
    # The values that common/arg.cpp takes as true (is_truthy).
    return option in map(option_of, arguments) or env.get(variable) in {"1", "on", "enabled", "true"}


def repacks(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether matrices are repacked for the CPU, as they are by default."""
    given = [option for word in arguments if (option := option_of(word)) in {"--repack", "--no-repack"}]
    if given:
        return given[-1] == "--repack"
    if "LLAMA_ARG_NO_REPACK" in env:  # with any value (common/arg.cpp, get_value_from_env)
        return False
    # The values that common/arg.cpp takes as false (is_falsey).
    return env.get("LLAMA_ARG_REPACK") not in {"0", "off", "disabled", "false"}


# Options whose value names a file that an instance loads beside the model; each with the variable, if there is one.
_FILES: Final = {
    "--mmproj": "LLAMA_ARG_MMPROJ", "--spec-draft-model": "LLAMA_ARG_SPEC_DRAFT_MODEL", "--lora": None,
    "--lora-scaled": None, "--control-vector": None, "--control-vector-scaled": None,
}  # fmt: skip
DRAFT: Final = "--spec-draft-model"
MMPROJ: Final = frozenset({"--mmproj", "LLAMA_ARG_MMPROJ", "--mmproj-url", "LLAMA_ARG_MMPROJ_URL"})
"""Options and variables for an encoder of pictures or sound."""
# Options whose files are not on this host yet, or named by another program.
_DOWNLOADED: Final = {
    "--mmproj-url": "LLAMA_ARG_MMPROJ_URL", "--spec-draft-hf": "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
}  # fmt: skip
_SCALE: Final = re.compile(r"(?P<file>.+):-?\d+(?:\.\d+)?", re.ASCII)


def added_files(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, str | None], ...]:
    """Options of engine.args, or variables of engine.env, for files beside the model, each with the path of a file; None
    for a file that llama-server fetches itself, and for an option without a value."""
    found: list[tuple[str, str | None]] = []
    for index, word in enumerate(arguments):
        option = option_of(word) or ""
        if option in _DOWNLOADED:
            found.append((option, None))
        elif option in _FILES:
            text = value_of(arguments[index : index + 2], option)
            found += [(option, None)] if text is None else [(option, path) for path in _paths(option, text)]
    given = {option for option, _ in found}
    for option, variable in (_FILES | _DOWNLOADED).items():
        if variable is not None and option not in given and env.get(variable):
            found.append((variable, env[variable] if option in _FILES else None))
    return tuple(found)


def _paths(option: str, text: str) -> Iterator[str]:
    """llama-server splits the values of adapters at commas; FILE:SCALE in the options that end with -scaled."""
    for part in [text] if option in {"--mmproj", DRAFT} else text.split(","):
        match = _SCALE.fullmatch(part) if option.endswith("-scaled") else None
        yield part if match is None else match["file"]


def overriding(arguments: Sequence[str], keys: Iterable[str]) -> tuple[int, ...]:
    """Indices of the options, and of their values, that override these keys of [[models]]."""
    return options.overriding(arguments, keys, _KEYS, option_of)


# --- `kind = "command"`: a template that starts llama-server. ---


def is_llama_server(argv: Sequence[str]) -> bool:
    return any(PurePath(word).name == _LLAMA_SERVER for word in argv)


def options_after_program(command: Sequence[str]) -> tuple[str, ...]:
    """The words after the program, which is the last word named llama-server, else the first word."""
    last = max((index for index, word in enumerate(command) if is_llama_server((word,))), default=0)
    return tuple(command[last + 1 :])


def slots_of(argv: Sequence[str], env: Mapping[str, str]) -> int | None:
    """Requests that a llama-server computes at once; None where it is not told, or `argv` starts another server."""
    if not is_llama_server(argv):
        return None
    text = env.get(_PARALLEL_ENV, "")
    for word, following in pairwise((*argv, "")):
        if option_of(word) == "--parallel":
            text = word.partition("=")[2] or following
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else None


def _argv(subject: Subject) -> tuple[str, ...]:
    return (*subject.config.engine.command, *subject.config.engine.args)


def numa_argument(subject: Subject) -> Iterator[Finding]:
    """With --numa and several nodes, ggml widens the mask of its threads to all cpus after computing
    (ggml/src/ggml-cpu/ggml-cpu.c, clear_numa_thread_affinity, build 11434). Without it the mask is unchanged."""
    engine = subject.config.engine
    words = (("engine.command", engine.command), ("engine.args", engine.args))
    where = next((key for key, argv in words if "--numa" in map(option_of, argv)), None)
    name = "LLAMA_ARG_NUMA" if where is None else "--numa"
    if where is not None or name in engine.env:
        yield warning(
            "numa-argument",
            f"{'engine.env sets' if where is None else f'{where} has'} {name}, which lets llama.cpp's threads "
            "leave the slot's cpus on machines with several NUMA nodes",
            f"remove {name}: numactl pins the instance, and its threads inherit the mask",
        )


def threads_argument(subject: Subject) -> Iterator[Finding]:
    """llama.cpp counts the machine's cores, not the affinity mask's (common/common.cpp, common_cpu_get_num_math)."""
    argv = _argv(subject)
    told = "--threads" in map(option_of, argv) or "LLAMA_ARG_THREADS" in subject.config.engine.env
    if not told and is_llama_server(argv):
        yield warning(
            "threads-not-told",
            "llama-server has no --threads: it starts one thread per core of the machine, on the slot's cpus",
            'add "--threads", "{threads}" to engine.command',
        )


def mixed_inputs(subject: Subject) -> Iterator[Finding]:
    """With a part of the context for each request, several inputs are cut into ubatches with as many tokens of each
    (src/llama-kv-cache.cpp, init_batch: split_equal), and the vector or score of a longer one is made from its part in the
    last. One pool for all, which llama-server takes if it is not told --parallel, is cut between inputs only. Seen with
    build 11549. The model is not known here: without a KV cache, or with the last token's vector, all is well."""
    argv, env = _argv(subject), subject.config.engine.env
    slots = slots_of(argv, env)
    if slots is None or slots == 1 or not _pools(argv, env) or _is_unified(argv, env):
        return
    option, result = ("--rerank", "score") if ranks(argv, env) else ("--embedding", "vector")
    last = "" if ranks(argv, env) else ', or "--pooling", "last" if the model is made for it'
    yield warning(
        "inputs-mixed",
        f"llama-server has {option} and --parallel {slots}: of several inputs at once it makes the {result} of a longer one "
        "from a part of it, without an error, unless the model has no KV cache (BERT) or takes the last token (Qwen3)",
        f'set "--parallel", "1" or add "--kv-unified"{last}',
    )


def short_inputs(subject: Subject) -> Iterator[Finding]:
    """An input is computed in one ubatch (tools/server/server-context.cpp, can_split: "input is too large to process")."""
    argv, env = _argv(subject), subject.config.engine.env
    if not is_llama_server(argv) or not _pools(argv, env):
        return
    longest = max((model.max_model_len or 0 for model, _ in subject.models()), default=0)
    texts = (
        value_of(argv, "--ubatch-size") or env.get("LLAMA_ARG_UBATCH") or str(DEFAULT_UBATCH),
        value_of(argv, "--batch-size") or env.get("LLAMA_ARG_BATCH") or str(DEFAULT_BATCH),
    )
    sizes = [int(text) for text in texts if text.isascii() and text.isdecimal()]
    size = min(filter(None, sizes), default=longest)  # 0: as the batch
    if size < longest:
        yield warning(
            "inputs-refused",
            f"llama-server computes an input in one ubatch, of {size} tokens here, and answers a longer one with "
            f"error 500, unless the model takes the last token (Qwen3); max_model_len is {longest}",
            f'add "--batch-size", "{longest}", "--ubatch-size", "{longest}", or lower max_model_len to {size}',
        )


def _pools(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the server embeds or ranks, as far as it is told from all tokens of an input."""
    return embeds_or_ranks(argv, env) and pooling_of(argv, env) != "last"


def _is_unified(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    given = [option for word in argv if (option := option_of(word)) in {"--kv-unified", "--no-kv-unified"}]
    return given[-1] == "--kv-unified" if given else _has((), env, "", "LLAMA_ARG_KV_UNIFIED")


TEMPLATE_RULES: Final[tuple[Rule, ...]] = (numa_argument, threads_argument, mixed_inputs, short_inputs)
"""For a command template."""
