"""The rate of requests that a policy serves at a given latency, on the simulator.

    python -m bench.simulated_rates [--contenders min_waste:400000 lru discard] [--latency 25] [--minutes 30]
                                    [--seeds 0 1 2] [--json FILE] [--resume]

The workload is the mixture of `weft sim interceptions`, and a contender a policy, with the tokens of its host tier
after a colon. For each seed the rate is found at which the median over requests of (end to end - time in calls) /
output tokens is `--latency` milliseconds: by steps of `--step` upwards until it is exceeded, then by a line between the
logarithms of the last two latencies. Medians over seeds are shown. The file is written after every simulation, and
`--resume` uses the ones that it has. The same seed gives the same figures on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from weft.cli.bench.record import command_line, heading, surroundings, write_record
from weft.sim.devices import find_device
from weft.sim.run import SimulationSettings, simulate
from weft.sim.workloads import MixtureParameters, mixture

FIRST_RATE = {"discard": 0.4, "improved_discard": 0.6, "preserve": 0.3, "swap": 0.6}
DEFAULT_FIRST_RATE = 1.0
MAX_RATE = 8.0


class Simulations:
    """Simulations by contender, rate and seed, kept in a file."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._device = find_device(args.device)
        self.done: dict[str, dict[str, Any]] = {}
        if args.resume and args.json is not None and args.json.is_file():
            known = json.loads(args.json.read_text("utf-8"))
            if (known["minutes"], known["device"]) == (args.minutes, args.device):
                self.done = known["simulations"]

    def latency_s(self, contender: str, rate: float, seed: int) -> float:
        """Median latency per output token, simulated unless it is known."""
        key = f"{contender} {rate:.4g} {seed}"
        if key not in self.done:
            policy, _, host_tokens = contender.partition(":")
            done = simulate(
                self._device,
                mixture(MixtureParameters(rate=rate, minutes=self._args.minutes), seed),
                SimulationSettings(policy=policy, host_tokens=int(host_tokens or 0)),
                seed=seed,
                arrivals_s=self._args.minutes * 60,
            )
            self.done[key] = done.summary._asdict()
            self.write({})
        found: float = self.done[key]["latency_per_token_s"]
        print(f"  {contender:20} {rate:5.2f}/s  seed {seed}  {1000 * found:7.1f} ms/token", flush=True)
        return found

    def write(self, rates: dict[str, Any]) -> None:
        """Write what is known to the file, if there is one."""
        if self._args.json is not None:
            write_record(
                self._args.json,
                {
                    **surroundings(),
                    "command": command_line("bench.simulated_rates"),
                    "device": self._args.device,
                    "minutes": self._args.minutes,
                    "latency_ms": self._args.latency,
                    "rates": rates,
                    "simulations": self.done,
                },
            )


def rate_at(simulations: Simulations, contender: str, seed: int, latency_s: float, step: float) -> float:
    """Requests per second at which the median latency is `latency_s`; that of the first rate where it is exceeded
    already."""
    rate = FIRST_RATE.get(contender, DEFAULT_FIRST_RATE)
    below: tuple[float, float] | None = None
    while rate <= MAX_RATE:
        found = simulations.latency_s(contender, rate, seed)
        if found > latency_s:
            return rate if below is None else between(below, (rate, found), latency_s)
        below = rate, found
        rate = round(rate + step, 4)
    return MAX_RATE


def between(below: tuple[float, float], above: tuple[float, float], latency_s: float) -> float:
    """The rate between two (rate, latency), by a line through the logarithms of the latencies."""
    part = math.log(latency_s / below[1]) / math.log(above[1] / below[1])
    return below[0] + part * (above[0] - below[0])


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--contenders", nargs="+", default=["min_waste:400000", "lru:400000", "lru", "discard"])
    parser.add_argument("--latency", type=float, default=25.0, help="milliseconds per output token (25)")
    parser.add_argument("--minutes", type=float, default=30.0, help="for which requests arrive (30)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--step", type=float, default=0.2, help="of the rate, in requests per second (0.2)")
    parser.add_argument("--device", default="gptj-6b-a100")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after every simulation")
    parser.add_argument("--resume", action="store_true", help="use the simulations that the file has")
    args = parser.parse_args()
    print(heading(surroundings()))
    simulations = Simulations(args)
    rates = {
        contender: [rate_at(simulations, contender, seed, args.latency / 1000, args.step) for seed in args.seeds]
        for contender in args.contenders
    }
    simulations.write(rates)
    print(f"requests per second at {args.latency:g} ms/token; median of {len(args.seeds)} seed(s)")
    for contender, found in rates.items():
        print(f"  {contender:20} {statistics.median(found):5.2f}  ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
