"""What is done number by number: normalisation, rotation and storing, the gated activation, copies of KV."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row of x [rows, SIZE]."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    values = tl.load(x + first + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    weights = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first + i, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm(x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row of x [rows, SIZE]: adds it to that of the residual, and normalises the sum as it is stored."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    added = tl.load(x + first + i, mask=inside, other=0.0).to(tl.float32)
    total = added + tl.load(residual + first + i, mask=inside, other=0.0).to(tl.float32)
    stored = total.to(residual.dtype.element_ty)
    tl.store(residual + first + i, stored, mask=inside)
    values = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    weights = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first + i, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row of gate_up [rows, 2 SIZE] and BLOCK columns of the result."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + i, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_store(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    write_slots,
    kv,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """A program per token and BLOCK_H of its heads, each head as two halves.

    Queries are written over themselves, keys and values to the token's slot.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    j = tl.arange(0, BLOCK_HALF)
    HALF: tl.constexpr = HEAD_DIM // 2
    exists = head < HEADS + 2 * KV_HEADS
    in_half = (j < HALF)[None, :]
    inside = exists[:, None] & in_half
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + j[None, :]
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    normed_left = left
    normed_right = right
    if NORMED:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        q_left = tl.load(q_weight + j, mask=j < HALF, other=0.0).to(tl.float32)
        q_right = tl.load(q_weight + HALF + j, mask=j < HALF, other=0.0).to(tl.float32)
        k_left = tl.load(k_weight + j, mask=j < HALF, other=0.0).to(tl.float32)
        k_right = tl.load(k_weight + HALF + j, mask=j < HALF, other=0.0).to(tl.float32)
        normed_left = left * scale * tl.where(is_query[:, None], q_left[None, :], k_left[None, :])
        normed_right = right * scale * tl.where(is_query[:, None], q_right[None, :], k_right[None, :])
    c = tl.load(cos + token * HALF + j, mask=j < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + j, mask=j < HALF, other=0.0)[None, :]
    turned_left = tl.where(is_value[:, None], left, normed_left * c - normed_right * s).to(kv.dtype.element_ty)
    turned_right = tl.where(is_value[:, None], right, normed_right * c + normed_left * s).to(kv.dtype.element_ty)

    queries = is_query[:, None] & in_half
    tl.store(source, turned_left, mask=queries)
    tl.store(source + HALF, turned_right, mask=queries)

    slot = tl.load(write_slots + token)
    stored = (exists & (head >= HEADS))[:, None] & in_half & (slot >= 0)
    # A page has all heads' K, then all heads' V, which is the order in which they follow the queries here.
    block = slot // PAGE * (2 * KV_HEADS) + (head - HEADS)
    target = kv + (block * PAGE + slot % PAGE)[:, None] * HEAD_DIM + j[None, :]
    tl.store(target, turned_left, mask=stored)
    tl.store(target + HALF, turned_right, mask=stored)


@triton.jit
def copy_pages(kv, source, destination, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program per copy and BLOCK of a page's SIZE elements."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    begin = tl.load(source + tl.program_id(0)) * SIZE
    end = tl.load(destination + tl.program_id(0)) * SIZE
    tl.store(kv + end + i, tl.load(kv + begin + i, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["source_pages", "destination_pages"])
def move_pages(table, source_pages, destination_pages, LAYERS: tl.constexpr, BLOCK: tl.constexpr):
    """A program per pair of pages, layer and BLOCK words of 8 bytes.

    The rows of the table [5, LAYERS] are the addresses of the layer in the source and the destination, the bytes from
    a page to the next in both, and the words of a page. All of them are multiples of 16 bytes.
    """
    layer = table + tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(layer) + tl.load(source_pages + tl.program_id(0)) * tl.load(layer + 2 * LAYERS)
    end = tl.load(layer + LAYERS) + tl.load(destination_pages + tl.program_id(0)) * tl.load(layer + 3 * LAYERS)
    inside = i < tl.multiple_of(tl.load(layer + 4 * LAYERS), 2)
    source = tl.multiple_of(begin.to(tl.pointer_type(tl.int64)), 16)
    destination = tl.multiple_of(end.to(tl.pointer_type(tl.int64)), 16)
    tl.store(destination + i, tl.load(source + i, mask=inside), mask=inside)


@triton.jit
def move_slots(
    kv,
    slots,
    staging,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    INTO_KV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per slot and BLOCK_H of its HEADS (K's, then V's): to staging [n, HEADS, HEAD_DIM], or back."""
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (h < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    slot = tl.load(slots + tl.program_id(0))
    row = (slot // PAGE * HEADS + h) * PAGE + slot % PAGE
    in_kv = kv + row[:, None] * HEAD_DIM + d[None, :]
    staged = staging + (tl.program_id(0).to(tl.int64) * HEADS + h)[:, None] * HEAD_DIM + d[None, :]
    if INTO_KV:
        tl.store(in_kv, tl.load(staged, mask=inside), mask=inside)
    else:
        tl.store(staged, tl.load(in_kv, mask=inside), mask=inside)
