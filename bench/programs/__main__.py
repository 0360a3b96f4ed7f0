"""Costs and gains of programs.

    python -m bench.programs [costs calls policies share launch apps functions attention ...] [--runs 5] [--json FILE]

On a device whose every step takes a fixed time:

costs      what Weft adds per token to `generate`, to a loop over distributions and to one over explicit pages, with
           1 to 128 programs, when every step takes 10 ms
calls      a call that only enqueues, and a round trip to an idle engine, trusted and sandboxed
policies   the batching policies of the paper's table 5
share      the same programs on random weights in the shape of Llama 3.2 1B: the device's time, and the rest
launch     one launch beside --burst programs that are paused, bursts of as many, and the memory of --paused programs:
           trusted, core Wasm, sandboxed Python

On a model, served by `weft serve` in a process of its own:

apps       each application as a program beside the model and, with the same logic, as a client of /v1/completions
           30 ms away (15 ms before and after each request, the one that launches the program too). Tools are an HTTP
           server of the benchmark, 0 ms away from both. Agents (8, 8 and 32 inputs and outputs), tree, recursion,
           graph and skeleton of thought, prefix caching, prompt lookup. Token counts are forced, so that both sides
           compute the same number; seconds at 1 program, programs per second at more. `gain` is the client's time
           by the program's; `pairs`: least and greatest of a pair of runs. All of it shares this machine's cores
functions  the paper's figure 7: a function-calling agent as a remote client, as a program, and with specifications of
           APIs taken from an export (they then see themselves only, at their place: modular caching), calls that are
           not awaited, and specifications dropped after their use; each step on top of those before
attention  long outputs with full, windowed and sink attention: tokens per second and KV pages held

Examples:

    python -m bench.programs launch --runs 3
    python -m bench.programs apps --apps react swarm --programs 1 8 --trusted
    python -m bench.programs apps --against http://127.0.0.1:9000 --against-model weft-tiny
    python -m bench.programs attention --random-shape qwen3-0.6b --length 300 --programs 1
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from bench import alone
from bench.programs.applications import APPLICATIONS
from bench.programs.apps import Options, report_apps
from bench.programs.attention import Lengths, report_attention
from bench.programs.costs import report_calls, report_costs, report_policies
from bench.programs.functions import report_functions
from bench.programs.launch import Sizes, report_launch
from bench.programs.served import RANDOM_SHAPES, Peer
from bench.programs.share import report_share
from weft.cli.bench.record import command_line, heading, surroundings, write_record

SECTIONS = ("costs", "calls", "policies", "share", "launch", "apps", "functions", "attention")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The chosen sections, one after the other."""
    found: dict[str, Any] = {}
    model = args.random_shape or args.model
    peer = Peer(args.against, args.against_model) if args.against else None
    served = Options(args.runs, args.programs or (1, 8, 64), model, args.trusted, args.apps, args.threads, peer)
    for section in args.sections or SECTIONS:
        match section:
            case "costs":
                found[section] = await report_costs(args.runs, args.programs or [1, 32, 64, 128], args.tokens)
            case "calls":
                found[section] = await report_calls(args.runs)
            case "policies":
                found[section] = await report_policies(args.runs, 64, args.tokens)
            case "share":
                found[section] = await report_share(args.runs, args.programs or [1, 8], min(args.tokens, 24))
            case "launch":
                found[section] = await report_launch(args.runs, Sizes(args.burst, args.paused))
            case "apps":
                found[section] = await report_apps(served)
            case "functions":
                found[section] = await report_functions(served)
            case "attention":
                few = served._replace(programs=args.programs or (1, 8))
                found[section] = await report_attention(few, Lengths(tokens=args.length, window=args.window))
    return found


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m bench.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("sections", nargs="*", metavar="SECTION", help="what to measure; default: everything")
    found.add_argument("--runs", type=int, default=5, help="medians are of so many (5)")
    found.add_argument(
        "--programs",
        type=int,
        nargs="+",
        help="at once (costs: 1 32 64 128; apps, functions: 1 8 64; attention: 1 8)",
    )
    found.add_argument("--json", type=Path, help="write the figures to this file too, with machine and versions")
    found.add_argument("--tokens", type=int, default=100, help="costs, policies: tokens of each program (100)")
    found.add_argument("--burst", type=int, default=Sizes().burst, help="launch: programs of a burst (896)")
    found.add_argument("--paused", type=int, default=Sizes().paused, help="launch: programs that wait (1000)")
    found.add_argument("--apps", nargs="+", choices=APPLICATIONS, default=list(APPLICATIONS), help="apps: which ones")
    found.add_argument("--model", default="weft-tiny", help="apps, functions, attention: as for weft serve (weft-tiny)")
    found.add_argument("--random-shape", choices=list(RANDOM_SHAPES), help="random weights in this shape instead")
    found.add_argument("--trusted", action="store_true", help="the server trusts the programs: no sandbox")
    found.add_argument("--threads", type=int, help="of the served engine's kernels (half the cores)")
    found.add_argument("--against", metavar="URL", help="apps, functions: clients ask this server of the OpenAI API")
    found.add_argument("--against-model", default="", metavar="NAME", help="what it calls the same weights")
    found.add_argument("--length", type=int, default=Lengths().tokens, help="attention: tokens generated (1500)")
    found.add_argument("--window", type=int, default=Lengths().window, help="attention: tokens seen (256)")
    return found


def main() -> None:
    parsing = parser()
    args = parsing.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parsing.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    where = surroundings()
    print(heading(where))
    found = asyncio.run(measure(args))
    if args.json is not None:
        write_record(args.json, {**where, "command": command_line("bench.programs"), "results": found})


if __name__ == "__main__":
    alone.require()
    main()
