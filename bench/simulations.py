"""Simulations by name, kept in a file that a later run continues; and those of the mixture of interceptions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from weft.cli.bench.record import command_line, surroundings, write_record
from weft.sim.devices import find_device
from weft.sim.run import SimulationSettings, simulate
from weft.sim.scripts import scaled
from weft.sim.workloads import MixtureParameters, mixture

Key = TypeVar("Key")
Value = TypeVar("Value")
Figures = Mapping[str, Any]

DEVICE = "gptj-6b-a100"
HOST_TOKENS = 400_000
"""KV of the host tier: about eight times that of the device, 180 GB."""
NO_WAITS = "no-waits-host"
STALE = "stale"
"""Among the figures of a simulation in a file: why the code does not give them any more."""


class Case(Protocol):
    """One simulation. Must be hashable, and picklable."""

    @property
    def key(self) -> str:
        """Its name in a file."""
        ...

    def run(self) -> dict[str, Any]:
        """Its figures, as JSON values."""
        ...


class Unknown(Exception):
    """Simulations are needed that have not been made."""

    def __init__(self, cases: Sequence[Case]):
        super().__init__("; ".join(case.key for case in cases))
        self.cases = list(cases)


def gather(find: Callable[[Key], Value], keys: Iterable[Key]) -> dict[Key, Value]:
    """What `find` says of each. Raises `Unknown` for all that it cannot say together."""
    found, unknown = {}, []
    for key in keys:
        try:
            found[key] = find(key)
        except Unknown as error:
            unknown += error.cases
    if unknown:
        raise Unknown(unknown)
    return found


class Simulations:
    """What is known, and how to know more."""

    def __init__(self, file: Path | None = None, *, resume: bool = False, module: str = "bench.simulated_rates"):
        """`module` is that of the command. With `resume`, what `file` has is known, but for what it marks as `STALE`:
        that stays there until it is made anew."""
        self._file, self._module = file, module
        self._stale: dict[str, dict[str, Any]] = {}
        self.known: dict[str, dict[str, Any]] = {}
        if resume and file is not None and file.is_file():
            for key, found in json.loads(file.read_text("utf-8"))["simulations"].items():
                (self._stale if STALE in found else self.known)[key] = found

    def __call__(self, case: Case) -> Figures:
        """The figures of a simulation. Raises `Unknown`."""
        if case.key not in self.known:
            raise Unknown([case])
        return self.known[case.key]

    def make(self, cases: Iterable[Case], jobs: int) -> None:
        """Run simulations, `jobs` at a time, and write the file after each."""
        if jobs == 1:
            for case in cases:
                self._note(case, case.run())
            return
        with ProcessPoolExecutor(jobs) as pool:
            pending = {pool.submit(_run, case): case for case in cases}
            for done in as_completed(pending):
                self._note(pending[done], done.result())

    def _note(self, case: Case, found: dict[str, Any]) -> None:
        self.known[case.key] = found
        print(f"  {len(self.known):4}  {case.key}", flush=True)
        self.write({}, [])

    def write(self, results: Figures, incomplete: Sequence[str]) -> None:
        """Write what is known to the file, if there is one: `results` of parts, and the parts that lack simulations."""
        if self._file is not None:
            write_record(
                self._file,
                {
                    **surroundings(),
                    "command": command_line(self._module),
                    "incomplete": incomplete,
                    "results": results,
                    "simulations": dict(sorted({**self._stale, **self.known}.items())),
                },
            )


def _run(case: Case) -> dict[str, Any]:
    return case.run()


def add_arguments(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add what commands of simulations have in common: the parts to find, and the file that keeps simulations."""
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time (1)")
    parser.add_argument("--most", type=int, default=1 << 30, help="end after so many simulations")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after every simulation")
    parser.add_argument("--resume", action="store_true", help="use the simulations that the file has")


def find_parts(
    simulations: Simulations,
    parts: Mapping[str, Callable[[], Figures]],
    shown: Callable[[Figures], Iterable[str]],
    args: argparse.Namespace,
) -> None:
    """Find each part, with the simulations that it lacks, as far as `--most` allows; print and write them."""
    results: dict[str, Figures] = {}
    left: int = args.most
    for name, find in parts.items():
        while name not in results:
            try:
                results[name] = find()
            except Unknown as unknown:
                cases = list(dict.fromkeys(unknown.cases))[:left]
                if not cases:
                    print(f"{name}: simulations are missing")
                    break
                simulations.make(cases, args.jobs)
                left -= len(cases)
        if name in results:
            print(name, *shown(results[name]), sep="\n", flush=True)
    simulations.write(results, [name for name in parts if name not in results])


# The mixture


def _with_host(policy: str, **settings: Any) -> SimulationSettings:
    return SimulationSettings(policy=policy, host_tokens=HOST_TOKENS, **settings)


CONTENDERS: Mapping[str, SimulationSettings] = {
    "min_waste-host": _with_host("min_waste"),
    "lru-host": _with_host("lru"),
    "min_waste": SimulationSettings(policy="min_waste"),
    "lru": SimulationSettings(policy="lru"),
    "discard": SimulationSettings(policy="discard"),
    "improved_discard": SimulationSettings(policy="improved_discard"),
    "preserve": SimulationSettings(policy="preserve"),
    "heuristic": SimulationSettings(policy="heuristic"),
    "swap-host": _with_host("swap", synchronous_swaps=True),
    "min_waste-host-elapsed": _with_host("min_waste", estimator="elapsed"),
    "min_waste-host-oracle": _with_host("min_waste", estimator="oracle"),
    "min_waste-host-arrival": _with_host("min_waste", return_order="arrival"),
    NO_WAITS: _with_host("min_waste"),
    "discard-whole": SimulationSettings(policy="discard", saturate=False),
    "improved_discard-whole": SimulationSettings(policy="improved_discard", saturate=False),
    "budgeted_swap-host": _with_host("budgeted_swap"),
    "budgeted_heuristic-host": _with_host("budgeted_heuristic"),
}
"""By name: what is simulated. `-host` has a host tier, and `-whole` computes prompts in as few steps as a step's 2,048
tokens allow, as engines without chunked prefill do. `swap` moves pages while nothing is computed, as in the paper. Of
`no-waits-host` all calls return at once, so it is what remains when KV waits for nothing but the device. `-arrival`
serves returns in the order of first arrivals, as the paper does."""


class MixtureCase(NamedTuple):
    """A contender under the mixture."""

    contender: str
    rate: float
    """Requests per second."""
    minutes: float
    """For which requests arrive."""
    seed: int
    to_end: bool = True
    """False: it stops when no more arrive."""

    @property
    def key(self) -> str:
        """As `Case`."""
        end = "" if self.to_end else ", to the last arrival"
        return f"{self.contender}, {self.rate:g}/s, {self.minutes:g} min, seed {self.seed}{end}"

    def run(self) -> dict[str, Any]:
        """A `Summary`."""
        scripts = mixture(MixtureParameters(rate=self.rate, minutes=self.minutes), self.seed)
        done = simulate(
            find_device(DEVICE),
            scaled(scripts, tokens=1.0, waits=0.0) if self.contender == NO_WAITS else scripts,
            msgspec.structs.replace(CONTENDERS[self.contender], to_end=self.to_end),
            seed=self.seed,
            arrivals_s=self.minutes * 60,
        )
        return done.summary._asdict()
