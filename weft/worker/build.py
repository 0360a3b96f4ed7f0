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
from weft.core.step import ForwardBatch, LateInputs, SamplingBatch, SlotSet, Step, StepResult
from weft.kernels import dispatch
from weft.kernels.base import HeadShape
from weft.kernels.triton import support as triton
from weft.models.base import ModelSpec
from weft.models.loader import LoadedModel, load_model
from weft.worker.executor import PoolSizes, TorchWorker
from weft.worker.graphs import GraphOptions, default_batch_sizes, graph_bytes
from weft.worker.graphs_cuda import CudaGraphs
from weft.worker.host_link import LinkThrottle
from weft.worker.memory import free_host_bytes, usable_cores
from weft.worker.sizing import FreeMemory, Sizing, kernel_threads, size_pools

NUM_EMBED_SLOTS = 4096
NUM_SAMPLE_SLOTS = 64
"""Beside those of running sequences: for programs that draw a token at a time."""
"""One hidden vector each: 32 MiB for a hidden size of 4096 in bfloat16."""
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


def build_worker(config: EngineConfig, progress: Progress | None = None) -> TorchWorker:
    """Load the model and start a worker for it.

    Raises `ConfigError` for settings that do not fit this machine, and what `load_model` raises.
    """
    return start_worker(config, load(config, progress))


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
    num_tokens = min(step_tokens(config), loaded.max_context)
    working_bytes = _rehearse(loaded, config, device, num_tokens) if gpu else 0
    graphs = _graph_options(config, loaded.spec, device)
    if graphs is not None:
        working_bytes += graph_bytes(loaded.spec, max(graphs.batch_sizes))
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
    result = warm_up(worker, num_tokens if gpu else WARM_UP_TOKENS_ON_CPU, spread=True)
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


def warm_up(worker: TorchWorker, num_tokens: int, *, spread: bool = False) -> StepResult:
    """Run one step of about `num_tokens`, greedy and random, on pages and slots that no sequence owns yet.

    `spread`: over tokens of the whole vocabulary, so that more weights (rows of embeddings, experts) are tried. Else
    all are token 0, which one set of experts gets: what needs most memory.
    """
    spec = worker.spec
    count = max(1, min(num_tokens, spec.num_device_pages * spec.page_size, spec.max_context))
    num_pages = -(-count // spec.page_size)
    samplers = min(2, spec.num_slots)
    tokens = np.linspace(0, spec.vocab_size - 1 if spread else 0, count)
    forward = ForwardBatch(
        token_ids=tokens.astype(np.int32),
        positions=np.arange(count, dtype=np.int32),
        write_slots=np.arange(count, dtype=np.int32),
        q_indptr=np.array([0, count], np.int32),
        kv_indptr=np.array([0, num_pages], np.int32),
        kv_page_ids=np.arange(num_pages, dtype=np.int32),
        kv_lens=np.array([count], np.int32),
        output_tokens=np.array([count - 1], np.int32),
    )
    sampling = SamplingBatch(
        rows=np.zeros(samplers, np.int32),
        slots=np.arange(samplers, dtype=np.int32),
        uniforms=np.full(samplers, 0.5),
        num_logprobs=np.zeros(samplers, np.int32),
        suppress_stop=np.zeros(samplers, np.bool_),
        late_mask=np.zeros(samplers, np.bool_),
    )
    params = (SamplingParams(temperature=0.0), SamplingParams(top_k=10, top_p=0.9))
    states = [SlotSet(slot, params[slot]) for slot in range(samplers)]
    handle = worker.launch(Step(0, slot_sets=states, forward=forward, sampling=sampling))
    worker.bind(handle, LateInputs())
    return handle.wait()


def graphs_missing(config: EngineConfig, spec: ModelSpec, device: torch.device) -> str | None:
    """Why decode steps are not launched as graphs, for people. None: they are."""
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
    return GraphOptions(CudaGraphs(), tuple(config.graph_batch_sizes or default_batch_sizes(config.max_running)))


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


def _rehearse(loaded: LoadedModel, config: EngineConfig, device: torch.device, num_tokens: int) -> int:
    """Run the largest step once, in pools of its own size: the bytes that it needs besides pages."""
    sizes = PoolSizes(config.page_size, -(-num_tokens // config.page_size), 0, 2, 1)
    worker = TorchWorker(loaded.model, sizes, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    warm_up(worker, num_tokens)
    needed = torch.cuda.max_memory_allocated(device) - before
    worker.close()
    return needed
