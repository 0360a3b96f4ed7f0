"""What programs cost and gain.

    python -m bench.programs [costs calls policies ...] [--runs 5] [--json FILE]

costs      what Weft adds per token to `generate`, to a loop over distributions and to one over explicit pages, with
           1 to 128 programs, when every step of the device takes 10 ms
calls      a call that only enqueues, and a round trip to an idle engine, trusted and sandboxed
policies   the batching policies of the paper's table 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from pathlib import Path
from typing import Any

from bench.programs.costs import report_calls, report_costs, report_policies

SECTIONS = ("costs", "calls", "policies")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The chosen sections, one after the other."""
    found: dict[str, Any] = {}
    for section in args.sections or SECTIONS:
        match section:
            case "costs":
                found[section] = await report_costs(args.runs, args.programs, args.tokens)
            case "calls":
                found[section] = await report_calls(args.runs)
            case "policies":
                found[section] = await report_policies(args.runs, 64, args.tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=SECTIONS, help="what to measure; default: everything")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each program")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 32, 64, 128])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}")
    found = asyncio.run(measure(args))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
