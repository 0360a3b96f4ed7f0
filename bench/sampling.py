"""Time of a step's tokens on a CPU: edits of logits and draws in C++, and in torch and numpy.

    python -m bench.sampling [--vocab 32000 151936] [--samplers 1 32] [--threads 2] [--runs 5] [--json FILE]

Both do the same work in turns, on logits in float32 that lie in memory. Times are medians over runs of the median of
some calls; the ratio is that of neighbouring runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import alone
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.core.sampling import SamplingParams
from weft.core.step import LateInputs, SamplingBatch, SlotSet
from weft.kernels.cpu.sampling import CpuSampling
from weft.kernels.dispatch import host_sampling
from weft.worker.machine import cpu_name
from weft.worker.sampler import StepSampler
from weft.worker.slots import SlotTable

CALLS = 15
MASKED = 0.5
"""Share of the tokens that a grammar's mask leaves."""


class Kind(NamedTuple):
    """How the samplers of a step are set."""

    params: SamplingParams
    masked: bool = False
    """Whether each has a grammar."""


KINDS = {
    "greedy": Kind(SamplingParams(temperature=0.0)),
    "temperature 1": Kind(SamplingParams(temperature=1.0)),
    "top-k 20, top-p 0.8": Kind(SamplingParams(temperature=0.7, top_k=20, top_p=0.8)),
    "top-p 0.9": Kind(SamplingParams(temperature=1.0, top_p=0.9)),
    "penalty": Kind(SamplingParams(temperature=0.7, frequency_penalty=0.5)),
    "grammar, greedy": Kind(SamplingParams(temperature=0.0), masked=True),
    "grammar, temperature 1": Kind(SamplingParams(temperature=1.0), masked=True),
}


class Work:
    """The tokens of one step, again and again, by one implementation."""

    def __init__(self, kind: Kind, vocab_size: int, count: int, threads: int, kernels: CpuSampling | None):
        random = np.random.default_rng(0)
        table = SlotTable(count, vocab_size, 4096, torch.device("cpu"))
        for slot in range(count):
            table.set(SlotSet(slot, kind.params))
        self._sampler = StepSampler(table, threads=threads, kernels=kernels)
        self._logits = torch.from_numpy(4 * random.standard_normal((count, vocab_size), np.float32))
        every = np.arange(count, dtype=np.int32)
        none = np.zeros(count, np.bool_)
        waits = np.full(count, kind.masked)
        self._batch = SamplingBatch(every, every, random.random(count), np.full(count, -1, np.int32), none, waits)
        kept = random.random((count, -(-vocab_size // 32) * 32)) < MASKED
        masks = np.packbits(kept, axis=1, bitorder="little").view(np.uint32)
        self._late = LateInputs(every, masks) if kind.masked else LateInputs()

    def milliseconds(self) -> float:
        """Of one call: the median of `CALLS`."""
        times = []
        with torch.inference_mode():
            for _ in range(CALLS):
                began = time.perf_counter()
                self._sampler.sample(self._logits, self._batch, self._late)
                times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)


def compare(kind: Kind, vocab_size: int, count: int, args: argparse.Namespace, kernels: CpuSampling) -> dict[str, Any]:
    """Times of both, in turns; the first run of each is not counted."""
    ours, other = (Work(kind, vocab_size, count, args.threads, one) for one in (kernels, None))
    pairs = [(ours.milliseconds(), other.milliseconds()) for _ in range(args.runs + 1)][1:]
    mine, theirs = (list(times) for times in zip(*pairs, strict=True))
    return {"cpp_ms": mine, "numpy_ms": theirs, "ratios": [b / a for a, b in pairs]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936], help="sizes of the vocabulary")
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 32], help="tokens of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if min(*args.vocab, *args.samplers, args.threads, args.runs) < 1:
        parser.error("all numbers must be positive")
    return args


def main() -> None:
    args = parse_arguments()
    kernels = host_sampling()
    if kernels is None:
        raise SystemExit("the kernels in C++ are not there: `weft doctor` says why")
    torch.set_num_threads(args.threads)
    print(f"{cpu_name()}, {args.threads} threads; ms in C++, in torch and numpy, and how many times as fast")
    results: dict[str, Any] = {}
    for vocab_size in args.vocab:
        for count in args.samplers:
            for name, kind in KINDS.items():
                found = compare(kind, vocab_size, count, args, kernels)
                results[f"{vocab_size} tokens, {count} samplers, {name}"] = found
                mine, theirs = (statistics.median(found[key]) for key in ("cpp_ms", "numpy_ms"))
                ratio = Spread.of(found["ratios"])
                times = f"{mine:8.2f} {theirs:8.2f} {ratio.median:6.1f} ({ratio.low:.1f} to {ratio.high:.1f})"
                print(f"  {vocab_size:7d} {count:3d}  {name:24s} {times}", flush=True)
    if args.json:
        where = surroundings(threads=args.threads)
        write_record(args.json, {**where, "command": command_line("bench.sampling"), "results": results})


if __name__ == "__main__":
    alone.require()
    main()
