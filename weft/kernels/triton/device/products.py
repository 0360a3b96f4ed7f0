"""Products with int8 weights: for few rows at once, and making floats of a weight for a product of many."""

import triton
import triton.language as tl


@triton.jit
def int8_linear(
    x,
    weight,
    scales,
    bias,
    residual,
    out,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program per BLOCK_N outputs, of all rows of x [rows, INPUTS]; `rows` is at most BLOCK_M.

    `residual` may be `out`: a program reads what it writes and nothing else. WIDEN: for the interpreter, which cannot
    multiply bfloat16.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (m < rows)[:, None]
    is_output = n < OUTPUTS
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        is_input = k < INPUTS
        left = tl.load(x + m[:, None] * INPUTS + k[None, :], mask=is_row & is_input[None, :], other=0.0)
        right = tl.load(weight + n[None, :] * INPUTS + k[:, None], mask=is_input[:, None] & is_output[None, :], other=0)
        floats = right.to(tl.float32)
        if WIDEN:
            left = left.to(tl.float32)
        else:
            floats = floats.to(left.dtype)
        sums += tl.dot(left, floats, input_precision="ieee")
    result = sums * tl.load(scales + n, mask=is_output, other=0.0)[None, :]
    if BIASED:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    inside = is_row & is_output[None, :]
    at = m[:, None] * OUTPUTS + n[None, :]
    if ADDED:
        result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize(values, scales, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row of values [rows, SIZE] and BLOCK of its numbers."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    wide = tl.load(values + row * SIZE + i, mask=inside, other=0).to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * SIZE + i, wide.to(out.dtype.element_ty), mask=inside)
