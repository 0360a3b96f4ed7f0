"""`weft sim`: the scheduler on virtual time, under published workloads.

Reads flags, runs `weft.sim` once for each rate, policy and seed, and shows and writes the figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from weft.cli import sim_agents
from weft.cli.bench.flags import parsed, progress
from weft.cli.bench.record import command_line, surroundings, write_record

if TYPE_CHECKING:
    from weft.sim.devices import Device
    from weft.sim.metrics import Summary

DEFAULT_DEVICE = "gptj-6b-a100"
DEFAULT_STEP = 0.5
LOAD_PANEL, ENGINE_PANEL, RUN_PANEL = "Workload", "Simulated engine", "Runs"

EXAMPLES = """Examples:

  weft sim interceptions                                         one rate, ten minutes of arrivals

  weft sim interceptions --rate 0.5..4 --minutes 30 --runs 3     a sweep; medians of three seeds

  weft sim interceptions --rate 2 --driving clients              every turn sends the whole session again

  weft sim interceptions --rate 2 --host-tokens 200000           with a host tier for evicted KV

  weft sim interceptions --device profile.json --kv-tokens 8192  this machine, as `weft profile` measured it

The simulation runs the scheduler and the cache of `weft serve`. Only the device is simulated: its steps and page
transfers take the time that its cost model predicts. The same seed gives the same schedule, on any machine.
"""


def register(app: typer.Typer) -> None:
    """Add the group `sim` to the application."""
    group = typer.Typer(no_args_is_help=True, help="Simulate scheduling on virtual time, without a model or a GPU.")
    group.command("interceptions", epilog=EXAMPLES)(interceptions)
    group.command("agents", epilog=sim_agents.EXAMPLES)(sim_agents.agents)
    app.add_typer(group, name="sim")


def parse_rates(text: str) -> list[float]:
    """`2`, `0.5,1,2`, `0.5..4` (in steps of 0.5) or `1..4:1`. Raises `ValueError`."""
    rates: list[float] = []
    for part in text.split(","):
        low, dots, rest = part.partition("..")
        high, _, step = rest.partition(":")
        try:
            first = float(low)
            last, width = (float(high), float(step or DEFAULT_STEP)) if dots else (first, DEFAULT_STEP)
        except ValueError:
            first = last = width = math.nan
        if not (0 < first <= last < math.inf and 0 < width < math.inf):
            raise ValueError(f"{part!r} is not a rate: write 2, 0.5,1,2, 0.5..4 or 1..4:1")
        rates += [first + index * width for index in range(math.floor((last - first) / width + 1e-9) + 1)]
    return rates


def interceptions(
    rate: Annotated[
        str,
        typer.Option(
            "--rate",
            metavar="RATES",
            help="Mean arrivals per second, Poisson: 2, a list 0.5,1,2 or a range 0.5..4, 1..4:1.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = "1",
    minutes: Annotated[
        float,
        typer.Option("--minutes", min=0.01, help="Time for which requests arrive.", rich_help_panel=LOAD_PANEL),
    ] = 10.0,
    generated: Annotated[
        str,
        typer.Option(
            "--generated",
            metavar="LOW:HIGH",
            help="Tokens generated before each call and after the last: uniform.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = "30:150",
    returned: Annotated[
        float,
        typer.Option(
            "--returned",
            min=0.01,
            help="Factor on what calls return: log-normal around 150 tokens (qa, chatbot) or 30 (others).",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = 1.0,
    driving: Annotated[
        str,
        typer.Option(
            "--driving",
            metavar="programs|clients",
            help="programs keep a sequence open during a call; clients send the whole session again.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = "programs",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Whose KV goes when pages run out; repeat to compare: min_waste, lru, discard, improved_discard, "
            "preserve, swap, heuristic. (min_waste and lru)",
            rich_help_panel=ENGINE_PANEL,
            show_default=False,
        ),
    ] = None,
    estimator: Annotated[
        str,
        typer.Option(
            "--estimator",
            metavar="learned|elapsed|oracle",
            help="How min_waste estimates waits; oracle is told them.",
            rich_help_panel=ENGINE_PANEL,
        ),
    ] = "learned",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME|FILE",
            help="gptj-6b-a100, vicuna-13b-2xa100, or a profile of `weft profile` (`--json`).",
            rich_help_panel=ENGINE_PANEL,
        ),
    ] = DEFAULT_DEVICE,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            min=1,
            help="Tokens of KV on the device. (the device's)",
            rich_help_panel=ENGINE_PANEL,
            show_default=False,
        ),
    ] = None,
    host_tokens: Annotated[
        int,
        typer.Option("--host-tokens", min=0, help="Tokens of KV in the host tier.", rich_help_panel=ENGINE_PANEL),
    ] = 0,
    synchronous_swaps: Annotated[
        bool,
        typer.Option(
            "--synchronous-swaps",
            help="Page transfers lengthen the step instead of overlapping with its forward pass.",
            rich_help_panel=ENGINE_PANEL,
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the first run.", rich_help_panel=RUN_PANEL)] = 0,
    runs: Annotated[
        int,
        typer.Option(
            "--runs", min=1, help="Runs with consecutive seeds; medians are shown.", rich_help_panel=RUN_PANEL
        ),
    ] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write every run, with machine and versions.", rich_help_panel=RUN_PANEL
        ),
    ] = None,
) -> None:
    """Simulate requests that stop for calls of tools, services or people, and show what waiting KV costs.

    Requests are a uniform mixture of six kinds, from calculators (0.1 ms a call) to people (half a minute), with the
    calls, contexts and times of APIServe (InferCept), table 1. They arrive for --minutes and run to completion.

    Latency is the median over requests of (end to end - time in calls) / output tokens. Waste is KV memory x time that
    did no work: held during a call, computed again, being moved, or stalled by either; *pressed* counts only steps in
    which some sequence waits for pages. Rates beyond what the device can serve show how a policy behaves under load.
    """
    from weft.sim.devices import find_device
    from weft.sim.policies import check_policy

    if driving not in ("programs", "clients"):
        raise typer.BadParameter(f"--driving is programs or clients, not {driving}")
    policies = policy or ["min_waste", "lru"]
    for name in policies:
        check_policy(name, estimator)
    plan = _Plan(
        device=find_device(device, kv_tokens=kv_tokens),
        rates=parsed(parse_rates)(rate),
        minutes=minutes,
        generated=parsed(_parse_range)(generated),
        returned=returned,
        driving="programs" if driving == "programs" else "clients",
        host_tokens=host_tokens,
        synchronous_swaps=synchronous_swaps,
        estimator=estimator,
    )
    found = [
        _Row(rate, name, [_simulate(plan, rate, name, one) for one in range(seed, seed + runs)])
        for rate in plan.rates
        for name in policies
    ]
    typer.echo(f"{plan.device.about}: {plan.device.kv_tokens} tokens of KV, S = {plan.device.saturation_tokens}")
    typer.echo(f"mixture of interceptions, {minutes:g} minutes, {driving}, host tier of {host_tokens} tokens")
    _print(found)
    if json_file is not None:
        write_record(json_file, _content(plan, found, seed))


class _Plan(NamedTuple):
    device: Device
    rates: list[float]
    minutes: float
    generated: tuple[int, int]
    returned: float
    driving: Literal["programs", "clients"]
    host_tokens: int
    synchronous_swaps: bool
    estimator: str


class _Row(NamedTuple):
    rate: float
    policy: str
    runs: list[Summary]

    def median(self, value: str) -> float | None:
        """The median over runs of a figure; None where a run has none."""
        values = [getattr(run, value) for run in self.runs]
        return None if any(one is None for one in values) else statistics.median(values)


def _simulate(plan: _Plan, rate: float, policy: str, seed: int) -> Summary:
    from weft.sim.run import SimulationSettings, simulate
    from weft.sim.workloads import MixtureParameters, mixture

    parameters = MixtureParameters(
        rate=rate, minutes=plan.minutes, generated_tokens=plan.generated, returned_factor=plan.returned
    )
    scripts = mixture(parameters, seed)
    settings = SimulationSettings(
        policy=policy,
        driving=plan.driving,
        host_tokens=plan.host_tokens,
        synchronous_swaps=plan.synchronous_swaps,
        estimator=plan.estimator,
    )
    with progress(f"{policy}, {rate:g}/s, seed {seed}", len(scripts)) as advance:
        done = simulate(
            plan.device,
            scripts,
            settings,
            seed=seed,
            arrivals_s=plan.minutes * 60,
            on_done=lambda record: advance(None),
        )
    return done.summary


def _parse_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise ValueError(f"{text!r} is not LOW:HIGH, two numbers of tokens")
    return int(low), int(high)


_COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "completed_per_s": ("completed/s", 1, ".2f"),
    "latency_per_token_s": ("ms/token", 1000, ".1f"),
    "ttft_first_s": ("TTFT s", 1, ".2f"),
    "ttft_return_s": ("return TTFT s", 1, ".2f"),
    "recomputed_tokens": ("recomputed", 1, ",.0f"),
    "swapped_pages": ("pages moved", 1, ",.0f"),
    "waste_share": ("waste %", 100, ".1f"),
    "pressed_waste_share": ("pressed waste %", 100, ".1f"),
}
"""Figure: title, factor and format of its column."""


def _print(rows: Sequence[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("rate", "policy", *(column[0] for column in _COLUMNS.values())):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    for row in rows:
        cells = []
        for figure, (_, factor, form) in _COLUMNS.items():
            value = row.median(figure)
            cells.append("" if value is None else format(value * factor, form))
        table.add_row(f"{row.rate:g}", row.policy, *cells)
    Console(width=1000).print(table)


def _content(plan: _Plan, rows: Sequence[_Row], seed: int) -> dict[str, Any]:
    import msgspec

    return {
        "simulation": "interceptions",
        "command": command_line(),
        **surroundings(),
        "device": msgspec.to_builtins(plan.device),
        "minutes": plan.minutes,
        "driving": plan.driving,
        "estimator": plan.estimator,
        "host_tokens": plan.host_tokens,
        "rows": [
            {
                "rate": row.rate,
                "policy": row.policy,
                "runs": [{"seed": seed + index, **run._asdict()} for index, run in enumerate(row.runs)],
            }
            for row in rows
        ],
    }
