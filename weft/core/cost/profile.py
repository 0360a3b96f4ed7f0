"""A cost profile: fitted models, for what exactly they hold, how good they are, and the samples behind them.

Owns the file's content as JSON and its checks. Where files lie, and who reads them, is not known here. A profile has no
date: the same measurements give the same file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

from weft.abi.errors import ConfigError
from weft.core.cost.fit import (
    HELD_OUT_EVERY,
    HELD_OUT_FIRST,
    ErrorSummary,
    MoveSample,
    Sample,
    SwapSample,
    fit_beside,
    fit_forward,
    fit_swap,
    split_samples,
    summarise,
    summarise_moves,
)
from weft.core.cost.model import CostModel, ForwardModel, SwapModel

FORMAT = 2
"""1 had no forwards beside which pages move."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For what a profile holds: everything that times depend on. Equal identities mean the same profile."""

    model: str
    """Architecture and a hash of the model's shape: weights of another value take no other time."""
    dtype: str
    device: str
    """The processor as it calls itself."""
    threads: int
    page_size: int
    kernels: list[str]
    """Variants of all operations, and which build of them."""
    software: list[str]
    """Versions of Weft and torch."""
    host_link: str = ""
    """The rate of a throttled link between device and host pages; empty: the device's own."""

    @property
    def key(self) -> str:
        """A hash of all fields; the file's name."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:32]

    def describe(self) -> str:
        """The identity in one line, for people."""
        return f"{self.model}, {self.dtype}, {self.device}, {self.threads} threads"


class Residual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sample beside what the model says of it."""

    sample: Sample
    predicted_s: float
    held_out: bool


class Swaps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One direction of swapping: its model, None where there was nothing to fit, and its samples."""

    model: SwapModel | None
    samples: list[SwapSample]


class Moves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forwards beside which pages move: by how much they take longer, None where there was nothing to fit."""

    beside_out: SwapModel | None
    beside_in: SwapModel | None
    samples: list[MoveSample]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted cost model with its samples and errors, as `weft profile` stores it."""

    format: int = FORMAT
    key: str
    identity: Identity
    name: str
    """The model as it was named when it was measured; says nothing about where the profile holds."""
    forward: ForwardModel
    saturation_tokens: int
    max_tokens: int
    """Query tokens of the largest step that was measured; beyond it predictions extrapolate."""
    errors: list[ErrorSummary]
    swap_out: Swaps
    swap_in: Swaps
    moves: Moves
    residuals: list[Residual]

    def cost_model(self) -> CostModel:
        """A predictor that corrects itself, starting from this profile."""
        swaps = (self.swap_out.model, self.swap_in.model)
        beside = (self.moves.beside_out, self.moves.beside_in)
        return CostModel(self.forward, *swaps, self.saturation_tokens, *beside)


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of forwards and swaps that a profiler measured."""

    forwards: list[Sample]
    swap_outs: list[SwapSample]
    swap_ins: list[SwapSample]
    moves: list[MoveSample] = []


def make_profile(identity: Identity, name: str, measured: Measurements) -> Profile:
    """Fit everything. Raises `ValueError` for too few samples."""
    split = split_samples(measured.forwards)
    model = fit_forward([measured.forwards[index] for index in split.fitted])
    unseen = set(split.held_out)
    most = max(sample.shape.num_tokens for sample in measured.forwards)
    swap_out, swap_in = fit_swap(measured.swap_outs), fit_swap(measured.swap_ins)
    errors = summarise(model, [measured.forwards[index] for index in split.held_out])
    unseen_moves = measured.moves[HELD_OUT_FIRST::HELD_OUT_EVERY]
    seen_moves = [one for index, one in enumerate(measured.moves) if index % HELD_OUT_EVERY != HELD_OUT_FIRST]
    beside = fit_beside(seen_moves, swap_out, swap_in)
    if beside is not None and swap_out is not None and swap_in is not None:
        errors.append(summarise_moves(unseen_moves, (swap_out, swap_in), beside))
    return Profile(
        key=identity.key,
        identity=identity,
        name=name,
        forward=model,
        saturation_tokens=model.saturation_tokens(most),
        max_tokens=most,
        errors=errors,
        swap_out=Swaps(swap_out, measured.swap_outs),
        swap_in=Swaps(swap_in, measured.swap_ins),
        moves=Moves(None, None, measured.moves) if beside is None else Moves(beside[0], beside[1], measured.moves),
        residuals=[
            Residual(sample, model.predict_s(sample.shape), index in unseen)
            for index, sample in enumerate(measured.forwards)
        ],
    )


def encode_profile(profile: Profile) -> bytes:
    """Encode a profile as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode_profile(data: bytes) -> Profile:
    """The inverse of `encode_profile`; takes what `weft profile --json` wrote too, which has the profile as a field.

    Raises `ConfigError` for bytes that are not a profile, are of another format, or hold impossible values.
    """
    try:
        record = msgspec.json.decode(data, type=_Record)
        data = bytes(record.profile) or data
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise ConfigError(f"its format is {header.format}, not {FORMAT}; run `weft profile` again")
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"it is no cost profile, or a damaged one ({error}); run `weft profile` again") from error
    if profile.key != profile.identity.key:
        raise ConfigError("its key is not that of its identity: it was edited or damaged; run `weft profile` again")
    fault = _fault(profile)
    if fault is not None:
        raise ConfigError(f"{fault}: it was edited or damaged; run `weft profile` again")
    return profile


class _Record(msgspec.Struct, frozen=True):
    """What has a profile beside the machine and the versions that it was measured with."""

    profile: msgspec.Raw = msgspec.Raw()


class _Header(msgspec.Struct, frozen=True):
    """What every format has."""

    format: int


def _fault(profile: Profile) -> str | None:
    """What cannot be right, or None."""
    forward = profile.forward
    coefficients = (*forward.fixed, *forward.slopes)
    if not _are_costs(coefficients) or not any(coefficients):
        return "its forward model has coefficients that are no costs"
    are_ascending = list(forward.knots) == sorted({*forward.knots}) and min(forward.knots, default=1) > 0
    if len(forward.slopes) != len(forward.knots) + 1 or not are_ascending:
        return "its forward model has slopes that do not fit its knots"
    moves = (profile.swap_out.model, profile.swap_in.model, profile.moves.beside_out, profile.moves.beside_in)
    for swap in moves:
        if swap is not None and not _are_costs((swap.base_s, swap.per_page_s)):
            return "its swap model has coefficients that are no costs"
    if not 1 <= profile.saturation_tokens <= profile.max_tokens:
        return "its saturation point lies outside of what was measured"
    return None


def _are_costs(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)
