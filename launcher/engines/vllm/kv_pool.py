"""The layout of vLLM 0.32's KV cache on CPU: one pool of blocks shared by all layers. Pure.

Rules of v1/core/kv_cache_utils.py and v1/kv_cache_interface.py, with the CPU backend's layout (LBNHC) and the
hybrid manager on, which it is on CPU (platforms/cpu.py, support_hybrid_kv_cache):

1. A layer's page holds K and V of `block_size` tokens on one rank.
2. Layers of one kind form one group, and a block costs the sum of their pages.
3. Layers of several kinds get equal pages: the block size of the smaller is multiplied, or the page padded.
   Then each kind is cut into groups of as many layers as the rarest kind has (as the commonest has, where
   that is less than 1.5 times as many), and a block costs one such group.
4. Attention beside recurrent states: the attention's block grows until its page holds a state.
5. A request of n tokens takes n / block_size blocks of each full group, rounded up; of a sliding group those
   of its window and of the tokens of one step, and one more; of a chunked group those of a chunk and of one step; of
   a state group as many as its layers keep states.
6. One block of the pool, the null block, is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.models.layers import KvLayers, LayerKind

KERNEL_BLOCK: Final = 32
"""CPU attention works on multiples of this (v1/attention/backends/cpu_attn.py)."""
_FEW_MORE: Final = 1.5  # kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size


class Group(Struct, frozen=True):
    """Layers that share block numbers; `count` such groups."""

    kind: LayerKind
    block_size: int
    count: int = 1
    window: int | None = None
    states: int = 0


class Pool(Struct, frozen=True):
    """Size of a block on one rank, and the groups that use blocks."""

    block_bytes: int
    groups: tuple[Group, ...]
    step_tokens: int
    """Tokens of one engine step (max_num_batched_tokens): kept until the step ends."""

    def blocks(self, length: int) -> int:
        """Blocks that one request of `length` tokens holds at most."""
        return sum(group.count * self._blocks_of(group, length) for group in self.groups)

    def _blocks_of(self, group: Group, length: int) -> int:
        if group.kind is LayerKind.FULL:
            return -(-length // group.block_size)
        if group.kind is LayerKind.SLIDING:
            kept = min((group.window or length) - 1 + self.step_tokens, length)
            return -(-kept // group.block_size) + 1
        if group.kind is LayerKind.CHUNKED:
            return -(-min((group.window or length) + self.step_tokens, length) // group.block_size)
        return group.states if group.kind is LayerKind.STATE else -(-self.step_tokens // group.block_size)

    def bytes_for(self, requests: int, length: int) -> int:
        """Bytes that `requests` of `length` tokens can use, plus the null block. 0 for models without a KV cache."""
        return (requests * self.blocks(length) + 1) * self.block_bytes if self.groups else 0

    def tokens(self, kv_bytes: int, length: int) -> int:
        """The "KV cache size" that vLLM logs: how many requests of `length` fit, times `length`."""
        if not self.groups:
            return 0
        return int(kv_bytes // self.block_bytes / self.blocks(length) * length)


class _Pages(Struct, frozen=True):
    kind: LayerKind
    count: int
    block_size: int
    page_bytes: int
    window: int | None
    states: int = 0


def pool_of(
    layers: Sequence[KvLayers], *, ranks: int, block_size: int, step_tokens: int, hybrid: bool = True
) -> Pool:
    """The pool of a model. `hybrid` False is vLLM's --disable-hybrid-kv-cache-manager."""
    block_size = _aligned(layers, ranks, block_size)
    pages = [_pages(its, layers, ranks=ranks, block_size=block_size, hybrid=hybrid) for its in layers]
    if not pages:
        return Pool(0, (), step_tokens)
    kinds = {(its.kind, its.block_size, its.window, its.states) for its in pages}
    if len(kinds) == 1:
        kind, size, window, states = kinds.pop()
        block = sum(its.count * its.page_bytes for its in pages)
        return Pool(block, (Group(kind, size, window=window, states=states),), step_tokens)
    largest = max(its.page_bytes for its in pages)
    pages = [_unified(its, largest) for its in pages]
    least, most = min(its.count for its in pages), max(its.count for its in pages)
    size = most if most < _FEW_MORE * least else least
    groups = tuple(
        Group(its.kind, its.block_size, -(-its.count // size), its.window, its.states) for its in pages
    )
    return Pool(size * largest, groups, step_tokens)


def _aligned(layers: Sequence[KvLayers], ranks: int, block_size: int) -> int:
    """Rule 4: platforms/interface.py, _align_hybrid_block_size."""
    state = max((its.state_bytes for its in layers if its.kind is LayerKind.STATE), default=0)
    token = next((its.token_bytes(ranks) for its in layers if its.kind is LayerKind.FULL), 0)
    if not state or not token:
        return block_size
    step = max(KERNEL_BLOCK, block_size)
    steps = _up(_up(state, ranks), step * token)
    return _up(steps * step, KERNEL_BLOCK) * KERNEL_BLOCK


def _up(amount: int, by: int) -> int:
    return -(-amount // by)


def _pages(its: KvLayers, layers: Sequence[KvLayers], *, ranks: int, block_size: int, hybrid: bool) -> _Pages:
    if its.kind is LayerKind.STATE:
        token = next((other.token_bytes(ranks) for other in layers if other.kind is LayerKind.FULL), 0)
        size = max(-(-its.state_bytes // ranks), token * block_size, 1)
        return _Pages(its.kind, its.count, block_size, size, None, its.state_blocks)
    kind, window = its.kind, its.window
    if kind in {LayerKind.SLIDING, LayerKind.CHUNKED}:
        if not hybrid and any(other.kind is LayerKind.FULL for other in layers):
            kind, window = LayerKind.FULL, None
        else:
            block_size = max(KERNEL_BLOCK, block_size // KERNEL_BLOCK * KERNEL_BLOCK)
    return _Pages(kind, its.count, block_size, its.token_bytes(ranks) * block_size, window)


def _unified(its: _Pages, largest: int) -> _Pages:
    """Rule 3: a page of the largest size."""
    if its.kind is not LayerKind.STATE and largest % its.page_bytes == 0:
        return replace(its, block_size=its.block_size * (largest // its.page_bytes), page_bytes=largest)
    return replace(its, page_bytes=largest)
