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
from weft.core.cost.fit import ErrorSummary, Sample, SwapSample, fit_forward, fit_swap, split_samples, summarise
from weft.core.cost.model import CostModel, ForwardModel, SwapModel

FORMAT = 1


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
    residuals: list[Residual]

    def cost_model(self) -> CostModel:
        """A predictor that corrects itself, starting from this profile."""
        return CostModel(self.forward, self.swap_out.model, self.swap_in.model, self.saturation_tokens)


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of forwards and swaps that a profiler measured."""

    forwards: list[Sample]
    swap_outs: list[SwapSample]
    swap_ins: list[SwapSample]


def make_profile(identity: Identity, name: str, measured: Measurements) -> Profile:
    """Fit everything. Raises `ValueError` for too few samples."""
    split = split_samples(measured.forwards)
    model = fit_forward([measured.forwards[index] for index in split.fitted])
    unseen = set(split.held_out)
    most = max(sample.shape.num_tokens for sample in measured.forwards)
    return Profile(
        key=identity.key,
        identity=identity,
        name=name,
        forward=model,
        saturation_tokens=model.saturation_tokens(most),
        max_tokens=most,
        errors=summarise(model, [measured.forwards[index] for index in split.held_out]),
        swap_out=Swaps(fit_swap(measured.swap_outs), measured.swap_outs),
        swap_in=Swaps(fit_swap(measured.swap_ins), measured.swap_ins),
        residuals=[
            Residual(sample, model.predict_s(sample.shape), index in unseen)
            for index, sample in enumerate(measured.forwards)
        ],
    )


def encode_profile(profile: Profile) -> bytes:
    """Encode a profile as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode_profile(data: bytes) -> Profile:
    """The inverse of `encode_profile`.

    Raises `ConfigError` for bytes that are not a profile, are of another format, or hold impossible values.
    """
    try:
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


class _Header(msgspec.Struct, frozen=True):
    """What every format has."""

    format: int


def _fault(profile: Profile) -> str | None:
    """What cannot be right, or None."""
    forward = profile.forward
    coefficients = (*forward.fixed, *forward.slopes)
    if not _are_costs(coefficients) or not any(coefficients):
        return "its forward model has coefficients that are no costs"
    if len(forward.slopes) != len(forward.knots) + 1 or list(forward.knots) != sorted({*forward.knots} - {0}):
        return "its forward model has slopes that do not fit its knots"
    for swaps in (profile.swap_out, profile.swap_in):
        if swaps.model is not None and not _are_costs((swaps.model.base_s, swaps.model.per_page_s)):
            return "its swap model has coefficients that are no costs"
    if not 1 <= profile.saturation_tokens <= profile.max_tokens:
        return "its saturation point lies outside of what was measured"
    return None


def _are_costs(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)
