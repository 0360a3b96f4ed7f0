"""Products with weights in quantized blocks, and expanding them. Layout: `weft.kernels.triton.block_layout`.

A *step* is 32 inputs of a panel of 32 outputs. It is 128 *places*, of which number 16 a + 4 b + c is for output 4 a + c
and the inputs from 8 b on, eight of them: a thread reads the words of four neighbouring places, and 32 threads a step.
That is where tensor cores want the numbers, so they go from memory to products without leaving their thread.
"""

import triton
import triton.language as tl

PANEL = tl.constexpr(32)
STEP = tl.constexpr(32)
PLACES = tl.constexpr(128)
LEAST = tl.constexpr(8)
"""The fewest rows of x that tensor cores take."""


@triton.jit
def _pair(word, upper, exponent, i: tl.constexpr, BITS: tl.constexpr):
    """Numbers 2 i and 2 i + 1 of eight, float32: 2^23 plus 2^12 times the number; of less than 8 bits, the second one
    is 2^23 plus 2^16 times the number. `word` has them, or of 8 bits numbers 0 to 3 or 4 to 7; `upper` the upper bits.

    `exponent` is the bits of 2^23, and an argument of the kernel because ANDing and ORing with two constants would be
    two instructions. With `^=` the compiler does not reorder what then are two instructions into three.
    """
    if BITS == 8:
        first = (word >> 4 if i % 2 else word << 12) & 0xFF000 | exponent
        second = (word >> 12 if i % 2 else word << 4) & 0xFF000 | exponent
    else:
        moved = word << (12 - 8 * i) if i < 2 else word >> (8 * i - 12)
        first = moved & 0xF000 | exponent
        second = moved & 0xF0000 | exponent
        if BITS > 4:
            mask: tl.constexpr = (1 << (BITS - 4)) - 1
            moved = upper << (16 - (i if BITS == 5 else i % 2 * 2 + i // 2 * 8))
            first ^= moved & (mask << 16)
            second ^= moved & (mask << 20)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def _scaled(value, bits: tl.constexpr, scale, offset, minimum, EXACT: tl.constexpr):
    """value: 2^23 plus 2^bits times a number -> (number - offset) * scale - minimum. If not EXACT, it is off by up to
    2^-13 of the scale."""
    unit: tl.constexpr = 2.0**-bits
    base: tl.constexpr = 2.0 ** (23 - bits)
    if EXACT:
        return (value * unit - base - offset) * scale - minimum
    return value * (scale * unit) - ((base + offset) * scale + minimum)


@triton.jit
def _values(
    numbers,
    upper,
    scales,
    minima,
    factors,
    minimum_factors,
    panel,
    step,
    exponent,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """What the numbers of steps stand for, rounded to DTYPE, [R, 128, 2, 2, 2]; the last dimensions are the lowest,
    middle and highest bit of the input among eight. panel and step: [R, 1]"""
    i = tl.arange(0, PLACES)[None, :]
    at = panel * (INPUTS // STEP) + step
    o = i // 16 * 4 + i % 4
    k = step * STEP + i // 4 % 4 * 8
    at_block = (panel * (INPUTS // BLOCK) + k // BLOCK) * PANEL + o
    at_group = (panel * (INPUTS // GROUP) + k // GROUP) * PANEL + o
    if BITS == 8:
        word = tl.load(numbers + at * (2 * PLACES) + i).to(tl.uint32, bitcast=True)
        other = tl.load(numbers + at * (2 * PLACES) + PLACES + i).to(tl.uint32, bitcast=True)
    else:
        word = tl.load(numbers + at * PLACES + i).to(tl.uint32, bitcast=True)
        other = word
    exponent = exponent.to(tl.uint32)
    bits = word
    if BITS == 5 or BITS == 6:
        # Written so that a thread has the same places here as of the words.
        bits = tl.load(upper + at * PLACES + (i // 4 * 4 + i % 4)).to(tl.uint32)
        if BITS == 6:
            bits &= 0xFFFF
    scale = tl.load(scales + at_block).to(tl.float32)
    offset = OFFSET * 1.0
    minimum = 0.0
    if FACTORS:
        scale *= tl.load(factors + at_group).to(tl.float32)
    if ZEROS:
        offset = tl.load(minima + at_block).to(tl.float32)
    if MINIMA:
        minimum = tl.load(minima + at_block).to(tl.float32) * tl.load(minimum_factors + at_group).to(tl.float32)
    second: tl.constexpr = 12 if BITS == 8 else 16
    n0, n1 = _pair(word, bits, exponent, 0, BITS)
    n2, n3 = _pair(word, bits, exponent, 1, BITS)
    n4, n5 = _pair(other, bits, exponent, 2, BITS)
    n6, n7 = _pair(other, bits, exponent, 3, BITS)
    n0 = _scaled(n0, 12, scale, offset, minimum, EXACT).to(DTYPE)
    n1 = _scaled(n1, second, scale, offset, minimum, EXACT).to(DTYPE)
    n2 = _scaled(n2, 12, scale, offset, minimum, EXACT).to(DTYPE)
    n3 = _scaled(n3, second, scale, offset, minimum, EXACT).to(DTYPE)
    n4 = _scaled(n4, 12, scale, offset, minimum, EXACT).to(DTYPE)
    n5 = _scaled(n5, second, scale, offset, minimum, EXACT).to(DTYPE)
    n6 = _scaled(n6, 12, scale, offset, minimum, EXACT).to(DTYPE)
    n7 = _scaled(n7, second, scale, offset, minimum, EXACT).to(DTYPE)
    low = tl.join(tl.join(n0, n1), tl.join(n2, n3))
    return tl.join(low, tl.join(tl.join(n4, n5), tl.join(n6, n7)))


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
    exponent,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    WIDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
):
    """A program per panel and M rows of x [rows, INPUTS]. Bias, residual and out begin at the first output of the part;
    rows of the last two are `stride` apart. `residual` may be `out`.

    Every warp, W of them, has U steps of U W at a time, and sums of its own, which are added in the end. Values of a
    weight are rounded to the dtype of x, which is not rounded. WIDEN: for the interpreter, which cannot multiply
    bfloat16. WIDTH: inputs side by side that a thread of the compiler's layout of operands holds. Indices are of 32
    bits: a weight has less than 2^33 numbers.
    """
    panel = tl.program_id(0)
    begin = tl.program_id(1) * M
    steps: tl.constexpr = INPUTS // STEP
    dtype: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    unit = tl.arange(0, U * W)[:, None]
    # Two dimensions, of which the compiler gives the first to lanes, then warps, then registers.
    blocks: tl.constexpr = M // LEAST
    j = tl.arange(0, U * blocks * W * LEAST)[:, None]
    m = begin + j // (LEAST * W) % blocks * LEAST + j % LEAST
    unit_x = j // (LEAST * W * blocks) * W + j // LEAST % W
    row = x + m * INPUTS + tl.arange(0, STEP)[None, :]
    sums = tl.zeros((W, PANEL, M), tl.float32)
    for first in tl.range(0, steps, U * W):
        step = first + unit_x
        right = tl.load(row + step * STEP, mask=(m < rows) & (step < steps), other=0.0).to(dtype)
        # Beyond the last step is the last one again, which meets an x of 0.
        left = _values(
            *(numbers, upper, scales, minima, factors, minimum_factors),
            *(panel, tl.minimum(first + unit, steps - 1), exponent, dtype, dtype == tl.float32),
            *(INPUTS, BITS, OFFSET, BLOCK, GROUP, FACTORS, MINIMA, ZEROS),
        )
        left = tl.reshape(left, (U, W, 8, 4, 4, 2, 2, 2))
        right = tl.reshape(right, (U, blocks, W, LEAST, 4, 2, 4))
        if WIDTH == 8:
            left = tl.permute(left, (1, 4, 2, 0, 3, 7, 6, 5))
            right = tl.permute(right, (2, 0, 4, 5, 6, 1, 3))
        else:
            left = tl.permute(left, (1, 4, 2, 0, 7, 3, 6, 5))
            right = tl.permute(right, (2, 0, 5, 4, 6, 1, 3))
        left = tl.reshape(left, (W, PANEL, U * STEP))
        right = tl.reshape(right, (W, U * STEP, M))
        sums = tl.dot(left, right, sums, input_precision="ieee")
    total = tl.sum(sums, 0)
    i = tl.arange(0, PANEL)
    n = panel * PANEL + i % 8 * 4 + i // 8
    m = begin + tl.arange(0, M)
    is_row = (m < rows)[None, :]
    if BIASED:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    at = m[None, :] * stride + n[:, None]
    if ADDED:
        total += tl.load(residual + at, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_row)


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
    exponent,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    U: tl.constexpr,
):
    """A program per panel, from `first_panel` on, and U steps: out [32 panels, INPUTS] has what the weight stands
    for."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1) * U + tl.arange(0, U)[:, None]
    steps: tl.constexpr = INPUTS // STEP
    values = _values(
        *(numbers, upper, scales, minima, factors, minimum_factors),
        *(first_panel + row, tl.minimum(step, steps - 1), exponent, out.dtype.element_ty, True),
        *(INPUTS, BITS, OFFSET, BLOCK, GROUP, FACTORS, MINIMA, ZEROS),
    )
    values = tl.permute(tl.reshape(values, (U, 8, 4, 4, 2, 2, 2)), (1, 3, 0, 2, 6, 5, 4))
    n = row * PANEL + tl.arange(0, PANEL)[:, None]
    k = tl.program_id(1) * (U * STEP) + tl.arange(0, U * STEP)[None, :]
    tl.store(out + n * INPUTS + k, tl.reshape(values, (PANEL, U * STEP)), mask=k < INPUTS)
