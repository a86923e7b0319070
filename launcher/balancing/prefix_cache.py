"""A prompt's chain of block hashes, and the chains that each instance's KV cache holds.

vLLM keeps the KV of past prompts in blocks; a block is named by the hash of its tokens and of all before it, and the
least recently used are evicted first (vllm/v1/core/kv_cache_utils.py, 0.32). The proxy sees bytes, not tokens, and
does the same with blocks of bytes of the JSON text as it was sent.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

BLOCK_BYTES: Final = 512  # about one vLLM block on CPU: 128 tokens of 4 bytes
# Blocks of an instance's cache, where its size is learned; the upper bound is 32 million tokens.
LEAST_CAPACITY: Final = 16
MOST_CAPACITY: Final = 262_144
MAX_BLOCKS: Final = 4096  # 2 MiB of text: longer than any context


def fingerprint(raw: bytes | bytearray | memoryview, salt: int = 0) -> tuple[int, ...]:
    """Chain hashes of the whole blocks of a prompt's raw JSON text (`messages`, `prompt`, `input`).

    Two prompts share exactly as many leading hashes as leading blocks of BLOCK_BYTES; an incomplete last block does
    not count. `salt` stands for what the engine's template puts before the prompt, such as hash(raw JSON of `tools`).
    Hashes are valid within one process only.
    """
    if len(raw) < BLOCK_BYTES:
        return ()
    text = bytes(raw if len(raw) <= BLOCK_BYTES * MAX_BLOCKS else raw[: BLOCK_BYTES * MAX_BLOCKS])
    chain = salt
    hashes: list[int] = []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = hash((chain, text[start : start + BLOCK_BYTES]))
        hashes.append(chain)
    return tuple(hashes)


class PrefixCache:
    """The blocks that one instance is believed to hold, least recently used first.

    A block is always used together with all before it and counts as used after them. So the end of a chain is evicted
    first, and what is held of a chain is always its beginning.
    """

    def __init__(self, capacity: int = 512) -> None:
        self.capacity: int = max(1, capacity)
        # Block -> the ticket number of the last request that used it.
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, prefix: tuple[int, ...]) -> int:
        """How many leading blocks of `prefix` are held."""
        blocks = self._blocks
        if not prefix or prefix[0] not in blocks:
            return 0
        if prefix[-1] in blocks:
            return len(prefix)
        # prefix[low - 1] is held, prefix[high] is not.
        low, high = 1, len(prefix) - 1
        while low < high:
            middle = (low + high) // 2
            if prefix[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, prefix: tuple[int, ...], by: int = 0) -> None:
        """The instance computes, and so holds, all of `prefix` for the request `by`; the least recently used are evicted."""
        blocks = self._blocks
        for block in reversed(prefix):
            blocks[block] = by
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)

    def forget(self, new: tuple[int, ...], by: int) -> None:
        """`by` did not compute these last blocks of its prefix; what others have used since stays."""
        for block in reversed(new):
            if self._blocks.get(block, by) != by:
                break
            self._blocks.pop(block, None)

    def set_capacity(self, blocks: int) -> None:
        """The capacity is known. Takes effect when blocks are used next."""
        self.capacity = max(1, blocks)

    def resize(self, factor: float) -> None:
        self.capacity = min(MOST_CAPACITY, max(LEAST_CAPACITY, int(self.capacity * factor + (factor > 1.0))))
