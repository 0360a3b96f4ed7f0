"""Shows a cost profile as text (formula, errors, bars) and writes it to files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from weft.abi.errors import ConfigError, WeftError
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.core.cost.model import HIDDEN_SHARE, ForwardModel
from weft.core.cost.profile import Profile, Residual, Swaps

BAR_WIDTH = 40
PLOTTING = "matplotlib"


def show(profile: Profile, path: Path) -> None:
    """Print a profile and the path of its file."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{profile.name}: {profile.identity.describe()}", markup=False)
    for line in formula(profile):
        console.print(line, markup=False)
    table = Table(title="Error on held-out shapes", title_justify="left", box=None, pad_edge=False)
    for name in ("kind", "shapes", "median", "90th percentile"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for one in profile.errors:
        table.add_row(one.kind, str(one.count), f"{100 * one.median:.1f} %", f"{100 * one.p90:.1f} %")
    console.print(table)
    console.print("Prompt chunks without context: time (█ measured, │ predicted)")
    for line in bars(profile):
        console.print(line, markup=False)
    console.print(f"stored in {path}", markup=False)


def formula(profile: Profile) -> Iterator[str]:
    """Yield the fitted models, one line each."""
    model = profile.forward
    terms = [
        (model.base_s, ""),
        (model.head_s, "if a row has an output"),
        (model.per_row_s, "per row"),
        (model.per_output_s, "per output row"),
        *((slope, f"per token{part}") for slope, part in _parts(model)),
        (model.per_decode_kv_s, "per KV entry of decoding rows"),
        (model.per_chunk_kv_s, "per KV entry of chunks"),
        (model.per_chunk_pair_s, "per token and KV entry of chunks"),
    ]
    shown = [f"{_time(seconds)} {what}".rstrip() for seconds, what in terms if seconds > 0]
    for index, term in enumerate(shown):
        yield f"{'      +' if index else 'T_fwd ='} {term}"
    for name, swaps in (("out", profile.swap_out), ("in", profile.swap_in)):
        yield f"T_swap {name} = {_swap(swaps)}"
    yield from _moves(profile)
    yield f"S = {profile.saturation_tokens} tokens per step (of {profile.max_tokens} measured)"


def bars(profile: Profile) -> Iterator[str]:
    """Yield a bar of time for each size of a chunk that begins a prompt."""
    chunks = _beginnings(profile)
    longest = max((max(r.sample.seconds, r.predicted_s) for r in chunks), default=1.0)
    saturated = False
    for residual in chunks:
        tokens, seconds = residual.sample.shape.num_tokens, residual.sample.seconds
        line = ["█"] * round(BAR_WIDTH * seconds / longest)
        line += [" "] * (BAR_WIDTH + 1 - len(line))
        line[round(BAR_WIDTH * residual.predicted_s / longest)] = "│"
        mark = "  ← S" if not saturated and tokens >= profile.saturation_tokens else ""
        saturated = saturated or bool(mark)
        yield f"{tokens:6d} {_time(seconds):>10}  {''.join(line)} {tokens / seconds:7.0f} tokens/s{mark}"


def write_json(profile: Profile, file: Path) -> None:
    """Write the profile with the machine, the versions and the command. Raises `WeftError`."""
    write_record(file, {"command": command_line(), **surroundings(), "profile": msgspec.to_builtins(profile)})


def need_matplotlib() -> Any:
    """Import matplotlib. Raises `ConfigError` that says how to install it."""
    try:
        drawing = importlib.import_module(PLOTTING)
        drawing.use("Agg")
        return importlib.import_module(f"{PLOTTING}.pyplot")
    except ImportError as error:
        raise ConfigError(f"--png needs the package {PLOTTING}: pip install {PLOTTING}") from error


def write_png(profile: Profile, file: Path) -> None:
    """Plot measured against predicted times, and time over tokens. Raises `WeftError`."""
    pyplot = need_matplotlib()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for kind in sorted({r.sample.kind for r in profile.residuals}):
        for held_out, marker in ((False, "."), (True, "x")):
            chosen = [r for r in profile.residuals if r.sample.kind == kind and r.held_out == held_out]
            label = f"{kind}, held out" if held_out else kind
            left.plot([r.sample.seconds for r in chosen], [r.predicted_s for r in chosen], marker, label=label)
    ends = [f(r.sample.seconds for r in profile.residuals) for f in (min, max)]
    left.plot(ends, ends, color="grey", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title=profile.name)
    left.legend(fontsize="small")
    chunks = _beginnings(profile)
    tokens = [r.sample.shape.num_tokens for r in chunks]
    right.plot(tokens, [r.sample.seconds for r in chunks], "o", label="measured")
    right.plot(tokens, [r.predicted_s for r in chunks], label="predicted")
    right.axvline(profile.saturation_tokens, color="grey", linewidth=0.8, label=f"S = {profile.saturation_tokens}")
    right.set(xlabel="tokens of a chunk that begins a prompt", ylabel="s")
    right.legend(fontsize="small")
    figure.tight_layout()
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise WeftError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _beginnings(profile: Profile) -> list[Residual]:
    """Chunks without context, by size."""
    chunks = [r for r in profile.residuals if r.sample.kind == "chunk"]
    chosen = [r for r in chunks if r.sample.shape.decode_kv + r.sample.shape.chunk_kv == r.sample.shape.num_tokens]
    return sorted(chosen, key=lambda r: r.sample.shape.num_tokens)


def _parts(model: ForwardModel) -> Iterator[tuple[float, str]]:
    """Slopes with their ranges of tokens."""
    if not model.knots:
        yield model.slopes[0], ""
        return
    for slope, low, high in zip(model.slopes, (0, *model.knots), (*model.knots, None), strict=True):
        yield slope, f" above {low}" if high is None else f" up to {high}" if not low else f" from {low} to {high}"


def _swap(swaps: Swaps) -> str:
    if swaps.model is None:
        return "not measured: there is no host tier (host_kv_bytes)"
    return f"{_time(swaps.model.base_s)} + {_time(swaps.model.per_page_s)} per page"


def _moves(profile: Profile) -> Iterator[str]:
    """What pages cost that move beside a forward, and how many move for `HIDDEN_SHARE` of the largest and the smallest
    forward beside which that was measured, or of several such forwards."""
    for name, model in (("out", profile.moves.beside_out), ("in", profile.moves.beside_in)):
        if model is not None:
            yield f"beside a forward, {name} = {_time(model.base_s)} + {_time(model.per_page_s)} per page"
    costs = profile.cost_model()
    shapes = sorted({sample.shape for sample in profile.moves.samples}, key=costs.predict_forward_s)
    for shape in dict.fromkeys(shapes[:1] + shapes[-1:]):
        budget = costs.move_budget(shape, HIDDEN_SHARE)
        if budget is not None:
            steps = f"{shape.num_rows} rows, {shape.num_tokens} tokens, {_time(costs.predict_forward_s(shape))}"
            which = "a step" if budget.steps == 1 else f"{budget.steps} steps"
            yield f"{budget.pages} pages move for {HIDDEN_SHARE:.0%} of {which} of {steps}"


def _time(seconds: float) -> str:
    """Format seconds with three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
