"""`weft bench serve`: measures a server under load over HTTP, as its clients observe it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from weft.abi.errors import WeftError
from weft.cli.bench.client import Endpoint, LoadClient, Target, open_client
from weft.cli.bench.clock import LoopWatch
from weft.cli.bench.flags import (
    DEFAULT_TIMEOUT_S,
    LOAD_PANEL,
    ApiKey,
    BaseUrl,
    EndpointFlag,
    ExtraBody,
    IgnoreEos,
    InputLengths,
    JsonFile,
    MaxConcurrency,
    ModelName,
    OutputLengths,
    RandomWeights,
    Runs,
    Seed,
    SharedPrefixLen,
    Slo,
    Timeout,
    engine_subject,
    measured_server,
    parsed,
    progress,
    read_extra_body,
    read_slo,
    text_of_random_weights,
)
from weft.cli.bench.lengths import Lengths
from weft.cli.bench.load import closed_loop, is_closed, offer
from weft.cli.bench.measure import Failure, Outcome, Targets
from weft.cli.bench.report import report
from weft.cli.bench.results import Results
from weft.cli.bench.shapes import SINGLE, single_requests
from weft.cli.bench.workload import BenchRequest, arrivals, check_prefix, parse_rate, random_requests, read_requests
from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings

NUM_PROMPTS = 32
OVERVIEW = (
    "requests_per_s",
    "goodput_requests_per_s",
    "output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "e2e_ms_p99",
    "failed_requests",
)
EXAMPLES = """Examples:

  weft bench serve --request-rate 4 --num-prompts 40                     starts a server

  weft bench serve --base-url http://127.0.0.1:8000 --request-rate 1 --request-rate 2 --request-rate inf

  weft bench serve --request-rate 2 --slo ttft:500 --slo tpot:50 --json result.json

  weft bench serve --dataset chat-search --scale 0.1 --max-concurrency 8
"""


def register(group: typer.Typer) -> None:
    """Add the command `serve` to the application."""
    group.command("serve", epilog=EXAMPLES)(serve)


@takes_settings(*ENGINE_KEYS)
def serve(
    settings: Settings,
    model: Model = None,
    base_url: BaseUrl = None,
    model_name: ModelName = None,
    api_key: ApiKey = None,
    endpoint: EndpointFlag = "completions",
    ignore_eos: IgnoreEos = True,
    extra_body: ExtraBody = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    request_rate: Annotated[
        list[str] | None,
        typer.Option(
            "--request-rate",
            "--rate",
            metavar="RATE",
            help="Mean arrival rate per second, Poisson; inf: all at once; repeat for a sweep. (inf)",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = None,
    max_concurrency: MaxConcurrency = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            "--num-requests",
            min=1,
            help=f"Requests per run. ({NUM_PROMPTS}, or all of a file)",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Warm-up requests before the first run.", rich_help_panel=LOAD_PANEL)
    ] = 2,
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="random|SHAPE|FILE",
            help=f"random; a published workload ({', '.join(SINGLE)}); or a JSON-lines file with prompt or messages.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = "random",
    scale: Annotated[
        float,
        typer.Option(
            "--scale", min=0.0001, help="Factor on the lengths of a published workload.", rich_help_panel=LOAD_PANEL
        ),
    ] = 1.0,
    slo: Slo = None,
    input_len: InputLengths = "128",  # type: ignore[assignment]  # typer parses defaults
    output_len: OutputLengths = "32",  # type: ignore[assignment]
    shared_prefix_len: SharedPrefixLen = 0,
    random_weights: RandomWeights = None,
    runs: Runs = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure latency, throughput and goodput of a server, over HTTP with streaming.

    Latency counts from the time at which a request is due, including a wait for --max-concurrency, so a server that
    falls behind cannot hide it. --request-rate inf with --max-concurrency has no schedule: a request is due when an
    earlier one ends.
    """
    lengths = RandomLengths(input_len, output_len, shared_prefix_len)
    extra = read_extra_body(extra_body) | text_of_random_weights(random_weights)
    source = RequestSource(dataset, lengths, scale, num_prompts, endpoint, extra)
    source.check()
    rates = [parsed(parse_rate)(text) for text in request_rate or ["inf"]]
    plan = ServePlan(source, rates, max_concurrency, read_slo(slo), warmup, runs, seed)
    asked = Target(base_url, model_name or model, api_key, endpoint, ignore_eos, timeout)
    with measured_server(settings, asked, random_weights) as target:
        results, name = asyncio.run(_measure(target, plan))
    subject: dict[str, Any] = {
        "model": name,
        "server": base_url or "own",
        "endpoint": endpoint,
        "requests": num_prompts or "all of the file" if source.file else source.num_requests,
        "concurrency": max_concurrency or "unlimited",
        **source.describe(),
        **({} if base_url else engine_subject(settings)),
    }
    notes = results.notes()
    if source.file is not None and runs * len(rates) > 1:
        notes.append("a file's prompts are the same in every run; cached_share shows the reuse in later runs")
    report("serve", results.groups, subject, json_file, overview=OVERVIEW, notes=notes)


class RandomLengths(NamedTuple):
    """Distributions of prompt and answer lengths, and the length of the prefix that all prompts share."""

    inputs: Lengths
    outputs: Lengths
    shared_prefix: int


class RequestSource(NamedTuple):
    """The dataset that the requests of a run are taken from."""

    dataset: str
    lengths: RandomLengths
    scale: float
    num_prompts: int | None
    endpoint: Endpoint
    extra: dict[str, Any]

    @property
    def file(self) -> Path | None:
        """Path of the dataset if it is a file, else None."""
        return None if self.dataset == "random" or self.dataset in SINGLE else Path(self.dataset)

    @property
    def num_requests(self) -> int:
        """Number of requests in a run, unless the dataset is a file."""
        return self.num_prompts or NUM_PROMPTS

    def check(self) -> None:
        """Check the dataset before a server is started. Raises `typer.BadParameter` or `WeftError`."""
        if self.file is not None and not self.file.is_file():
            known = ", ".join(SINGLE)
            raise typer.BadParameter(f"--dataset {self.dataset} is neither a file, random, nor one of {known}")
        if self.scale != 1.0 and self.dataset not in SINGLE:
            raise typer.BadParameter("--scale applies to published workloads; use --input-len and --output-len")
        if self.dataset == "random":
            check_prefix(self.lengths.inputs, self.lengths.shared_prefix)
        self.requests(0)

    def requests(self, seed: int) -> list[BenchRequest]:
        """Return the requests of a run. Prompts depend on the seed, except from a file. Raises `WeftError`."""
        as_text = self.endpoint == "chat"
        if self.file is not None:
            requests = read_requests(self.file, self.lengths.outputs, seed)
            if other := {request.endpoint for request in requests} - {None, self.endpoint}:
                raise WeftError(f"{self.file} has prompts for another endpoint; give --endpoint {other.pop()}")
            if self.num_prompts is not None and self.num_prompts > len(requests):
                raise WeftError(
                    f"{self.file} has {len(requests)} requests and --num-prompts asks for {self.num_prompts}; the same "
                    "prompt twice would be found in the cache"
                )
            requests = requests[: self.num_prompts]
        elif self.dataset in SINGLE:
            requests = single_requests(SINGLE[self.dataset], seed, self.num_requests, self.scale, as_text)
        else:
            requests = random_requests(
                seed,
                count=self.num_requests,
                inputs=self.lengths.inputs,
                outputs=self.lengths.outputs,
                shared_prefix=self.lengths.shared_prefix,
                as_text=as_text,
            )
        return [dataclasses.replace(request, fields=self.extra | request.fields) for request in requests]

    def describe(self) -> dict[str, Any]:
        """Return the dataset's description for the report."""
        if self.dataset != "random":
            return {"dataset": self.dataset, **({} if self.file else {"scale": self.scale})}
        inputs, outputs, shared_prefix = self.lengths
        return {"input": str(inputs), "shared prefix": shared_prefix, "output": str(outputs)}


class ServePlan(NamedTuple):
    """Options of `weft bench serve`: requests, rates, targets, warm-up requests, runs per rate."""

    source: RequestSource
    rates: list[float]
    max_concurrency: int | None
    targets: Targets
    warmup: int
    runs: int
    seed: int


async def _measure(target: Target, plan: ServePlan) -> tuple[Results, str]:
    results = Results(plan.targets)
    async with open_client(target) as client:
        await _warm_up(client, plan)
        for number, rate in enumerate(plan.rates):
            # Different seeds, so that runs share no KV.
            for seed in range(plan.seed + number * plan.runs, plan.seed + (number + 1) * plan.runs):
                outcomes, elapsed, watch = await _run(client, plan, rate, seed)
                results.add(f"rate {rate:g}" if len(plan.rates) > 1 else "", outcomes, elapsed, watch)
    return results, client.model


async def _warm_up(client: LoadClient, plan: ServePlan) -> None:
    requests = plan.source.requests(plan.seed - 1)[: plan.warmup]
    for outcome in await asyncio.gather(*(client.send(request, 0.0) for request in requests)):
        if isinstance(outcome, Failure):
            raise WeftError(f"a request before the first run failed ({outcome.kind}): {outcome.message}")


async def _run(client: LoadClient, plan: ServePlan, rate: float, seed: int) -> tuple[list[Outcome], float, LoopWatch]:
    requests = plan.source.requests(seed)
    with progress(f"rate {rate:g}", len(requests)) as advance:
        async with LoopWatch() as watch:
            if is_closed(rate, plan.max_concurrency):
                outcomes, elapsed = await closed_loop(
                    requests, client.send, concurrency=plan.max_concurrency or 1, on_done=advance
                )
            else:
                outcomes, elapsed = await offer(
                    requests,
                    arrivals(seed, len(requests), rate),
                    client.send,
                    max_concurrency=plan.max_concurrency,
                    on_done=advance,
                )
    return outcomes, elapsed, watch
