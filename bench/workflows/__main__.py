"""Workflows: clients that send calls one by one, and Weft, on the same server.

    python -m bench.workflows [--workloads trading,debate_mmlu,...] [--contenders clients,weft,...]
                              [--pools small,large] [--scale 8] [--calls 150] [--runs 3]
                              [--json FILE [--resume]] [--vllm-python PATH]

The eight workflows of Helium's section 7 with all lengths divided by `--scale`, and rows cut to about `--calls` calls.
The model has random weights (`--model`, a shape), and every call generates a fixed number of letters, greedily.

Contenders take turns, with the prefix cache on and each run with a cache salt of its own, so that none finds KV of
another. `query-wise`, `operator-wise` and `clients` (asynchronous) are plain HTTP clients: one row after the other, one
operator after the other, and every call as soon as its inputs are there. `weft` gives the server the graph and the
rows. All of these share one `weft serve`. `vllm` is `clients` on vLLM's server, which is up beside it and has as many
KV tokens. Not run unless they are asked for: `weft-unplanned` and `weft-unoptimised`, without plans and without the
optimiser; `weft-unordered`, `weft-unpinned` and `weft-turnless`, without one of the uses of plans (`planning`);
`weft-uncached`, without the prompt cache, which is cold for the others; `weft-unmerged`, with a field that tells equal
calls of a row apart; and `weft-api`, the graph run in the client over the API of the others, without plans and
optimiser. All others of `weft` make equal calls once; `--no-duplicates` replaces equal calls by such that begin alike.

Pools: `large` holds the trie of all prompts and outputs, `small` a third of it (or the longest call, if that is more).
Figures: seconds, tokens that were computed from prompts (prompt less cached, as the server says) over the *minimum*
(tokens of that trie that no call decodes), and the time of `clients` over that of the contender in the same turn. With
`--profile`, seconds also stand over the *lower bound*: the larger of all work and of the longest chain of calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import weft
from bench import alone
from bench.peers.vllm_cpu import PYTHON_VARIABLE, vllm_server
from bench.resume import continued
from bench.workflows.clients import STRATEGIES, Answers, GraphClient, Used, run_clients
from bench.workflows.floor import PAGE_SIZE, POOLS, Floor, FloorEngines, floor_of
from bench.workflows.shapes import SHAPES, Workload, salted, told_apart, workload
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, heading, surroundings, write_record
from weft.cli.bench.server import own_server
from weft.cli.random_weights import SHAPES as MODELS
from weft.cli.random_weights import random_weights
from weft.cli.settings import load
from weft.client import Client
from weft.config import EngineConfig
from weft.core.cost.profile import decode_profile
from weft.core.ids import unpack_tokens
from weft.tokenizers.chats import ChatPrompt, render
from weft.tokenizers.load import load_tokenizer
from weft.worker.build import step_tokens
from weft.worker.memory import usable_cores
from weft.worker.sizing import kernel_threads
from weft.workflow.targets import RunOptions

VLLM = "vllm"
REFERENCE = "clients"
UNMERGED = "weft-unmerged"
WEFT: Mapping[str, RunOptions] = {
    "weft": {},
    "weft-unplanned": {"planning": False},
    "weft-unordered": {"planning": {"order": False}},
    "weft-unpinned": {"planning": {"pins": False}},
    "weft-turnless": {"planning": {"turns": False}},
    "weft-unoptimised": {"optimise": False},
    "weft-uncached": {"cache": False},
    UNMERGED: {},
}
"""Contender -> options of its run."""
USUAL = (*STRATEGIES, "weft", VLLM)
CONTENDERS = (*USUAL, "weft-api", *(name for name in WEFT if name not in USUAL))
_salts = count()


class Found(NamedTuple):
    """One run of a contender."""

    seconds: float
    used: Used
    answers: Answers


@contextlib.contextmanager
def weft_server(checkpoint: Path, kv_tokens: int | None) -> Iterator[str]:
    """`weft serve`, ready: its URL. None: as much KV as it holds unless told otherwise."""
    values: dict[str, Any] = {
        "engine.model": str(checkpoint),
        "engine.dtype": "bfloat16",
        "engine.page_size": PAGE_SIZE,
        "engine.num_pages": None if kv_tokens is None else kv_tokens // PAGE_SIZE,
        "programs.start": "off",
    }
    with own_server(load(flags={key: ("the benchmark", value) for key, value in values.items()})) as url:
        yield url


def run_weft(contender: str, work: Workload, url: str, salt: str) -> Found:
    """Run a workload as a graph."""
    graph = salted(work, salt)
    flow = weft.Workflow(told_apart(graph) if contender == UNMERGED else graph)
    began = time.perf_counter()
    if contender == "weft-api":
        results = flow.run(work.rows, on=f"{url}/v1", optimise=False, progress=False)
    else:
        with Client(url) as client:
            results = flow.run(work.rows, on=client, progress=False, **WEFT[contender])
    seconds = time.perf_counter() - began
    if results.errors:
        raise RuntimeError(f"row {results.errors[0].row} failed: {results.errors[0].message}")
    calls = results.counts.calls
    answers = {(row.row, name): text for row in results for name, text in row.outputs.items()}
    return Found(seconds, Used(calls.prompt_tokens, calls.cached_tokens, calls.output_tokens), answers)


def run_once(contender: str, work: Workload, url: str, model: str) -> Found:
    """One run."""
    salt = f"run{next(_salts)}"
    if contender.startswith("weft"):
        return run_weft(contender, work, url, salt)
    began = time.perf_counter()
    strategy = REFERENCE if contender == VLLM else contender
    client = asyncio.run(run_clients(strategy, work, url, model, salt))
    return Found(time.perf_counter() - began, client.used, client.answers)


def floor_here(args: argparse.Namespace, work: Workload, checkpoint: Path, kv_tokens: int) -> Floor:
    """Run a workload once, and count the tokens of its calls; the bound is of an engine with so many KV tokens."""
    tokenizer = load_tokenizer(str(checkpoint))
    with weft_server(checkpoint, None) as url:
        client: GraphClient = asyncio.run(run_clients(REFERENCE, work, url, str(checkpoint), "size"))

    def encoded(text: str) -> list[int]:
        ids: list[int] = unpack_tokens(tokenizer.encode(text, add_special_tokens=False)).tolist()
        return ids

    calls = {
        call: (encoded(render(ChatPrompt(messages=messages[:-1]), tokenizer)), encoded(messages[-1]["content"]))
        for call, messages in client.conversations.items()
    }
    if sum(len(prompt) for prompt, _ in calls.values()) != client.used.prompt:
        raise RuntimeError("the benchmark renders prompts otherwise than the server")
    engines = None
    if args.profile is not None:
        forward = decode_profile(args.profile.read_bytes()).forward
        config = EngineConfig()
        engines = FloorEngines(forward, kv_tokens, config.max_running, step_tokens(config))
    return floor_of(work.graph, calls, engines)


# The comparison


def measure(args: argparse.Namespace, record: dict[str, Any], checkpoint: Path) -> None:
    """Measure what the record lacks; it is written after each turn."""
    for name in args.workloads:
        work = workload(name, args.scale, args.calls, duplicates=not args.no_duplicates)
        found = record["results"].setdefault(name, {})
        if "floor" not in found:
            generous = sum(len(text) for row in work.rows for text in row.values()) + work.num_calls * 4000
            floor = floor_here(args, work, checkpoint, -(-generous // PAGE_SIZE) * PAGE_SIZE)
            found |= {"rows": len(work.rows), "calls": work.num_calls, "floor": floor._asdict(), "pools": {}}
            keep(args, record)
        floor = Floor(**found["floor"])
        print(f"{name}: {len(work.rows)} rows, {work.num_calls} calls, {floor}", flush=True)
        for pool in args.pools:
            kv_tokens = floor.pool_tokens(POOLS[pool])
            runs = found["pools"].setdefault(pool, {"kv_tokens": kv_tokens, "runs": {}})["runs"]
            if any(len(runs.get(contender, [])) < args.runs for contender in args.contenders):
                with servers(args.contenders, checkpoint, kv_tokens, floor.longest + PAGE_SIZE) as places:
                    take_turns(args, record, runs, places, work, checkpoint)
            print("\n".join(summary(pool, runs, floor)), flush=True)


class Place(NamedTuple):
    """Where a contender's calls go."""

    url: str
    alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Within, nothing else computes."""


@contextlib.contextmanager
def servers(
    contenders: Sequence[str], checkpoint: Path, kv_tokens: int, max_context: int
) -> Iterator[dict[str, Place]]:
    """The servers of these contenders, which are up together. All but `vllm` share one; it takes no processor time
    while it waits for calls, and vLLM's, which does, is stopped while others have their turns."""
    with contextlib.ExitStack() as stack:
        places = dict.fromkeys(contenders, Place(""))
        alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if VLLM in contenders:
            threads = kernel_threads(None, usable_cores())
            peer = stack.enter_context(vllm_server(checkpoint, threads, kv_tokens, max_context))
            places[VLLM], alone = Place(peer.url), peer.stopped
        if own := [contender for contender in contenders if contender != VLLM]:
            with alone():
                url = stack.enter_context(weft_server(checkpoint, kv_tokens))
            places |= dict.fromkeys(own, Place(url, alone))
        yield places


def take_turns(
    args: argparse.Namespace, record: dict[str, Any], runs: dict[str, list[Any]], places: Mapping[str, Place],
    work: Workload, checkpoint: Path,
) -> None:  # fmt: skip
    """All contenders after each other, `--runs` times."""
    begun = min(len(runs.get(contender, [])) for contender in places)

    def run(contender: str) -> Found:
        with places[contender].alone():
            return run_once(contender, work, places[contender].url, str(checkpoint))

    if not begun:
        for contender in {place.url: contender for contender, place in places.items()}.values():
            run(contender)  # warm: once on each server
    for turn in range(begun, args.runs):
        answers: Answers | None = None
        for contender in places:
            if len(runs.get(contender, [])) > turn:
                continue  # the file has it
            found = run(contender)
            answers = answers or found.answers
            differ = sum(found.answers[call] != text for call, text in answers.items())
            told = {"seconds": found.seconds, **found.used._asdict(), "answers_that_differ": differ}
            runs.setdefault(contender, []).append(told)
            print(f"  {contender}: {told}", flush=True)
        keep(args, record)


def keep(args: argparse.Namespace, record: dict[str, Any]) -> None:
    if args.json:
        write_record(args.json, record)


def summary(pool: str, runs: dict[str, list[dict[str, Any]]], floor: Floor) -> list[str]:
    """A line for each contender."""
    lines = [f"  {pool} pool"]
    for contender, found in runs.items():
        seconds = Spread.of([run["seconds"] for run in found])
        computed = statistics.median((run["prompt"] - run["cached"]) / floor.minimum for run in found)
        ratios = [other["seconds"] / run["seconds"] for other, run in zip(runs.get(REFERENCE, []), found, strict=False)]
        ratio = f", {Spread.of(ratios).text(2)} x clients" if ratios else ""
        bound = f", {seconds.median / floor.seconds:.2f} x lower bound" if floor.seconds else ""
        lines.append(f"    {contender:14} {seconds.text(2)} s, prefill {computed:.2f} x minimum{bound}{ratio}")
    return lines


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.workflows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {"workloads": SHAPES, "contenders": CONTENDERS, "pools": POOLS}
    for name, known in names.items():
        usual = USUAL if name == "contenders" else known
        parser.add_argument(f"--{name}", default=",".join(usual), help=f"comma-separated: {', '.join(known)}")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.1b", help="random weights in this shape")
    parser.add_argument("--scale", type=float, default=8.0, help="divides all lengths (8)")
    parser.add_argument("--calls", type=int, default=150, help="of a workload, about; at least one row (150)")
    parser.add_argument("--runs", type=int, default=3, help="of each contender (3)")
    parser.add_argument(
        "--profile", type=Path, help="what `weft profile CHECKPOINT --json` wrote: gives the lower bound in time"
    )
    parser.add_argument("--no-duplicates", action="store_true", help="no two calls of a row are equal")
    parser.add_argument("--vllm-python", help=f"the interpreter of an environment with vLLM ({PYTHON_VARIABLE})")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file has")
    args = parser.parse_args(arguments)
    for name, known in names.items():
        given = [one for one in getattr(args, name).split(",") if one]
        if unknown := [one for one in given if one not in known]:
            parser.error(f"--{name}: no {', '.join(unknown)}; there are {', '.join(known)}")
        setattr(args, name, given)
    if args.scale <= 0 or min(args.calls, args.runs) < 1:
        parser.error("--scale, --calls and --runs must be positive")
    if args.resume and not args.json:
        parser.error("--resume needs --json, the file to continue")
    if args.vllm_python:
        os.environ[PYTHON_VARIABLE] = args.vllm_python
    elif VLLM in args.contenders and PYTHON_VARIABLE not in os.environ:
        print("vllm: no figure, it is not installed (--vllm-python)", file=sys.stderr)
        args.contenders.remove(VLLM)
    return args


def main() -> None:
    args = parse_arguments()
    alone.require()
    asked = {"model": args.model, "scale": args.scale, "calls": args.calls, "duplicates": not args.no_duplicates}
    record: dict[str, Any] = {**surroundings(), "command": command_line("bench.workflows"), "asked": asked}
    record["results"] = {}
    if args.resume:
        record = continued(args.json, record)
    print(heading(record))
    measure(args, record, random_weights(args.model, print))


if __name__ == "__main__":
    main()
