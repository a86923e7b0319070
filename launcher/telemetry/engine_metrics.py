"""The one parser of engines' metrics pages: vLLM's, and llama-server's. Pure; a page of 50 KB costs 0.2 ms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

# The names: vllm/v1/metrics/loggers.py of 0.32; llama-server: tools/server/server-task.cpp, build 11434.
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
KV_USAGE: Final = "vllm:kv_cache_usage_perc"
ADAPTERS: Final = "vllm:lora_requests_info"
_LLAMA_RUNNING: Final = "llamacpp:requests_processing"
# A float counts in steps of 1 up to here.
_MAX_COUNT: Final = 2**53
_KV_TOKENS: Final = re.compile(r'\bkv_cache_size_tokens="([0-9]+)"')
# vLLM's CPU backend reports its own blocks under this name, too.
_BLOCKS: Final = re.compile(r'\bnum_gpu_blocks="([0-9]+)"')
_MAX_ADAPTERS: Final = re.compile(r'\bmax_lora="([0-9]{1,9})"')
_BLOCK_SIZE: Final = re.compile(r'[{,]block_size="([0-9]+)"')
# llama-server prints six digits of a number (server-task.cpp, to_metrics: a stream's default precision). From here on
# a counter of engine steps is printed in steps of 100 or more and may not change on the page while it rises.
_ROUNDED_FROM: Final = 10_000_000


class EngineMetrics(Struct, frozen=True):
    """An engine's load and progress, summed over the engine cores of one server."""

    running: int  # vllm:num_requests_running, llamacpp:requests_processing
    waiting: int  # vllm:num_requests_waiting, llamacpp:requests_deferred
    generated: int
    """vllm:generation_tokens_total, llamacpp:tokens_predicted_total (which rises when a request ends)."""
    steps: int
    """vllm:iteration_tokens_total_count, llamacpp:n_decode_total: engine steps, prefill of a long prompt included."""
    kv_usage: float | None = None  # share of the KV cache in use, 0 to 1, of the fullest engine core
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0
    rounded: bool = False
    """The page prints too few digits of `steps`: an unchanged value does not prove that the engine is idle."""
    kv_tokens: int | None = None  # capacity of the KV cache in tokens
    max_adapters: int | None = None  # LoRA adapters that can run at once


def parse(page: str) -> EngineMetrics | None:
    """None when the page is neither vLLM's nor llama-server's, or when a value that is read is not a count."""
    try:
        if RUNNING in page:
            return _vllm(page)
        if _LLAMA_RUNNING in page:
            return _llama_server(page)
    # Also raised by int() for more digits than sys.set_int_max_str_digits allows.
    except ValueError:
        pass
    return None


def _vllm(page: str) -> EngineMetrics | None:
    running = _sum(page, RUNNING)
    generated = _sum(page, "vllm:generation_tokens_total")
    if running is None or generated is None:
        return None
    return EngineMetrics(
        running=running, waiting=_sum(page, WAITING) or 0, generated=generated,
        steps=_sum(page, "vllm:iteration_tokens_total_count") or 0,
        kv_usage=max(_values(page, KV_USAGE), default=None),
        prefix_queries=_sum(page, "vllm:prefix_cache_queries_total") or 0,
        prefix_hits=_sum(page, "vllm:prefix_cache_hits_total") or 0, kv_tokens=_kv_tokens(page),
        max_adapters=_max_adapters(page),
    )  # fmt: skip


def _llama_server(page: str) -> EngineMetrics | None:
    running = _sum(page, _LLAMA_RUNNING)
    if running is None:
        return None
    fresh = _sum(page, "llamacpp:prompt_tokens_total") or 0
    cached = _sum(page, "llamacpp:prompt_tokens_cached_total") or 0
    decoded = _sum(page, "llamacpp:n_decode_total")
    steps = fresh if decoded is None else decoded
    return EngineMetrics(
        running=running, waiting=_sum(page, "llamacpp:requests_deferred") or 0,
        generated=_sum(page, "llamacpp:tokens_predicted_total") or 0, steps=steps,
        prefix_queries=fresh + cached, prefix_hits=cached, rounded=steps >= _ROUNDED_FROM,
    )  # fmt: skip


def _sum(page: str, name: str) -> int | None:
    """None where the page has no sample of that name. Raises ValueError for a value that is not a count."""
    values = list(_values(page, name))
    total = sum(values)
    if total > _MAX_COUNT:
        raise ValueError(f"{name}: {total} is not a count")
    return int(total) if values else None


def _values(page: str, name: str) -> Iterator[float]:
    for sample in _samples(page, name):
        # Behind the last brace: a label's value may hold one, and spaces.
        value = float("".join(sample.rpartition("}")[2].split()[:1]))
        if not 0 <= value <= _MAX_COUNT:
            raise ValueError(f"{name}: {value} is not a count")
        yield value


def sums_by_label(page: str, name: str, label: str) -> dict[str, float]:
    """The samples of one metric, of any exporter, summed by the value of one label. Samples without it are left out."""
    wanted = re.compile(rf'[{{,]{re.escape(label)}="([^"]*)"')
    sums: dict[str, float] = {}
    for sample in _samples(page, name):
        labels, _, value = sample.rpartition("}")
        found = wanted.search(labels)
        if found is not None:
            sums[found[1]] = sums.get(found[1], 0.0) + float(value.split()[0])
    return sums


def _samples(page: str, name: str) -> Iterator[str]:
    """The samples of one metric, from behind its name. str.find takes a hundredth of a pattern's time."""
    start = page.find(name)
    while start >= 0:
        end = page.find("\n", start)
        end = len(page) if end < 0 else end
        begin = start + len(name)
        if (start == 0 or page[start - 1] == "\n") and page[begin : begin + 1] in ("{", " ", "\t"):
            yield page[begin:end]
        start = page.find(name, end)


def _kv_tokens(page: str) -> int | None:
    total = 0
    for labels in _samples(page, "vllm:cache_config_info"):
        size, blocks, per_block = (found.search(labels) for found in (_KV_TOKENS, _BLOCKS, _BLOCK_SIZE))
        if size is not None:
            total += int(size[1])
        elif blocks is not None and per_block is not None:
            total += int(blocks[1]) * int(per_block[1])
    return total if 0 < total <= _MAX_COUNT else None


def _max_adapters(page: str) -> int | None:
    found = [_MAX_ADAPTERS.search(labels) for labels in _samples(page, ADAPTERS)]
    return max((int(each[1]) for each in found if each is not None), default=None)


# --- Rates of engines' counters, which are read with each health probe and not with each row. ---
#
# A rate between two probes holds until the next probe: each token is in as many rows as the probes are apart.

# A probe that takes longer than twice the last interval and this is late: its rate is unknown then.
_LATE_S: Final = 5.0


class EngineCounts(Struct, frozen=True):
    """An engine's counters at a probe."""

    generation: int
    at: float
    """Of the probe, monotonic."""
    output_tokens: int
    prefix_queries: int
    prefix_hits: int


class Rates(Struct, frozen=True):
    """Per second, between two probes."""

    output_tokens: float
    prefix_queries: float
    prefix_hits: float


class _Seen(Struct, frozen=True):
    counts: EngineCounts
    rates: Rates | None = None
    until: float = 0.0
    """The rates are unknown after this time."""


class EngineRates:
    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def rates(self, slot: int, counts: EngineCounts | None, now: float) -> Rates | None:
        """None before the second probe of an instance, and where the last probe got no counters (`counts` is None)."""
        if counts is None:
            self._seen.pop(slot, None)
            return None
        before = self._seen.get(slot)
        if before is None or before.counts != counts:
            before = self._seen[slot] = _between(None if before is None else before.counts, counts)
        return before.rates if now <= before.until else None

    def keep(self, slots: frozenset[int]) -> None:
        """Forget all other slots."""
        for slot in self._seen.keys() - slots:
            del self._seen[slot]


def _between(old: EngineCounts | None, new: EngineCounts) -> _Seen:
    if old is None or old.generation != new.generation or new.at <= old.at:
        return _Seen(new)
    elapsed = new.at - old.at
    rises = (
        new.output_tokens - old.output_tokens,
        new.prefix_queries - old.prefix_queries,
        new.prefix_hits - old.prefix_hits,
    )
    if min(rises) < 0:
        return _Seen(new)  # another process answers
    return _Seen(new, Rates(*(rise / elapsed for rise in rises)), new.at + 2 * elapsed + _LATE_S)
