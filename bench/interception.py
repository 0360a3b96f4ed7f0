"""Policies for KV that waits, under a load of sessions that call tools, on this machine.

    python -m bench.interception --rate 0.1 --json FILE [--resume] [--requests 120] [--runs 3]
                                 [--contenders lru,min_waste,...] [--vllm-python PATH]
    python -m bench.interception --own-link --scale 1 --rate 3 --requests 600 --window 120:160 --runs 1 --together 2
                                 --contenders min_waste,lru,lru-host,min_waste-no-host --checkpoint DIR --json FILE

`weft bench multi-turn --shape mixture` against `weft serve` with random weights in the shape of Qwen3-0.6B, bfloat16:
the same requests for every contender, their contexts a quarter of the published ones, durations of calls as published.
Contenders take turns, each run has a server of its own, and medians over runs are reported with their extremes.

The benchmark prepares itself in three steps, whose results are in the file:

1. `weft profile` measures the cost model of this machine. Servers use it too.
2. The pool is a third of the live contexts: of the greatest sum of the context tokens of all requests under way, as the
   simulator plays the same requests on the profiled device with a pool that holds everything. The host tier holds all
   of them. `--kv-tokens` sets the pool instead.
3. The link (`--host-link`) gets the rate at which moving a token out and in again takes 0.8 of the time of computing it
   again, which is the time by which one more token lengthens a step of S tokens. That is the ratio of GPT-J 6B on an
   A100: 2 x 458,752 bytes / 25 GB/s to 0.0463 ms. Servers with that link use the profile with its rate.

On a CUDA device the link is the device's own (`--own-link`), and `--checkpoint` is a model that keeps the device busy.
`--window BEGIN:END` shortens a run: it has the turns that are due in these seconds, and the sessions under way before
begin with the context that they had (`weft.sim.scripts.window`).

Contenders: `lru` and `min_waste-no-host` (no host tier), `lru-host`, `discard` and `min_waste` (host tier behind that
link), `lru-host-unthrottled` and `min_waste-unthrottled` (host tier at memory speed), and `vllm` (vLLM's server on the
CPU, prefix caching, as many KV tokens), which is left out with the reason if it is not installed.

The file is written after every run; `--resume` continues it. Decisions are counted where waits end, by where the KV was
then: kept on the device, on the host, or recomputed. A run of which one of them has more than 90 % is void.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench import alone
from bench.peers import INSTALL
from bench.peers.vllm_cpu import vllm_server
from bench.resume import add_arguments, check_arguments, chosen, continued
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, heading, surroundings, write_record
from weft.cli.bench.server import own_server
from weft.cli.bench.server_counts import DECISIONS
from weft.cli.bench.shapes import drawn_sessions
from weft.cli.bench.workload import parse_window
from weft.cli.random_weights import random_weights
from weft.cli.settings import Settings, load
from weft.config import cache_directory
from weft.core.cost.model import ForwardModel, StepShape, SwapModel
from weft.core.cost.profile import Identity, Profile, Swaps
from weft.engine.profiles import load_profile, profile_path, store_profile
from weft.sim.bounds import TimedTurn, WorkingSet, working_set
from weft.sim.devices import Device, device_of_profile
from weft.sim.records import SessionRecord
from weft.sim.run import SimulationSettings, simulate
from weft.sim.scripts import SessionScript
from weft.worker.identity import describe_link
from weft.worker.memory import usable_cores
from weft.worker.sizing import kernel_threads

WORKLOAD = "mixture"
MODEL = "qwen3-0.6b"
"""Random weights."""
SCALE = 0.25
PAGE_SIZE = 16
LINK_SHARE = 0.8
"""Time of swapping a token / time of computing it again."""
POOL_SHARE = 1 / 3
VOID_SHARE = 0.9
DTYPE = "bfloat16"
KV_ITEM_BYTES = 2
RUN_TIMEOUT_S = 3600


class Contender(NamedTuple):
    """A server to measure."""

    name: str
    policy: str
    """Empty: not Weft."""
    host_tier: bool = True
    throttled: bool = True


CONTENDERS = (
    Contender("lru", "lru", host_tier=False, throttled=False),
    Contender("lru-host", "lru"),
    Contender("discard", "discard"),
    Contender("min_waste", "min_waste"),
    Contender("min_waste-no-host", "min_waste", host_tier=False, throttled=False),
    Contender("lru-host-unthrottled", "lru", throttled=False),
    Contender("min_waste-unthrottled", "min_waste", throttled=False),
    Contender("vllm", "", host_tier=False, throttled=False),
)
SHOWN = (
    "normalized_ms_per_token_p50",
    "normalized_ms_per_token_p90",
    "return_ttft_ms_p50",
    "return_ttft_ms_p90",
    "return_ms_per_token_p50",
    "completed_conversations",
    "failed_requests",
    "recomputed_tokens",
    "server_recomputed_tokens",
    "seconds",
)


# Sizes


def link_bytes_per_s(forward: ForwardModel, saturation_tokens: int, kv_bytes_per_token: int) -> float:
    """The rate of a link at which swapping a token out and in again takes `LINK_SHARE` of computing it again.

    Computing a token again takes the time by which one more lengthens a step at the saturation point. A tiny model's
    profile can say that it lengthens none; then it takes a token's part of the whole step.
    """
    once, twice = (forward.predict_s(StepShape.chunk(n * saturation_tokens)) for n in (1, 2))
    token_s = ((twice - once) or once) / saturation_tokens
    return 2 * kv_bytes_per_token / (LINK_SHARE * token_s)


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """KV of one token in `DTYPE`, by a checkpoint's config.json: keys and values of all layers."""
    return 2 * KV_ITEM_BYTES * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def live_contexts(device: Device, sessions: Sequence[SessionScript]) -> WorkingSet:
    """Context tokens of sessions under way, as the simulator plays them with a pool that holds everything."""
    everything = sum(session.num_tokens + PAGE_SIZE for session in sessions)
    large = msgspec.structs.replace(device, kv_tokens=everything)
    done = simulate(large, sessions, SimulationSettings(policy="lru", driving="clients"))
    return working_set([turn for record in done.records for turn in _timed(record)])


def _timed(record: SessionRecord) -> Iterator[TimedTurn]:
    for index, turn in enumerate(record.turns):
        later = record.turns[index + 1 :]
        next_s = later[0].due_s if later else math.inf
        yield TimedTurn(
            record.number,
            record.kind,
            turn.due_s,
            turn.end_s,
            turn.prompt_tokens,
            turn.output_tokens,
            turn.known_tokens,
            0,
            next_s,
        )


class Sizes(NamedTuple):
    """What all servers of a comparison have."""

    kv_tokens: int
    host_bytes: int
    link_gbs: float | None
    """Of a throttled link; None: the device's own."""
    max_context: int


def choose_sizes(args: argparse.Namespace, profile: Profile, config: Mapping[str, Any]) -> tuple[Sizes, dict[str, Any]]:
    """The sizes, and what they come from. Ends the process where the pool is smaller than the longest request."""
    sessions = drawn(args)
    live = live_contexts(device_of_profile(profile, "profile", 1), sessions)
    per_token = kv_bytes_per_token(config)
    longest = max(session.num_tokens for session in sessions)
    pages = -(-(args.kv_tokens or round(live.peak * POOL_SHARE)) // PAGE_SIZE)
    if pages * PAGE_SIZE <= longest:
        sys.exit(f"a pool of {pages * PAGE_SIZE} tokens does not hold the longest request ({longest}): raise --rate")
    rate = link_bytes_per_s(profile.forward, profile.saturation_tokens, per_token)
    sizes = Sizes(
        kv_tokens=pages * PAGE_SIZE,
        host_bytes=(-(-live.peak // PAGE_SIZE) + 1) * PAGE_SIZE * per_token,
        link_gbs=None if args.own_link else float(f"{rate / 1e9:.4g}"),
        max_context=longest + 1,
    )
    return sizes, {"live_tokens": live.mean, "peak_live_tokens": live.peak, "kv_bytes_per_token": per_token}


def drawn(args: argparse.Namespace) -> list[SessionScript]:
    """The requests of every run."""
    scales = args.scale, args.time_scale
    return drawn_sessions(WORKLOAD, args.requests, args.rate, scales, args.seed, args.window)


# Servers and runs


def settings_of(contender: Contender, checkpoint: Path, sizes: Sizes) -> Settings:
    """The settings of a Weft server."""
    values: dict[str, Any] = {
        "engine.model": str(checkpoint),
        "engine.dtype": DTYPE,
        "engine.page_size": PAGE_SIZE,
        "engine.num_pages": sizes.kv_tokens // PAGE_SIZE,
        "engine.max_context": sizes.max_context,
        "engine.host_kv_bytes": sizes.host_bytes if contender.host_tier else 0,
        "engine.intercept_policy": contender.policy,
        "programs.start": "off",
    }
    if contender.throttled and sizes.link_gbs is not None:
        values["engine.host_link_gbs"] = sizes.link_gbs
    return load(flags={key: (contender.name, value) for key, value in values.items()})


@contextlib.contextmanager
def server(contender: Contender, checkpoint: Path, sizes: Sizes) -> Iterator[str]:
    """A contender's server, ready: its URL. Raises `ImportError` for a peer that is not installed."""
    if contender.policy:
        with own_server(settings_of(contender, checkpoint, sizes)) as url:
            yield url
    else:
        threads = kernel_threads(None, usable_cores())
        with vllm_server(checkpoint, threads, sizes.kv_tokens, sizes.max_context) as peer:
            yield peer.url


class Measured(NamedTuple):
    """What a client found in one run."""

    figures: dict[str, float]
    notes: list[str]
    """Failures, and reasons to doubt the figures."""


def one_run(url: str, args: argparse.Namespace) -> Measured:
    """Run a client, in a process of its own, against a server. Raises `RuntimeError`."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "weft.cli.main", "bench", "multi-turn", "--base-url", url]
        command += ["--shape", WORKLOAD, "--scale", str(args.scale), "--time-scale", str(args.time_scale)]
        command += ["--request-rate", str(args.rate), "--num-conversations", str(args.requests)]
        command += ["--seed", str(args.seed), "--runs", "1", "--timeout", str(RUN_TIMEOUT_S), "--json", str(file)]
        if args.window is not None:
            command += ["--window", "{}:{}".format(*args.window)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the client ended with status {done.returncode}: {done.stderr[-1000:]}")
        found = json.loads(file.read_text(encoding="utf-8"))
        return Measured(found["runs"]["all turns"][0], found["notes"])


def measure_profile(checkpoint: Path, quick: bool) -> Profile:
    """Measure a cost profile and store it where servers look for it. Raises `RuntimeError`."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        file = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "weft.cli.main", "profile", str(checkpoint), "--dtype", DTYPE]
        command += ["--json", str(file), *(["--quick"] if quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"weft profile ended with status {done.returncode}: {done.stderr[-1000:]}")
        return msgspec.convert(json.loads(file.read_text(encoding="utf-8"))["profile"], Profile)


def link_model(link_gbs: float, bytes_per_token: int) -> SwapModel:
    """Times of a throttled link."""
    return SwapModel(base_s=0.0, per_page_s=PAGE_SIZE * bytes_per_token / (link_gbs * 1e9))


def throttled(profile: Profile, link_gbs: float, bytes_per_token: int) -> Profile:
    """The profile of the same machine with a throttled link: pages cross at its rate, whose time includes that of the
    copies, and copies lengthen the forward beside them as before."""
    link = Swaps(link_model(link_gbs, bytes_per_token), [])
    identity = msgspec.structs.replace(profile.identity, host_link=describe_link(link_gbs))
    return msgspec.structs.replace(profile, key=identity.key, identity=identity, swap_out=link, swap_in=link)


def stored(told: Mapping[str, Any]) -> Profile | None:
    """The profile that a record tells of, if servers would find it."""
    path = profile_path(cache_directory(os.environ), msgspec.convert(told["identity"], Identity))
    return load_profile(path) if path.exists() else None


def tell(profile: Profile) -> dict[str, Any]:
    """A profile as the record has it: without its samples."""
    kept = {"identity": profile.identity, "forward": profile.forward, "saturation_tokens": profile.saturation_tokens}
    models = {"swap_out": profile.swap_out.model, "swap_in": profile.swap_in.model}
    beside = {"beside_out": profile.moves.beside_out, "beside_in": profile.moves.beside_in}
    content: dict[str, Any] = msgspec.to_builtins({**kept, **models, **beside, "errors": profile.errors})
    return content


# The comparison


def prepare(args: argparse.Namespace, record: dict[str, Any], checkpoint: Path) -> Sizes:
    """Profile the machine and choose the sizes, or take them from the record. Afterwards servers find their profiles: a
    profile that is not stored here is measured again. `--profile` names one that was measured on this machine."""
    profile = stored(record["profile"]) if "profile" in record else None
    if profile is None and args.profile is not None:
        profile = load_profile(args.profile)
        store_profile(cache_directory(os.environ), profile)
        record["profile"] = tell(profile)
    if profile is None:
        print("profiling this machine", flush=True)
        profile = measure_profile(checkpoint, args.quick_profile)
        record["profile"] = tell(profile)
    if "sizes" not in record:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        sizes, sources = choose_sizes(args, profile, config)
        record["sizes"], record["sources"] = sizes._asdict(), sources
    keep(args, record)
    sizes = Sizes(**record["sizes"])
    if sizes.link_gbs is not None:
        bytes_per_token = record["sources"]["kv_bytes_per_token"]
        store_profile(cache_directory(os.environ), throttled(profile, sizes.link_gbs, bytes_per_token))
    return sizes


def run(args: argparse.Namespace, record: dict[str, Any], checkpoint: Path, sizes: Sizes) -> None:
    """Measure what the record lacks; it is written after each run. What fails or is not installed is in `failed`."""
    runs = record["runs"]
    failed = record["failed"] = {}
    for number in range(args.runs):
        lacking = [one for one in args.contenders if len(runs.setdefault(one.name, [])) <= number]
        for start in range(0, len(lacking), args.together):
            group = [one for one in lacking[start : start + args.together] if one.name not in failed]
            with servers(group, checkpoint, sizes) as urls:
                run_group(args, record, number, urls)


@contextlib.contextmanager
def servers(contenders: Sequence[Contender], checkpoint: Path, sizes: Sizes) -> Iterator[dict[Contender, Future[str]]]:
    """Servers of contenders, which start at the same time: for each its URL, or why it did not start."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max(1, len(contenders))) as threads:
        urls = {one: threads.submit(stack.enter_context, server(one, checkpoint, sizes)) for one in contenders}
        wait(urls.values())
        yield urls


def run_group(
    args: argparse.Namespace, record: dict[str, Any], number: int, urls: Mapping[Contender, Future[str]]
) -> None:
    """Measure one run on each of these servers, one after the other."""
    runs, failed = record["runs"], record["failed"]
    for contender, url in urls.items():
        found = runs[contender.name]
        began = time.strftime("%H:%M:%S")
        try:
            measured = one_run(url.result(), args)
        except Exception as error:  # servers and peers fail in ways of their own
            failed[contender.name] = f"{type(error).__name__}: {error}"
            print(f"{began} {contender.name}: no figure: {failed[contender.name]}", flush=True)
            if isinstance(error, ImportError):
                print(f"{contender.name} is not installed: {INSTALL[contender.name]}")
        else:
            found.append(measured.figures)
            notes = record["notes"].setdefault(contender.name, [])
            notes += [f"run {number + 1}: {note}" for note in measured.notes]
            shown = ", ".join(f"{name} {found[-1][name]:.5g}" for name in SHOWN if name in found[-1])
            print("; ".join([f"{began} {contender.name}, run {number + 1}: {shown}", *measured.notes]), flush=True)
        keep(args, record)


def keep(args: argparse.Namespace, record: Mapping[str, Any]) -> None:
    if args.json:
        write_record(args.json, record)


def void(figures: Mapping[str, float]) -> str | None:
    """Why a run says nothing of policies: one action has nearly all decisions. None: it says something."""
    actions = {name: count for name, count in figures.items() if name.startswith(DECISIONS)}
    total = sum(actions.values())
    for name, count in actions.items():
        if count > VOID_SHARE * total:
            return f"{count / total:.0%} of decisions are {name.removeprefix(DECISIONS)}"
    return None


def summary(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Lines of medians and extremes by contender and figure, and why runs are void."""
    lines = []
    for name, found in runs.items():
        if not found:
            continue
        lines.append(f"{name}, {len(found)} runs")
        figures = [*SHOWN, *sorted({figure for one in found for figure in one if figure.startswith(DECISIONS)})]
        for figure in figures:
            values = [one[figure] for one in found if figure in one]
            if values:
                lines.append(f"  {figure:32} {Spread.of(values).text(1)}")
        lines += [f"  void, run {number}: {why}" for number, one in enumerate(found, 1) if (why := void(one))]
    return lines


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """What has to be equal for runs to stand in one file."""
    names = ("rate", "requests", "seed", "scale", "time_scale", "kv_tokens", "own_link")
    span = None if args.window is None else list(args.window)  # as the file has it
    return {"model": str(args.checkpoint or MODEL), **{name: getattr(args, name) for name in names}, "window": span}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.interception",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = {contender.name: contender for contender in CONTENDERS}
    parser.add_argument("--rate", type=float, default=0.1, help="mean arrivals of requests per second, Poisson (0.1)")
    parser.add_argument("--requests", type=int, default=120, help="of a run (120)")
    parser.add_argument("--runs", type=int, default=3, help="of each contender (3)")
    parser.add_argument("--contenders", default=",".join(known), help=f"comma-separated: {', '.join(known)}")
    parser.add_argument("--kv-tokens", type=int, help="tokens of the pool, instead of a third of the live contexts")
    parser.add_argument("--scale", type=float, default=SCALE, help=f"factor on all lengths ({SCALE})")
    parser.add_argument("--time-scale", type=float, default=1.0, help="factor on the durations of calls (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    parser.add_argument("--checkpoint", type=Path, help=f"to use instead of random weights in the shape of {MODEL}")
    parser.add_argument("--window", type=parse_window, metavar="BEGIN:END", help="play these seconds alone")
    parser.add_argument("--own-link", action="store_true", help="no throttled links: the device has a link of its own")
    parser.add_argument("--together", type=int, default=1, help="servers that are up at a time, one of them busy (1)")
    parser.add_argument("--profile", type=Path, help="a cost model that `weft profile --json` measured here")
    parser.add_argument("--quick-profile", action="store_true", help="a coarser cost model, sooner")
    add_arguments(parser, record="every run", kept="runs")
    args = parser.parse_args(arguments)
    args.contenders = [known[name] for name in chosen(parser, args.contenders, known, "contender")]
    if not 0 < args.rate < math.inf or min(args.requests, args.runs, args.together) < 1 or args.seed < 0:
        parser.error("--rate, --requests, --runs and --together must be positive, and --seed not negative")
    check_arguments(parser, args)
    return args


def main() -> None:
    args = parse_arguments()
    record: dict[str, Any] = {
        **surroundings(),
        "command": command_line("bench.interception"),
        "asked": asked(args),
        "runs": {},
        "notes": {},
    }
    if args.resume:
        record = continued(args.json, record)
    print(heading(record))
    checkpoint = args.checkpoint or random_weights(MODEL, print)
    sizes = prepare(args, record, checkpoint)
    print(", ".join(f"{name} {value}" for name, value in sizes._asdict().items()), flush=True)
    run(args, record, checkpoint, sizes)
    print("\n".join(["", *summary(record["runs"])]))
    if any(contender.policy and contender.name in record["failed"] for contender in args.contenders):
        sys.exit(1)


if __name__ == "__main__":
    alone.require()
    main()
