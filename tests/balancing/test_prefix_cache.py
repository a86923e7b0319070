"""Chains of hashes, and what an instance's cache holds of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.balancing.prefix_cache import (
    BLOCK_BYTES,
    LEAST_CAPACITY,
    MAX_BLOCKS,
    MOST_CAPACITY,
    PrefixCache,
    fingerprint,
)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_prompts_share_as_many_leading_hashes_as_blocks(same: int, more: int) -> None:
    one = fingerprint(b"s" * same + b"1" * more)
    two = fingerprint(b"s" * same + b"2" * more)
    shared = 0
    while shared < len(one) and one[shared] == two[shared]:
        shared += 1
    assert shared == same // BLOCK_BYTES
    assert len(one) == (same + more) // BLOCK_BYTES


def test_a_hash_depends_on_all_blocks_before_it_and_on_the_salt() -> None:
    block = b"x" * BLOCK_BYTES
    twice = fingerprint(block * 2)
    assert twice[0] != twice[1]
    assert fingerprint(block, salt=1) != fingerprint(block)
    assert fingerprint(memoryview(block)) == fingerprint(bytearray(block)) == fingerprint(block)


def test_long_prompts_are_cut() -> None:
    assert len(fingerprint(bytes(BLOCK_BYTES * (MAX_BLOCKS + 3)))) == MAX_BLOCKS


def test_the_end_of_the_least_recently_used_chain_is_evicted_first() -> None:
    cache = PrefixCache(4)
    cache.use((1, 2, 3))
    cache.use((7, 8))
    assert len(cache) == 4
    assert cache.match((1, 2, 3)) == 2
    assert cache.match((7, 8)) == 2
    assert cache.match((7, 8, 9)) == 2
    assert cache.match((5,)) == cache.match(()) == 0


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=30), st.integers(1, 20))
def test_the_beginning_of_a_chain_is_held_and_the_capacity_kept(
    texts: list[list[int]], capacity: int
) -> None:
    cache = PrefixCache(capacity)
    chains = []
    for text in texts:
        chain = tuple(hash(tuple(text[: n + 1])) for n in range(len(text)))
        chains.append(chain)
        cache.use(chain)
        assert len(cache) <= capacity
    for chain in chains:
        held = [block in cache._blocks for block in chain]
        assert held == sorted(held, reverse=True)
        assert cache.match(chain) == sum(held)


def test_capacity_is_learned_within_bounds() -> None:
    cache = PrefixCache(100)
    cache.resize(0.97)
    assert cache.capacity == 97
    cache.resize(1.03)
    assert cache.capacity > 97
    cache.resize(1e-9)
    assert cache.capacity == LEAST_CAPACITY
    cache.resize(1e9)
    assert cache.capacity == MOST_CAPACITY
