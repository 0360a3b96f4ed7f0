"""Policies for KV that waits behind a slow link: the requests of `bench.interception`, played on the machine that one
of its results has measured.

    python -m bench.simulated_link [--measured FILE] [--rate 0.08] [--requests 40] [--seeds 16]
                                   [--json FILE] [--resume] [--jobs 1] [--most N]

One run of these requests takes a server a quarter of an hour and says little: close to overload, a page more or less
changes the order of everything after it, and the latency by a sixth. Here every contender plays many seeds, each in
three pools that differ by two pages. Latencies are given as ratios to `lru` with the same tier and the same requests.
The same file gives the same figures on any machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.interception import PAGE_SIZE, POOL_SHARE, drawn, link_model, live_contexts, parse_arguments
from bench.simulations import Simulations, add_arguments, find_parts, gather
from weft.cli.bench.record import heading, surroundings
from weft.sim.devices import Device
from weft.sim.run import SimulationSettings, simulate
from weft.sim.scripts import SessionScript

MEASURED = Path(__file__).parent / "results/interception-epyc-zen3-2-cores.json"
MORE_PAGES = (-2, 0, 2)
TIERS = (0.0, 0.15, 0.4, 1.0)
"""Host tiers, as parts of the greatest sum of live contexts; 0: none."""

Found = Mapping[str, Any]


class Machine(NamedTuple):
    """What was measured, and the requests."""

    measured: Path
    rate: float
    requests: int

    def device(self, num_pages: int) -> Device:
        """The machine, with its throttled link and so many pages."""
        found = json.loads(self.measured.read_text("utf-8"))
        link = link_model(found["sizes"]["link_gbs"], found["sources"]["kv_bytes_per_token"])
        told = {name: found["profile"][name] for name in ("forward", "saturation_tokens", "beside_out", "beside_in")}
        known = {"name": "measured", "about": self.measured.name, "kv_tokens": num_pages * PAGE_SIZE}
        return msgspec.convert({**known, **told, "swap_out": link, "swap_in": link}, Device, from_attributes=True)

    def sessions(self, seed: int) -> list[SessionScript]:
        """The requests of a seed."""
        asked = ["--rate", str(self.rate), "--requests", str(self.requests), "--seed", str(seed)]
        return drawn(parse_arguments(asked))


@functools.cache
def peak_tokens(machine: Machine, seed: int) -> int:
    """The greatest sum of the context tokens of all requests under way."""
    return live_contexts(machine.device(1), machine.sessions(seed)).peak


class LinkCase(NamedTuple):
    """A policy with a tier, for requests and a pool."""

    machine: Machine
    policy: str
    tier: float
    seed: int
    more_pages: int
    """Beyond the pool of `bench.interception`."""
    estimator: str = "learned"

    @property
    def key(self) -> str:
        """As `bench.simulations.Case`."""
        policy = self.policy if self.estimator == "learned" else f"{self.policy} ({self.estimator})"
        load = f"{self.machine.requests} requests at {self.machine.rate:g}/s"
        return f"{policy}, tier {self.tier:g}, {load}, seed {self.seed}, {self.more_pages:+d} pages"

    def run(self) -> dict[str, Any]:
        """A `Summary`."""
        sessions, peak = self.machine.sessions(self.seed), peak_tokens(self.machine, self.seed)
        longest = max(session.num_tokens for session in sessions)
        pages = max(-(-round(peak * POOL_SHARE) // PAGE_SIZE), -(-longest // PAGE_SIZE) + 2 - min(MORE_PAGES))
        settings = SimulationSettings(
            policy=self.policy, estimator=self.estimator, host_tokens=int(peak * self.tier), driving="clients"
        )
        return simulate(self.machine.device(pages + self.more_pages), sessions, settings).summary._asdict()


def contenders() -> list[tuple[str, float, str]]:
    """(policy, tier, estimator)."""
    return [*product(("lru", "min_waste"), TIERS, ("learned",)), ("min_waste", TIERS[-1], "oracle")]


def compared(find: Simulations, machine: Machine, seeds: Iterable[int]) -> Found:
    """By contender, over all seeds and pools: the median of latencies; the geometric mean of their ratios to those of
    `lru` with the same tier, with its standard error over seeds; tokens computed again, as a part of those of `lru`."""
    pools = list(product(seeds, MORE_PAGES))
    cases = [LinkCase(machine, p, tier, seed, more, e) for (p, tier, e), (seed, more) in product(contenders(), pools)]
    found = gather(find, cases)
    table: dict[str, dict[str, float]] = {}
    for policy, tier, estimator in contenders():
        own = [found[LinkCase(machine, policy, tier, *pool, estimator)] for pool in pools]
        base = [found[LinkCase(machine, "lru", tier, *pool)] for pool in pools]
        logs = [math.log(a["latency_per_token_s"] / b["latency_per_token_s"]) for a, b in zip(own, base, strict=True)]
        count = len(MORE_PAGES)
        by_seed = [statistics.fmean(logs[first : first + count]) for first in range(0, len(logs), count)]
        mean = statistics.fmean(by_seed)
        error = statistics.stdev(by_seed) / math.sqrt(len(by_seed)) if len(by_seed) > 1 else math.nan
        name = policy if estimator == "learned" else f"{policy} ({estimator})"
        table[f"{name}, tier {tier:g}"] = {
            "median_ms": 1e3 * statistics.median(one["latency_per_token_s"] for one in own),
            "ratio": math.exp(mean),
            "ratio_low": math.exp(mean - error),
            "ratio_high": math.exp(mean + error),
            "recomputed": sum(one["recomputed_tokens"] for one in own) / sum(b["recomputed_tokens"] for b in base),
        }
    return table


def shown(found: Found) -> Iterable[str]:
    """A line for each contender."""
    for name, row in found.items():
        spread = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
        yield (
            f"  {name:30} {row['median_ms']:6.0f} ms/token   {row['ratio']:.3f} x lru ({spread})"
            f"   tokens computed again {row['recomputed']:.2f} x lru"
        )


def main() -> None:
    """Simulate what is missing, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, ["compared"])
    parser.add_argument("--measured", type=Path, default=MEASURED, help="a result of bench.interception")
    parser.add_argument("--rate", type=float, default=0.08, help="requests per second (0.08)")
    parser.add_argument("--requests", type=int, default=40, help="requests of a seed (40)")
    parser.add_argument("--seeds", type=int, default=16, help="seeds, from 0 (16)")
    args = parser.parse_args()
    print(heading(surroundings()))
    machine = Machine(args.measured, args.rate, args.requests)
    simulations = Simulations(args.json, resume=args.resume, module="bench.simulated_link")
    parts = {"compared": lambda: compared(simulations, machine, range(args.seeds))}
    find_parts(simulations, parts, shown, args)


if __name__ == "__main__":
    main()
