"""The CPU kernels against the machine's memory bandwidth and matmul FLOP/s; shared prefixes, quantized blocks, pages
to the host.

    python -m bench.kernels [--threads 2] [--runs 5] [--only pages|blocks] [--json FILE]

Shapes of Qwen3-0.6B, bfloat16, every layer with memory of its own, so that caches do not help. Limits are measured
beside each kernel, in turns; medians are reported. Of products, the time in the library counts: a model calls it once
for a layer, and what Python does between two products here, 10 to 40 microseconds, is not part of its step.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench import alone
from weft.cli import probe
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.core.step import ForwardBatch
from weft.gguf.types import BY_NAME, GROUPS
from weft.kernels import shared_chunks
from weft.kernels.batch import AttentionBatch, lower
from weft.kernels.block_weights import BLOCK_TYPES, BlockPart, BlockWeight, stored_size
from weft.kernels.cpu import huge_pages, limits, ops
from weft.kernels.quantized_blocks import SCALES

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 16, 8, 128, 16
PRODUCTS = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
"""(inputs, outputs) of a layer."""
LARGE_PRODUCTS, LARGE_LAYERS = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)), 2
"""The same of Qwen3-8B: beside a product of tens of megabytes, what it takes to begin and to end one is little."""
BLOCK_REPEATS = 2
"""Weights in blocks are small: so many times as many layers, that the last-level cache does not hold them."""
CACHED_SHAPES, CACHED_RUNS = ((1024, 512),), 100
"""A weight that stays in the second-level cache, and how often it is multiplied with."""
NUM_WEIGHTS = sum(inputs * outputs for inputs, outputs in PRODUCTS) * LAYERS


Compare = Callable[[str, Callable[[], object], float, Callable[[], float], str], None]
"""(name, kernel, work of one call, what the machine does at most per second, unit of both)"""
Ratio = Callable[[str, Callable[[], object], Callable[[], object]], None]


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Stopwatch:
    """Runs for as long as one of a library's functions does."""

    def __init__(self, kernels: ops.CpuKernels):
        self._spent = 0.0
        for name in ("_linear_packed", "_linear_blocks"):
            setattr(kernels, name, self._timed(getattr(kernels, name)))

    def _timed(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._spent += time.perf_counter() - began

        return call

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds that `run` spent in products, or all of its seconds if it calls none."""
        self._spent = 0.0
        whole = seconds(run)
        return self._spent or whole


def decode_batch(rows: int, shared: int, own: int) -> tuple[AttentionBatch, int]:
    """Rows of one query each over `shared` entries that all have in common and `own` of theirs; and how many pages."""
    common, rest = shared // PAGE, -(-own // PAGE)
    pages = [[*range(common), *range(common + r * rest, common + (r + 1) * rest)] for r in range(rows)]
    lens = np.full(rows, common * PAGE + own, np.int32)
    forward = ForwardBatch(
        token_ids=np.zeros(rows, np.int32),
        positions=lens - 1,
        write_slots=np.full(rows, -1, np.int32),
        q_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indptr=np.arange(rows + 1, dtype=np.int32) * np.int32(common + rest),
        kv_page_ids=np.array(pages, np.int32).ravel(),
        kv_lens=lens,
        output_tokens=np.arange(rows, dtype=np.int32),
    )
    return lower(forward, PAGE), common + rows * rest


class Products(NamedTuple):
    """Every product of the layers on some rows."""

    run: Callable[[], object]
    bytes: float
    """Of weights, scales included."""
    operations: float


def products(kernels: ops.CpuKernels, rows: int) -> Products:
    """All products of the layers, with weights in bfloat16."""
    weights: list[tuple[Tensor, Tensor]] = []
    for inputs, outputs in PRODUCTS:
        x = torch.randn(rows, inputs).bfloat16()
        weights += [(x, kernels.pack_weight(torch.randn(outputs, inputs).bfloat16())) for _ in range(LAYERS)]

    def run() -> None:
        for x, weight in weights:
            kernels.linear(x, weight)

    return Products(run, 2.0 * NUM_WEIGHTS, 2.0 * rows * NUM_WEIGHTS)


def block_products(
    kernels: ops.CpuKernels,
    kind: str,
    rows: int,
    shapes: Sequence[tuple[int, int]] = PRODUCTS,
    repeats: int = LAYERS * BLOCK_REPEATS,
) -> Products:
    """Products of these shapes, (inputs, outputs), with weights in quantized blocks of a type: random bytes with scales
    of 0.01."""
    weights: list[tuple[Tensor, BlockWeight]] = []
    num_weights = sum(inputs * outputs for inputs, outputs in shapes)
    scale = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    for inputs, outputs in shapes:
        x = torch.randn(rows, inputs).bfloat16()
        part = BlockPart(kind, outputs)
        for _ in range(repeats):
            data = torch.randint(0, 256, (stored_size(part, inputs),), dtype=torch.uint8)
            blocks = data.view(-1, BY_NAME[kind].num_bytes)
            if kind in GROUPS:
                blocks[:, :4] = torch.tensor([0.01]).view(torch.uint8)
            else:
                first, count = SCALES[kind]
                for i in range(count):
                    blocks[:, first + 2 * i : first + 2 * i + 2] = scale
            packed = kernels.pack_weight(BlockWeight.of(data, [part], inputs))
            assert isinstance(packed, BlockWeight)
            weights.append((x, packed))

    def run() -> None:
        for x, weight in weights:
            kernels.linear(x, weight)

    return Products(run, sum(weight.numel() for _, weight in weights), 2.0 * rows * num_weights * repeats)


def attention(kernels: ops.CpuKernels, batch: AttentionBatch, pages: int) -> Callable[[], object]:
    shape = (pages, 2, KV_HEADS, PAGE, HEAD_DIM)
    # On huge pages, as an engine's pages are.
    kvs = [huge_pages.empty(*shape, dtype=torch.bfloat16).normal_() for _ in range(LAYERS)]
    q = torch.randn(batch.num_tokens, HEADS, HEAD_DIM).bfloat16()

    def run() -> None:
        for kv in kvs:
            kernels.attention(q, kv, batch, HEAD_DIM**-0.5)

    return run


def moves(kernels: ops.CpuKernels, layers: int, pages: int) -> tuple[list[tuple[str, Callable[[], object]]], int]:
    """Scattered pages of `layers` layers to a host pool and back, and memcpy; and how many bytes each copies."""
    part = 2 * KV_HEADS * PAGE * HEAD_DIM * 2
    pools = [huge_pages.empty(3 * pages, part, dtype=torch.uint8).fill_(1) for _ in range(layers)]
    rows = huge_pages.empty(3 * pages, layers * part, dtype=torch.uint8).fill_(2)
    host = torch.split(rows, part, dim=1)
    device_pages, host_pages = torch.randperm(3 * pages)[:pages], torch.randperm(3 * pages)[:pages]
    size = pages * layers * part
    out, back = kernels.prepare_move(pools, host), kernels.prepare_move(host, pools)
    one, other = (huge_pages.empty(size, dtype=torch.uint8).fill_(3) for _ in range(2))
    runs = [
        ("device to host", lambda: out(device_pages, host_pages)),
        ("host to device", lambda: back(host_pages, device_pages)),
        ("memcpy", lambda: ctypes.memmove(other.data_ptr(), one.data_ptr(), size)),
    ]
    return runs, size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only",
        choices=["pages", "blocks"],
        help="only pages that move to the host, or products with quantized blocks",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = ops.best()
    if isinstance(kernels, Exception):
        parser.error(f"the kernels in C++ are {kernels}")
    torch.set_num_threads(args.threads)
    stopwatch = Stopwatch(kernels)
    print(f"{probe.cpu_name()}, {args.threads} threads, level {kernels.instructions}")
    results: dict[str, object] = {}

    def compare(name: str, run: Callable[[], object], amount: float, limit: Callable[[], float], unit: str) -> None:
        run()
        rates, bounds = [], []
        for _ in range(args.runs):
            bounds.append(limit())
            rates.append(amount / stopwatch.seconds(run))
        shares = [rate / bound for rate, bound in zip(rates, bounds, strict=True)]
        rate, bound, share = (statistics.median(values) for values in (rates, bounds, shares))
        print(
            f"  {name:52s} {rate / 1e9:8.1f} of {bound / 1e9:7.1f} {unit}: {share:4.0%} ({min(shares):.0%} to "
            f"{max(shares):.0%})"
        )
        results[name] = {"rate": rate, "limit": bound, "share": share, "shares": shares}

    def ratio(name: str, run: Callable[[], object], other: Callable[[], object]) -> None:
        """How many times as fast `run` is as `other`, which takes turns with it."""
        ratios = []
        for _ in range(args.runs + 1):
            mine = stopwatch.seconds(run)
            ratios.append(stopwatch.seconds(other) / mine)
        ratios = ratios[1:]
        spread = Spread.of(ratios)
        print(f"  {name:52s} {spread.median:.2f} times as fast ({spread.low:.2f} to {spread.high:.2f})")
        results[name] = {"ratio": spread.median, "ratios": ratios}

    for count in (1, 8, 64) if args.only != "blocks" else ():
        (*ways, (_, memcpy)), size = moves(kernels, 28, count)

        def copying(memcpy: Callable[[], object] = memcpy, size: int = size) -> float:
            return size / seconds(memcpy)

        for way, run in ways:
            compare(f"{count} pages of 28 layers, {way}", run, size, copying, "GB/s")
    if args.only is None:
        compare_kernels(args.threads, kernels, compare, ratio)
    if args.only != "pages":
        compare_blocks(args.threads, kernels, compare, ratio, stopwatch)
    if args.json:
        where = {**surroundings(threads=args.threads), "level": kernels.instructions}
        write_record(args.json, {**where, "command": command_line("bench.kernels"), "results": results})


def compare_kernels(threads: int, kernels: ops.CpuKernels, compare: Compare, ratio: Ratio) -> None:
    """All kernels but the movements of pages."""

    def reading() -> float:
        return limits.read_bandwidth(kernels, threads, runs=1)

    def multiplying() -> float:
        return limits.product_peak(kernels, torch.bfloat16, threads, runs=1)

    for rows in (1, 16, 32, 64):
        made = products(kernels, rows)
        compare(f"products, {rows} rows: weights read", made.run, made.bytes, reading, "GB/s")
    for rows in (128, 512):
        made = products(kernels, rows)
        compare(f"products, {rows} rows", made.run, made.operations, multiplying, "GFLOP/s")
    per_entry = 2 * KV_HEADS * HEAD_DIM * 2 * LAYERS
    for rows, own in ((32, 280), (4, 2000)):
        batch, pages = decode_batch(rows, 0, own)
        run = attention(kernels, batch, pages)
        compare(f"decode attention, {rows} x {own}: KV read", run, rows * own * per_entry, reading, "GB/s")
    find = shared_chunks.find
    for rows, shared in ((64, 6000), (32, 2000)):
        batch, pages = decode_batch(rows, shared, 100)
        run = attention(kernels, batch, pages)

        def together(batch: AttentionBatch = batch, run: Callable[[], object] = run) -> None:
            batch.cache.clear()
            run()

        def alone(batch: AttentionBatch = batch, run: Callable[[], object] = run) -> None:
            batch.cache.clear()
            shared_chunks.find = lambda *_: None
            run()
            shared_chunks.find = find

        ratio(f"decode attention, {rows} rows sharing {shared}", together, alone)


def compare_blocks(threads: int, kernels: ops.CpuKernels, compare: Compare, ratio: Ratio, stopwatch: Stopwatch) -> None:
    """Products with quantized blocks. Weights read are compared with the bandwidth of memory, and of one row with the
    lower of that and the rate at which weights in the cache are unpacked and multiplied; operations with the peak of
    bfloat16."""

    def reading() -> float:
        return limits.read_bandwidth(kernels, threads, runs=1)

    def multiplying() -> float:
        return limits.product_peak(kernels, torch.bfloat16, threads, runs=1)

    for kind in BLOCK_TYPES:
        cached = block_products(kernels, kind, 1, CACHED_SHAPES, 1)

        def unpacking(cached: Products = cached) -> float:
            """Bytes per second of weights that lie in the second-level cache: of one core, times the threads."""
            torch.set_num_threads(1)
            took = stopwatch.seconds(lambda: [cached.run() for _ in range(CACHED_RUNS)])
            torch.set_num_threads(threads)
            return threads * CACHED_RUNS * cached.bytes / took

        made = block_products(kernels, kind, 1, LARGE_PRODUCTS, LARGE_LAYERS)
        compare(f"{kind} products of Qwen3-8B, 1 row: weights read", made.run, made.bytes, reading, "GB/s")
        made = block_products(kernels, kind, 1)
        compare(
            *(f"{kind} products, 1 row: of the lower limit", made.run, made.bytes),
            *(lambda unpacking=unpacking: min(reading(), unpacking()), "GB/s"),
        )
        made = block_products(kernels, kind, 8)
        compare(f"{kind} products, 8 rows: weights read", made.run, made.bytes, reading, "GB/s")
        for rows in (32, 512):
            made = block_products(kernels, kind, rows)
            compare(f"{kind} products, {rows} rows", made.run, made.operations, multiplying, "GFLOP/s")
    for kind in ("Q8_0", "Q4_K"):
        for rows in (1, 4, 8, 16, 32, 64, 512):
            blocks, plain = block_products(kernels, kind, rows).run, products(kernels, rows).run

            def as_often(plain: Callable[[], object] = plain) -> None:
                for _ in range(BLOCK_REPEATS):
                    plain()

            ratio(f"{kind} beside bfloat16 products, {rows} rows", blocks, as_often)


if __name__ == "__main__":
    alone.require()
    main()
