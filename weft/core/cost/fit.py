"""From measured times to models, and how far those are off where they were not fitted.

Owns the split into fitted and held-out samples, the forms that are tried, and the choice among them. A quarter of the
samples of every kind is held out: it takes no part in choosing the form, placing knots or fitting coefficients, and
the errors that are reported are those on it. Deterministic: the same samples give the same models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from weft.core.cost.model import ForwardModel, StepShape, SwapModel
from weft.core.cost.nnls import nnls
from weft.core.step import F64

HELD_OUT_EVERY, HELD_OUT_FIRST = 4, 2
FOLDS = 5
MIN_SAMPLES = 12
"""Fewer would not tell forms apart."""
SIMPLER_IS_ENOUGH = 0.005
"""A form with more knots must be better by so much relative error."""
MIN_MOVES = 6
REWEIGHTINGS = 8
SMALLEST_RESIDUAL = 0.01
"""Relative; smaller residuals weigh as much as this one."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shape of step and its least measured time: a disturbance can only add to it."""

    kind: str
    """chunk, decode, prompts, mixed."""
    shape: StepShape
    seconds: float


class SwapSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pages moved by one step, and the least measured time."""

    num_pages: int
    seconds: float


class MoveSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that computes and moves pages, and the least measured times, with and without the pages."""

    shape: StepShape
    num_out: int
    num_in: int
    forward_s: float
    """Of the same step without pages, measured in turns with it."""
    seconds: float


class ErrorSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative errors |predicted / measured - 1| on held-out samples of one kind, or of all."""

    kind: str
    count: int
    median: float
    p90: float


class Split(NamedTuple):
    """Indices of samples; no index is in both."""

    fitted: list[int]
    held_out: list[int]


def split_samples(samples: Sequence[Sample]) -> Split:
    """Every fourth of each kind, in order of size, is held out."""
    held_out: list[int] = []
    for kind in sorted({sample.kind for sample in samples}):
        held_out += _in_order(samples, kind)[HELD_OUT_FIRST::HELD_OUT_EVERY]
    chosen = set(held_out)
    return Split([index for index in range(len(samples)) if index not in chosen], sorted(held_out))


def fit_forward(samples: Sequence[Sample]) -> ForwardModel:
    """The model that fits `samples` best, of the simplest form that predicts about as well as any.

    Forms are a line in the query tokens, a line with one knee, and lines with a knot at every fourth or every second
    power of two. They are compared by cross-validation inside `samples`. Raises `ValueError` for too few of them.
    """
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples are too few to fit; at least {MIN_SAMPLES} are needed")
    shapes = np.array([sample.shape for sample in samples], np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    folds = _folds(samples)
    forms = _forms(int(shapes[:, 0].max()))
    scores = [_cross_validated(form, shapes, seconds, folds) for form in forms]
    enough = min(scores) + SIMPLER_IS_ENOUGH
    form = next(form for form, score in zip(forms, scores, strict=True) if score <= enough)
    return _fit_form(form, shapes, seconds).model


def fit_swap(samples: Sequence[SwapSample]) -> SwapModel | None:
    """T_swap = a + b * pages, both not negative; None for fewer than two samples."""
    if len(samples) < 2:
        return None
    matrix = np.array([(1.0, sample.num_pages) for sample in samples])
    base_s, per_page_s = _robust_nnls(matrix, np.array([sample.seconds for sample in samples])).tolist()
    return SwapModel(base_s, per_page_s)


def fit_beside(
    samples: Sequence[MoveSample], swap_out: SwapModel | None, swap_in: SwapModel | None
) -> tuple[SwapModel, SwapModel] | None:
    """By how much pages that move out and in lengthen a forward: a + b * pages for each direction, not negative.

    Errors count relative to the time of the step. Samples in which the link takes longer than the forward do not tell,
    and are left out. None for fewer than `MIN_MOVES` others, or where a direction is missing.
    """
    if swap_out is None or swap_in is None:
        return None
    telling = [
        one for one in samples if swap_out.predict_s(one.num_out) + swap_in.predict_s(one.num_in) <= one.forward_s
    ]
    counts = np.array([(one.num_out, one.num_in) for one in telling], np.float64).reshape(-1, 2)
    if len(telling) < MIN_MOVES or not counts.any(axis=0).all():
        return None
    matrix = np.concatenate(((counts > 0).astype(np.float64), counts), axis=1)
    forward_s = np.array([one.forward_s for one in telling])
    added_s = np.array([one.seconds for one in telling]) - forward_s
    base_out_s, base_in_s, out_s, in_s = _robust_nnls(matrix, added_s, forward_s).tolist()
    return SwapModel(base_out_s, out_s), SwapModel(base_in_s, in_s)


def summarise_moves(
    samples: Sequence[MoveSample], swaps: tuple[SwapModel, SwapModel], beside: tuple[SwapModel, SwapModel]
) -> ErrorSummary:
    """The relative errors of steps that move pages, given the measured times of their forwards.

    `swaps` and `beside` are (out, in): of the link alone, and by how much a forward takes longer.
    """
    errors = []
    for one in samples:
        link_s, added_s = (out.predict_s(one.num_out) + into.predict_s(one.num_in) for out, into in (swaps, beside))
        errors.append(abs(max(one.forward_s + added_s, link_s) / one.seconds - 1))
    median, p90 = np.quantile(errors, (0.5, 0.9)).tolist() if errors else (0.0, 0.0)
    return ErrorSummary("moves", len(errors), median, p90)


def relative_errors(model: ForwardModel, samples: Sequence[Sample]) -> F64:
    """|predicted / measured - 1| of each sample."""
    return np.array([abs(model.predict_s(sample.shape) / sample.seconds - 1) for sample in samples])


def summarise(model: ForwardModel, held_out: Sequence[Sample]) -> list[ErrorSummary]:
    """The errors on samples that were not fitted, of all first, then by kind."""
    groups = {"all": list(held_out)}
    for sample in sorted(held_out, key=lambda one: one.kind):
        groups.setdefault(sample.kind, []).append(sample)
    summaries = []
    for kind, group in groups.items():
        errors = relative_errors(model, group)
        median, p90 = np.quantile(errors, (0.5, 0.9)).tolist() if len(errors) else (0.0, 0.0)
        summaries.append(ErrorSummary(kind, len(group), median, p90))
    return summaries


class _Form(NamedTuple):
    """Alternatives of which the one with the least error is taken: one unless a knot is searched."""

    knots: tuple[tuple[int, ...], ...]


class _Fitted(NamedTuple):
    model: ForwardModel
    loss: float


def _forms(most: int) -> list[_Form]:
    """Simplest first. `most` is the largest number of query tokens."""
    powers = [2**e for e in range(1, 31) if 2**e < most]
    halves = sorted({round(2 ** (e / 2)) for e in range(1, 61) if 2 ** (e / 2) < most})
    forms = [_Form(((),)), _Form(tuple((knot,) for knot in halves)), _Form((tuple(powers[1::2]),))]
    forms.append(_Form((tuple(powers),)))
    return [form for form in forms if form.knots]


def _cross_validated(form: _Form, shapes: F64, seconds: F64, folds: npt.NDArray[np.int64]) -> float:
    """Mean relative error on samples that a fit has not seen; one error counts 1 at most."""
    errors = []
    for fold in range(FOLDS):
        inside = folds != fold
        model = _fit_form(form, shapes[inside], seconds[inside]).model
        predicted = _design(shapes[~inside], model.knots) @ _coefficients(model)
        errors.append(np.minimum(1.0, np.abs(predicted / seconds[~inside] - 1)))
    return float(np.concatenate(errors).mean())


def _fit_form(form: _Form, shapes: F64, seconds: F64) -> _Fitted:
    return min((_fit_knots(knots, shapes, seconds) for knots in form.knots), key=lambda fitted: fitted.loss)


def _fit_knots(knots: tuple[int, ...], shapes: F64, seconds: F64) -> _Fitted:
    matrix = _design(shapes, knots)
    x = _robust_nnls(matrix, seconds)
    loss = float(np.abs(matrix @ x / seconds - 1).mean())
    base_s, head_s, row_s, output_s, decode_kv_s, chunk_kv_s, chunk_pair_s, *slopes = x.tolist()
    fixed = (base_s, head_s, row_s, output_s, decode_kv_s, chunk_kv_s, chunk_pair_s)
    return _Fitted(ForwardModel(*fixed, knots, tuple(slopes)), loss)


def _design(shapes: F64, knots: tuple[int, ...]) -> F64:
    """[samples, 7 + len(knots) + 1]: a column for each coefficient of a `ForwardModel`, in the order of its fields."""
    tokens = shapes[:, 0]
    edges = [0.0, *knots, np.inf]
    ramps = [np.clip(tokens - low, 0.0, high - low) for low, high in pairwise(edges)]
    return np.stack([np.ones(len(shapes)), shapes[:, 2] > 0, *shapes[:, 1:].T, *ramps], axis=1)


def _coefficients(model: ForwardModel) -> F64:
    return np.array([*model.fixed, *model.slopes])


def _robust_nnls(matrix: F64, seconds: F64, scale: F64 | None = None) -> F64:
    """Coefficients >= 0 of about the least sum of absolute residuals relative to `scale` (None: to `seconds`): rows are
    weighted again and again, so that a sample which something else disturbed pulls no harder than others."""
    scale = seconds if scale is None else scale
    relative, target = matrix / scale[:, None], seconds / scale
    weights = np.ones(len(seconds))
    x = np.zeros(matrix.shape[1])
    for _ in range(REWEIGHTINGS):
        x = nnls(relative * weights[:, None], target * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(relative @ x - target), SMALLEST_RESIDUAL))
    return x


def _folds(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    """[samples] the fold of each: neighbours in size are in different ones."""
    folds = np.zeros(len(samples), np.int64)
    for kind in {sample.kind for sample in samples}:
        for place, index in enumerate(_in_order(samples, kind)):
            folds[index] = place % FOLDS
    return folds


def _in_order(samples: Sequence[Sample], kind: str) -> list[int]:
    chosen = [index for index, sample in enumerate(samples) if sample.kind == kind]
    return sorted(chosen, key=lambda index: (samples[index].shape, index))
