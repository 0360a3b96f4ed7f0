"""`weft bench throughput`: many prompts at once through the offline API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from weft.cli.bench.flags import (
    InputLengths,
    JsonFile,
    OutputLen,
    RandomWeights,
    Runs,
    Seed,
    SharedPrefixLen,
    engine_subject,
    with_model,
)
from weft.cli.bench.lengths import Lengths
from weft.cli.bench.report import Run, report
from weft.cli.bench.workload import random_prompts
from weft.cli.local import local_llm
from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings

if TYPE_CHECKING:
    from weft.llm import LLM


class Sizes(TypedDict):
    """Lengths of a run's prompts."""

    lengths: Lengths
    shared_prefix: int


EXAMPLES = """Examples:

  weft bench throughput --num-prompts 64 --input-len 128 --output-len 64

  weft bench throughput --random-weights qwen3-0.6b --shared-prefix-len 96 --json result.json
"""


def register(group: typer.Typer) -> None:
    """Add the command `throughput` to the application."""
    group.command("throughput", epilog=EXAMPLES)(throughput)


@takes_settings(*ENGINE_KEYS)
def throughput(
    settings: Settings,
    model: Model = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts per run.")] = 64,
    input_len: InputLengths = "128",  # type: ignore[assignment]  # typer parses defaults
    output_len: OutputLen = 64,
    shared_prefix_len: SharedPrefixLen = 0,
    random_weights: RandomWeights = None,
    runs: Runs = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the throughput of prompts that start together, in this process, through weft.LLM.

    A small run is a warm-up. Every run has its own prompts, so runs share no KV.
    """
    settings = with_model(settings, random_weights)
    with local_llm(settings.config.engine) as llm:
        tokens = [token for token in range(llm.tokenizer.vocab_size) if token not in llm.tokenizer.special_ids]
        sizes: Sizes = {"lengths": input_len, "shared_prefix": shared_prefix_len}
        _run(llm, random_prompts(seed - 1, tokens, count=min(8, num_prompts), **sizes), min(8, output_len))
        measured = [
            _run(llm, random_prompts(seed + index, tokens, count=num_prompts, **sizes), output_len)
            for index in range(runs)
        ]
        subject = {
            "model": llm.info.model,
            "device": llm.info.device,
            "dtype": llm.info.dtype,
            "prompts": num_prompts,
            "input": str(input_len),
            "shared prefix": shared_prefix_len,
            "output": output_len,
            **engine_subject(settings),
        }
    report("throughput", {"": measured}, subject, json_file)


def _run(llm: LLM, prompts: list[list[int]], output_len: int) -> Run:
    before = llm.stats()
    began = time.perf_counter()
    results = llm.generate(prompts, progress=False, temperature=0.0, max_tokens=output_len, ignore_eos=True)
    elapsed = time.perf_counter() - began
    after = llm.stats()
    prompt_tokens = sum(map(len, prompts))
    output_tokens = sum(result.num_output_tokens for result in results)
    steps = after.steps - before.steps
    return {
        "seconds": elapsed,
        "requests_per_s": len(prompts) / elapsed,
        "output_tokens_per_s": output_tokens / elapsed,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / elapsed,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": after.prefix_hits - before.prefix_hits,
        "output_tokens": output_tokens,
        "steps": steps,
        "device_ms_per_step": 1000 * (after.step_device_s - before.step_device_s) / max(1, steps),
        "host_ms_per_step": 1000 * (after.step_host_s - before.step_host_s) / max(1, steps),
        "preemptions": after.preemptions - before.preemptions,
    }
