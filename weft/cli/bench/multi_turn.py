"""`weft bench multi-turn`: conversations with pauses, and the share of their history that stays cached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from weft.abi.errors import WeftError
from weft.cli.bench.client import LoadClient, Target, open_client
from weft.cli.bench.clock import LoopWatch
from weft.cli.bench.conversation import HeldConversation, Pauses, Script, Workload, hold, scripts, session_scripts
from weft.cli.bench.conversation_figures import conversation_figures
from weft.cli.bench.flags import (
    DEFAULT_TIMEOUT_S,
    LOAD_PANEL,
    ApiKey,
    BaseUrl,
    EndpointFlag,
    ExtraBody,
    IgnoreEos,
    JsonFile,
    MaxConcurrency,
    ModelName,
    OutputLengths,
    RandomWeights,
    Runs,
    Seed,
    Slo,
    Timeout,
    engine_subject,
    measured_server,
    parsed,
    progress,
    read_extra_body,
    read_slo,
)
from weft.cli.bench.lengths import KINDS, Lengths, parse_lengths
from weft.cli.bench.measure import Outcome, Targets, Timing
from weft.cli.bench.report import report
from weft.cli.bench.results import Results
from weft.cli.bench.server_counts import counted
from weft.cli.bench.shapes import CONVERSATIONS, drawn_sessions
from weft.cli.bench.workload import arrivals, parse_rate, parse_window
from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings

ALL_TURNS = "all turns"
SHOWN_TURNS = 8
"""Later turns are counted together."""
NUM_CONVERSATIONS = 8
OVERVIEW = ("answered_requests", "input_tokens", "cached_share", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50")
EXAMPLES = """Examples:

  weft bench multi-turn --num-conversations 8 --turns 5 --think-time 0.5

  weft bench multi-turn --turns 5 --no-prefix-cache                     without reuse, for comparison

  weft bench multi-turn --shape mixture --scale 0.25 --request-rate 0.3 --runs 1

  weft bench multi-turn --base-url http://127.0.0.1:8000 --endpoint chat --tool-share 0.5 --tool-time 0.2
"""


def register(group: typer.Typer) -> None:
    """Add the command `multi-turn` to the application."""
    group.command("multi-turn", epilog=EXAMPLES)(multi_turn)


@takes_settings(*ENGINE_KEYS)
def multi_turn(
    settings: Settings,
    model: Model = None,
    base_url: BaseUrl = None,
    model_name: ModelName = None,
    api_key: ApiKey = None,
    endpoint: EndpointFlag = "completions",
    ignore_eos: IgnoreEos = True,
    extra_body: ExtraBody = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    num_conversations: Annotated[
        int | None,
        typer.Option(
            "--num-conversations",
            min=1,
            help=f"Conversations per run. ({NUM_CONVERSATIONS}; mixture: {CONVERSATIONS['mixture'].num_sessions})",
            rich_help_panel=LOAD_PANEL,
            show_default=False,
        ),
    ] = None,
    request_rate: Annotated[
        str,
        typer.Option(
            "--request-rate",
            metavar="RATE",
            help="Mean rate of new conversations per second, Poisson; inf: all at once.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = "inf",
    max_concurrency: MaxConcurrency = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="|".join(CONVERSATIONS),
            help="Published workload whose turns, lengths and pauses replace the flags below.",
            rich_help_panel=LOAD_PANEL,
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        float,
        typer.Option("--scale", min=0.0001, help="Factor on the lengths of a shape.", rich_help_panel=LOAD_PANEL),
    ] = 1.0,
    time_scale: Annotated[
        float,
        typer.Option("--time-scale", min=0, help="Factor on the pauses of a shape.", rich_help_panel=LOAD_PANEL),
    ] = 1.0,
    window_s: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="BEGIN:END",
            help="Seconds of a shape's arrivals to play, with the conversations that were under way before.",
            rich_help_panel=LOAD_PANEL,
            show_default=False,
        ),
    ] = None,
    turns: Annotated[
        Lengths,
        typer.Option(
            "--turns",
            parser=parsed(parse_lengths),
            metavar="LENGTHS",
            help=f"Turns per conversation: a number, or {KINDS}. (5)",
            rich_help_panel=LOAD_PANEL,
            show_default=False,
        ),
    ] = "5",  # type: ignore[assignment]  # typer parses defaults
    system_len: Annotated[
        int,
        typer.Option(
            "--system-len",
            min=0,
            help="Tokens of a system prompt that all conversations share.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = 64,
    input_len: Annotated[
        Lengths,
        typer.Option(
            "--input-len",
            parser=parsed(parse_lengths),
            metavar="LENGTHS",
            help="New tokens per turn. (64)",
            rich_help_panel=LOAD_PANEL,
            show_default=False,
        ),
    ] = "64",  # type: ignore[assignment]
    output_len: OutputLengths = "32",  # type: ignore[assignment]
    think_time: Annotated[
        float,
        typer.Option(
            "--think-time", min=0, help="Mean pause between turns in seconds, exponential.", rich_help_panel=LOAD_PANEL
        ),
    ] = 0.0,
    tool_share: Annotated[
        float,
        typer.Option(
            "--tool-share",
            min=0,
            max=1,
            help="Share of the pauses that are a tool's.",
            rich_help_panel=LOAD_PANEL,
        ),
    ] = 0.0,
    tool_time: Annotated[
        float,
        typer.Option(
            "--tool-time", min=0, help="Mean duration of a tool in seconds, exponential.", rich_help_panel=LOAD_PANEL
        ),
    ] = 0.0,
    slo: Slo = None,
    random_weights: RandomWeights = None,
    runs: Runs = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure conversations: latency without pauses, and time to first token and cached share of the prompt per turn.

    With --no-prefix-cache, the server that the benchmark starts recomputes every history, for comparison. Of a Weft
    server, the counts of /metrics over each run are reported too.
    """
    as_text = endpoint == "chat"
    rate = parsed(parse_rate)(request_rate)
    span = None if window_s is None else parsed(parse_window)(window_s)
    if shape is None and span is not None:
        raise typer.BadParameter("--window plays a part of a published workload; give a --shape")
    if shape is None:
        pauses = Pauses(think_time, tool_time, tool_share)
        workload = Workload(turns, system_len, input_len, input_len, output_len, pauses.draw)
        count = num_conversations or NUM_CONVERSATIONS
        draw = _drawing(workload, count, rate, as_text)
        described = _described(workload, pauses)
    elif shape not in CONVERSATIONS:
        raise typer.BadParameter(f"--shape {shape} is unknown; known shapes are {', '.join(CONVERSATIONS)}")
    elif seed < 0:
        raise typer.BadParameter(f"--seed {seed} is negative, which shapes do not accept")
    else:
        count = num_conversations or CONVERSATIONS[shape].num_sessions
        draw = _drawing_of_shape(shape, count, rate, (scale, time_scale), span, as_text)
        described = {"shape": shape, "scale": scale, "time scale": time_scale}
        described |= {} if window_s is None else {"window": window_s}
    plan = MultiTurnPlan(
        draw,
        max_concurrency,
        # Histories have the answers' ids; in a chat they have the texts.
        ({} if as_text else {"return_token_ids": True}) | read_extra_body(extra_body),
        read_slo(slo),
        runs,
        seed,
    )
    asked = Target(base_url, model_name or model, api_key, endpoint, ignore_eos, timeout)
    with measured_server(settings, asked, random_weights) as target:
        results, name = asyncio.run(_measure(target, plan))
    subject: dict[str, Any] = {
        "model": name,
        "server": base_url or "own",
        "endpoint": endpoint,
        "conversations": count,
        "rate": request_rate,
        **described,
        **({} if base_url else engine_subject(settings)),
    }
    report(
        "multi-turn",
        results.groups,
        subject,
        json_file,
        overview=OVERVIEW,
        detailed=(ALL_TURNS,),
        notes=results.notes(),
    )


class DrawnConversations(NamedTuple):
    """The conversations of a run, and when they arrive, in seconds from its begin."""

    scripts: list[Script]
    arrivals_s: list[float]


class MultiTurnPlan(NamedTuple):
    """Options of `weft bench multi-turn`: conversations by seed, targets, and runs."""

    draw: Callable[[int], DrawnConversations]
    max_concurrency: int | None
    fields: dict[str, Any]
    targets: Targets
    runs: int
    seed: int


def _drawing(workload: Workload, count: int, rate: float, as_text: bool) -> Callable[[int], DrawnConversations]:
    def draw(seed: int) -> DrawnConversations:
        return DrawnConversations(scripts(workload, seed, count, as_text), list(arrivals(seed, count, rate)))

    return draw


def _drawing_of_shape(
    shape: str,
    count: int,
    rate: float,
    scales: tuple[float, float],
    span: tuple[float, float] | None,
    as_text: bool,
) -> Callable[[int], DrawnConversations]:
    def draw(seed: int) -> DrawnConversations:
        sessions = drawn_sessions(shape, count, rate, scales, seed, span)
        first_s = sessions[0].arrive_s
        return DrawnConversations(
            session_scripts(sessions, seed, as_text), [session.arrive_s - first_s for session in sessions]
        )

    return draw


def _described(workload: Workload, pauses: Pauses) -> dict[str, Any]:
    return {
        "turns": str(workload.turns),
        "system": workload.system_len,
        "input": str(workload.first),
        "output": str(workload.outputs),
        "think": f"{pauses.think_s:g} s",
        **({"tools": f"{pauses.tool_share:.0%} of {pauses.tool_s:g} s"} if pauses.tool_share else {}),
    }


async def _measure(target: Target, plan: MultiTurnPlan) -> tuple[Results, str]:
    results = Results(plan.targets)
    async with open_client(target) as client:
        await _warm_up(client, plan)
        for seed in range(plan.seed, plan.seed + plan.runs):
            before = await client.counts()
            held, elapsed, watch = await _run(client, plan, seed)
            more = conversation_figures(held) | counted(before, await client.counts())
            results.add(ALL_TURNS, [outcome for one in held for outcome in one.outcomes], elapsed, watch, more)
            for title, outcomes in by_turn([one.outcomes for one in held]).items():
                results.add_part(title, outcomes, elapsed)
    return results, client.model


async def _warm_up(client: LoadClient, plan: MultiTurnPlan) -> None:
    script = plan.draw(plan.seed + plan.runs).scripts[0]
    [one], _ = await hold([script._replace(turns=script.turns[:1])], [0.0], client.send, fields=plan.fields)
    [first] = one.outcomes
    if not isinstance(first, Timing):
        raise WeftError(f"a request before the first run failed ({first.kind}): {first.message}")


async def _run(client: LoadClient, plan: MultiTurnPlan, seed: int) -> tuple[list[HeldConversation], float, LoopWatch]:
    drawn = plan.draw(seed)
    with progress("turns", sum(script.num_turns for script in drawn.scripts)) as advance:
        async with LoopWatch() as watch:
            held, elapsed = await hold(
                drawn.scripts,
                drawn.arrivals_s,
                client.send,
                fields=plan.fields,
                max_concurrency=plan.max_concurrency,
                on_done=advance,
            )
    return held, elapsed, watch


def by_turn(conversations: Sequence[Sequence[Outcome]]) -> dict[str, list[Outcome]]:
    """Group outcomes by the number of their turn; turns after `SHOWN_TURNS` form one group."""
    groups: dict[str, list[Outcome]] = {}
    for turns in conversations:
        for number, outcome in enumerate(turns, 1):
            title = f"turn {number}" if number <= SHOWN_TURNS else f"turn {SHOWN_TURNS + 1} and later"
            groups.setdefault(title, []).append(outcome)
    return groups
