"""The block pool against a simple model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.prefix_cache import extend_hashes
from tests.support.budget import examples


@settings(max_examples=examples(200))
@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "release", "publish", "share", "withdraw"]), st.integers(0, 7)
        ),
        max_size=80,
    ),
)
def test_reference_counts_match_the_block_tables(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Any sequence of calls keeps reference counts and the free list right."""
    pool = BlockPool(num_blocks)
    references: list[int] = []
    content: dict[bytes, int] = {}
    for action, number in actions:
        digest = bytes([number])
        if action == "allocate" and pool.num_free:
            block = pool.allocate()
            assert 0 < block <= num_blocks and block not in references
            content = {d: b for d, b in content.items() if b != block}
            references.append(block)
        elif action == "release" and references:
            pool.release([references.pop(number % len(references))])
        elif action == "publish" and references:
            block = references[number % len(references)]
            if digest not in content and block not in content.values():
                content[digest] = block
            pool.publish(block, digest)
        elif action == "withdraw" and references:
            block = references[number % len(references)]
            content = {d: b for d, b in content.items() if b != block}
            pool.invalidate([block])
        elif action == "share":
            block = pool.acquire(digest)
            assert block == content.get(digest)
            if block is not None:
                references.append(block)
        pool.check([references])


def test_content_is_kept_until_the_block_is_reused() -> None:
    pool = BlockPool(2)
    first = pool.allocate()
    pool.publish(first, b"x")
    pool.release([first])
    other = pool.allocate()
    assert other != first, "blocks without content are reused first"
    assert pool.acquire(b"x") == first
    pool.release([first])
    assert pool.allocate() == first
    assert pool.acquire(b"x") is None


def test_prefix_blocks_outlive_later_blocks() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block, digest in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    pool.allocate()
    assert pool.cached_prefix([b"a", b"b", b"c"]) == [b"a", b"b"]


def test_double_release_is_asserted() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="twice"):
        pool.release([block])


def test_leak_is_asserted() -> None:
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(0, 40), st.sampled_from([1, 4]))
def test_hashes_cover_the_whole_prefix(tokens: list[int], other_at: int, block_size: int) -> None:
    """Hashes are equal up to the first difference; hashing in parts changes nothing."""
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, "tenant")
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_hashes(grown, tokens[:end], block_size, "tenant")
    assert grown == hashes and len(hashes) == len(tokens) // block_size
    changed = [token + (i == other_at) for i, token in enumerate(tokens)]
    other: list[bytes] = []
    extend_hashes(other, changed, block_size, "tenant")
    for index, (a, b) in enumerate(zip(hashes, other, strict=True)):
        assert (a == b) == (other_at >= (index + 1) * block_size)
    salted: list[bytes] = []
    extend_hashes(salted, tokens, block_size, "other tenant")
    assert not set(salted) & set(hashes)
