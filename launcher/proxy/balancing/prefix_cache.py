"""A prompt's chain of block hashes, and what each instance's KV cache still holds of such chains.

vLLM keeps the KV of past prompts in blocks; a block is named by the hash of its tokens and of all before it,
and the least recently used go first (vllm/v1/core/kv_cache_utils.py, 0.32). We see bytes, not tokens, and do
the same with blocks of bytes of the JSON text as it was sent.
"""

from __future__ import annotations

from collections import OrderedDict

BLOCK_BYTES = 512  # about one vLLM block on CPU: 128 tokens of 4 bytes
LEAST_CAPACITY = 16  # blocks of an instance's cache, where it is learned
MOST_CAPACITY = 262_144  # 32 million tokens
MAX_BLOCKS = 4096  # 2 MiB of text is longer than any context


def fingerprint(raw: bytes | bytearray | memoryview, salt: int = 0) -> tuple[int, ...]:
    """Chain hashes of the whole blocks of a prompt's raw JSON text (`messages`, `prompt`, `input`).

    Two prompts share exactly as many leading hashes as they share leading blocks of BLOCK_BYTES; what is
    left after the last whole block is not counted. `salt` stands for what comes before the prompt in the
    engine's template, such as hash(raw JSON of `tools`). Hashes hold within one process only.
    """
    view = bytes(raw[: BLOCK_BYTES * MAX_BLOCKS]) if len(raw) > BLOCK_BYTES * MAX_BLOCKS else bytes(raw)
    chain = salt
    hashes = []
    for start in range(0, len(view) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = hash((chain, view[start : start + BLOCK_BYTES]))
        hashes.append(chain)
    return tuple(hashes)


class Ghosts:
    """Blocks that were evicted not long ago, from any instance of a model: were they wanted again?"""

    __slots__ = ("_blocks", "_evicted", "_limit", "_regretted")

    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._evicted = 0.0
        self._regretted = 0.0

    def evicted(self, block: int) -> None:
        """It was forgotten somewhere."""
        self._blocks[block] = None
        self._evicted += 1.0
        if len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)
        if self._evicted > self._limit:  # both halve, so that the share follows a changing workload
            self._evicted *= 0.5
            self._regretted *= 0.5

    def computed(self, block: int) -> None:
        """It is computed somewhere, perhaps again."""
        if block in self._blocks:
            del self._blocks[block]
            self._regretted += 1.0

    @property
    def regret(self) -> float:
        """Share of what is evicted that is computed again soon, 0 to 1; a half while too little was seen."""
        return min(1.0, (self._regretted + 64.0) / (self._evicted + 128.0))


class PrefixCache:
    """The blocks that one instance is believed to hold, least recently used first.

    A block is always used together with all before it and counted as used after them, so of a chain the
    end is forgotten first and what is held of a chain is always its beginning.
    """

    __slots__ = ("_blocks", "capacity", "ghosts")

    def __init__(self, capacity: int = 512) -> None:
        self.capacity = max(1, capacity)  # blocks
        self.ghosts = Ghosts()
        self._blocks: OrderedDict[int, int] = OrderedDict()  # -> by whom it was used last

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, prefix: tuple[int, ...]) -> int:
        """How many leading blocks of `prefix` are held."""
        blocks = self._blocks
        if not prefix or prefix[0] not in blocks:
            return 0
        if prefix[-1] in blocks:
            return len(prefix)
        low, high = 1, len(prefix) - 1  # prefix[low - 1] is held, prefix[high] is not
        while low < high:
            middle = (low + high) // 2
            if prefix[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def overflow(self, new: int) -> int:
        """How many blocks must go when `new` ones come."""
        return max(0, min(len(self._blocks), len(self._blocks) + new - self.capacity))

    def oldest(self) -> int | None:
        """The block that would go first."""
        return next(iter(self._blocks), None)

    def holds(self, block: int) -> bool:
        """Whether this block is held, and so all before it in its chain."""
        return block in self._blocks

    def use(self, prefix: tuple[int, ...], by: int = 0) -> None:
        """The instance computes for `by`, and so holds, all of `prefix`; the least recently used make room."""
        blocks, ghosts = self._blocks, self.ghosts
        for block in reversed(prefix):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                ghosts.computed(block)
            blocks[block] = by
        while len(blocks) > self.capacity:
            ghosts.evicted(blocks.popitem(last=False)[0])

    def forget(self, new: tuple[int, ...], by: int) -> None:
        """`by` did not compute these last blocks of its prefix; what others use since then stays."""
        for block in reversed(new):
            if self._blocks.get(block, by) != by:
                break
            self._blocks.pop(block, None)

    def resize(self, factor: float) -> None:
        """It holds more, or fewer, than was thought."""
        self.capacity = min(MOST_CAPACITY, max(LEAST_CAPACITY, int(self.capacity * factor + (factor > 1.0))))
