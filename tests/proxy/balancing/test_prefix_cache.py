"""Chains of hashes, and what an instance's cache holds of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.balancing.prefix_cache import (
    BLOCK_BYTES,
    LEAST_CAPACITY,
    MAX_BLOCKS,
    MOST_CAPACITY,
    PrefixCache,
    fingerprint,
)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_as_many_leading_hashes_are_shared_as_leading_blocks(same: int, more: int) -> None:
    one = fingerprint(b"s" * same + b"1" * more)
    two = fingerprint(b"s" * same + b"2" * more)
    shared = 0
    while shared < len(one) and one[shared] == two[shared]:
        shared += 1
    assert shared == same // BLOCK_BYTES
    assert len(one) == (same + more) // BLOCK_BYTES


def test_a_block_is_named_by_all_before_it_and_by_the_salt() -> None:
    block = b"x" * BLOCK_BYTES
    twice = fingerprint(block * 2)
    assert twice[0] != twice[1]
    assert fingerprint(block, salt=1) != fingerprint(block)
    assert fingerprint(memoryview(block)) == fingerprint(bytearray(block)) == fingerprint(block)


def test_what_is_longer_than_any_context_is_cut() -> None:
    assert len(fingerprint(bytes(BLOCK_BYTES * (MAX_BLOCKS + 3)))) == MAX_BLOCKS


def test_the_end_of_the_least_recent_chain_goes_first() -> None:
    store = PrefixCache(4)
    store.use((1, 2, 3))
    store.use((7, 8))
    assert len(store) == 4
    assert store.match((1, 2, 3)) == 2
    assert store.match((7, 8)) == 2
    assert store.match((7, 8, 9)) == 2
    assert store.match((5,)) == store.match(()) == 0


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=30), st.integers(1, 20))
def test_what_is_held_of_a_chain_is_its_beginning_and_capacity_holds(
    texts: list[list[int]], capacity: int
) -> None:
    store = PrefixCache(capacity)
    chains = []
    for text in texts:
        chain = tuple(hash(tuple(text[: n + 1])) for n in range(len(text)))
        chains.append(chain)
        store.use(chain)
        assert len(store) <= capacity
    for chain in chains:
        held = [block in store._blocks for block in chain]
        assert held == sorted(held, reverse=True)
        assert store.match(chain) == sum(held)


def test_capacity_is_learned_within_bounds() -> None:
    store = PrefixCache(100)
    store.resize(0.97)
    assert store.capacity == 97
    store.resize(1.03)
    assert store.capacity > 97
    store.resize(1e-9)
    assert store.capacity == LEAST_CAPACITY
    store.resize(1e9)
    assert store.capacity == MOST_CAPACITY
