"""Workflows on simulated engines: Weft against clients that know nothing of KV, on the same engines.

    python -m bench.simulated_workflows [--parts helium ablation order scaling ...] [--workloads trading ...]
                                        [--json FILE] [--resume] [--jobs 1] [--most N]

The real scheduler, cache, router, planner and runner, on a virtual clock and devices of `weft/sim/devices.toml`. The
same command gives the same figures on any machine. The file is written after each simulation, and `--resume` uses the
ones that it has; `--most` ends the command after so many.

    helium    the eight workflows of Helium's section 7, its rows and lengths, Qwen3 8B on two H100: Weft, and clients
              that go operator by operator, or send each call when its inputs are there
    ablation  what the parts of Weft are worth there
    pools     trading and debate in pools of a third of all KV, and of all
    order     hit rates of trading by the order of calls alone, query by query too (Helium, table 4)
    scaling   trading by rows, branches, rounds and engines (Helium, figure 8)
    machine   the workflows of `bench.workflows` on one engine with the costs that `weft profile` measured on a CPU

and Parrot's section 8, LLaMA 13B on an A100 and 7B on four A6000:

    chain       a summary of 20,000 tokens, chunk after chunk; clients are 200 to 300 ms away from the service
    beside      the same beside requests of chat, on an engine that is held to 6,144 tokens
    map_reduce  the same document in parts, beside an engine that is held to 4,096 tokens and one that is not
    users       four applications with long prompts that their users share
    mixed       chat and map-reduce on four engines

Workflows of Helium with equal calls run in two ways: `merged`, with these, which Weft makes once; and `distinct`, with
none, every call begun like the one that it would be equal to. Tokens computed from prompts are given
over the *minimum* (tokens of the trie of all prompts and outputs that no call decodes), times over the *lower bound*:
the larger of all work, with each different token computed once in full steps, and the longest chain of calls, by the
cost model. To be quick, all lengths of these workflows are divided by 4, and so are the KV pool and its pages, while
reading a KV entry takes four times as long: all terms of a run's time are divided by 4, and the tokens of a step are as
many. Times are given as they are simulated, a quarter. In `machine` lengths are those of `bench.workflows`, divided by
8, while pages and costs are not: it tells what the real benchmark would find without noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.simulations import Simulations, add_arguments, find_parts, gather
from bench.workflows import parrot
from bench.workflows.floor import PAGE_SIZE, POOLS, Floor
from bench.workflows.played import CONTENDERS, ROOMY_TOKENS, engine_settings, least, play, shrunk
from bench.workflows.shapes import SHAPES, Workload, workload
from weft.cli.bench.record import heading, surroundings
from weft.sim.devices import Device, find_device
from weft.sim.run import SimulationSettings
from weft.sim.workflow_run import SpelledPrompts

DEVICE, ENGINES = "qwen3-8b-h100", 2
BASELINES = ("clients", "operator-wise")
PARTS_OF_WEFT = (
    "clients-merged",
    "weft-unplanned",
    "weft-no-order",
    "weft-no-pins",
    "weft-no-turns",
    "weft-no-engines",
    "weft-not-continued",
)
PARTS_FOR_EQUAL_CALLS = ("weft-unmerged", "weft-cache-cold", "weft-cache-warm")
SCALE = 4
"""Divides all lengths, see `shrunk`."""
SCALED_ROWS, SCALED_BRANCHES, SCALED_ROUNDS, SCALED_ENGINES = (8, 16, 40, 80), (4, 8, 16), (2, 3, 4, 5), (1, 2, 4)
MEASURED = Path(__file__).parent / "results/profile-qwen3-0.1b-epyc-avx512-2-cores.json"
MEASURED_SCALE, MEASURED_CALLS, MEASURED_STEP_TOKENS = 8, 150, 512
"""Of the real benchmark, on a CPU."""
ABLATED = ("map_reduce_mmlu", "map_reduce_tatqa", "debate_mmlu", "debate_tatqa", "reflect_tatqa", "trading")
"""Not those over reviews, which take as long with all parts as with none."""
IN_POOLS = ("debate_tatqa", "trading")

Found = Mapping[str, Any]


class Setting(NamedTuple):
    """A workload on some engines. None: as in the paper."""

    name: str
    merged: bool
    rows: int | None = None
    branches: int | None = None
    rounds: int | None = None
    engines: int = ENGINES
    kv_tokens: int | None = None
    """Of each engine."""
    measured: bool = False
    """Whether it is one of `bench.workflows`, on the machine of `MEASURED`."""

    def __str__(self) -> str:
        kind = "merged" if self.merged else "distinct"
        options = ("rows", self.rows), ("branches", self.branches), ("rounds", self.rounds), ("KV", self.kv_tokens)
        given = "".join(f", {name} {value}" for name, value in options if value is not None)
        return f"{self.name}, {kind}{given}, {'measured machine' if self.measured else f'{self.engines} engines'}"

    @property
    def scale(self) -> int:
        """Divides the engine's pages, see `shrunk`."""
        return 1 if self.measured else SCALE

    @property
    def prompts(self) -> SpelledPrompts:
        """On the measured machine as long as those of the real benchmark."""
        return SpelledPrompts(names_roles=self.measured)

    def work(self) -> Workload:
        if self.measured:
            return workload(self.name, MEASURED_SCALE, MEASURED_CALLS, duplicates=self.merged)
        changes = {name: value for name, value in (("branches", self.branches), ("rounds", self.rounds)) if value}
        return workload(self.name, SCALE, duplicates=self.merged, num_rows=self.rows, **changes)

    def device(self) -> Device:
        if self.measured:
            return find_device(str(MEASURED), kv_tokens=self.kv_tokens or ROOMY_TOKENS)
        device = shrunk(find_device(DEVICE), SCALE)
        return device if self.kv_tokens is None else msgspec.structs.replace(device, kv_tokens=self.kv_tokens)

    def engine_settings(self, policy: str) -> SimulationSettings:
        sizes = {"max_step_tokens": MEASURED_STEP_TOKENS} if self.measured else {}
        return engine_settings(policy=policy, **sizes)


class FloorCase(NamedTuple):
    """What a workload needs at least."""

    setting: Setting

    @property
    def key(self) -> str:
        """As `Case`."""
        return f"floor of {self.setting}"

    def run(self) -> dict[str, Any]:
        """A `Floor`, and its calls."""
        setting = self.setting
        settings = setting.engine_settings(CONTENDERS["clients-merged"].policy)
        found = least(setting.work(), setting.device(), setting.engines, settings, setting.prompts)
        return {**found._asdict(), "seconds": found.seconds}


class PlayedCase(NamedTuple):
    """A contender with a workload."""

    contender: str
    setting: Setting

    @property
    def key(self) -> str:
        """As `Case`."""
        return f"{self.contender}: {self.setting}"

    def run(self) -> dict[str, Any]:
        """A `PlayedRun`."""
        setting, contender = self.setting, CONTENDERS[self.contender]
        options = {"scale": setting.scale, "prompts": setting.prompts}
        settings = setting.engine_settings(contender.policy)
        found = play(setting.work(), contender, setting.device(), setting.engines, settings, **options)
        return {**found._asdict(), "hit_rate": found.hit_rate}


class Parts:
    """What each part finds in simulations. Every method raises `Unknown` for the simulations that it lacks."""

    def __init__(self, simulations: Simulations, names: Sequence[str]):
        self._find = simulations
        self._names = names

    def helium(self) -> Found:
        """All contenders in all workflows, and the mean gain over asynchronous clients."""
        return self._summed(self._table(self._settings(), ("weft", *BASELINES)))

    def ablation(self) -> Found:
        """Parts of Weft."""
        settings = [one for one in self._settings() if one.name in ABLATED]
        by_merged = {which: [one for one in settings if one.merged is which] for which in (True, False)}

        def table(merged: bool) -> Found:
            parts = (*PARTS_OF_WEFT, *PARTS_FOR_EQUAL_CALLS) if merged else PARTS_OF_WEFT
            return self._table(by_merged[merged], ("weft", "clients", *parts))

        found = gather(table, by_merged)
        return {setting: row for table in found.values() for setting, row in table.items()}

    def pools(self) -> Found:
        """Engines that hold a part of all KV together."""
        settings = []
        for name in (name for name in IN_POOLS if name in self._names):
            floor = self._find(FloorCase(Setting(name, False)))
            for part in POOLS.values():
                kv = max(int(part * floor["trie"] / ENGINES), floor["longest"] + 4 * PAGE_SIZE) // PAGE_SIZE * PAGE_SIZE
                settings.append(Setting(name, False, kv_tokens=kv))
        return self._table(settings, ("weft", "clients", "weft-unplanned", "weft-no-pins", "weft-no-engines"))

    def order(self) -> Found:
        """Trading without equal calls."""
        return self._table([Setting("trading", False)], ("weft", "weft-unplanned", *BASELINES, "query-wise"))

    def scaling(self) -> Found:
        """Trading, larger."""
        settings = [Setting("trading", True, rows=rows) for rows in SCALED_ROWS]
        settings += [Setting("trading", True, branches=count) for count in SCALED_BRANCHES]
        settings += [Setting("trading", True, rounds=count) for count in SCALED_ROUNDS]
        settings += [Setting("trading", True, engines=count) for count in SCALED_ENGINES]
        return self._table(settings, ("weft", "clients"))

    def machine(self) -> Found:
        """One engine with the costs of a measured machine, in the pools of the real benchmark, and the mean gain of
        workflows without equal calls in each."""
        asked = [one._replace(engines=1, measured=True) for one in self._settings()]
        floors = gather(self._find, [FloorCase(one) for one in asked])
        by_pool: dict[str, list[Setting]] = {pool: [] for pool in POOLS}
        for case, found in floors.items():
            floor = Floor(*(found[name] for name in Floor._fields))
            for pool, part in POOLS.items():
                by_pool[pool].append(case.setting._replace(kv_tokens=floor.pool_tokens(part)))
        contenders = ("weft", "clients", "weft-unplanned", "operator-wise")
        table = self._table([one for settings in by_pool.values() for one in settings], contenders)
        means = {
            f"mean, distinct, {pool} pool": _mean_gains(
                [table[str(one)] for one in settings if not one.merged], contenders
            )
            for pool, settings in by_pool.items()
        }
        return {**table, **means}

    def _settings(self) -> list[Setting]:
        """Without equal calls, and with those that a workflow has."""
        with_equals = [name for name in self._names if workload(name, SCALE, num_rows=1).has_equal_calls]
        return [Setting(name, False) for name in self._names] + [Setting(name, True) for name in with_equals]

    def _table(self, settings: Iterable[Setting], contenders: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Figures by setting and contender."""
        settings = list(dict.fromkeys(settings))
        floors = gather_both(self._find, [FloorCase(one) for one in settings],
                             [PlayedCase(name, one) for one in settings for name in contenders])  # fmt: skip
        table: dict[str, dict[str, Any]] = {}
        for setting in settings:
            floor = floors[FloorCase(setting)]
            reference = floors[PlayedCase("clients", setting)]["seconds"]
            table[str(setting)] = {
                name: _figures(floors[PlayedCase(name, setting)], floor, reference) for name in contenders
            }
        return table

    def _summed(self, table: dict[str, dict[str, Any]]) -> Found:
        means = {}
        for merged in (False, True):
            rows = [table.get(str(Setting(name, merged)), table[str(Setting(name, False))]) for name in self._names]
            means[f"mean, {'merged' if merged else 'distinct'}"] = _mean_gains(rows, ("weft", *BASELINES))
        return {**table, **means}

    def chain(self) -> Found:
        """Chains over documents."""
        return parrot.summaries(self._find, "chain")

    def map_reduce(self) -> Found:
        """Map-reduce over documents."""
        return parrot.summaries(self._find, "map_reduce")

    def beside(self) -> Found:
        """Chains beside chat."""
        return parrot.chains_beside_chat(self._find)

    def users(self) -> Found:
        """Four applications."""
        return parrot.users(self._find)

    def mixed(self) -> Found:
        """Chat and map-reduce."""
        return parrot.mixed(self._find)


def gather_both(find: Callable[[Any], Any], *groups: Sequence[Any]) -> dict[Any, Any]:
    """As `gather`, of cases of several kinds."""
    return gather(find, [case for group in groups for case in group])


def _mean_gains(rows: Sequence[Found], contenders: Sequence[str]) -> dict[str, dict[str, float]]:
    return {name: {"gain": statistics.fmean(row[name]["gain"] for row in rows)} for name in contenders}


def _figures(run: Found, floor: Found, reference_s: float) -> dict[str, Any]:
    return {
        "seconds": run["seconds"],
        "gain": reference_s / run["seconds"],
        "over_bound": run["seconds"] / floor["seconds"],
        "prefill": run["prefill_tokens"] / floor["minimum"],
        "hit_rate": run["hit_rate"],
        "rows_per_step": run["rows_per_step"],
        "busy_share": run["busy_share"],
    }


def shown(found: Found) -> Iterable[str]:
    """The lines of a part."""
    if not any("over_bound" in figures for row in found.values() for figures in row.values()):
        yield from parrot.shown(found)
        return
    for setting, row in found.items():
        yield f"  {setting}"
        for name, figures in row.items():
            if "seconds" not in figures:
                yield f"    {name:18} {figures['gain']:.2f} x clients"
                continue
            yield (
                f"    {name:18} {figures['seconds']:9.1f} s  {figures['gain']:5.2f} x clients"
                f"  {figures['over_bound']:6.2f} x bound  prefill {figures['prefill']:.2f}"
                f"  hits {figures['hit_rate']:.3f}  rows {figures['rows_per_step']:.0f}"
                f"  busy {figures['busy_share']:.2f}"
            )


ALL_PARTS = (
    *("helium", "order", "ablation", "pools", "scaling", "machine"),
    *("chain", "beside", "map_reduce", "users", "mixed"),
)


def main() -> None:
    """Simulate what is missing, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated_workflows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, ALL_PARTS)
    parser.add_argument("--workloads", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    args = parser.parse_args()
    print(heading(surroundings()))
    simulations = Simulations(args.json, resume=args.resume, module="bench.simulated_workflows")
    parts = Parts(simulations, args.workloads)
    find_parts(simulations, {name: getattr(parts, name) for name in args.parts}, shown, args)


if __name__ == "__main__":
    main()
