"""Devices that the simulator knows: how much KV they hold and what a step costs them.

`devices.toml` has the devices of published measurements; any other comes from a cost profile of `weft profile`. Costs
are those of `weft.core.cost`, so the scheduler, its policies and the simulated device use one model.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from weft.abi.errors import ConfigError
from weft.core.cost.model import CostModel, ForwardModel, SwapModel
from weft.core.cost.profile import Profile, decode_profile

DEVICES_FILE = Path(__file__).with_name("devices.toml")
PAGE_SIZE = 16


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device with one model on it."""

    name: str
    about: str
    """Model and device, for people."""
    kv_tokens: int
    page_size: int = PAGE_SIZE
    bytes_per_page: int = 0
    """0: unknown."""
    forward: ForwardModel
    swap_out: SwapModel | None
    swap_in: SwapModel | None
    beside_out: SwapModel | None = SwapModel(base_s=0.0, per_page_s=0.0)
    beside_in: SwapModel | None = SwapModel(base_s=0.0, per_page_s=0.0)
    """By how much a forward takes longer beside which pages move; nothing where the link alone moves them."""
    saturation_tokens: int

    @property
    def num_pages(self) -> int:
        """Pages that the KV memory holds; the rest of a page is not used."""
        return self.kv_tokens // self.page_size

    def costs(self) -> CostModel:
        """A predictor of the device's steps, without correction so far."""
        swaps, beside = (self.swap_out, self.swap_in), (self.beside_out, self.beside_in)
        return CostModel(self.forward, *swaps, self.saturation_tokens, *beside)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device in `devices.toml`, which explains the fields."""

    model: str
    device: str
    kv_tokens: int
    kv_bytes_per_token: int
    base_s: float
    per_token_s: float
    saturation_tokens: int
    link_bytes_per_s: float
    per_kv_s: float = 0.0


def known_devices() -> dict[str, Device]:
    """The devices of `devices.toml` by name."""
    entries = msgspec.convert(tomllib.loads(DEVICES_FILE.read_text("utf-8")), dict[str, _Entry])
    return {name: _device(name, entry) for name, entry in entries.items()}


def find_device(name: str, *, kv_tokens: int | None = None) -> Device:
    """The device of that name, or the one whose cost profile is the file `name`.

    `kv_tokens` replaces the tokens of KV; a profile does not say how many fit, so it needs them. Raises `ConfigError`.
    """
    known = known_devices()
    device = known.get(name)
    if device is None:
        file = Path(name)
        if not file.is_file():
            raise ConfigError(
                f"device {name!r} is unknown: there are {', '.join(known)}, and files that `weft profile` has stored"
            )
        if kv_tokens is None:
            raise ConfigError(
                f"{name} is a profile, which does not say how much KV fits: give the tokens (--kv-tokens)"
            )
        device = profiled_device(file, kv_tokens)
    elif kv_tokens is not None:
        device = msgspec.structs.replace(device, kv_tokens=kv_tokens)
    if device.num_pages < 1:
        raise ConfigError(f"{device.kv_tokens} tokens of KV are less than a page of {device.page_size}")
    return device


def profiled_device(file: Path, kv_tokens: int) -> Device:
    """The device of a stored cost profile, with room for `kv_tokens`. Raises `ConfigError` for another file."""
    try:
        profile = decode_profile(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    return device_of_profile(profile, file.name, kv_tokens)


def device_of_profile(profile: Profile, name: str, kv_tokens: int) -> Device:
    """The device of a cost profile, with room for `kv_tokens`."""
    return Device(
        name=name,
        about=profile.identity.describe(),
        kv_tokens=kv_tokens,
        page_size=profile.identity.page_size,
        forward=profile.forward,
        swap_out=profile.swap_out.model,
        swap_in=profile.swap_in.model,
        beside_out=profile.moves.beside_out,
        beside_in=profile.moves.beside_in,
        saturation_tokens=profile.saturation_tokens,
    )


def _device(name: str, entry: _Entry) -> Device:
    bytes_per_page = entry.kv_bytes_per_token * PAGE_SIZE
    # `CostModel` adds both directions, which is what one shared link takes.
    swap = SwapModel(base_s=0.0, per_page_s=bytes_per_page / entry.link_bytes_per_s)
    return Device(
        name=name,
        about=f"{entry.model} on {entry.device}",
        kv_tokens=entry.kv_tokens,
        bytes_per_page=bytes_per_page,
        forward=linear_forward(entry.base_s, entry.per_token_s, entry.per_kv_s),
        swap_out=swap,
        swap_in=swap,
        saturation_tokens=entry.saturation_tokens,
    )


def linear_forward(base_s: float, per_token_s: float, per_kv_s: float = 0.0) -> ForwardModel:
    """T_fwd that depends on the query tokens, and on the KV entries that rows read."""
    return ForwardModel(
        base_s=base_s,
        head_s=0.0,
        per_row_s=0.0,
        per_output_s=0.0,
        per_decode_kv_s=per_kv_s,
        per_chunk_kv_s=per_kv_s,
        per_chunk_pair_s=0.0,
        knots=(),
        slopes=(per_token_s,),
    )
