"""What an engine says of its own load on its metrics page. Pure; a page of 50 KB costs 0.1 ms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_MOST: Final = 2**53
_SIZE: Final = re.compile(r'\bkv_cache_size_tokens="([0-9]+)"')
_BLOCKS: Final = re.compile(r'\bnum_gpu_blocks="([0-9]+)"')  # vLLM's CPU backend counts its own there, too
_BLOCK_SIZE: Final = re.compile(r'[{,]block_size="([0-9]+)"')


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One page's gauges; summed over the engines of one server."""

    running: int
    waiting: int
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1: of the fullest engine."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds."""


def read_load(page: str) -> EngineLoad | None:
    """The load that a page tells of; None when it is neither vLLM's nor llama-server's."""
    try:
        running, waiting = _requests(page, "vllm:num_requests_running", "vllm:num_requests_waiting")
        if not running:
            running, waiting = _requests(page, "llamacpp:requests_processing", "llamacpp:requests_deferred")
        usage = list(_values(page, "vllm:kv_cache_usage_perc"))
        tokens = _kv_tokens(page)
    except ValueError:  # also of more digits than int() takes (sys.set_int_max_str_digits)
        return None
    if not running or not waiting:
        return None
    return EngineLoad(sum(running), sum(waiting), max(usage, default=None), tokens)


def _requests(page: str, running: str, waiting: str) -> tuple[list[int], list[int]]:
    return [int(value) for value in _values(page, running)], [int(value) for value in _values(page, waiting)]


def _lines(page: str, name: str) -> Iterator[str]:
    """The samples of one metric, from behind its name. A search for text: a hundred times a pattern's speed."""
    start = page.find(name)
    while start >= 0:
        end = page.find("\n", start)
        end = len(page) if end < 0 else end
        if (start == 0 or page[start - 1] == "\n") and page[
            start + len(name) : start + len(name) + 1
        ] in "{ ":
            yield page[start + len(name) : end]
        start = page.find(name, end)


def _values(page: str, name: str) -> Iterator[float]:
    """Raises ValueError for what is no count: NaN, less than 0, more than a float counts one by one."""
    for line in _lines(page, name):
        value = float(line.rpartition(" ")[2])
        if not 0 <= value <= _MOST:
            raise ValueError(f"{value} is no count")
        yield value


def _kv_tokens(page: str) -> int | None:
    sizes = []
    for labels in _lines(page, "vllm:cache_config_info"):
        size, blocks, per_block = (found.search(labels) for found in (_SIZE, _BLOCKS, _BLOCK_SIZE))
        if size is not None:
            sizes.append(int(size[1]))
        elif blocks is not None and per_block is not None:
            sizes.append(int(blocks[1]) * int(per_block[1]))
    return sum(sizes) or None if sum(sizes) <= _MOST else None
