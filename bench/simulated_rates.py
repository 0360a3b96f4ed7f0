"""What policies for KV that waits are worth, on the simulator: the mixture of `weft sim interceptions`.

    python -m bench.simulated_rates [--parts rates waste collapse order estimators ablation figures] [--seeds 0 1 2]
                                    [--json FILE] [--resume] [--jobs 1] [--most N]

One set of simulations answers every part; those that parts share are made once. The file is written after each, and
`--resume` uses the ones that it has. `--most` ends the command after so many. The same seed gives the same figures on
any machine.

    rates       requests per second at a median of `--latency` milliseconds per token: between two rates, 0.1 apart
                (0.2 without a host tier), by a line through the logarithms of their latencies
    waste       at 1 request per second, beside what the cheapest choice for each wait would waste
    collapse    requests completed per second from saturation to three times its rate, by the order of returns
    jobs        times of jobs of a coding-agent day, on a device with costs
    days        recomputed tokens of whole coding-agent days, beside the optimum
    order       latencies of `min_waste` and `lru` over all rates
    estimators  `rates` of the estimators of waits
    ablation    one technique after the other, at 2 requests per second (APIServe, section 5.2)
    figures     latency and completed requests by rate, of all policies (APIServe, figures 2 and 3)

What is claimed (`rates`, `waste`, `collapse`, `estimators`) is of half an hour of arrivals and every seed, but for the
other order of `collapse`, which is of the first seed; `order` and `ablation` are of ten minutes and every seed,
`figures` of ten minutes and the first seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

from bench.simulated_days import BOUNDS, DayCase, JobCase
from bench.simulations import MixtureCase, Simulations, add_arguments, find_parts, gather
from weft.cli.bench.record import heading, surroundings

LONG, SHORT = 30.0, 10.0
"""Minutes of arrivals."""
CLAIMED = ("min_waste-host", "lru-host", "discard", "lru", "no-waits-host", "min_waste")
ESTIMATORS = ("min_waste-host", "min_waste-host-elapsed", "min_waste-host-oracle")
ABLATION = (
    "discard-whole",
    "improved_discard-whole",
    "improved_discard",
    "budgeted_swap-host",
    "budgeted_heuristic-host",
    "min_waste-host",
)
WASTED = ("min_waste-host", "min_waste", "discard")
COLLAPSING, OTHER_ORDER = "min_waste-host", "min_waste-host-arrival"
PAIRS = (("min_waste-host", "lru-host"), ("min_waste", "lru"))
DRAWN = (
    "min_waste-host",
    "lru-host",
    "min_waste",
    "lru",
    "swap-host",
    "preserve",
    "heuristic",
    "improved_discard",
    "discard",
)
RATES = (0.5, 1.0, 2.0, 3.0)
WASTE_RATE, ABLATION_RATE = 1.0, 2.0
COLLAPSE_RATES = (2.0, 4.0, 6.0)
FIRST_RATE = {"discard": 0.4, "lru": 1.0, "min_waste": 1.0, "lru-host": 1.8}
DEFAULT_FIRST_RATE = 1.9
STEPS = {"discard": 0.2, "lru": 0.2, "min_waste": 0.2}
DEFAULT_STEP = 0.1
MAX_RATE = 8.0
DAYS = ((0.02, 0.5), (0.05, 0.5), (0.02, 0.75), (0.05, 0.75))
"""(sessions per second, pool as a part of the working set)."""
JOBS = (0.02, 0.5)

Found = Mapping[str, Any]


def rate_at(latency_s: Callable[[float], float], wanted_s: float, first: float, step: float) -> float:
    """Requests per second at which `latency_s` of a rate is `wanted_s`, sought from the rate `first` on in steps; the
    smallest rate tried where it is exceeded there already, and `MAX_RATE` where it never is."""
    rate = first
    while rate > 1.5 * step and latency_s(rate) > wanted_s:
        rate = round(rate - step, 4)
    below = rate, latency_s(rate)
    if below[1] > wanted_s:
        return rate
    while rate < MAX_RATE:
        rate = round(rate + step, 4)
        above = rate, latency_s(rate)
        if above[1] > wanted_s:
            return between(below, above, wanted_s)
        below = above
    return MAX_RATE


def between(below: tuple[float, float], above: tuple[float, float], latency_s: float) -> float:
    """The rate between two (rate, latency), by a line through the logarithms of the latencies."""
    part = math.log(latency_s / below[1]) / math.log(above[1] / below[1])
    return below[0] + part * (above[0] - below[0])


class Parts:
    """What each part finds in simulations. Every method raises `Unknown` for the simulations that it lacks."""

    def __init__(self, simulations: Simulations, args: argparse.Namespace):
        self._find = simulations
        self._seeds: list[int] = args.seeds
        self._latency_s = args.latency / 1000

    def rates(self) -> Found:
        """Requests per second by contender and seed."""
        return self._rates(CLAIMED, LONG)

    def estimators(self) -> Found:
        """The same by estimator."""
        return self._rates(ESTIMATORS, LONG)

    def waste(self) -> Found:
        """Waste under pressure by contender and seed."""
        figures = ("pressed_s", "busy_s", "pressed_waste_share", "pressed_waste_shares", "pressed_cheapest_share")
        return self._by_contender(WASTED, [WASTE_RATE], LONG, figures)

    def collapse(self) -> Found:
        """Completed requests by rate and seed, while others arrive; of the other order for the first seed."""
        figures = ["completed_per_s"]
        found = self._by_contender([COLLAPSING], COLLAPSE_RATES, LONG, figures, to_end=False)
        first = self._seeds[:1]
        other = self._by_contender([OTHER_ORDER], COLLAPSE_RATES, LONG, figures, seeds=first, to_end=False)
        return {**found, **other}

    def order(self) -> Found:
        """Latencies of policies with the same memory."""
        return self._by_contender([one for pair in PAIRS for one in pair], RATES, SHORT, ["latency_per_token_s"])

    def ablation(self) -> Found:
        """Latency and waste."""
        figures = ("latency_per_token_s", "completed_per_s", "waste_share", "waste_shares")
        return self._by_contender(ABLATION, [ABLATION_RATE], SHORT, figures)

    def figures(self) -> Found:
        """Latency and completed requests by rate, of one seed."""
        figures = ("latency_per_token_s", "completed_per_s", "ttft_return_s")
        return self._by_contender(DRAWN, RATES, SHORT, figures, seeds=self._seeds[:1])

    def days(self) -> Found:
        """Recomputed tokens of days by policy, and what each saves of what `lru` computes beyond the optimum."""
        names = ("lru", "min_waste", *BOUNDS)
        cases = [DayCase(name, *one, seed) for seed, one, name in product(self._seeds, DAYS, names)]
        found = gather(self._find, cases)
        table: dict[str, dict[str, list[float]]] = {}
        for rate, pool in DAYS:
            row = table.setdefault(f"{rate:g}/s, pool {pool:g}", {})
            for name in names:
                row[name] = [found[DayCase(name, rate, pool, seed)]["recomputed_tokens"] for seed in self._seeds]
            for name, base in (("min_waste", "lru"), ("bound by kind", "bound of lru")):
                each = zip(row[base], row[name], row["optimum"], strict=True)
                row[f"saved by {name}"] = [(lru - own) / (lru - least) for lru, own, least in each]
        return table

    def jobs(self) -> Found:
        """Times of jobs on a device with costs, by policy and tier."""
        kinds = list(product(("lru", "min_waste"), (False, True)))
        cases = [JobCase(name, *JOBS, seed, host) for seed, (name, host) in product(self._seeds, kinds)]
        found = gather(self._find, cases)
        table: dict[str, dict[str, list[float]]] = {}
        for case, figures in found.items():
            row = table.setdefault(f"{case.policy}, {'host tier' if case.with_host else 'no host tier'}", {})
            for name, value in figures.items():
                row.setdefault(name, []).append(value)
        return table

    def _rates(self, contenders: Iterable[str], minutes: float) -> Found:
        found = gather(lambda one: self._rate(*one, minutes), list(product(self._seeds, contenders)))
        return {name: [found[seed, name] for seed in self._seeds] for _, name in found}

    def _rate(self, seed: int, contender: str, minutes: float) -> float:
        def latency_s(rate: float) -> float:
            found = self._find(MixtureCase(contender, rate, minutes, seed))["latency_per_token_s"]
            return math.inf if found is None else found

        first, step = FIRST_RATE.get(contender, DEFAULT_FIRST_RATE), STEPS.get(contender, DEFAULT_STEP)
        return rate_at(latency_s, self._latency_s, first, step)

    def _by_contender(
        self,
        contenders: Iterable[str],
        rates: Iterable[float],
        minutes: float,
        figures: Iterable[str],
        *,
        seeds: list[int] | None = None,
        to_end: bool = True,
    ) -> Found:
        """Figures by contender, then rate, then seed."""
        seeds = self._seeds if seeds is None else seeds
        cases = [MixtureCase(c, r, minutes, seed, to_end) for seed, c, r in product(seeds, contenders, rates)]
        found = gather(self._find, cases)
        table: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for case, summary in found.items():
            row = {figure: summary[figure] for figure in figures}
            table.setdefault(case.contender, {}).setdefault(f"{case.rate:g}", []).append(row)
        return table


ALL_PARTS = ("rates", "waste", "collapse", "figures", "ablation", "estimators", "jobs", "days", "order")


def shown(found: Found) -> Iterable[str]:
    """The lines of a part: medians over seeds, with the least and the most."""
    for contender, values in found.items():
        if isinstance(values, list):
            yield f"  {contender:24} {_spread(values)}"
            continue
        for rate, rows in values.items():
            if not isinstance(rows[0], dict):
                yield f"  {contender:28} {rate:24} {_spread(rows)}"
                continue
            figures = {name: [row[name] for row in rows] for name in rows[0] if not isinstance(rows[0][name], dict)}
            text = "  ".join(f"{name} {_spread(values)}" for name, values in figures.items() if None not in values)
            yield f"  {contender:24} {rate:>5}/s  {text}"


def _spread(values: list[float]) -> str:
    middle = f"{statistics.median(values):.4g}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    """Simulate what is missing, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, ALL_PARTS)
    parser.add_argument("--latency", type=float, default=25.0, help="milliseconds per output token (25)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print(heading(surroundings()))
    simulations = Simulations(args.json, resume=args.resume)
    parts = Parts(simulations, args)
    find_parts(simulations, {name: getattr(parts, name) for name in args.parts}, shown, args)


if __name__ == "__main__":
    main()
