"""Compiles the kernels in Triton as their launches would, without a device. Run by `test_triton.py`.

    python -m tests.kernels.compile_triton [--all]

Prints a line for each: name, capability of the device, dtype, bytes of shared memory. The launches are those of the
package, on CPU tensors; a stand-in for each kernel takes their arguments and compiles.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tests.kernels.batches import random_case
from tests.kernels.blocks import random_block_weight
from weft.kernels.base import HeadNorm, HeadShape, Norm
from weft.kernels.batch import lower
from weft.kernels.triton import attention, blocks, move, ops
from weft.kernels.triton.device import attention as attention_kernels
from weft.kernels.triton.device import blocks as block_kernels
from weft.kernels.triton.device import elementwise as other_kernels

KERNELS = {
    *("decode", "prefill", "merge", "rms_norm", "add_rms_norm", "silu_mul", "rotate_and_store", "copy_pages"),
    *("move_pages", "move_slots", "block_linear", "expand_blocks"),
}


class Compiled:
    """Stands for a kernel: `kernel[grid](*arguments)` compiles it for what the arguments are."""

    def __init__(self, kernel: Any, capability: int):
        self._kernel = kernel
        self._capability = capability

    def __getitem__(self, grid: Any) -> Any:
        assert all(size > 0 for size in grid)
        return self._compile

    def _compile(self, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **sizes: Any) -> None:
        names = self._kernel.arg_names
        values = dict(zip(names, arguments, strict=False)) | sizes
        assert set(values) == set(names)
        aligned = [i for i, name in enumerate(names) if name not in sizes and _is_aligned(values[name])]
        source = triton.compiler.ASTSource(
            self._kernel,
            signature={name: "constexpr" if name in sizes else _type(values[name]) for name in names},
            constexprs=sizes,
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=options)
        assert compiled.asm["cubin"]
        print(self._kernel.__name__, self._capability, _type(arguments[0]), compiled.metadata.shared, flush=True)


class Stand:
    """Stands for a module of kernels."""

    def __init__(self, module: Any, capability: int):
        for name in KERNELS & set(vars(module)):
            setattr(self, name, Compiled(getattr(module, name), capability))


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        widths = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8"}
        widths |= {torch.int8: "i8", torch.int16: "i16"}
        return "*" + (widths.get(value.dtype) or {torch.int32: "i32", torch.int64: "i64"}[value.dtype])
    return {int: "i32", float: "fp32"}[type(value)]


def _is_aligned(value: Any) -> bool:
    return value.data_ptr() % 16 == 0 if isinstance(value, Tensor) else type(value) is int and value % 16 == 0


def main() -> None:
    """Every kernel for one device, and attention with the widest heads for that with the least shared memory. `--all`:
    attention and products at more sizes, and for more devices."""
    rows, no_rules = [(1, 600), (20, 20)], {}
    rules = {"causal": False, "visibility": True, "masks": True}
    everything = (90, torch.bfloat16, HeadShape(8, 2, 128), no_rules, None)
    others = (
        (80, torch.bfloat16, HeadShape(8, 2, 128), no_rules, None),
        (80, torch.float32, HeadShape(7, 1, 48), no_rules, None),
        (90, torch.bfloat16, HeadShape(8, 2, 128), no_rules, 100),
        (90, torch.bfloat16, HeadShape(8, 2, 128), rules, 100),
        (90, torch.float16, HeadShape(8, 1, 256), no_rules, 100),
    )
    least = (86, torch.float32, HeadShape(8, 1, 256), rules, 100)
    for launch in (everything, least, *(others if "--all" in sys.argv else ())):
        capability, dtype, shape, options, window = launch
        attention.takes = ops.takes = lambda *tensors: True
        attention.device, ops.device = Stand(attention_kernels, capability), Stand(other_kernels, capability)
        move.device, move.INTERPRETED = ops.device, True
        blocks.device = Stand(block_kernels, capability)
        attention.is_hopper = lambda device, found=capability // 10 == 9: found
        heads, kv_heads, head_dim = shape
        case = random_case(
            np.random.default_rng(1),
            rows,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=16,
            dtype=dtype,
            **options,
        )
        pages = torch.ones(2, 2, 1 << 16, dtype=torch.uint8)
        ops.prepare_move(pages[:1], pages[1:])(torch.arange(2), torch.arange(2))
        ops.attention(case.q, case.kv, lower(case.forward, 16), 0.1, window)
        if dtype != torch.float16 and options is no_rules and window is None:
            # Q4_0 is as INT4_G128 but for its zero points; elsewhere one type with minima, and one with upper bits.
            few = ("Q4_K", "Q6_K")
            kinds = ("Q8_0", "Q5_K", "INT4_G128", *few) if capability == 90 else few
            for kind, inputs in (*product(kinds, (512,)), ("Q5_K", blocks.LONG_INPUTS)):
                x = torch.ones(50, inputs, dtype=dtype)
                weight = ops.pack_weight(random_block_weight([(kind, 96)], inputs))
                for count in (1, 50):
                    ops.linear(x[:count], weight, x[0, :96], x[:count, :96])
                blocks.expanded(weight, 32, 96, dtype)
        if launch is everything:
            x = torch.ones(21, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
            angles = torch.ones(21, head_dim // 2)
            norm = HeadNorm(x[0, :head_dim], x[0, :head_dim], 1e-6)
            ops.rms_norm(x, x[0], 1e-6)
            ops.silu_mul(x)
            weight, residual = torch.ones(192, x.shape[1], dtype=dtype), torch.ones(21, 192, dtype=dtype)
            ops.linear_rms_norm(x, weight, residual, Norm(residual[0], 1e-6), residual[0])
            ops.rotate_and_store(x, shape, (angles, angles), norm, case.batch, case.kv)
            ids = torch.arange(2)
            ops.copy_pages(case.kv, ids, ids)
            ops.copy_slots(case.kv, ids, ids)


if __name__ == "__main__":
    main()
