"""The block pool against a model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.prefix_cache import extend_hashes


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "release", "publish", "share", "withdraw"]), st.integers(0, 7)
        ),
        max_size=80,
    ),
)
def test_references_are_those_of_the_holders(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Whatever happens, each block is held as often as its holders say, and free blocks are free."""
    pool = BlockPool(num_blocks)
    held: list[int] = []
    content: dict[bytes, int] = {}
    for action, number in actions:
        digest = bytes([number])
        if action == "allocate" and pool.num_free:
            block = pool.allocate()
            assert 0 < block <= num_blocks and block not in held
            content = {d: b for d, b in content.items() if b != block}
            held.append(block)
        elif action == "release" and held:
            pool.release([held.pop(number % len(held))])
        elif action == "publish" and held:
            block = held[number % len(held)]
            if digest not in content and block not in content.values():
                content[digest] = block
            pool.publish(block, digest)
        elif action == "withdraw" and held:
            block = held[number % len(held)]
            content = {d: b for d, b in content.items() if b != block}
            pool.invalidate([block])
        elif action == "share":
            found = pool.acquire(digest)
            assert found == content.get(digest)
            if found is not None:
                held.append(found)
        pool.check([held])


def test_content_is_kept_until_the_block_is_needed() -> None:
    pool = BlockPool(2)
    first = pool.allocate()
    pool.publish(first, b"x")
    pool.release([first])
    other = pool.allocate()
    assert other != first, "blocks without content go first"
    assert pool.acquire(b"x") == first
    pool.release([first])
    assert pool.allocate() == first
    assert pool.acquire(b"x") is None


def test_beginnings_outlive_their_continuations() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block, digest in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    pool.allocate()
    assert pool.contains(b"a") and pool.contains(b"b") and not pool.contains(b"c")


def test_releasing_twice_is_noticed() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="twice"):
        pool.release([block])


def test_a_leak_is_noticed() -> None:
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="references"):
        pool.check([])


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(0, 40), st.sampled_from([1, 4]))
def test_hashes_name_the_whole_beginning(tokens: list[int], other_at: int, block_size: int) -> None:
    """Equal up to the first difference, different from there on; growing by parts makes no difference."""
    whole: list[bytes] = []
    extend_hashes(whole, tokens, block_size, "tenant")
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_hashes(grown, tokens[:end], block_size, "tenant")
    assert grown == whole and len(whole) == len(tokens) // block_size
    changed = [token + (i == other_at) for i, token in enumerate(tokens)]
    other: list[bytes] = []
    extend_hashes(other, changed, block_size, "tenant")
    for index, (a, b) in enumerate(zip(whole, other, strict=True)):
        assert (a == b) == (other_at >= (index + 1) * block_size)
    foreign: list[bytes] = []
    extend_hashes(foreign, tokens, block_size, "other tenant")
    assert not set(foreign) & set(whole)
