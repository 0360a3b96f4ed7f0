"""`weft profile`: measures the time of steps on this machine, fits a cost model, and stores it for engines.

Calls `weft.worker.profile` to measure, `weft.core.cost` to fit, `weft.engine.profiles` to store and `profile_report` to
show.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weft.abi.errors import ConfigError
from weft.cli.loading import loading_progress
from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings
from weft.config import EngineConfig, cache_directory

if TYPE_CHECKING:
    from weft.core.cost.profile import Profile

MAX_HOST_PAGES = 256
"""Bytes of the host tier for measuring swaps, if the settings have none."""

EXAMPLES = """Examples:

  weft profile                                    weft-tiny, half a minute

  weft profile Qwen/Qwen3-0.6B --quick            fewer shapes and rounds

  weft profile ./llama --dtype bfloat16 --threads 8 --json profile.json --png profile.png

Use the settings that you serve with: a profile is valid for its model, dtype, device, threads, page size, kernels and
release. `weft serve` finds it at start and logs its use; /metrics has the ratio of measured to predicted step times
(`weft:cost_model_ratio`).
"""


def register(app: typer.Typer) -> None:
    """Add the command `profile` to the application."""
    app.command("profile", epilog=EXAMPLES)(profile)


@takes_settings(*ENGINE_KEYS)
def profile(
    settings: Settings,
    model: Model = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and rounds, for a coarser model.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the profile, with machine and versions, to a file.", metavar="FILE"),
    ] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Plot the measurements; requires matplotlib.", metavar="FILE")
    ] = None,
) -> None:
    """Measure step times on this machine and store a cost model.

    Runs batches of many shapes on the model (chunks of prompts, decoding rows, mixtures; KV pages to the host and back)
    and fits T_fwd, the time of a forward pass, and T_swap, the time to copy pages. The table has the error on a quarter
    of the shapes, which is held out. S, the saturation point, is the number of tokens per step above which the time
    grows proportionally; below it additional tokens are nearly free.

    Profile an idle machine. The result is stored under WEFT_CACHE, else XDG_CACHE_HOME or ~/.cache.
    """
    from weft.cli import profile_report

    if png_file is not None:
        profile_report.need_matplotlib()
    found, path = _measure(settings.config.engine, quick)
    profile_report.show(found, path)
    if json_file is not None:
        profile_report.write_json(found, json_file)
    if png_file is not None:
        profile_report.write_png(found, png_file)


def _measure(config: EngineConfig, quick: bool) -> tuple[Profile, Path]:
    """The profile, and where it was stored. Raises `ModelLoadError` or `ConfigError`."""
    from weft.worker.memory import usable_cores
    from weft.worker.sizing import kernel_environment, kernel_threads

    if "torch" not in sys.modules:  # as in an engine process: kernel threads read the environment once
        os.environ.update(kernel_environment(kernel_threads(config.threads, usable_cores())) | os.environ)
    from weft.core.cost.profile import make_profile
    from weft.engine.profiles import store_profile
    from weft.worker.build import load, start_worker, step_tokens
    from weft.worker.identity import identify
    from weft.worker.profile import FULL, QUICK, Profiler, make_plan

    loaded = load(config, loading_progress(config.model))
    bytes_per_page = loaded.model.kv_spec().bytes_per_page(config.page_size)
    worker = start_worker(_with_host_tier(config, bytes_per_page), loaded)
    try:
        plan = make_plan(worker.spec, step_tokens(config), QUICK if quick else FULL)
        with _bar(plan.num_visits) as progress:
            measured = Profiler(worker).measure(plan, progress)
    finally:
        worker.close()
    try:
        found = make_profile(identify(config, loaded), config.model, measured)
    except ValueError as error:
        raise ConfigError(f"{error}; give more pages (num_pages) or a larger max_step_tokens") from error
    return found, store_profile(cache_directory(os.environ), found)


def _with_host_tier(config: EngineConfig, bytes_per_page: int) -> EngineConfig:
    """Host pages for swaps: a CPU has none by default, a GPU has more than needed."""
    from weft.worker.profile import SWAP_BYTES

    if config.host_kv_bytes is not None:
        return config
    return msgspec.structs.replace(config, host_kv_bytes=min(SWAP_BYTES, MAX_HOST_PAGES * bytes_per_page))


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)
