"""Products with weights in quantized blocks, and expanding them. Layout: `weft.kernels.triton.block_layout`."""

import triton
import triton.language as tl

PANEL = tl.constexpr(32)


@triton.jit
def _numbers(numbers, upper, at, BITS: tl.constexpr, HALF: tl.constexpr):
    """The numbers of both halves of step `at`, counted over all panels, [HALF, 32] float32 each."""
    r = tl.arange(0, HALF)[:, None]
    o = tl.arange(0, PANEL)[None, :]
    if BITS == 8:
        first = tl.load(numbers + (at * 2 * HALF + r) * PANEL + o).to(tl.int32)
        second = tl.load(numbers + (at * 2 * HALF + HALF + r) * PANEL + o).to(tl.int32)
    else:
        both = tl.load(numbers + (at * HALF + r) * PANEL + o).to(tl.int32)
        first = both & 15
        second = both >> 4
        if BITS > 4:
            width: tl.constexpr = BITS - 4
            rows: tl.constexpr = HALF * width // 4
            bits = tl.load(upper + (at * rows + r % rows) * PANEL + o).to(tl.int32) >> (2 * width * (r // rows))
            first |= (bits & ((1 << width) - 1)) << 4
            second |= (bits >> width & ((1 << width) - 1)) << 4
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _scaling(
    scales,
    minima,
    factors,
    minimum_factors,
    panel,
    k,
    INPUTS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Scale, offset and minimum of the inputs from `k` on that share them, [32] float32 each."""
    o = tl.arange(0, PANEL)
    at_block = (panel * (INPUTS // BLOCK) + k // BLOCK) * PANEL + o
    at_group = (panel * (INPUTS // GROUP) + k // GROUP) * PANEL + o
    scale = tl.load(scales + at_block).to(tl.float32)
    offset = tl.full((PANEL,), OFFSET, tl.float32)
    minimum = tl.zeros((PANEL,), tl.float32)
    if ZEROS:
        offset = tl.load(minima + at_block).to(tl.float32)
    if MINIMA:
        factor = tl.load(minimum_factors + at_group).to(tl.float32)
        minimum = tl.load(minima + at_block).to(tl.float32) * factor
    if FACTORS:
        scale *= tl.load(factors + at_group).to(tl.float32)
    return scale, offset, minimum


@triton.jit
def block_linear(
    x,
    numbers,
    upper,
    scales,
    minima,
    factors,
    minimum_factors,
    bias,
    residual,
    out,
    rows,
    stride,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A program per panel and BLOCK_M rows of x [rows, INPUTS]. Bias, residual and out begin at the first output of the
    part; rows of the last two are `stride` apart.

    Numbers are exact in every dtype of x, so scales meet sums: x is not rounded, and a weight neither. `residual` may
    be `out`. WIDEN: for the interpreter, which cannot multiply bfloat16.
    """
    panel = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (m < rows)[:, None]
    r = tl.arange(0, HALF)
    steps: tl.constexpr = INPUTS // (2 * HALF)
    sums = tl.zeros((BLOCK_M, PANEL), tl.float32)
    for step in range(steps):
        first, second = _numbers(numbers, upper, panel * steps + step, BITS, HALF)
        for half in tl.static_range(2):
            k = (2 * step + half) * HALF
            left = tl.load(x + m[:, None] * INPUTS + (k + r)[None, :], mask=is_row, other=0.0)
            scale, offset, minimum = _scaling(
                *(scales, minima, factors, minimum_factors, panel, k),
                *(INPUTS, OFFSET, BLOCK, GROUP, FACTORS, MINIMA, ZEROS),
            )
            values = (second if half else first) - offset[None, :]
            if WIDEN:
                product = tl.dot(left.to(tl.float32), values, input_precision="ieee")
            else:
                product = tl.dot(left, values.to(left.dtype), input_precision="ieee")
            sums += product * scale[None, :]
            if MINIMA:
                sums -= tl.sum(left.to(tl.float32), 1)[:, None] * minimum[None, :]
    n = panel * PANEL + tl.arange(0, PANEL)
    if BIASED:
        sums += tl.load(bias + n).to(tl.float32)[None, :]
    at = m[:, None] * stride + n[None, :]
    if ADDED:
        sums += tl.load(residual + at, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def expand_blocks(
    numbers,
    upper,
    scales,
    minima,
    factors,
    minimum_factors,
    out,
    first_panel,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """A program per panel, from `first_panel` on, and step: out [32 panels, INPUTS] has what the weight stands for."""
    row = tl.program_id(0).to(tl.int64)
    panel = first_panel + row
    step = tl.program_id(1)
    steps: tl.constexpr = INPUTS // (2 * HALF)
    first, second = _numbers(numbers, upper, panel * steps + step, BITS, HALF)
    r = tl.arange(0, HALF)
    n = row * PANEL + tl.arange(0, PANEL)
    for half in tl.static_range(2):
        k = (2 * step + half) * HALF
        scale, offset, minimum = _scaling(
            *(scales, minima, factors, minimum_factors, panel, k),
            *(INPUTS, OFFSET, BLOCK, GROUP, FACTORS, MINIMA, ZEROS),
        )
        values = ((second if half else first) - offset[None, :]) * scale[None, :] - minimum[None, :]
        turned = tl.trans(values.to(out.dtype.element_ty))
        tl.store(out + n[:, None] * INPUTS + (k + r)[None, :], turned)
