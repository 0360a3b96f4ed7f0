"""`weft bench shared-prefix`: requests with one long common prefix, with and without the prefix cache."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weft.cli.bench.flags import JsonFile, RandomWeights, Runs, Seed, with_model
from weft.cli.bench.lengths import fixed
from weft.cli.bench.report import Run, report
from weft.cli.bench.workload import random_prompts
from weft.cli.local import local_llm
from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings

if TYPE_CHECKING:
    from weft.llm import LLM

WITH, WITHOUT, RATIO = "prefix cache", "no prefix cache", "without / with"
EXAMPLES = """Examples:

  weft bench shared-prefix --num-prompts 16 --shared-prefix-len 1024

  weft bench shared-prefix --random-weights qwen3-0.6b --num-prompts 64 --shared-prefix-len 2000 --json result.json
"""


def register(group: typer.Typer) -> None:
    """Add the command `shared-prefix` to the application."""
    group.command("shared-prefix", epilog=EXAMPLES)(shared_prefix)


@takes_settings(*ENGINE_KEYS)
def shared_prefix(
    settings: Settings,
    model: Model = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts per run.")] = 32,
    shared_prefix_len: Annotated[
        int, typer.Option("--shared-prefix-len", min=1, help="Length of the prefix that all prompts of a run share.")
    ] = 512,
    own_len: Annotated[int, typer.Option("--own-len", min=1, help="Tokens of each prompt after the prefix.")] = 32,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens per answer.")] = 8,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Alternate with an engine without the prefix cache.")
    ] = True,
    random_weights: RandomWeights = None,
    runs: Runs = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure prefix reuse: tokens computed and time, with and without the prefix cache.

    All requests start together, in this process, through weft.LLM. The engines alternate; the ratio is of neighbouring
    runs.
    """
    settings = with_model(settings, random_weights)
    config = settings.config.engine
    groups: dict[str, list[Run]] = {title: [] for title in ((WITH, WITHOUT, RATIO) if compare else (WITH,))}
    with contextlib.ExitStack() as stack:
        engines = {
            title: stack.enter_context(local_llm(msgspec.structs.replace(config, prefix_cache=title == WITH)))
            for title in groups
            if title != RATIO
        }
        info = engines[WITH].info
        tokenizer = engines[WITH].tokenizer
        tokens = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
        for index in range(runs + 1):
            # The first run is a warm-up. Each run has its own prefix, so runs share no KV.
            prompts = random_prompts(
                seed + index - 1,
                tokens,
                count=num_prompts,
                lengths=fixed(shared_prefix_len + own_len),
                shared_prefix=shared_prefix_len,
            )
            found = {title: _run(llm, prompts, shared_prefix_len, output_len) for title, llm in engines.items()}
            if index:
                for title, run in found.items():
                    groups[title].append(run)
                if compare:
                    groups[RATIO].append({"seconds_ratio": found[WITHOUT]["seconds"] / found[WITH]["seconds"]})
    subject = {
        "model": info.model,
        "device": info.device,
        "dtype": info.dtype,
        "prompts": num_prompts,
        "shared prefix": shared_prefix_len,
        "own": own_len,
        "output": output_len,
        **({} if config.quantization is None else {"quantization": config.quantization}),
    }
    report("shared-prefix", groups, subject, json_file)


def _run(llm: LLM, prompts: list[list[int]], shared: int, output_len: int) -> Run:
    before = llm.stats()
    began = time.perf_counter()
    llm.generate(prompts, progress=False, temperature=0.0, max_tokens=output_len, ignore_eos=True)
    elapsed = time.perf_counter() - began
    after = llm.stats()
    distinct = shared + sum(len(prompt) - shared for prompt in prompts)
    computed = after.prefill_tokens - before.prefill_tokens
    return {
        "seconds": elapsed,
        "requests_per_s": len(prompts) / elapsed,
        "prompt_tokens": sum(map(len, prompts)),
        "distinct_tokens": distinct,
        "computed_tokens": computed,
        "computed_per_distinct": computed / distinct,
        "cached_tokens": after.prefix_hits - before.prefix_hits,
        "preemptions": after.preemptions - before.preemptions,
    }
