"""Nothing between a step's launch and its readback waits for the device.

The device is torch's "meta", whose tensors have no numbers: whatever would bring a number to the host, or has as many
results as the numbers say, fails. What crosses to the device is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.sampling_help import late_inputs, sampling_batch, slot_set
from tests.worker.step_help import forward, greedy, ints, step
from weft.core.protocols import WorkerSpec
from weft.core.sampling import SamplingParams
from weft.core.step import LateInputs, SlotSet
from weft.kernels import batch as kernels_batch
from weft.kernels import torch_ops
from weft.models.base import LanguageModel, ResidentWeights
from weft.models.random_checkpoints import FAMILIES
from weft.models.registry import family_of
from weft.worker import transfer
from weft.worker.draw_device import DEVICE
from weft.worker.runner import StepRunner
from weft.worker.sampler import StepSampler
from weft.worker.slots import SlotTable

THERE = torch.device("meta")
VOCABULARY = 300


class Crossings:
    """Counts copies to the device."""

    def __init__(self) -> None:
        self.to_device = 0

    def send(self, host: Tensor, device: torch.device) -> Tensor:
        self.to_device += 1
        return torch.empty(host.shape, dtype=host.dtype, device=device)


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crossings]:
    counter = Crossings()
    monkeypatch.setattr(transfer, "_send", counter.send)
    monkeypatch.setattr(kernels_batch, "_put", lambda a, device, dtype=None: counter.send(_host(a, dtype), device))
    with torch.inference_mode():
        yield counter


def _host(array: np.ndarray, dtype: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=dtype))


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "index with a mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_found(name: str):
    with pytest.raises((RuntimeError, NotImplementedError)):
        WAITING[name](torch.zeros(3, device=THERE))


PLAIN = [SamplingParams(temperature=0.0)] * 4
RANDOM = [SamplingParams(temperature=0.7)] * 4
LIMITED = [SamplingParams(top_p=0.9), SamplingParams(top_k=20), SamplingParams(min_p=0.1), SamplingParams()]
EDITED = [
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={3: 1.0}),
    SamplingParams(bad_words=[[1, 2], [7]], top_p=0.5),
    SamplingParams(allowed_token_ids=[4, 5, 6]),
]


def sample(params: list[SamplingParams], late: LateInputs | None = None, **options: Any) -> Tensor:
    table = SlotTable(8, VOCABULARY, 4096, THERE)
    for slot, one in enumerate(params):
        table.set(slot_set(slot, one, prompt=[1, 2, 3], output=[4], stop_ids=[9]))
    rows = range(len(params))
    batch = sampling_batch(rows, rows, np.linspace(0, 0.9, len(rows)), **options)
    logits = torch.empty(len(rows), VOCABULARY, device=THERE)
    return StepSampler(table, drawing=DEVICE).sample(logits, batch, late or LateInputs())


@pytest.mark.parametrize(
    ("params", "most"),
    [(PLAIN, 1), (RANDOM, 2), (LIMITED, 2), (PLAIN[:2] + LIMITED[:2], 4)],
    ids=["greedy", "random", "limited", "mixed"],
)
def test_drawing_sends_what_it_needs_at_once(crossings: Crossings, params: list[SamplingParams], most: int):
    """One copy for the slots that tokens are recorded in, one for the draws; two more that put a mixture in order."""
    tokens = sample(params)
    assert tokens.device == THERE
    assert crossings.to_device <= most + 1


def test_edited_rows_do_not_wait(crossings: Crossings):
    mask = np.ones((1, VOCABULARY), np.bool_)
    suppress = np.array([True] * 4)
    late = np.array([False, True, False, False])
    assert sample(EDITED, late_inputs([1], mask), suppress_stop=suppress, late_mask=late).shape == (4,)


@pytest.fixture
def model() -> LanguageModel:
    """With torch's kernels; those in Triton cannot be launched on such tensors."""
    raw = FAMILIES["qwen3"]
    family = family_of(raw)
    spec = family.spec(raw)

    def weights(targets: Any) -> dict[str, Tensor]:
        return {target.name: torch.empty(target.shape, dtype=spec.dtype, device=THERE) for target in targets}

    layers = [weights(family.layer_weights(spec, i)) for i in range(spec.num_layers)]
    return family.build(spec, ResidentWeights(weights(family.shared_weights(spec)), layers), torch_ops.KERNELS)


def test_a_whole_decode_step_does_not_wait(crossings: Crossings, model: LanguageModel):
    spec = model.spec
    worker = WorkerSpec(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        page_size=8,
        num_device_pages=20,
        num_host_pages=0,
        num_slots=8,
        num_embed_slots=4,
        max_context=100,
        bytes_per_page=1,
        device="meta",
        dtype="float32",
    )
    pools = [torch.empty(model.kv_spec().layer_shape(i, 20, 8), device=THERE) for i in range(spec.num_layers)]
    runner = StepRunner(model, SimpleNamespace(layers=pools, move=lambda one: None), worker, THERE, 1)  # type: ignore[arg-type]
    batch = forward([([-1], 11, [3, 4]), ([-1], 3, [9]), ([7], 8, [1, 2])], token_slots=ints([0, 1, -1]))
    one = step(
        slot_sets=[SlotSet(0, SamplingParams()), SlotSet(1, SamplingParams(temperature=0.0)), SlotSet(2, LIMITED[0])],
        forward=batch,
        sampling=greedy([0, 1, 2], [0, 1, 2], num_logprobs=ints([2, -1, 0])),
    )
    found = runner.sampling_half(one, runner.forward_half(one), LateInputs())
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "tokens": (3,),
        "logprobs": (2,),
        "ranks": (2,),
        "top_ids": (2, 2),
        "top_logprobs": (2, 2),
    }


def test_packed_arrays_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch):
    sent: list[Tensor] = []

    def send(host: Tensor, device: torch.device) -> Tensor:
        assert device == THERE
        sent.append(host.clone())
        return sent[-1]

    monkeypatch.setattr(transfer, "_send", send)
    arrays = [
        np.array([[1, 2, 3], [4, 5, 6]], np.int64).T,
        np.zeros((3, 0), np.int64),
        np.array([0.25, 1e-300]),
        np.array([True, False, True]),
        np.arange(5, dtype=np.int32)[::-1],
        np.float32(1.5) * np.ones((1, 1), np.float32),
    ]
    got = transfer.upload_all(arrays, THERE)
    assert len(sent) == 1
    for tensor, array in zip(got, arrays, strict=True):
        assert tensor.data_ptr() % transfer.ALIGNMENT == sent[0].data_ptr() % transfer.ALIGNMENT or not array.size
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    assert transfer.upload_all([], THERE) == []
