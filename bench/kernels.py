"""The CPU kernels beside what the machine can do: bandwidth of reading, rate of products, shared prefixes.

    python -m bench.kernels [--threads 2] [--runs 5] [--json FILE]

Shapes of Qwen3-0.6B, bfloat16, every layer with memory of its own, so that caches do not help. Limits are measured
beside each kernel, in turns; medians are reported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.cli import probe
from weft.core.step import ForwardBatch
from weft.kernels import shared_chunks
from weft.kernels.batch import AttentionBatch, lower
from weft.kernels.cpu import limits, ops

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 16, 8, 128, 16
PRODUCTS = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
"""(inputs, outputs) of a layer."""


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


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


def products(kernels: ops.CpuKernels, rows: int) -> tuple[Callable[[], object], float, float]:
    """Run every product of the layers on `rows` rows; its bytes of weights and its operations."""
    weights: list[tuple[Tensor, Tensor]] = []
    for inputs, outputs in PRODUCTS:
        x = torch.randn(rows, inputs).bfloat16()
        weights += [(x, kernels.pack_weight(torch.randn(outputs, inputs).bfloat16())) for _ in range(LAYERS)]

    def run() -> None:
        for x, weight in weights:
            kernels.linear(x, weight)

    size = sum(inputs * outputs for inputs, outputs in PRODUCTS) * LAYERS
    return run, 2.0 * size, 2.0 * rows * size


def attention(kernels: ops.CpuKernels, batch: AttentionBatch, pages: int) -> Callable[[], object]:
    kvs = [torch.randn(pages, 2, KV_HEADS, PAGE, HEAD_DIM).bfloat16() for _ in range(LAYERS)]
    q = torch.randn(batch.num_tokens, HEADS, HEAD_DIM).bfloat16()

    def run() -> None:
        for kv in kvs:
            kernels.attention(q, kv, batch, HEAD_DIM**-0.5)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = ops.best()
    if isinstance(kernels, Exception):
        parser.error(f"the kernels in C++ are {kernels}")
    torch.set_num_threads(args.threads)
    print(f"{probe.cpu_name()}, {args.threads} threads, level {kernels.level.name.lower()}")
    results: dict[str, object] = {}

    def compare(name: str, run: Callable[[], object], amount: float, limit: Callable[[], float], unit: str) -> None:
        run()
        rates, bounds = [], []
        for _ in range(args.runs):
            bounds.append(limit())
            rates.append(amount / seconds(run))
        shares = [rate / bound for rate, bound in zip(rates, bounds, strict=True)]
        rate, bound, share = (statistics.median(values) for values in (rates, bounds, shares))
        print(
            f"  {name:44s} {rate / 1e9:8.1f} of {bound / 1e9:7.1f} {unit}: {share:4.0%} ({min(shares):.0%} to "
            f"{max(shares):.0%})"
        )
        results[name] = {"rate": rate, "limit": bound, "share": share, "shares": shares}

    def reading() -> float:
        return limits.read_bandwidth(kernels, args.threads, runs=1)

    def multiplying() -> float:
        return limits.product_peak(kernels, torch.bfloat16, args.threads, runs=1)

    for rows in (1, 16, 32, 64):
        run, num_bytes, _ = products(kernels, rows)
        compare(f"products, {rows} rows: weights read", run, num_bytes, reading, "GB/s")
    for rows in (128, 512):
        run, _, operations = products(kernels, rows)
        compare(f"products, {rows} rows", run, operations, multiplying, "GFLOP/s")
    per_entry = 2 * KV_HEADS * HEAD_DIM * 2 * LAYERS
    for rows, own in ((32, 280), (4, 2000)):
        batch, pages = decode_batch(rows, 0, own)
        run = attention(kernels, batch, pages)
        compare(f"decode attention, {rows} x {own}: KV read", run, rows * own * per_entry, reading, "GB/s")
    for rows, shared in ((64, 6000), (32, 2000)):
        batch, pages = decode_batch(rows, shared, 100)
        run = attention(kernels, batch, pages)
        find = shared_chunks.find
        ratios = []
        for _ in range(args.runs + 1):
            batch.cache.clear()
            together = seconds(run)
            batch.cache.clear()
            shared_chunks.find = lambda *_: None
            alone = seconds(run)
            shared_chunks.find = find
            ratios.append(alone / together)
        ratios = ratios[1:]
        name = f"decode attention, {rows} rows sharing {shared}"
        print(
            f"  {name:44s} {statistics.median(ratios):.2f} times as fast as each row alone ({min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )
        results[name] = {"ratio": statistics.median(ratios), "ratios": ratios}
    if args.json:
        where = {"machine": {**probe.machine(), "threads": args.threads}, "level": kernels.level.name.lower()}
        data = {**where, "command": " ".join(["python -m bench.kernels", *sys.argv[1:]]), "results": results}
        args.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
