"""Passes as graphs: the same tokens as without, whatever the batches are; and when graphs are captured.

The graphs are recordings of Triton's launches in its interpreter and of torch's operations (see `recording`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.recording import RecordingBackend, recording_backend
from tests.worker.step_help import dist, forward, greedy, ints, run, set_slots, step
from weft.core import wire
from weft.core.clock import ManualClock
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.step import ForwardBatch, HeadBatch
from weft.engine.engine import Engine
from weft.kernels import work_items
from weft.kernels.base import HeadShape, Norm, NormedSum
from weft.models.base import LanguageModel
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny
from weft.sched.scheduler import SchedulerConfig
from weft.worker.executor import PoolSizes, TorchWorker
from weft.worker.graphs import (
    LAUNCH_BOUND,
    GraphOptions,
    default_batch_sizes,
    default_step_sizes,
    is_plain,
    wants_logits_alone,
)

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)

from weft.kernels.triton import attention as triton_attention
from weft.kernels.triton import ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

CHUNK = 16
"""Entries of a split here, so that short sequences have several."""
SIZES = PoolSizes(page_size=8, num_device_pages=80, num_host_pages=4, num_slots=16, num_embed_slots=4)
BATCH_SIZES = (1, 2, 4, 8)
SHAPE = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "eos_token_id": 1,
}


def exact_linear(x: Tensor, weight: Tensor, bias=None, residual: Tensor | None = None, scales=None) -> Tensor:
    """A row's product, rounded once, is the same in every batch."""
    assert bias is None
    assert scales is None
    out = (x.double() @ weight.double().T).float()
    return out if residual is None else residual + out


def exact_linear_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, bias=None, scales=None) -> NormedSum:
    total = exact_linear(x, weight, bias, residual, scales)
    return NormedSum(total, ops.rms_norm(total, norm.weight, norm.eps))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    directory = write_tiny(tmp_path_factory.mktemp("model"), "qwen3", **SHAPE)
    kernels = ops.KERNELS._replace(
        linear=exact_linear,
        linear_rms_norm=exact_linear_rms_norm,
        gated_linear=lambda x, weight, *rest, **more: ops.silu_mul(exact_linear(x, weight)),
    )
    return load_model(str(directory), dtype="float32", kernels=kernels).model


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_items, "CHUNK", CHUNK)
    monkeypatch.setattr(triton_attention, "CHUNK", CHUNK)


@pytest.fixture
def backend() -> Iterator[RecordingBackend]:
    with recording_backend() as backend:
        yield backend


def options(backend: RecordingBackend, **changes: Any) -> GraphOptions:
    cuts = triton_attention.cuts(HeadShape(2, 1, 16), torch.float32, True, torch.device("cpu"))
    return GraphOptions(backend, cuts, BATCH_SIZES)._replace(**changes)


class Client:
    """One engine on one worker, and all that it said."""

    def __init__(self, worker: TorchWorker):
        self.events: list[tuple[int, wire.Event]] = []
        spec = worker.spec
        config = SchedulerConfig(
            max_context=spec.max_context, max_running=10, max_step_tokens=40, vocab_size=spec.vocab_size, seed=3
        )
        self.engine = Engine(worker, config, self._receive, clock=ManualClock())

    def _receive(self, client: int, envelope: wire.Envelope) -> None:
        self.events += [(envelope.step_id, event) for event in envelope.events]

    def play(self, script: list[tuple[int, list[wire.Command]]]) -> list[tuple[int, wire.Event]]:
        """Commands by the turn of the loop before which they arrive; then until all is done."""
        turn = 0
        while script or self.engine.busy:
            while script and script[0][0] <= turn:
                self.engine.submit(1, script.pop(0)[1])
            self.engine.step()
            turn += 1
        self.engine.close()
        return self.events


def random_sampling(rng: random.Random) -> SamplingParams:
    kind = rng.randrange(5)
    if kind == 0:
        return SamplingParams(temperature=0.0, logprobs=rng.choice([None, 2]))
    if kind == 1:
        return SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.7)
    if kind == 2:
        return SamplingParams(temperature=2.0, top_p=0.8, seed=rng.randrange(100))
    if kind == 3:
        return SamplingParams(temperature=1.5, top_k=7, presence_penalty=1.0, logprobs=1)
    return SamplingParams(temperature=1.0, min_p=0.1, logit_bias={5: 2.0}, bad_words=[[3, 4], [9]])


def random_script(seed: int, turns: int) -> list[tuple[int, list[wire.Command]]]:
    """Sequences that come and go, each of its own length; some are forked while others decode."""
    rng = random.Random(seed)
    script: list[tuple[int, list[wire.Command]]] = []
    ids = iter(range(1, 1000))
    for turn in sorted(rng.randrange(turns) for _ in range(7)):
        seq, op = next(ids), next(ids)
        prompt = [rng.randrange(2, 96) for _ in range(rng.choice([2, 5, 15, 16, 17, 33]))]
        commands: list[wire.Command] = [
            wire.Open(seq=seq),
            wire.Append(seq=seq, op=op, tokens=pack_tokens(prompt)),
        ]
        members = [seq]
        if rng.random() < 0.4:
            child = next(ids)
            commands.append(wire.Fork(seq=seq, child=child))
            members.append(child)
        for member in members:
            stop = StopParams(max_tokens=rng.randrange(3, 12), ignore_eos=True)
            commands.append(wire.Generate(seq=member, op=next(ids), sampling=random_sampling(rng), stop=stop))
        script.append((turn, commands))
    return script


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_graphs_change_no_token(model: LanguageModel, backend: RecordingBackend, seed: int):
    plain = Client(TorchWorker(model, SIZES)).play(random_script(seed, 14))
    worker = TorchWorker(model, SIZES, graphs=options(backend))
    with_graphs = Client(worker)
    graphs = worker._graphs
    assert graphs is not None
    assert with_graphs.play(random_script(seed, 14)) == plain
    assert sum(isinstance(event, wire.Token) for _, event in plain) > 40
    counts = graphs.counts
    assert counts.captured >= 2
    assert counts.replayed > 2 * counts.captured
    assert counts.captured == len(backend.graphs)
    assert len({bucket.tokens for bucket in graphs.buckets}) > 1
    assert any(bucket.merges for bucket in graphs.buckets)
    assert all(bucket.gives_logits for bucket in graphs.buckets)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_graphs_of_steps_with_prompts_change_no_token(model: LanguageModel, backend: RecordingBackend, seed: int):
    """One size of step, so that most steps find a graph."""
    plain = Client(TorchWorker(model, SIZES)).play(random_script(seed, 9))
    worker = TorchWorker(model, SIZES, graphs=options(backend, batch_sizes=(1,), step_sizes=(40,)))
    with_graphs = Client(worker)
    graphs = worker._graphs
    assert graphs is not None
    assert with_graphs.play(random_script(seed, 9)) == plain
    buckets = [bucket for bucket in graphs.buckets if not bucket.gives_logits]
    assert any(bucket.tiles and bucket.merges for bucket in buckets)
    assert graphs.counts.replayed > 2 * graphs.counts.captured


def decode(rows: list[tuple[int, list[int]]], **changes: object) -> ForwardBatch:
    """Rows of (KV entries before the token, pages), each with the token that its slot sampled last."""
    return forward([([-1], before, pages) for before, pages in rows], token_slots=ints(range(len(rows))), **changes)


def decode_step(rows: list[tuple[int, list[int]]]):
    every = list(range(len(rows)))
    return step(slot_sets=set_slots(*every), forward=decode(rows), sampling=greedy(every, every))


def test_a_graph_is_captured_at_the_second_need(model: LanguageModel, backend: RecordingBackend):
    worker = TorchWorker(model, SIZES, graphs=options(backend))
    captured = []
    for before in (3, 4, 5):
        run(worker, decode_step([(before, [1]), (before, [2]), (before, [3])]))
        assert worker.graph_counts is not None
        captured.append(worker.graph_counts)
    worker.close()
    assert captured == [(0, 0, 1), (1, 1, 1), (1, 2, 1)]
    assert worker.graph_counts is None


def test_tokens_that_the_host_knows(model: LanguageModel, backend: RecordingBackend):
    """In rows beside those whose tokens only the device knows."""
    found = []
    for graphs in (None, options(backend)):
        worker = TorchWorker(model, SIZES, graphs=graphs)
        tokens = []
        for i, known in enumerate((7, 8, 30, 9)):
            rows = [([-1], i, [1]), ([known], i, [2]), ([-1], i, [3])]
            batch = forward(rows, token_slots=ints([0, -1, 2]))
            one = step(slot_sets=set_slots(0, 1, 2), forward=batch, sampling=greedy([0, 1, 2], [0, 1, 2]))
            tokens.append(run(worker, one).tokens.tolist())
        worker.close()
        found.append(tokens)
    assert found[0] == found[1]
    assert len({tokens[1] for tokens in found[0]}) > 2
    assert len(backend.graphs) == 1


def test_padding_takes_its_part_of_the_table(model: LanguageModel, backend: RecordingBackend):
    """Three rows with four splits, and a fourth row."""
    rows = [(CHUNK, [1, 4, 5]), (3, [2]), (3, [3])]
    plain, padded = TorchWorker(model, SIZES), TorchWorker(model, SIZES, graphs=options(backend))
    for _ in range(3):
        assert run(padded, decode_step(rows)).tokens.tolist() == run(plain, decode_step(rows)).tokens.tolist()
    assert padded.graph_counts == (1, 2, 1)
    plain.close()
    padded.close()


def test_padding_writes_nothing(model: LanguageModel, backend: RecordingBackend):
    worker = TorchWorker(model, SIZES, graphs=options(backend))
    graphs = worker._graphs
    assert graphs is not None
    for before in (3, 4, 5):
        run(worker, decode_step([(before, [1]), (before, [2]), (before, [3])]))
        (kv,) = graphs._kv
        written = kv.abs().amax((1, 2, 4)).nonzero().tolist()
        assert written == [[page, entry] for page in (1, 2, 3) for entry in range(3, before + 1)]
    worker.close()


def test_the_least_recently_used_graph_gives_way(model: LanguageModel, backend: RecordingBackend):
    worker = TorchWorker(model, SIZES, graphs=options(backend, max_graphs=1))
    one, two = [(3, [1])], [(3, [1]), (3, [2])]
    counts = []
    for rows in (one, one, two, two, one, one, one, one):
        run(worker, decode_step(rows))
        counts.append(worker.graph_counts)
    # Each is captured at its second need; the first, having given way, at its fourth after that.
    assert [count.captured for count in counts] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert [count.replayed for count in counts] == [0, 1, 1, 2, 2, 2, 2, 3]
    worker.close()


def test_a_failed_capture_is_told_once_and_changes_nothing(
    model: LanguageModel, backend: RecordingBackend, caplog: pytest.LogCaptureFixture
):
    steps = [[(3, [1])], [(4, [1])], [(5, [1])], [(5, [1]), (2, [2])], [(6, [1]), (3, [2])], [(7, [1]), (4, [2])]]
    plain = TorchWorker(model, SIZES)
    expected = [run(plain, decode_step(rows)).tokens.tolist() for rows in steps]
    plain.close()
    worker = TorchWorker(model, SIZES, graphs=options(backend))
    backend.refuse = RuntimeError("operation not permitted when stream is capturing")
    assert [run(worker, decode_step(rows)).tokens.tolist() for rows in steps] == expected
    assert worker.graph_counts == (0, 0, 2)
    worker.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "weft.worker"]
    assert "RuntimeError: operation not permitted when stream is capturing" in warning


def test_graphs_that_were_captured_go_on_when_a_capture_fails(model: LanguageModel, backend: RecordingBackend):
    worker = TorchWorker(model, SIZES, graphs=options(backend))
    for _ in range(2):
        run(worker, decode_step([(3, [1])]))
    backend.refuse = MemoryError()
    for _ in range(3):
        run(worker, decode_step([(3, [1]), (3, [2])]))
    run(worker, decode_step([(4, [1])]))
    assert worker.graph_counts == (1, 2, 3)
    worker.close()


NOT_PLAIN = {
    "not causal": lambda: decode([(3, [1])], causal=np.array([False])),
    "hidden entries": lambda: decode([(3, [1])], visibility=np.array([5], np.uint32)),
    "a mask": lambda: decode([(3, [1])], mask_bits=np.array([7], np.uint8), mask_indptr=ints([0, 1])),
    "an embedding as input": lambda: decode([(3, [1])], embed_slots=ints([0])),
}
MORE_THAN_LOGITS = {
    "two queries": lambda: forward([([3, 4], 0, [1])], output_tokens=ints([1])),
    "no output of the last row": lambda: decode([(3, [1]), (3, [2])], output_tokens=ints([0])),
    "outputs in another order": lambda: decode([(3, [1]), (3, [2])], output_tokens=ints([1, 0])),
    "a hidden state is summed": lambda: decode([(3, [1])], hidden_tokens=ints([0]), hidden_groups=ints([0])),
    "a hidden state is kept": lambda: decode([(3, [1])], store_tokens=ints([0]), store_slots=ints([0])),
}


@pytest.mark.parametrize("reason", NOT_PLAIN)
def test_what_is_not_plain_is_not_taken(model: LanguageModel, backend: RecordingBackend, reason: str):
    worker = TorchWorker(model, SIZES, graphs=options(backend, step_sizes=(8,)))
    graphs = worker._graphs
    assert graphs is not None
    batch = NOT_PLAIN[reason]()
    assert (graphs.logits(batch), graphs.hidden(batch)) == (None, None)
    assert graphs.counts == (0, 0, 0)
    worker.close()


@pytest.mark.parametrize("reason", MORE_THAN_LOGITS)
def test_steps_that_want_more_than_logits_get_hidden_states(
    model: LanguageModel, backend: RecordingBackend, reason: str
):
    batch = MORE_THAN_LOGITS[reason]()
    assert is_plain(batch)
    assert not wants_logits_alone(batch)
    plain = TorchWorker(model, SIZES)
    padded = TorchWorker(model, SIZES, graphs=options(backend, step_sizes=(8,)))
    for _ in range(3):
        found = []
        for worker in (plain, padded):
            done = run(worker, step(slot_sets=set_slots(0, 1), forward=batch, sampling=greedy([0], [0])))
            kept = run(worker, step(head=HeadBatch(ints([0])), sampling=dist([0], 3)))
            sums = None if done.hidden_sums is None else done.hidden_sums.tolist()
            found.append((done.tokens.tolist(), sums, kept.dist.ids.tolist()))
        assert found[0] == found[1]
    assert padded.graph_counts == (1, 2, 1)
    plain.close()
    padded.close()


def test_plain_decoding_in_other_words_is_taken():
    every = np.full(1, 0xFFFFFFFF, np.uint32)
    for batch in (
        decode([(3, [1])]),
        decode([(3, [1])], causal=np.array([True]), visibility=every),
        forward([([4], 3, [1])]),
    ):
        assert is_plain(batch)
        assert wants_logits_alone(batch)


def test_batches_that_no_graph_holds_run_as_ever(model: LanguageModel, backend: RecordingBackend, monkeypatch):
    monkeypatch.setattr("weft.worker.graphs.MAX_SPLITS", 4)
    worker = TorchWorker(model, SIZES, graphs=options(backend)._replace(batch_sizes=(2,)))
    long, short = (4 * CHUNK, [*range(1, 10)]), (3, [20])
    for rows in ([short] * 3, [long], [long, short]):
        run(worker, decode_step(rows))
    assert worker.graph_counts == (0, 0, 0)
    run(worker, decode_step([short]))
    assert worker.graph_counts == (0, 0, 1)
    worker.close()


def test_sizes_of_steps(model: LanguageModel):
    assert default_step_sizes(model.spec, 2048)[-4:] == (1664, 1792, 1920, 2048)
    assert default_step_sizes(model.spec, 100) == (16, 32, 48, 64, 80, 96, 100)
    sizes = {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8}
    eight = replace(model.spec, head_dim=128, **sizes)
    assert default_step_sizes(eight, 2048)[-1] == int(LAUNCH_BOUND / (32 * (4096 * (80 * 128 + 3 * 14336))))


def test_batch_sizes():
    assert default_batch_sizes(1) == (1,)
    assert default_batch_sizes(3) == (1, 2, 3)
    assert default_batch_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert default_batch_sizes(100)[-4:] == (64, 80, 96, 100)
    assert default_batch_sizes(5000)[-1] == 512
    for most in range(1, 600, 7):
        sizes = default_batch_sizes(most)
        assert list(sizes) == sorted(set(sizes))
