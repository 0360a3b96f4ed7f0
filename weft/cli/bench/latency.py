"""`weft bench latency`: latencies at fixed batch sizes, from an engine process."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.bench.flags import (
    InputLen,
    JsonFile,
    OutputLen,
    RandomWeights,
    Runs,
    Seed,
    engine_subject,
    with_model,
)
from weft.cli.bench.lengths import fixed
from weft.cli.bench.measure import Timing, latencies
from weft.cli.bench.report import Run, report
from weft.cli.bench.workload import random_prompts
from weft.cli.loading import loading_progress
from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings

if TYPE_CHECKING:
    from weft.programs.runtime import Runtime

OVERVIEW = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "e2e_ms_p50", "output_tokens_per_s")
EXAMPLES = """Examples:

  weft bench latency --batch-size 1 --batch-size 8

  weft bench latency --random-weights qwen3-0.6b --input-len 512 --output-len 32
"""


def register(group: typer.Typer) -> None:
    """Add the command `latency` to the application."""
    group.command("latency", epilog=EXAMPLES)(latency)


@takes_settings(*ENGINE_KEYS)
def latency(
    settings: Settings,
    model: Model = None,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", min=1, help="Number of concurrent requests; repeat for several.")
    ] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 32,
    random_weights: RandomWeights = None,
    runs: Runs = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure time to first token and between tokens, for batches that start together, without HTTP."""
    settings = with_model(settings, random_weights)
    sizes = batch_size or [1]
    groups, subject = asyncio.run(_measure(settings, sizes, input_len, output_len, runs, seed))
    subject |= {"input": input_len, "output": output_len, **engine_subject(settings)}
    report("latency", groups, subject, json_file, overview=OVERVIEW)


async def _measure(
    settings: Settings, sizes: list[int], input_len: int, output_len: int, runs: int, seed: int
) -> tuple[dict[str, list[Run]], dict[str, Any]]:
    from weft.engine.supervisor import ProcessEngine
    from weft.programs.runtime import Runtime
    from weft.tokenizers.load import load_tokenizer

    config = settings.config.engine
    tokenizer = load_tokenizer(config.model, config.revision, config.offline)
    engine = ProcessEngine(config, progress=loading_progress(config.model))
    runtime = Runtime(engine, tokenizer)
    try:
        info = await engine.wait_ready()
        tokens = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
        groups: dict[str, list[Run]] = {}
        lengths = fixed(input_len)
        for number, size in enumerate(sizes):
            # Different seeds, so that batches share no KV. The first batch is a warm-up.
            first = seed + number * (runs + 1)
            measured = [
                await _batch(runtime, random_prompts(first + index, tokens, count=size, lengths=lengths), output_len)
                for index in range(runs + 1)
            ]
            groups[f"batch size {size}"] = measured[1:]
    finally:
        await engine.close()
    return groups, {"model": config.model, "device": info.device, "dtype": info.dtype}


async def _batch(runtime: Runtime, prompts: list[list[int]], output_len: int) -> Run:
    began = time.perf_counter()
    timings = await asyncio.gather(*(_request(runtime, prompt, output_len) for prompt in prompts))
    elapsed = time.perf_counter() - began
    num_tokens = sum(timing.num_output_tokens for timing in timings)
    return {**latencies(timings), "output_tokens_per_s": num_tokens / elapsed}


async def _request(runtime: Runtime, prompt: list[int], output_len: int) -> Timing:
    from weft.core.ids import pack_tokens
    from weft.core.sampling import SamplingParams, StopParams
    from weft.programs.builtin import completion
    from weft.programs.types import Caller, CompletionArgs

    args = CompletionArgs(
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=output_len, ignore_eos=True),
    )
    sent = time.perf_counter()
    came: list[float] = []
    async for chunk in completion.main(args, Caller(), runtime):
        # Tokens of one step arrive together, without a gap.
        came += [time.perf_counter()] * len(chunk.tokens)
    return Timing(sent, sent, came, len(came), len(prompt))
