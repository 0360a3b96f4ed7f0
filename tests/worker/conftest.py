"""A tiny real model, and workers that close themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from weft.kernels import dispatch
from weft.models.base import LanguageModel
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny
from weft.worker.executor import PoolSizes, TorchWorker
from weft.worker.host_link import LinkThrottle

SIZES = PoolSizes(page_size=8, num_device_pages=40, num_host_pages=6, num_slots=8, num_embed_slots=16)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    directory = write_tiny(tmp_path_factory.mktemp("model"), "qwen3", dtype=torch.float32)
    # The reference kernels, so that a fault found here is one of the worker.
    kernels = dispatch.select("cpu", torch.float64, {"*": "reference"})
    return load_model(str(directory), dtype="float64", kernels=kernels).model


@pytest.fixture
def make_worker(model: LanguageModel) -> Iterator[Callable[..., TorchWorker]]:
    made: list[TorchWorker] = []

    def make(
        other: LanguageModel | None = None, *, throttle: LinkThrottle | None = None, **changes: int
    ) -> TorchWorker:
        made.append(TorchWorker(other or model, SIZES._replace(**changes), throttle=throttle))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def worker(make_worker: Callable[..., TorchWorker]) -> TorchWorker:
    return make_worker()
