"""vLLM's command line: the options of the operator merged with the launcher's, flag by flag. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from launcher.base.errors import LauncherError
from launcher.engines import options

# Short spellings of flags that the launcher passes or reads (vllm/engine/arg_utils.py, 0.32).
_SHORT: Final = {
    "-q": "--quantization", "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-pcp": "--prefill-context-parallel-size", "-sc": "--speculative-config",
}  # fmt: skip
# The proxy binds up to one limit of requests: below it vLLM would queue them, or answer 503.
_ONE_LIMIT: Final = "remove it, and set max_num_seqs in [[models]]: the proxy queues what is above that"
# Flags that only the launcher sets -> remedy.
_RESERVED: Final = {
    "--uds": "remove it: the launcher gives each instance a socket of its own",
    "--host": "remove it: clients connect to proxy.listen; instances accept connections of the launcher only",
    "--port": "remove it: clients connect to proxy.listen; instances accept connections of the launcher only",
    "--api-key": "remove it: instances are reachable through the proxy only",
    "--model": "set `path` in [[models]] instead",
    "--served-model-name": "set `name` in [[models]] instead",
    "--max-num-active-seqs": _ONE_LIMIT,
    "--max-num-queued-reqs": _ONE_LIMIT,
    "--num-gpu-blocks-override": "remove it, and set memory.kv_cache: the plan counts the KV cache in bytes",
    "--config": "write the file's keys into engine.args: the plan and the proxy depend on them, and do not read that file",
}
# Flags that the launcher reads beside those it passes. No flag of vLLM's is the beginning of one of these or of those
# above, so what looks like one is an abbreviation, which vLLM's parser expands (argparse, allow_abbrev).
_READ: Final = frozenset({
    "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--quantization", "--dtype",
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--kv-cache-memory-bytes",
    "--kv-cache-dtype", "--enforce-eager", "--disable-hybrid-kv-cache-manager", "--trust-remote-code", "--runner",
    "--lora-modules", "--generation-config", "--override-generation-config", "--enable-prompt-tokens-details",
    "--shutdown-timeout", "--performance-mode", "--prefill-context-parallel-size", "--hf-overrides",
})  # fmt: skip

# Keys of [[models]] that the launcher passes on, and the options that would override them.
_KEYS: Final = {"max_num_seqs": "--max-num-seqs", "max_num_batched_tokens": "--max-num-batched-tokens"}


def flag_of(argument: str) -> str | None:
    """The canonical flag of one argument: "--no-enable_x=1" is "--enable-x". None for a value."""
    if options.is_value(argument):
        return None
    flag = argument.partition("=")[0].replace("_", "-")
    if flag.startswith("--no-"):
        flag = "--" + flag.removeprefix("--no-")
    return _SHORT.get(flag, flag)


def check_arguments(theirs: Sequence[str]) -> None:
    """Raises LauncherError for an argument that is not a flag, is reserved or abbreviated, or has flag and value in one
    string."""
    begun = False
    for argument in theirs:
        flag = flag_of(argument)
        if flag is not None:
            _check_flag(flag, argument)
            begun = True
        elif not begun:
            raise LauncherError(
                f"cannot use {argument!r} in engine.args: it is not an option",
                'options start with "--"; the model is set by `path` in [[models]]',
            )


def _check_flag(flag: str, argument: str) -> None:
    if " " in flag:
        name, _, value = argument.partition(" ")
        raise LauncherError(
            f"cannot use {argument!r} in engine.args: it has flag and value in one argument",
            f'write two: "{name}", "{value.strip()}"',
        )
    if flag in _RESERVED:
        raise LauncherError(f"cannot set {argument!r} in engine.args: the launcher sets it", _RESERVED[flag])
    meant = _abbreviated(flag)
    if meant is not None:
        raise LauncherError(
            f"cannot use {argument!r} in engine.args: it is short for {meant}, which the launcher reads",
            f'write it in full: "{meant}"',
        )


def _abbreviated(flag: str) -> str | None:
    """The flag that vLLM's parser would make of it; None for a flag in full, or one that the launcher does not read."""
    if flag in _READ:
        return None
    if not flag.startswith("--"):
        # argparse takes "-qawq" for "-q awq", and "-t" for "-tp".
        shorts = (
            short for short in _SHORT if short.startswith(flag) or (short == "-q" and flag.startswith(short))
        )
        return next((_SHORT[short] for short in shorts), None)
    return next((full for full in sorted(_READ | _RESERVED.keys()) if full.startswith(flag)), None)


def merge(ours: Sequence[tuple[str, ...]], theirs: Sequence[str]) -> tuple[str, ...]:
    """The launcher's options (flag and values each) without those that `theirs` sets, then `theirs` unchanged.

    Raises LauncherError as `check_arguments` does."""
    check_arguments(theirs)
    return options.merge(ours, theirs, flag_of)


def has_flag(arguments: Sequence[str], flag: str) -> bool:
    """Whether `flag` is on in `arguments`; the last occurrence counts."""
    on = False
    for argument in arguments:
        if flag_of(argument) == flag:
            on = not argument.replace("_", "-").startswith("--no-")
    return on


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of `flag`, in either form; None without one."""
    return options.value_of(arguments, flag, flag_of)


def json_of(arguments: Sequence[str], flag: str) -> dict[str, Any]:
    """The object that `flag JSON` gives, with the values of its dotted form, `flag.KEY.INNER VALUE`; empty without one.

    What cannot be read is left out: vLLM reports it when it starts."""
    values: dict[str, Any] = {}
    whole = _parsed(value_of(arguments, flag))
    if isinstance(whole, dict):
        values |= whole
    for argument in arguments:
        found = flag_of(argument)
        if found is None or not found.startswith(f"{flag}."):
            continue
        *parts, last = found.removeprefix(f"{flag}.").replace("-", "_").split(".")
        place = values
        for part in parts:
            inner = place.get(part)
            place[part] = place = dict(inner) if isinstance(inner, dict) else {}
        place[last] = _parsed(value_of(arguments, found))
    return values


def _parsed(text: str | None) -> object:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def value_given(arguments: Sequence[str], flag: str) -> str | None:
    """As `value_of`. Raises LauncherError for a flag without a value."""
    value = value_of(arguments, flag)
    if value is None and any(flag_of(argument) == flag for argument in arguments):
        raise LauncherError(
            f"cannot use {flag} in engine.args: it has no value",
            f"add the value, or remove {flag} from engine.args",
        )
    return value


def overriding(arguments: Sequence[str], keys: Iterable[str]) -> tuple[int, ...]:
    """Indices of the options, and of their values, that override these keys of [[models]]."""
    return options.overriding(arguments, keys, _KEYS, flag_of)
