"""A llama-server that engine.command starts: what its arguments say, and those that contradict the plan. Pure.

Options are those of build 11434 (common/arg.cpp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Final

from launcher.plan.plan import Finding, Rule, Subject, warning

_LLAMA_SERVER: Final = "llama-server"
_THREADS: Final = frozenset({"-t", "--threads"})


_PARALLEL: Final = frozenset({"-np", "--parallel"})
_PARALLEL_ENV: Final = "LLAMA_ARG_N_PARALLEL"


def is_llama_server(argv: Sequence[str]) -> bool:
    return any(PurePath(word).name == _LLAMA_SERVER for word in argv)


def slots_of(argv: Sequence[str], env: Mapping[str, str]) -> int | None:
    """Requests that a llama-server computes at once; None where it is not told, or `argv` starts another server."""
    if not is_llama_server(argv):
        return None
    text = env.get(_PARALLEL_ENV, "")
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if _option(word) in _PARALLEL:
            text = word.partition("=")[2] or following
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else None


def _option(word: str) -> str:
    return word.partition("=")[0]


def _argv(subject: Subject) -> tuple[str, ...]:
    return (*subject.config.engine.command, *subject.config.engine.args)


def numa_argument(subject: Subject) -> Iterator[Finding]:
    """With --numa and several nodes, ggml widens the mask of its threads to all cpus after computing
    (ggml/src/ggml-cpu/ggml-cpu.c, clear_numa_thread_affinity, build 11434). Without it the mask is unchanged."""
    by_argument = any(_option(word) == "--numa" for word in _argv(subject))
    name = "--numa" if by_argument else "LLAMA_ARG_NUMA"
    if by_argument or name in subject.config.engine.env:
        yield warning(
            "numa-argument",
            f"{'engine.command has' if by_argument else 'engine.env sets'} {name}, which lets llama.cpp's threads "
            "leave the slot's cpus on machines with several NUMA nodes",
            f"remove {name}: numactl pins the instance, and its threads inherit the mask",
        )


def threads_argument(subject: Subject) -> Iterator[Finding]:
    """llama.cpp counts the machine's cores, not the affinity mask's (common/common.cpp, common_cpu_get_num_math)."""
    argv = _argv(subject)
    told = any(_option(word) in _THREADS for word in argv) or "LLAMA_ARG_THREADS" in subject.config.engine.env
    if not told and is_llama_server(argv):
        yield warning(
            "threads-not-told",
            "llama-server has no --threads: it starts one thread per core of the machine, on the slot's cpus",
            'add "--threads", "{threads}" to engine.command',
        )


RULES: Final[tuple[Rule, ...]] = (numa_argument, threads_argument)
