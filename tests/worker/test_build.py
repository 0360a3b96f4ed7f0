"""From a configuration to a worker that answers."""

from __future__ import annotations

import pytest
import torch

from tests.worker.recording import RecordingBackend
from tests.worker.step_help import forward, greedy, run, set_slots, step
from weft.abi.errors import ConfigError
from weft.config import EngineConfig
from weft.core.step import MAX_SCORE_ROWS, Step
from weft.kernels import dispatch
from weft.kernels.work_items import Cuts
from weft.models.random_checkpoints import FAMILIES, write_tiny
from weft.models.registry import family_of
from weft.worker import build
from weft.worker.build import NUM_SAMPLE_SLOTS, choose_device, graphs_missing, load, start_worker
from weft.worker.executor import TorchWorker
from weft.worker.graphs import GraphOptions, graph_bytes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("checkpoint"), "llama"))


def test_a_worker_is_built_and_answers(checkpoint: str):
    calls: list[tuple[int, int]] = []
    config = EngineConfig(model=checkpoint, page_size=8, num_pages=64, max_running=4, device="cpu", threads=1)
    worker = start_worker(config, load(config, lambda done, total: calls.append((done, total))))
    try:
        spec = worker.spec
        assert (spec.page_size, spec.num_device_pages, spec.num_slots) == (8, 64, 4 + NUM_SAMPLE_SLOTS)
        assert (spec.device, spec.dtype, spec.num_host_pages) == ("cpu", "float32", 0)
        assert calls[-1][0] == calls[-1][1] > 0
        one = step(slot_sets=set_slots(3), forward=forward([([1, 2, 3], 0, [63])]), sampling=greedy([0], [3]))
        assert 0 <= run(worker, one).tokens[0] < spec.vocab_size
    finally:
        worker.close()


def test_a_context_that_does_not_fit_is_cut_and_told(checkpoint: str, caplog: pytest.LogCaptureFixture):
    config = EngineConfig(model=checkpoint, num_pages=2, max_running=1, device="cpu", threads=1)
    worker = start_worker(config, load(config))
    worker.close()
    assert worker.spec.max_context == 32
    assert "max_context is 32 instead of" in caplog.text


def test_the_largest_step_is_rehearsed_with_all_that_it_may_have(checkpoint: str, monkeypatch: pytest.MonkeyPatch):
    """As on a CUDA device, on a CPU: 100 tokens where a sequence has at most 40."""
    config = EngineConfig(
        model=checkpoint, device="cpu", page_size=16, max_context=40, max_step_tokens=100, max_running=70, threads=1
    )
    loaded = build.load(config)
    launched: list[Step] = []
    real = TorchWorker.launch
    monkeypatch.setattr(TorchWorker, "launch", lambda self, one: launched.append(one) or real(self, one))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 50_000_000)
    needed = build._rehearse(loaded, config, torch.device("cpu"))
    [one] = launched
    assert one.forward is not None
    assert one.sampling is not None
    assert one.forward.kv_lens.tolist() == [40, 40, 20]
    assert one.forward.kv_indptr.tolist() == [0, 3, 6, 8]  # pages of their own
    assert len(one.sampling.slots) == 70 + NUM_SAMPLE_SLOTS
    assert len(one.sampling.score_rows) == MAX_SCORE_ROWS
    assert len(one.forward.output_tokens) == 100
    assert needed == 50_000_000 - 1000 - 8 * loaded.model.kv_spec().bytes_per_page(16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused(checkpoint: str):
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        load(EngineConfig(model=checkpoint, device="cuda"))


@pytest.mark.parametrize(
    ("device", "changes", "settings", "reason"),
    [
        ("cuda", {}, {}, None),
        ("cpu", {}, {}, "only CUDA devices"),
        ("cuda", {}, {"cuda_graphs": False}, "cuda_graphs is off"),
        ("cuda", {"head_dim": 512}, {}, "heads of 512"),
    ],
)
def test_why_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch, device, changes, settings, reason):
    choice = dispatch.Choice("attention", "triton", ("triton", "torch"))
    monkeypatch.setattr(dispatch, "describe", lambda device, dtype: [choice])
    raw = {**FAMILIES["qwen3"], **changes}
    said = graphs_missing(EngineConfig(**settings), family_of(raw).spec(raw), torch.device(device))
    assert said is None if reason is None else reason in said


def test_attention_of_another_variant_has_no_graphs(monkeypatch: pytest.MonkeyPatch):
    choice = dispatch.Choice("attention", "torch", ("torch",), "Triton: needs a C compiler; install gcc")
    monkeypatch.setattr(dispatch, "describe", lambda device, dtype: [choice])
    spec = family_of(FAMILIES["llama"]).spec(FAMILIES["llama"])
    said = graphs_missing(EngineConfig(), spec, torch.device("cuda"))
    assert said is not None
    assert "that of torch" in said
    assert "install gcc" in said


def test_what_graphs_take_grows_with_the_largest_steps():
    spec = family_of(FAMILIES["llama"]).spec(FAMILIES["llama"])

    def needed(batch: int, tokens: int) -> int:
        return graph_bytes(spec, GraphOptions(RecordingBackend(), Cuts(4, 32), (1, batch), (16, tokens)))

    assert needed(256, 64) - needed(128, 64) == 128 * spec.vocab_size * 12
    of_token = 4 * spec.hidden_size + 3 * spec.intermediate_size + 3 * spec.num_heads * spec.head_dim
    assert needed(8, 2048) - needed(8, 1024) == 1024 * 4 * of_token


def test_a_throttled_link_is_for_a_cpu_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device(EngineConfig(device="cpu", host_link_gbs=2.0)).type == "cpu"
    for device in ("cuda", "auto"):
        with pytest.raises(ConfigError, match=r"host_link_gbs slows down copies .* on a CPU; .* unset it"):
            choose_device(EngineConfig(device=device, host_link_gbs=2.0))
        assert choose_device(EngineConfig(device=device)).type == "cuda"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_the_rate_of_a_link_is_positive(rate: float):
    with pytest.raises(ConfigError, match="host_link_gbs must be positive"):
        EngineConfig(host_link_gbs=rate)


def test_the_configured_rate_throttles_the_link(monkeypatch: pytest.MonkeyPatch):
    rates: list[float] = []
    monkeypatch.setattr(build, "LinkThrottle", lambda rate: rates.append(rate))
    config = EngineConfig(device="cpu", num_pages=32, host_link_gbs=0.5, host_kv_bytes=1 << 20, threads=1)
    worker = start_worker(config, load(config))
    assert worker.spec.num_host_pages == (1 << 20) // worker.spec.bytes_per_page > 0
    worker.close()
    assert rates == [5e8]
