"""`weft sim agents`: the coding-agent day, and how much of what plain prefix caching computes again a policy saves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from weft.cli.bench.flags import progress
from weft.cli.bench.record import command_line, surroundings, write_record

if TYPE_CHECKING:
    from weft.sim.bounds import ServiceTime
    from weft.sim.scripts import SessionScript

EXAMPLES = """Examples:

  weft sim agents --sessions 60                         a part of a day, in a minute

  weft sim agents --runs 3 --json day.json              the whole day, medians of three seeds

  weft sim agents --pool 0.75 --rate 0.05               another pool, more sessions at a time

Sessions send no hints, and there is no host tier. Turns take 0.5 s and 10 ms per output token, however much is
recomputed, so every policy meets the same arrivals, and the optimum, which knows the future, can be computed.
"""
MIN_STRIDE, MAX_STRIDE = 1, 50


class _Run(NamedTuple):
    seed: int
    pool_tokens: int
    lru_bound: int
    """Tokens that least recently used computes again in a replay of the same turns."""
    optimum: int
    """The same for the farthest next use: no policy computes fewer."""
    recomputed: dict[str, int]
    """By policy, in the simulated engine."""

    def saved(self, policy: str) -> float | None:
        """The part of what `lru` computes beyond the optimum that the policy saves; None where there is none."""
        base = self.recomputed.get("lru", self.lru_bound)
        gap = base - self.optimum
        return (base - self.recomputed[policy]) / gap if gap > 0 else None


def agents(
    sessions: Annotated[int, typer.Option("--sessions", min=2, help="Sessions of the day.")] = 400,
    rate: Annotated[float, typer.Option("--rate", min=1e-6, help="Sessions that arrive per second.")] = 0.02,
    pool: Annotated[
        float, typer.Option("--pool", min=0.01, max=1.0, help="KV on the device, as a part of the peak working set.")
    ] = 0.5,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Whose KV goes when pages run out; repeat to compare. (lru and min_waste)",
            show_default=False,
        ),
    ] = None,
    estimator: Annotated[
        str,
        typer.Option("--estimator", metavar="learned|elapsed|oracle", help="How min_waste estimates waits."),
    ] = "learned",
    stride: Annotated[
        int,
        typer.Option(
            "--stride",
            min=MIN_STRIDE,
            max=MAX_STRIDE,
            help="One simulated step for so many output tokens: the same contexts and times, fewer steps.",
        ),
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the first run.")] = 0,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs with consecutive seeds; medians are shown.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every run, with machine and versions.")
    ] = None,
) -> None:
    """Simulate a day of coding agents, and show how many tokens each policy computes again.

    Contexts begin with 20,000 tokens and grow with every turn, waits are for reads, edits, searches, shell commands,
    tests and people. *Saved* is the part of what `lru` computes beyond the optimum that a policy does not compute.
    """
    from weft.sim.policies import check_policy

    policies = policy or ["lru", "min_waste"]
    for name in policies:
        check_policy(name, estimator)
    found = [_run(sessions, rate, pool, policies, estimator, stride, one) for one in range(seed, seed + runs)]
    typer.echo(f"{sessions} sessions, {rate:g}/s, pool of {pool:g} of the peak working set, {runs} run(s)")
    _print(found, policies)
    if json_file is not None:
        write_record(json_file, _content(found, sessions, rate, pool, estimator, stride))


def _run(
    sessions: int, rate: float, pool: float, policies: Sequence[str], estimator: str, stride: int, seed: int
) -> _Run:
    from weft.sim.agents import AgentParameters, agent_day, coarsened
    from weft.sim.bounds import ServiceTime, farthest_next_use, least_recently_used, replay, timed_turns, working_set
    from weft.sim.devices import PAGE_SIZE

    scripts = coarsened(agent_day(AgentParameters(sessions=sessions, rate=rate), seed), stride)
    service = ServiceTime(ServiceTime().fixed_s, ServiceTime().per_token_s * stride)
    turns = timed_turns(scripts, service)
    pool_tokens = int(working_set(turns).peak * pool)
    bounds = [
        replay(turns, pool_tokens // PAGE_SIZE, PAGE_SIZE, order).recomputed_tokens
        for order in (least_recently_used, farthest_next_use)
    ]
    recomputed = {name: _recomputed(scripts, pool_tokens, service, name, estimator, seed) for name in policies}
    return _Run(seed, pool_tokens, bounds[0], bounds[1], recomputed)


def _recomputed(
    scripts: Sequence[SessionScript], pool_tokens: int, service: ServiceTime, policy: str, estimator: str, seed: int
) -> int:
    from weft.sim.given_service import simulate_given_service
    from weft.sim.scripts import with_subagents

    with progress(f"{policy}, seed {seed}", sum(1 for _ in with_subagents(scripts))) as advance:
        done = simulate_given_service(
            scripts,
            pool_tokens,
            service,
            policy=policy,
            estimator=estimator,
            seed=seed,
            on_done=lambda record: advance(None),
        )
    return done.summary.recomputed_tokens


def _print(found: Sequence[_Run], policies: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("policy", "recomputed", "saved %"):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    for name in policies:
        saved = [value for run in found if (value := run.saved(name)) is not None]
        tokens = statistics.median(run.recomputed[name] for run in found)
        table.add_row(name, f"{tokens:,.0f}", f"{100 * statistics.median(saved):.0f}" if saved else "")
    table.add_row("optimum", f"{statistics.median(run.optimum for run in found):,.0f}", "100")
    Console(width=1000).print(table)


def _content(
    found: Sequence[_Run], sessions: int, rate: float, pool: float, estimator: str, stride: int
) -> dict[str, Any]:
    return {
        "simulation": "agents",
        "command": command_line(),
        **surroundings(),
        "sessions": sessions,
        "rate": rate,
        "pool": pool,
        "estimator": estimator,
        "stride": stride,
        "runs": [{**run._asdict(), "saved": {name: run.saved(name) for name in run.recomputed}} for run in found],
    }
