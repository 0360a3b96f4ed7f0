"""Many requests that share a long system prompt and arrive together: how much of it is computed more than once?

    python -m bench.shared_prefix [--requests 64] [--shared 2000] [--runs 5] [--without]

Random weights in the shape of Qwen3-0.6B, bfloat16. Prints the tokens that went through a prefill by the engine's own
counter, their ratio to the distinct ones, and the time until all have their tokens. `--without` takes turns with an
engine whose prefix cache is off, and prints the ratio of the times.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.offline import Weft
from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint

UNIQUE_TOKENS, OUTPUT_TOKENS = 30, 8


def prompts(requests: int, shared: int, seed: int) -> list[list[int]]:
    """Random prompts with a common beginning, new for every seed."""
    generator = np.random.default_rng(seed)
    vocabulary = QWEN3_0_6B["vocab_size"]
    prefix = generator.integers(0, vocabulary, shared).tolist()
    return [prefix + generator.integers(0, vocabulary, UNIQUE_TOKENS).tolist() for _ in range(requests)]


def run(engine: Weft, batch: list[list[int]]) -> tuple[float, int]:
    """Seconds, and tokens that went through a prefill."""
    before = engine.loop.run_until_complete(engine.engine.stats()).prefill_tokens
    began = time.perf_counter()
    engine.generate(batch, OUTPUT_TOKENS)
    seconds = time.perf_counter() - began
    return seconds, engine.loop.run_until_complete(engine.engine.stats()).prefill_tokens - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=2000, help="tokens of the shared prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", action="store_true", help="take turns with an engine without a prefix cache")
    args = parser.parse_args()
    pages = args.requests * (args.shared + UNIQUE_TOKENS + OUTPUT_TOKENS) // 16 + 2 * args.requests
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", QWEN3_0_6B, dtype=torch.bfloat16, tokenizer=True)
        engines = {"with": Weft(checkpoint, args.threads, prefix_cache=True, num_pages=pages if args.without else 2000)}
        if args.without:
            engines["without"] = Weft(checkpoint, args.threads, prefix_cache=False, num_pages=pages)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for index in range(args.runs + 1):
            batch = prompts(args.requests, args.shared, index)
            distinct = args.shared + args.requests * UNIQUE_TOKENS
            for name, engine in engines.items():
                seconds, computed = run(engine, batch)
                if index:
                    times[name].append(seconds)
                    ratio = computed / distinct
                    print(f"  {name:8s} {seconds:7.2f} s, {computed} tokens prefilled, {ratio:.4f} x distinct")
        for name, seconds_of_runs in times.items():
            print(
                f"{args.requests} requests over a shared prompt of {args.shared} tokens, prefix cache: {name}: median "
                f"{statistics.median(seconds_of_runs):.2f} s (min {min(seconds_of_runs):.2f}, "
                f"max {max(seconds_of_runs):.2f})"
            )
        if args.without:
            gain = statistics.median(times["without"]) / statistics.median(times["with"])
            print(f"ratio: {gain:.2f}x")
        for engine in engines.values():
            engine.close()
    asyncio.set_event_loop(None)


if __name__ == "__main__":
    main()
