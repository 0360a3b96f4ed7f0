"""Movements of KV against a model of one, on pages that are poisoned until something is moved there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.step_help import ints, step
from weft.core.step import Step
from weft.kernels import dispatch
from weft.models.base import KVSpec, LayerKV
from weft.worker.kv_store import KVStore

SPEC = KVSpec((LayerKV(2, 4), LayerKV(1, 6)), torch.float32)
PAGE, DEVICE_PAGES, HOST_PAGES = 8, 12, 7
CPU = torch.device("cpu")


class Expected:
    """The pools as numpy arrays, moved one entry at a time."""

    def __init__(self, store: KVStore):
        self.device = [layer.numpy().copy() for layer in store.layers]
        self.host = [np.full((HOST_PAGES, *layer.shape[1:]), np.nan, np.float32) for layer in store.layers]

    def move(self, one: Step) -> None:
        for device, host in zip(self.device, self.host, strict=True):
            for source, target in one.swap_outs:
                host[target] = device[source]
            before = device.copy()
            for source, target in one.page_copies:
                device[target] = before[source]
            before = device.copy()
            for source, target in one.token_copies:
                device[target // PAGE, :, :, target % PAGE] = before[source // PAGE, :, :, source % PAGE]
            for source, target in one.swap_ins:
                device[target] = host[source]


def random_step(rng: np.random.Generator) -> Step:
    def pairs(sources: int, targets: int, most: int) -> np.ndarray:
        count = int(rng.integers(0, most))
        return np.stack((rng.integers(0, sources, count), rng.permutation(targets)[:count]), axis=1).astype(np.int32)

    split = rng.permutation(DEVICE_PAGES)
    copies = np.stack((rng.choice(split[:6], 4), split[6:10]), axis=1).astype(np.int32)
    return step(
        swap_outs=pairs(DEVICE_PAGES, HOST_PAGES, 5),
        page_copies=copies[: rng.integers(0, 5)],
        token_copies=pairs(DEVICE_PAGES * PAGE, DEVICE_PAGES * PAGE, 20),
        swap_ins=pairs(HOST_PAGES, DEVICE_PAGES, 5),
    )


@pytest.mark.parametrize("kernels", ["best", "reference"])
def test_random_movements(kernels: str):
    rng = np.random.default_rng(1)
    chosen = dispatch.select(CPU, SPEC.dtype, {} if kernels == "best" else {"*": kernels})
    store = KVStore(SPEC, chosen, PAGE, DEVICE_PAGES, HOST_PAGES, CPU)
    for layer in store.layers:
        layer.copy_(torch.tensor(rng.normal(size=layer.shape)))
    expected = Expected(store)
    # The host pool starts out poisoned as well.
    store._host.pages.view(torch.float32).fill_(torch.nan)
    for _ in range(100):
        one = random_step(rng)
        store.move(one)
        expected.move(one)
        for layer, wanted in zip(store.layers, expected.device, strict=True):
            np.testing.assert_array_equal(layer.numpy(), wanted)


def test_pools_have_the_shapes_and_bytes_of_the_spec():
    store = KVStore(SPEC, dispatch.select(CPU, SPEC.dtype), PAGE, DEVICE_PAGES, 0, CPU)
    assert [tuple(layer.shape) for layer in store.layers] == [(12, 2, 2, 8, 4), (12, 2, 1, 8, 6)]
    assert store.bytes_per_page == 4 * 8 * 2 * (2 * 4 + 6)
    assert all(layer.data_ptr() % 4096 == 0 and not layer.any() for layer in store.layers)


def test_swapping_nothing_needs_no_host_pool():
    store = KVStore(SPEC, dispatch.select(CPU, SPEC.dtype), PAGE, DEVICE_PAGES, 0, CPU)
    store.move(step(page_copies=ints([[0, 1]])))
