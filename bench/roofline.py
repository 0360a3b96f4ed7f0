"""The offline benchmark against the roofline of this machine, with limits measured in the same run.

    python -m bench.roofline [--runs 5] [--requests 32] [--shape qwen3-0.6b] [--json FILE]

The work of every step is counted from the step itself: operations of the products and of attention, and bytes of
weights (once a step) and KV (each row its own). The bound of a step is the larger of operations / product peak and
bytes / read bandwidth, as if each were reached and overlapped the other; that of a run is the sum over its steps.
Limits are measured before and after every run and averaged, because shared machines change from one second to the next.

Two parts of a run are also compared with the limit that is theirs: *prompts* (steps that compute more than one token of
some sequence) with the product peak, and *decoding* (all other steps) with the read bandwidth. A step lasts until the
next one begins, so what the host does in between counts against it. `WEFT_CPU_KERNELS` chooses the level, and limits
are those of the same level. The file is written after every run.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import alone
from bench.offline import INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS, SHAPES, THREADS
from bench.peers.weft_engine import Weft
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.core.step import Step
from weft.kernels.cpu import limits, ops
from weft.models.base import ModelSpec
from weft.models.loader import open_checkpoint
from weft.models.random_checkpoints import write_checkpoint
from weft.worker.runner import StepRunner


class Work(NamedTuple):
    """What one step cannot do without."""

    operations: float
    num_bytes: float


class TimedStep(NamedTuple):
    """A step of the engine and the `time.perf_counter` of its beginning."""

    step: Step
    began: float

    @property
    def computes_prompt(self) -> bool:
        forward = self.step.forward
        return forward is not None and len(forward.token_ids) > len(forward.kv_lens)


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


def figures(steps: Sequence[TimedStep], ended: float, spec: ModelSpec, now: Limits) -> dict[str, float]:
    """The figures of a run as a row of the record; shares are parts of 1."""
    began = [each.began for each in steps]
    lasted = [after - before for before, after in zip(began, [*began[1:], ended], strict=True)]
    work = [work_of(each.step, spec) for each in steps]
    bound = sum(now.seconds(each) for each in work)
    parts: dict[str, tuple[float, float, float]] = {}
    for name, wanted in (("prompt", True), ("decode", False)):
        chosen = [n for n, each in enumerate(steps) if each.computes_prompt == wanted]
        parts[name] = (
            sum(lasted[n] for n in chosen),
            sum(work[n].operations for n in chosen) / now.operations,
            sum(work[n].num_bytes for n in chosen) / now.num_bytes,
        )
    (prompt_s, products_s, _), (decode_s, _, reads_s) = parts["prompt"], parts["decode"]
    seconds = ended - began[0]
    return {
        "seconds": seconds,
        "bound_s": bound,
        "share": bound / seconds,
        "steps": len(steps),
        "prompt_s": prompt_s,
        "prompt_share_of_product_peak": products_s / prompt_s,
        "decode_s": decode_s,
        "decode_share_of_bandwidth": reads_s / decode_s,
        **now._asdict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of the random checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="use this checkpoint of SHAPE instead of a random one")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    args = parser.parse_args()
    kernels = ops.best()
    if isinstance(kernels, Exception):
        parser.error(f"limits are measured with the kernels in C++, which are {kernels}")
    torch.set_num_threads(args.threads)
    steps: list[TimedStep] = []
    forward_half = StepRunner.forward_half

    def record(self: StepRunner, step: Step) -> object:
        steps.append(TimedStep(step, time.perf_counter()))
        return forward_half(self, step)

    StepRunner.forward_half = record
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        checkpoint = args.checkpoint or write_checkpoint(
            Path(folder) / args.shape, shape, dtype=torch.bfloat16, tokenizer=True
        )
        engine = Weft(checkpoint, args.threads)
        spec = open_checkpoint(checkpoint).spec
        found: dict[str, Any] = {
            **surroundings(threads=args.threads),
            "command": command_line("bench.roofline"),
            "level": kernels.level.name.lower(),
            "shape": args.shape,
            "requests": args.requests,
            "runs": [],
        }
        generator = np.random.default_rng(0)
        prompts = generator.integers(0, shape["vocab_size"], (args.requests, INPUT_TOKENS)).tolist()
        engine.generate(prompts, OUTPUT_TOKENS)
        before = measure_limits(kernels, args.threads)
        for _ in range(args.runs):
            steps.clear()
            engine.generate(prompts, OUTPUT_TOKENS)
            ended = time.perf_counter()
            after = measure_limits(kernels, args.threads)
            now = Limits(*((a + b) / 2 for a, b in zip(before, after, strict=True)))
            row = figures(steps, ended, spec, now)
            found["runs"].append(row)
            found["median"] = {name: Spread.of([each[name] for each in found["runs"]]).median for name in row}
            print(
                f"{row['seconds']:6.2f} s, bound {row['bound_s']:5.2f} s: {row['share']:4.0%}; prompts "
                f"{row['prompt_s']:.2f} s, {row['prompt_share_of_product_peak']:.0%} of "
                f"{now.operations / 1e9:.0f} GFLOP/s; decoding {row['decode_s']:.2f} s, "
                f"{row['decode_share_of_bandwidth']:.0%} of {now.num_bytes / 1e9:.1f} GB/s",
                flush=True,
            )
            if args.json:
                write_record(args.json, found)
            before = after
        engine.close()
    for name in ("share", "prompt_share_of_product_peak", "decode_share_of_bandwidth"):
        median, low, high = Spread.of([row[name] for row in found["runs"]])
        print(f"{name.replace('_', ' ')}: median {median:.0%} ({low:.0%} to {high:.0%})")


if __name__ == "__main__":
    alone.require()
    main()
