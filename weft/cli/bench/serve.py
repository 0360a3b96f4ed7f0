"""`weft bench serve`: a server under load, over HTTP as its clients see it."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer

from weft.cli.bench.client import Load, open_load
from weft.cli.bench.commands import (
    InputLen,
    JsonFile,
    OutputLen,
    RandomWeights,
    Runs,
    Seed,
    SharedPrefixLen,
    with_model,
)
from weft.cli.bench.measure import Targets, Timing, latencies
from weft.cli.bench.report import Run, report
from weft.cli.bench.server import own_server
from weft.cli.bench.workload import arrivals, random_prompts
from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings
from weft.core.errors import WeftError

FIRST_TOKEN, LAST_TOKEN = 100, 1000
"""Prompts are drawn from these ids: ordinary tokens of every vocabulary there is."""

EXAMPLES = """Examples:

  weft bench serve --rate 4 --num-requests 40                   starts a server of its own

  weft bench serve --url http://127.0.0.1:8000 --max-concurrency 8

  weft bench serve --rate 2 --slo-ttft 500 --slo-tpot 50 --json result.json
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("serve", epilog=EXAMPLES)(serve)


@takes_settings(*ENGINE_KEYS)
def serve(
    settings: Settings,
    model: Model = None,
    url: Annotated[
        str | None, typer.Option("--url", envvar="WEFT_URL", help="Of a server that runs; any with OpenAI's API.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="WEFT_API_KEY", help="For that server.")] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", min=1, help="Requests of a run.")] = 32,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Mean arrivals per second, Poisson. (all at once)")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Requests under way; later ones wait in the client.")
    ] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 32,
    shared_prefix_len: SharedPrefixLen = 0,
    slo_ttft: Annotated[float | None, typer.Option("--slo-ttft", help="Goodput: ms to the first token.")] = None,
    slo_tpot: Annotated[float | None, typer.Option("--slo-tpot", help="Goodput: mean ms per further token.")] = None,
    slo_e2e: Annotated[float | None, typer.Option("--slo-e2e", help="Goodput: ms to the last token.")] = None,
    random_weights: RandomWeights = None,
    runs: Runs = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Latency percentiles, throughput and goodput of a server, over HTTP with streaming.

    Time counts from when a request should have been sent, so waiting for --max-concurrency counts too.
    """
    if url is not None and random_weights is not None:
        raise typer.BadParameter("--random-weights is for a server of its own; the one at --url has its model")
    targets = Targets(*(None if ms is None else ms / 1000 for ms in (slo_ttft, slo_tpot, slo_e2e)))
    plan = Plan(num_requests, rate, max_concurrency, input_len, output_len, shared_prefix_len, targets)
    if url is not None:
        measured, name = asyncio.run(_measure(url, model, api_key, plan, runs, seed))
    else:
        settings = with_model(settings, random_weights)
        with own_server(settings) as own_url:
            measured, name = asyncio.run(_measure(own_url, None, None, plan, runs, seed))
    subject: dict[str, Any] = {
        "model": name,
        "server": url or "own",
        "requests": num_requests,
        "rate": rate or "all at once",
        "input": input_len,
        "shared prefix": shared_prefix_len,
        "output": output_len,
    }
    report("serve", {"": measured}, subject, json_file)


class Plan:
    """What every run does."""

    def __init__(
        self,
        num_requests: int,
        rate: float | None,
        max_concurrency: int | None,
        input_len: int,
        output_len: int,
        shared_prefix_len: int,
        targets: Targets,
    ):
        self.num_requests = num_requests
        self.rate = rate
        self.max_concurrency = max_concurrency or num_requests
        self.output_len = output_len
        self.targets = targets
        self._sizes = {"length": input_len, "shared_prefix": shared_prefix_len}

    def prompts(self, seed: int, count: int) -> list[list[int]]:
        """The prompts of a run."""
        return random_prompts(seed, range(FIRST_TOKEN, LAST_TOKEN), count=count, **self._sizes)


async def _measure(
    url: str, model: str | None, api_key: str | None, plan: Plan, runs: int, seed: int
) -> tuple[list[Run], str]:
    async with open_load(url, model, api_key) as load:
        await asyncio.gather(*(load.complete(prompt, plan.output_len) for prompt in plan.prompts(seed - 1, 2)))
        return [await _run(load, plan, seed + index) for index in range(runs)], load.model


async def _run(load: Load, plan: Plan, seed: int) -> Run:
    prompts = plan.prompts(seed, plan.num_requests)
    slots = asyncio.Semaphore(plan.max_concurrency)
    began = time.perf_counter()

    async def one(prompt: list[int], at: float) -> Timing | WeftError:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        async with slots:
            try:
                timing = await load.complete(prompt, plan.output_len)
            except WeftError as error:
                return error
        return Timing(began + at, timing.came_s, timing.num_tokens)

    schedule = arrivals(seed, plan.num_requests, plan.rate)
    outcomes = await asyncio.gather(*(one(prompt, at) for prompt, at in zip(prompts, schedule, strict=True)))
    elapsed = time.perf_counter() - began
    timings = [outcome for outcome in outcomes if isinstance(outcome, Timing)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, WeftError)]
    if not timings:
        raise WeftError(f"no request succeeded; the first error: {errors[0].message}")
    figures = {
        **latencies(timings),
        "requests_per_s": len(timings) / elapsed,
        "output_tokens_per_s": sum(timing.num_tokens for timing in timings) / elapsed,
        "failed_requests": float(len(errors)),
    }
    if plan.targets != Targets():
        figures["goodput_requests_per_s"] = sum(map(plan.targets.kept_by, timings)) / elapsed
    return figures
