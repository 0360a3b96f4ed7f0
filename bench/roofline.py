"""The offline benchmark against the roofline of this machine, with limits measured in the same run.

    python -m bench.roofline [--runs 5] [--requests 32] [--json FILE]

The work of every step is counted from the step itself: operations of the products and of attention, and bytes of
weights (once a step) and KV (each row its own). The bound of a step is the larger of operations / product peak and
bytes / read bandwidth, as if each were reached and overlapped the other; that of a run is the sum over its steps.
Limits are measured before and after every run and averaged, because shared machines change from one second to the next.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench import alone
from bench.offline import INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS, THREADS
from bench.peers.weft_engine import Weft
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.core.step import Step
from weft.kernels.cpu import limits, ops
from weft.models.base import ModelSpec
from weft.models.loader import open_checkpoint
from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint
from weft.worker.runner import StepRunner


class Work(NamedTuple):
    """What one step cannot do without."""

    operations: float
    num_bytes: float


class Limits(NamedTuple):
    """Of the machine, per second."""

    operations: float
    num_bytes: float

    def seconds(self, work: Work) -> float:
        return max(work.operations / self.operations, work.num_bytes / self.num_bytes)


def work_of(step: Step, spec: ModelSpec) -> Work:
    """Count a step; what is done per token and layer besides products and attention is left out."""
    forward = step.forward
    if forward is None:
        return Work(0, 0)
    width = spec.dtype.itemsize
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    per_layer = spec.hidden_size * (2 * heads + 2 * kv_heads) * dim + 3 * spec.hidden_size * spec.intermediate_size
    head = spec.vocab_size * spec.hidden_size
    tokens, outputs = len(forward.token_ids), len(forward.output_tokens)
    queries, entries = np.diff(forward.q_indptr).astype(np.float64), forward.kv_lens.astype(np.float64)
    pairs = float((queries * entries - queries * (queries - 1) / 2).sum())
    attention = 4 * pairs * heads * dim * spec.num_layers
    kv = 2 * float(entries.sum()) * kv_heads * dim * width * spec.num_layers
    operations = 2.0 * tokens * per_layer * spec.num_layers + 2.0 * outputs * head + attention
    return Work(operations, (per_layer * spec.num_layers + (head if outputs else 0)) * width + kv)


def measure_limits(kernels: ops.CpuKernels, threads: int) -> Limits:
    peak = limits.product_peak(kernels, torch.bfloat16, threads)
    return Limits(peak, limits.read_bandwidth(kernels, threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--checkpoint", type=Path, help="use this checkpoint instead of a random one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = ops.best()
    if isinstance(kernels, Exception):
        parser.error(f"limits are measured with the kernels in C++, which are {kernels}")
    torch.set_num_threads(args.threads)
    steps: list[Step] = []
    forward_half = StepRunner.forward_half

    def record(self: StepRunner, step: Step) -> object:
        steps.append(step)
        return forward_half(self, step)

    StepRunner.forward_half = record
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        checkpoint = args.checkpoint or write_checkpoint(
            Path(folder) / "qwen3-0.6b-random", QWEN3_0_6B, dtype=torch.bfloat16, tokenizer=True
        )
        engine = Weft(checkpoint, args.threads)
        spec = open_checkpoint(checkpoint).spec
        generator = np.random.default_rng(0)
        prompts = generator.integers(0, QWEN3_0_6B["vocab_size"], (args.requests, INPUT_TOKENS)).tolist()
        rows = []
        engine.generate(prompts, OUTPUT_TOKENS)
        before = measure_limits(kernels, args.threads)
        for _ in range(args.runs):
            steps.clear()
            began = time.perf_counter()
            engine.generate(prompts, OUTPUT_TOKENS)
            seconds = time.perf_counter() - began
            after = measure_limits(kernels, args.threads)
            now = Limits(*((a + b) / 2 for a, b in zip(before, after, strict=True)))
            bound = sum(now.seconds(work_of(step, spec)) for step in steps)
            rows.append({"seconds": seconds, "bound_s": bound, "share": bound / seconds, **now._asdict()})
            print(
                f"{seconds:6.2f} s, bound {bound:5.2f} s: {bound / seconds:4.0%}   (product peak "
                f"{now.operations / 1e12:.2f} TFLOP/s, reading {now.num_bytes / 1e9:.1f} GB/s, {len(steps)} steps)"
            )
            before = after
        where = surroundings(threads=args.threads)
        engine.close()
    share, low, high = Spread.of([row["share"] for row in rows])
    level = kernels.level.name.lower()
    print(f"median {share:.0%} of the roofline ({low:.0%} to {high:.0%}), level {level}")
    if args.json:
        write_record(
            args.json,
            {**where, "level": level, "command": command_line("bench.roofline"), "median": share, "runs": rows},
        )


if __name__ == "__main__":
    alone.require()
    main()
