from __future__ import annotations

from pathlib import Path

import pytest

from weft.abi.errors import ConfigError
from weft.core.cost.fit import Sample, SwapSample
from weft.core.cost.model import StepShape
from weft.core.cost.profile import Identity, Measurements, encode_profile, make_profile
from weft.sim.devices import find_device, known_devices


@pytest.mark.parametrize(
    ("name", "pages", "forward_s", "swap_s"),
    [
        ("gptj-6b-a100", 3250, 0.010 + 384 * 0.0463e-3, 10 * 16 * 458752 / 25e9),
        ("vicuna-13b-2xa100", 3500, 0.0154 + 384 * 0.0279e-3, 10 * 16 * 819200 / 25e9),
    ],
)
def test_published_devices_cost_what_was_published(name: str, pages: int, forward_s: float, swap_s: float) -> None:
    device = known_devices()[name]
    costs = device.costs()
    assert device.num_pages == pages
    assert costs.predict_forward_s(StepShape.decodes(384, 200_000)) == pytest.approx(forward_s)
    # Six pages out and four in share one link.
    assert costs.predict_swap_s(6, 4) == pytest.approx(swap_s)
    assert costs.saturation_tokens == 384


def test_a_profile_is_a_device_once_its_room_is_known(tmp_path: Path) -> None:
    shapes = [StepShape.chunk(tokens, kv) for tokens in (1, 2, 4, 8, 16, 32, 64, 128) for kv in (0, 100)]
    samples = [Sample("chunk", shape, 0.002 + 0.0001 * shape.num_tokens) for shape in shapes]
    swaps = [SwapSample(pages, 0.0005 * pages) for pages in (1, 2, 4, 8, 16, 32)]
    identity = Identity(model="m", dtype="float32", device="cpu", threads=1, page_size=8, kernels=[], software=[])
    profile = make_profile(identity, "m", Measurements(samples, swaps, swaps))
    file = tmp_path / "profile.json"
    file.write_bytes(encode_profile(profile))
    device = find_device(str(file), kv_tokens=100)
    assert (device.page_size, device.num_pages) == (8, 12)
    assert device.costs().predict_forward_s(StepShape.chunk(64)) == pytest.approx(0.0084, rel=0.05)
    assert device.costs().predict_swap_s(4, 0) == pytest.approx(0.002, rel=0.05)
    with pytest.raises(ConfigError, match="--kv-tokens"):
        find_device(str(file))


def test_other_devices_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'h100'.*gptj-6b-a100, vicuna-13b-2xa100"):
        find_device("h100")
    file = tmp_path / "notes.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"notes\.json.*weft profile"):
        find_device(str(file), kv_tokens=100)
    with pytest.raises(ConfigError, match="less than a page"):
        find_device("gptj-6b-a100", kv_tokens=15)
