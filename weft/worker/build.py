"""From a configuration to a worker that is ready: device, dtype, threads, weights, pools, one step to warm up.

Reads this machine (memory, cores, devices); the arithmetic on what it finds is in `sizing`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from weft.abi.errors import ConfigError, ModelLoadError
from weft.config import EngineConfig
from weft.core.sampling import SamplingParams
from weft.core.step import MAX_SCORE_ROWS, ForwardBatch, LateInputs, SamplingBatch, SlotSet, Step, StepResult
from weft.kernels import dispatch
from weft.kernels.base import HeadShape
from weft.kernels.triton import support as triton
from weft.models.base import ModelSpec
from weft.models.loader import LoadedModel, load_model
from weft.worker.executor import PoolSizes, TorchWorker
from weft.worker.graphs import GraphOptions, default_batch_sizes, default_step_sizes, graph_bytes
from weft.worker.graphs_cuda import CudaGraphs
from weft.worker.host_link import LinkThrottle
from weft.worker.memory import free_host_bytes, usable_cores
from weft.worker.sizing import FreeMemory, Sizing, kernel_threads, size_pools

NUM_EMBED_SLOTS = 4096
"""One hidden vector each: 32 MiB for a hidden size of 4096 in bfloat16."""
NUM_SAMPLE_SLOTS = 64
"""Beside those of running sequences: for programs that draw a token at a time."""
STEP_TOKENS = {
    ("cpu", "interactivity"): 512,
    ("cpu", "throughput"): 2048,
    ("cuda", "interactivity"): 8192,
    ("cuda", "throughput"): 8192,
}
WARM_UP_TOKENS_ON_CPU = 32
"""Enough to have every kernel loaded; a CPU's allocator needs no rehearsal of the largest step."""

Progress = Callable[[int, int], None]
"""Called with (bytes of weights read, bytes to read)."""

_log = logging.getLogger("weft.worker")


def load(config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """The configured model, on the configured device. Raises `ConfigError` and what `load_model` raises."""
    device = choose_device(config)
    torch.set_num_threads(kernel_threads(config.threads, usable_cores()))
    loaded = load_model(
        config.model,
        revision=config.revision,
        offline=config.offline,
        dtype=config.dtype,
        quantization=config.quantization,
        quantized_blocks=config.quantized_blocks,
        device=device,
        max_context=config.max_context,
        progress=progress,
        memory_bytes=free_memory(device).device,
    )
    if loaded.notice is not None:
        _log.info("%s: %s", config.model, loaded.notice)
    return loaded


def step_tokens(config: EngineConfig) -> int:
    """Query tokens of one step, at most."""
    default = STEP_TOKENS[choose_device(config).type, config.performance_mode]
    return max(config.max_step_tokens or default, config.max_running)


def start_worker(config: EngineConfig, loaded: LoadedModel) -> TorchWorker:
    """Size the pools for what memory is left, and run one step to warm up.

    Raises `ConfigError`, and `ModelLoadError` for a model whose first step gives numbers that are not finite.
    """
    device = choose_device(config)
    threads = kernel_threads(config.threads, usable_cores())
    gpu = device.type == "cuda"
    working_bytes = _rehearse(loaded, config, device) if gpu else 0
    graphs = _graph_options(config, loaded.spec, device)
    if graphs is not None:
        working_bytes += graph_bytes(loaded.spec, graphs)
    sizing = size_pools(
        config,
        bytes_per_page=loaded.model.kv_spec().bytes_per_page(config.page_size),
        model_context=loaded.max_context,
        free=free_memory(device, working_bytes),
        gpu=gpu,
    )
    if sizing.notice is not None:
        _log.warning("%s", sizing.notice)
    worker = _start(loaded, config, sizing, device, threads, graphs)
    result = warm_up(worker, step_tokens(config) if gpu else WARM_UP_TOKENS_ON_CPU, spread=True)
    if (result.tokens < 0).any():
        worker.close()
        raise ModelLoadError(
            f"{config.model}: the first forward pass gave logits that are NaN or infinite. The weights hold such "
            f"values, or {worker.spec.dtype} overflows: check the checkpoint, or load it with dtype float32"
        )
    return worker


def choose_device(config: EngineConfig) -> torch.device:
    """The configured device; "auto" is the GPU if there is one.

    Raises `ConfigError` for one that is not there, and for settings that only another one has.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError('device is "cuda" and torch finds no CUDA device; set device to "cpu" or "auto"')
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    if config.host_link_gbs is not None:
        raise ConfigError(
            "host_link_gbs slows down copies between device and host pages on a CPU; a CUDA device has a link of its "
            'own: unset it, or set device to "cpu"'
        )
    return torch.device("cuda", torch.cuda.current_device())


def free_memory(device: torch.device, working_bytes: int = 0) -> FreeMemory:
    """What is free now, less `working_bytes` of the device that steps will need besides pages."""
    host = free_host_bytes()
    if device.type != "cuda":
        return FreeMemory(host, host)
    return FreeMemory(max(0, torch.cuda.mem_get_info(device)[0] - working_bytes), host)


def warm_up(
    worker: TorchWorker, num_tokens: int, *, spread: bool = False, num_samplers: int = 2, num_scores: int = 0
) -> StepResult:
    """Run one step of about `num_tokens`, on pages and slots that no sequence owns yet: as few sequences as have room
    for them, `num_samplers` tokens drawn (the first greedily), and the log-probabilities of `num_scores`.

    `spread`: over tokens of the whole vocabulary, so that more weights (rows of embeddings, experts) are tried. Else
    all are token 0, which one set of experts gets: what needs most memory.
    """
    spec = worker.spec
    lengths = _row_lengths(num_tokens, spec.max_context, spec.page_size, spec.num_device_pages)
    count, num_pages = sum(lengths), [-(-length // spec.page_size) for length in lengths]
    first_pages = np.cumsum([0, *num_pages])
    positions = np.concatenate([np.arange(length) for length in lengths])
    samplers = min(num_samplers, spec.num_slots)
    num_outputs = min(count, max(samplers, num_scores))
    tokens = np.linspace(0, spec.vocab_size - 1 if spread else 0, count)
    forward = ForwardBatch(
        token_ids=tokens.astype(np.int32),
        positions=positions.astype(np.int32),
        write_slots=(np.repeat(first_pages[:-1] * spec.page_size, lengths) + positions).astype(np.int32),
        q_indptr=np.cumsum([0, *lengths]).astype(np.int32),
        kv_indptr=first_pages.astype(np.int32),
        kv_page_ids=np.arange(first_pages[-1], dtype=np.int32),
        kv_lens=np.array(lengths, np.int32),
        output_tokens=np.arange(count - num_outputs, count, dtype=np.int32),
    )
    sampling = SamplingBatch(
        rows=np.arange(samplers, dtype=np.int32) % num_outputs,
        slots=np.arange(samplers, dtype=np.int32),
        uniforms=np.full(samplers, 0.5),
        num_logprobs=np.zeros(samplers, np.int32),
        suppress_stop=np.zeros(samplers, np.bool_),
        late_mask=np.zeros(samplers, np.bool_),
        score_rows=np.arange(num_scores, dtype=np.int32) % num_outputs,
        score_targets=np.zeros(num_scores, np.int32),
    )
    random = SamplingParams(top_k=10, top_p=0.9, repetition_penalty=1.1)
    states = [SlotSet(slot, random if slot else SamplingParams(temperature=0.0)) for slot in range(samplers)]
    handle = worker.launch(Step(0, slot_sets=states, forward=forward, sampling=sampling))
    worker.bind(handle, LateInputs())
    return handle.wait()


def _row_lengths(num_tokens: int, max_context: int, page_size: int, num_pages: int) -> list[int]:
    """`num_tokens` as rows of at most `max_context` tokens, each with pages of its own, as far as there are pages."""
    lengths: list[int] = []
    while num_tokens > 0 and num_pages > 0:
        lengths.append(min(num_tokens, max_context, num_pages * page_size))
        num_tokens -= lengths[-1]
        num_pages -= -(-lengths[-1] // page_size)
    return lengths


def graphs_missing(config: EngineConfig, spec: ModelSpec, device: torch.device) -> str | None:
    """Why steps are not launched as graphs, for people. None: they are."""
    if device.type != "cuda":
        return "only CUDA devices have them"
    if not config.cuda_graphs:
        return "cuda_graphs is off"
    attention = next(c for c in dispatch.describe(device, spec.dtype) if c.operation == "attention")
    if attention.chosen != triton.NAME:
        return f"attention is that of {attention.chosen}, whose launches depend on lengths ({attention.note})"
    if not triton.has_heads(HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)):
        return f"no kernel of attention for heads of {spec.head_dim}, {spec.num_heads} on {spec.num_kv_heads}"
    return None


def _graph_options(config: EngineConfig, spec: ModelSpec, device: torch.device) -> GraphOptions | None:
    if graphs_missing(config, spec, device) is not None:
        return None
    from weft.kernels.triton import attention  # imports Triton, which is there

    most = step_tokens(config) if config.graph_step_tokens is None else config.graph_step_tokens
    return GraphOptions(
        CudaGraphs(),
        attention.cuts(HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim), spec.dtype, True, device),
        tuple(config.graph_batch_sizes or default_batch_sizes(config.max_running)),
        default_step_sizes(spec, most) if most else (),
    )


def _start(
    loaded: LoadedModel,
    config: EngineConfig,
    sizing: Sizing,
    device: torch.device,
    threads: int,
    graphs: GraphOptions | None,
) -> TorchWorker:
    sizes = PoolSizes(
        page_size=config.page_size,
        num_device_pages=sizing.num_device_pages,
        num_host_pages=sizing.num_host_pages,
        num_slots=config.max_running + NUM_SAMPLE_SLOTS,
        num_embed_slots=NUM_EMBED_SLOTS,
    )
    return TorchWorker(
        loaded.model,
        sizes,
        max_context=sizing.max_context,
        device=device,
        threads=threads,
        graphs=graphs,
        throttle=None if config.host_link_gbs is None else LinkThrottle(config.host_link_gbs * 1e9),
    )


def _rehearse(loaded: LoadedModel, config: EngineConfig, device: torch.device) -> int:
    """Run a step with as much of everything as steps may have, in pools of its own size: the bytes that a worker needs
    besides pages."""
    num_tokens, page_size, num_slots = step_tokens(config), config.page_size, config.max_running + NUM_SAMPLE_SLOTS
    lengths = _row_lengths(num_tokens, loaded.max_context, page_size, num_tokens)
    num_pages = sum(-(-length // page_size) for length in lengths)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) + num_pages * loaded.model.kv_spec().bytes_per_page(page_size)
    sizes = PoolSizes(page_size, num_pages, 0, num_slots, NUM_EMBED_SLOTS)
    worker = TorchWorker(loaded.model, sizes, max_context=loaded.max_context, device=device)
    warm_up(worker, num_tokens, num_samplers=num_slots, num_scores=MAX_SCORE_ROWS)
    needed = torch.cuda.max_memory_allocated(device) - before
    worker.close()
    return needed
