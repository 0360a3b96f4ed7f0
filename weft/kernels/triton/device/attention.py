"""Paged attention: one online softmax (Milakov and Gimelshein, 2018) that two kernels share, and the merge of splits.

A program has BLOCK_M rows of one KV head: the queries of the heads that share it, query by query, so its K and V are
read once for all of them. Rows that are too many for the queries at hand are dead: they see nothing and are not stored.

A work item is eight int32, written by `attention.py` of the package above:

    token      first query token of the batch's row
    queries    its query tokens
    page       its first entry in `page_ids`
    entries    its KV entries
    row        its index, for what is kept per row
    query      the first query of the item, counted in the row
    begin      the first KV entry of the item
    partial    the item's first row in the scratch tensors, or -1: the item has the whole row and writes the result

An item without query tokens fills up a table of fixed size: nothing is read or written for it.

Scores are kept in base 2, because that is the exponential that devices have: `scale` is times log2(e). It is
positive, so that the maximum is found before scaling.
"""

import triton
import triton.language as tl

ITEM_FIELDS = tl.constexpr(8)
MERGE_FIELDS = tl.constexpr(4)


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    """a @ b in float32. WIDEN: for the interpreter, which cannot multiply bfloat16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _attend(
    q,
    kv,
    page_ids,
    positions,
    causal,
    visibility,
    mask_bits,
    mask_indptr,
    item,
    stop,
    q_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    GENERAL: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to the item's entries before `stop`: values [BLOCK_M, BLOCK_D], not divided by the sum; maximum; sum."""
    token = tl.load(item)
    num_queries = tl.load(item + 1)
    first_page = tl.load(item + 2)
    num_entries = tl.load(item + 3)
    row = tl.load(item + 4)
    first_query = tl.load(item + 5)
    begin = tl.load(item + 6)
    kv_head = tl.program_id(1)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = first_query + m // GROUP
    live = (m < BLOCK_M // GROUP * GROUP) & (query < num_queries)
    tokens = (token + query).to(tl.int64)
    columns = (kv_head * GROUP + m % GROUP) * HEAD_DIM
    queries = tl.load(
        q + tokens[:, None] * q_stride + columns[:, None] + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )

    # The last entry that each query may see.
    limit = num_entries - num_queries + query
    if GENERAL:
        limit = tl.where(tl.load(causal + row) != 0, limit, num_entries - 1)
        mask_begin = tl.load(mask_indptr + row)
        has_mask = tl.load(mask_indptr + row + 1) > mask_begin
        mask_rows = mask_bits + mask_begin.to(tl.int64) + query * ((num_entries + 7) // 8)
    limit = tl.where(live, tl.minimum(limit, num_entries - 1), -1)
    stop = tl.minimum(stop, tl.max(limit, 0) + 1)
    position = limit
    if WINDOW >= 0:
        position = tl.load(positions + tokens, mask=live, other=0).to(tl.int32)
        lowest = tl.min(tl.where(live, position - WINDOW + 1, num_entries), 0)
        begin += tl.maximum(lowest - begin, 0) // BLOCK_N * BLOCK_N

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kv += kv_head * (PAGE * HEAD_DIM)
    pages = page_ids + first_page
    block = tl.arange(0, BLOCK_N)
    # Parts: 0, until the windows of all queries have begun; 1, what all queries see, without masks; 2, up to the last
    # limit. Rows without a window have no part 0; rows that are not plain have part 2 alone.
    for part in tl.static_range(2 if GENERAL else 1 if WINDOW < 0 else 0, 3):
        end = stop
        if part == 0:
            all_see = tl.max(tl.where(live, position - WINDOW + 1, 0), 0)
            end = tl.minimum(begin + (tl.maximum(all_see - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, stop)
        elif part == 1:
            all_see = tl.minimum(num_entries - num_queries + first_query + 1, stop)
            end = begin + tl.maximum(all_see - begin, 0) // BLOCK_N * BLOCK_N
        n = begin + block
        page = tl.load(pages + n // PAGE, mask=n < end, other=0)
        for start in range(begin, end, BLOCK_N):
            n = start + block
            inside = n < end
            # Blocks begin at pages where they can, and then the slots within pages are computed once.
            in_page = kv + ((block if BLOCK_N % PAGE == 0 else n) % PAGE * HEAD_DIM)[:, None] + d[None, :]
            entries = in_page + (page.to(tl.int64) * (2 * KV_HEADS * PAGE * HEAD_DIM))[:, None]
            # A step ahead: K and V are prefetched only if their addresses do not wait for a load of the same step.
            ahead = n + BLOCK_N
            page = tl.load(pages + ahead // PAGE, mask=ahead < end, other=0)
            loaded = tl.full([BLOCK_N, BLOCK_D], True, tl.int1)
            if part != 1:
                loaded = loaded & inside[:, None]
            if HEAD_DIM < BLOCK_D:
                loaded = loaded & (d < HEAD_DIM)[None, :]
            k = tl.load(entries, mask=loaded, other=0.0)
            scores = _product(queries, tl.trans(k), WIDEN)

            if part != 1:
                seen = (n[None, :] <= limit[:, None]) & inside[None, :]
                if WINDOW >= 0:
                    seen = seen & (position[:, None] - n[None, :] < WINDOW)
                if GENERAL:
                    word = tl.load(visibility + first_page + n // PAGE, mask=inside, other=0)
                    seen = seen & (((word >> (n % PAGE)) & 1) != 0)[None, :]
                    octets = tl.load(
                        mask_rows[:, None] + (n // 8)[None, :],
                        mask=live[:, None] & inside[None, :] & has_mask,
                        other=255,
                    ).to(tl.int32)
                    seen = seen & (((octets >> (n % 8)[None, :]) & 1) != 0)
                scores = tl.where(seen, scores, float("-inf"))

            # Scores are scaled here, not before: scaling and shifting are then one multiply-add.
            new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
            # -inf less -inf would be NaN; a row that has seen nothing yet has weights of 0 from any finite maximum.
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(scores * scale - shift[:, None])
            kept = tl.exp2(largest - shift)
            total = total * kept + tl.sum(weights, 1)
            v = tl.load(entries + KV_HEADS * PAGE * HEAD_DIM, mask=loaded, other=0.0)
            if part != 1 and (GENERAL or WINDOW >= 0):
                # Masked values may be NaN, which a weight of 0 would not remove. Elsewhere `stop` leaves them out.
                is_seen = tl.max(seen.to(tl.int32), 0) != 0
                v = tl.where(is_seen[:, None], v, tl.zeros_like(v))
            values = values * kept[:, None] + _product(weights.to(v.dtype), v, WIDEN)
            largest = new_largest
        begin = end
    return values, largest, total


@triton.jit
def _store_result(
    out,
    item,
    values,
    total,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the mean of what each query of the item saw, 0 where it saw nothing, to out [T, heads * HEAD_DIM]."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = tl.load(item + 5) + m // GROUP
    live = (m < BLOCK_M // GROUP * GROUP) & (query < tl.load(item + 1))
    rows = (tl.load(item) + query).to(tl.int64) * (KV_HEADS * GROUP) + tl.program_id(1) * GROUP + m % GROUP
    mean = values / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(
        out + rows[:, None] * HEAD_DIM + d[None, :],
        mean.to(out.dtype.element_ty),
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit
def prefill(
    q,
    kv,
    out,
    page_ids,
    positions,
    causal,
    visibility,
    mask_bits,
    mask_indptr,
    items,
    q_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    GENERAL: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per item and KV head; an item is a tile of queries, with all entries that they see."""
    item = items + tl.program_id(0) * ITEM_FIELDS
    stop = tl.load(item + 3)
    values, _, total = _attend(
        q,
        kv,
        page_ids,
        positions,
        causal,
        visibility,
        mask_bits,
        mask_indptr,
        item,
        stop,
        q_stride,
        scale,
        KV_HEADS,
        GROUP,
        HEAD_DIM,
        PAGE,
        WINDOW,
        GENERAL,
        WIDEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    _store_result(out, item, values, total, KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def decode(
    q,
    kv,
    out,
    partial_values,
    partial_maxima,
    partial_sums,
    page_ids,
    positions,
    causal,
    visibility,
    mask_bits,
    mask_indptr,
    items,
    q_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    GENERAL: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per item and KV head; an item is all queries of a row, with one chunk of its entries.

    Scratch tensors are float32: `partial_values` [partials, heads, HEAD_DIM], the other two [partials, heads].
    """
    item = items + tl.program_id(0) * ITEM_FIELDS
    stop = tl.minimum(tl.load(item + 6) + CHUNK, tl.load(item + 3))
    values, largest, total = _attend(
        q,
        kv,
        page_ids,
        positions,
        causal,
        visibility,
        mask_bits,
        mask_indptr,
        item,
        stop,
        q_stride,
        scale,
        KV_HEADS,
        GROUP,
        HEAD_DIM,
        PAGE,
        WINDOW,
        GENERAL,
        WIDEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    partial = tl.load(item + 7)
    if partial < 0:
        _store_result(out, item, values, total, KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
    else:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        query = m // GROUP
        live = query < tl.load(item + 1)
        rows = (partial + query).to(tl.int64) * (KV_HEADS * GROUP) + tl.program_id(1) * GROUP + m % GROUP
        tl.store(
            partial_values + rows[:, None] * HEAD_DIM + d[None, :],
            values,
            mask=live[:, None] & (d < HEAD_DIM)[None, :],
        )
        tl.store(partial_maxima + rows, largest, mask=live)
        tl.store(partial_sums + rows, total, mask=live)


@triton.jit
def merge(
    out,
    partial_values,
    partial_maxima,
    partial_sums,
    merges,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per query token and head: the sum of its splits, each weighed by its share of the softmax.

    `merges` has four int32 a token: the token, its first row of the scratch tensors, the step to the next split's, and
    the number of splits; 0: `decode` has written the token's result, which is left alone.
    """
    fields = merges + tl.program_id(0) * MERGE_FIELDS
    token = tl.load(fields).to(tl.int64)
    first = tl.load(fields + 1)
    step = tl.load(fields + 2)
    splits = tl.load(fields + 3)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)

    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        inside = split < splits
        rows = (first + split * step).to(tl.int64) * HEADS + head
        maxima = tl.load(partial_maxima + rows, mask=inside, other=float("-inf"))
        sums = tl.load(partial_sums + rows, mask=inside, other=0.0)
        parts = tl.load(
            partial_values + rows[:, None] * HEAD_DIM + d[None, :],
            mask=inside[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(maxima, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(maxima - shift)
        kept = tl.exp2(largest - shift)
        total = total * kept + tl.sum(weights * sums, 0)
        values = values * kept + tl.sum(weights[:, None] * parts, 0)
        largest = new_largest
    mean = values / tl.where(total == 0, 1.0, total)
    tl.store(
        out + (token * HEADS + head) * HEAD_DIM + d,
        mean.to(out.dtype.element_ty),
        mask=(d < HEAD_DIM) & (splits > 0),
    )
