"""What rows of a batch share: the groups, and that attention is the same with and without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.step import ForwardBatch
from weft.kernels import reference, shared_chunks
from weft.kernels.batch import lower
from weft.kernels.cpu import library, ops, tensors

CHUNK = tensors.CHUNK


def batch_of(rows, page_size=16, **options):
    """Rows of (queries, prompt, shared entries, own entries): rows with the same prompt start with its pages."""
    prompts, pages, starts, lens, queries, positions = {}, [], [0], [], [0], []
    used = 0
    for count, prompt, shared, own in rows:
        if prompt not in prompts:
            prompts[prompt] = range(used, used + 1200 // page_size)
            used += len(prompts[prompt])
        own_pages = -(-own // page_size)
        pages += [*prompts[prompt][: shared // page_size], *range(used, used + own_pages)]
        used += own_pages
        lens.append(shared // page_size * page_size + own)
        starts.append(len(pages))
        queries.append(queries[-1] + count)
        positions += range(lens[-1] - count, lens[-1])
    arrays = {"positions": positions, "q_indptr": queries, "kv_indptr": starts, "kv_page_ids": pages, "kv_lens": lens}
    arrays |= {"token_ids": [0] * queries[-1], "write_slots": [-1] * queries[-1], "output_tokens": range(len(rows))}
    forward = ForwardBatch(**{name: np.array(values, np.int32) for name, values in arrays.items()}, **options)
    return lower(forward, page_size), used


def groups_of(found):
    spans = zip(found.group_indptr[:-1], found.group_indptr[1:], strict=True)
    return {(int(c), tuple(found.members[a:b].tolist())) for c, (a, b) in zip(found.group_chunks, spans, strict=True)}


def test_rows_with_the_same_pages_are_a_group_for_each_whole_chunk():
    rows = [
        (1, "a", 1024, 40),
        (1, "a", 600, 9),
        (1, "b", 512, 1),
        (1, "a", 1024, 3),
        (1, "c", 512, 5),
        (2, "b", 512, 9),
    ]
    batch, _ = batch_of(rows)
    found = shared_chunks.find(batch, CHUNK, 8)
    assert groups_of(found) == {(0, (0, 1, 3)), (1, (0, 1, 3)), (2, (0, 3)), (3, (0, 3)), (0, (2, 5)), (1, (2, 5))}
    for row, chunks in enumerate(np.diff(found.row_indptr)):
        for chunk in range(chunks):
            slot = found.slots[found.row_indptr[row] + chunk]
            assert (slot >= 0) == any(c == chunk and row in members for c, members in groups_of(found))
            if slot >= 0:
                assert found.members[slot] == row


@pytest.mark.parametrize(
    "rows",
    [
        [(1, "a", 1024, 4)],
        [(1, "a", 1024, 4), (1, "b", 1024, 4)],
        [(1, "a", 240, 4), (1, "a", 240, 4)],
        [(1, "a", 1024, 4), (9, "a", 1024, 40)],
        [(1, "a", 1024, 4), (0, "a", 1024, 4)],
    ],
    ids=["one row", "nothing shared", "less than a chunk", "too many queries", "no query"],
)
def test_nothing_is_shared(rows):
    assert shared_chunks.find(batch_of(rows)[0], CHUNK, 8) is None


def test_what_not_every_query_sees_is_not_shared():
    # The first of 8 queries sees all but the last 7 entries, one less than two chunks.
    batch, _ = batch_of([(8, "a", 512, 6), (1, "a", 512, 6)])
    assert {chunk for chunk, _ in groups_of(shared_chunks.find(batch, CHUNK, 8))} == {0}
    hidden = np.full(66, 0xFFFFFFFF, np.uint32)
    hidden[3] = 0
    batch, _ = batch_of([(1, "a", 512, 6), (1, "a", 512, 6)], visibility=hidden)
    assert shared_chunks.find(batch, CHUNK, 8) is None
    batch, _ = batch_of([(1, "a", 504, 6), (1, "a", 504, 6)], page_size=24)
    assert shared_chunks.find(batch, CHUNK, 8) is None


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 2, 5, 40]), st.sampled_from("ab"), st.integers(0, 1100), st.integers(40, 300)
        ),
        min_size=2,
        max_size=12,
    ),
    heads=st.sampled_from([(16, 8, 128), (4, 4, 64), (6, 1, 48), (32, 1, 32)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    page_size=st.sampled_from([8, 16, 32]),
)
def test_attention_is_the_same_to_the_bit_whoever_shares(rows, heads, dtype, page_size):
    try:
        loaded = library.load()
    except library.KernelsUnavailable as reason:
        pytest.skip(f"the library is {reason}")
    num_heads, kv_heads, head_dim = heads
    batch, num_pages = batch_of(rows, page_size)
    generator = torch.Generator().manual_seed(len(rows))
    kv = torch.randn(num_pages, 2, kv_heads, page_size, head_dim, generator=generator).to(dtype)
    q = torch.randn(batch.num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    expected = reference.attention(q, kv, batch, head_dim**-0.5)
    bound = (2**-7 if dtype == torch.bfloat16 else 1e-5) * expected.abs().max()
    for level in library.levels(loaded):
        batch.cache.clear()
        together = ops.CpuKernels(loaded, level).attention(q, kv, batch, head_dim**-0.5)
        assert ((together - expected).abs() <= bound).all()
        for row in range(len(rows)):
            alone, query = _only(batch, row, q)
            first, last = batch.q_indptr_host[row : row + 2]
            got = ops.CpuKernels(loaded, level).attention(query, kv, alone, head_dim**-0.5)
            assert (got == together[first:last]).all()


def _only(batch, row, q):
    first, last = batch.q_indptr_host[row : row + 2]
    begin, end = batch.kv_indptr_host[row : row + 2]
    count = last - first
    forward = ForwardBatch(
        token_ids=np.zeros(count, np.int32),
        positions=batch.positions[first:last].numpy().astype(np.int32),
        write_slots=np.full(count, -1, np.int32),
        q_indptr=np.array([0, count], np.int32),
        kv_indptr=np.array([0, end - begin], np.int32),
        kv_page_ids=batch.kv_page_ids[begin:end].numpy(),
        kv_lens=batch.kv_lens_host[row : row + 1],
        output_tokens=np.zeros(1, np.int32),
    )
    return lower(forward, batch.page_size), q[first:last]
