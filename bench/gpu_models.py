"""Models with random weights on a device, served by the engine itself: time per token, prompts, a batch of requests.

Weights are generated on the device; there is no checkpoint and no tokenizer. Generation is greedy and ignores the end
of sequence. The time per output token at a batch is the median time between consecutive steps that bring a token to
every sequence of the batch, when the engine publishes the tokens. Prompt tokens per second are those of prompts that
fill steps, until the first token of the last one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.token_client import GREEDY, TokenClient, TokenRequest
from weft.config import EngineConfig
from weft.core import wire
from weft.core.sampling import SamplingParams
from weft.engine.engine import Engine, Publish
from weft.engine.inline import InlineEngine
from weft.kernels import dispatch
from weft.models.base import ResidentWeights
from weft.models.layers.weights import WeightTarget
from weft.models.loader import LoadedModel
from weft.models.random_checkpoints import FAMILIES, QWEN3_0_6B
from weft.models.registry import family_of
from weft.sched.scheduler import SchedulerConfig
from weft.worker.build import choose_device, start_worker, step_tokens
from weft.worker.executor import TorchWorker

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {**QWEN3_0_6B, "vocab_size": 151936},
    "llama-3-8b": {
        **FAMILIES["llama"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "tiny": FAMILIES["llama"],
}

SPARE_ROWS = 4
"""Rows for prompts beside a batch: one that is done has its row for two more steps."""

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, number of output tokens of each) -> output tokens of each prompt."""
Save = Callable[[dict[str, Any]], None]
"""Called with all results so far."""


class Load(NamedTuple):
    """The sizes of the measurements."""

    batches: tuple[int, ...]
    input_tokens: int
    """Tokens of each prompt of a batch; the next fields are of each prompt too."""
    output_tokens: int
    prompts: int
    """Number of prompts that fill steps; their length follows."""
    prompt_tokens: int
    requests: int
    """Number of requests in the batch of requests; their input and output tokens follow."""
    request_input: int
    request_output: int
    runs: int
    options: Mapping[str, Any]
    """Options of the engine's configuration."""
    dtype: torch.dtype


LARGE = Load(
    *((1, 16, 64, 256), 128, 96, 8, 2048, 32, 256, 64, 3),
    options={"num_pages": 8192, "max_context": 4096, "max_running": 256, "host_kv_bytes": 0, "device": "cuda"},
    dtype=torch.bfloat16,
)
TINY = Load(
    *((1, 3), 5, 4, 2, 20, 2, 9, 3, 1),
    options={"num_pages": 64, "max_context": 128, "max_running": 4, "device": "cpu", "threads": 1},
    dtype=torch.float32,
)


class Run(NamedTuple):
    """The outcome of some prompts, all sent at once."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    """NaN for log-probabilities that were not requested."""
    steps: list[tuple[float, int]]
    """Of each step that brought tokens: when the engine handed them out (seconds after the prompts were sent), and how
    many."""


class Client:
    """An engine in this process, and its only client."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig):
        self._worker: TorchWorker | None = None
        self._steps: list[tuple[float, int]] = []

        def build(publish: Publish) -> Engine:
            def stamped(client: int, envelope: wire.Envelope) -> None:
                brought = sum(isinstance(event, wire.Token) for event in envelope.events)
                if brought:
                    self._steps.append((time.perf_counter(), brought))
                publish(client, envelope)

            worker = start_worker(config, loaded)
            self._worker = worker
            scheduler = SchedulerConfig(
                max_context=worker.spec.max_context,
                max_running=config.max_running,
                max_step_tokens=step_tokens(config),
                vocab_size=worker.spec.vocab_size,
                prefix_cache=False,
            )
            return Engine(worker, scheduler, stamped, overlap=config.overlap)

        self._loop = asyncio.new_event_loop()
        self._engine = InlineEngine(build)
        self._client = TokenClient(self._engine)
        self._loop.run_until_complete(self._engine.wait_ready())

    def run(
        self, prompts: list[list[int]], output_tokens: int | list[int], params: list[SamplingParams] | None = None
    ) -> Run:
        """Generate so many tokens after each prompt, the most probable ones unless `params` say otherwise."""
        count = len(prompts)
        limits = [output_tokens] * count if isinstance(output_tokens, int) else output_tokens
        requests = list(map(TokenRequest, prompts, limits, params or [GREEDY] * count))
        steps: list[tuple[float, int]] = []
        self._steps = steps
        began = time.perf_counter()
        found = self._loop.run_until_complete(self._client.generate(requests))
        nan = float("nan")
        return Run(
            [[event.token for event in events] for events in found],
            [[event.logprobs.logprob if event.logprobs else nan for event in events] for events in found],
            [(when - began, brought) for when, brought in steps],
        )

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """Generate the most probable tokens."""
        return self.run(prompts, output_tokens).tokens

    @property
    def graphs(self) -> dict[str, int] | None:
        """What became of steps. None: there are no graphs."""
        counts = None if self._worker is None else self._worker.graph_counts
        return None if counts is None else counts._asdict()

    def close(self) -> None:
        """Free the engine's memory; the model is the caller's."""
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()
        self._worker = None


def random_model(raw: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """A model of this config.json, its weights drawn on the device."""
    family = family_of(raw)
    spec = replace(family.spec(raw), dtype=dtype)
    kernels = dispatch.select(device, dtype)
    generator = torch.Generator(device).manual_seed(0)

    def draw(targets: list[WeightTarget]) -> dict[str, Tensor]:
        weights = {target.name: _random(target, dtype, device, generator) for target in targets}
        packed = {target.name: kernels.pack_weight(weights[target.name]) for target in targets if target.packed}
        return weights | packed

    shared = draw(family.shared_weights(spec))
    layers = [draw(family.layer_weights(spec, index)) for index in range(spec.num_layers)]
    num_bytes = sum(w.numel() * w.element_size() for group in (shared, *layers) for w in group.values())
    model = family.build(spec, ResidentWeights(shared, layers), kernels)
    return LoadedModel(model, Path(), eos_ids=(), max_context=spec.max_position, num_bytes=num_bytes)


def _random(target: WeightTarget, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    weight = torch.empty(target.shape, dtype=dtype, device=device)
    if len(target.shape) == 1:
        return weight.zero_() if target.name.endswith("bias") else weight.fill_(1)
    return weight.normal_(0, target.shape[1] ** -0.5, generator=generator)


def random_prompts(count: int, num_tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of which no two share a prefix."""
    drawn: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, (count, num_tokens)).tolist()
    return drawn


def measure(name: str, load: Load, save: Save) -> dict[str, Any]:
    """Measure one shape, with graphs and without if the device has graphs."""
    config = EngineConfig(**load.options)
    device = choose_device(config)
    loaded = random_model(SHAPES[name], load.dtype, device)
    found: dict[str, Any] = {"weights_gib": round(loaded.num_bytes / 2**30, 3), "dtype": str(load.dtype)}
    modes = (True, False) if device.type == "cuda" else (False,)
    for graphs in modes:
        mode = "graphs" if graphs else "no_graphs"
        client = Client(loaded, EngineConfig(**{**load.options, "cuda_graphs": graphs}))
        try:
            mine: dict[str, Any] = {}
            found[mode] = mine
            for batch in load.batches:
                mine[f"tpot_{batch}"] = tpot(client, load, batch, loaded)
                save(found)
            mine["prefill_tokens_per_s"] = prefill(client, load, loaded)
            mine["requests"] = requests(client.generate, load, loaded.spec.vocab_size)
            mine["graphs"] = client.graphs
            save(found)
        finally:
            client.close()
        mine["beside_prompts"] = beside_prompts(loaded, load, graphs)
        save(found)
    return found


def tpot(client: Client, load: Load, batch: int, loaded: LoadedModel) -> dict[str, float]:
    """Milliseconds between tokens of a full batch, and the GB/s at which its weights are read at that."""
    prompts = random_prompts(batch, load.input_tokens, loaded.spec.vocab_size, seed=batch)
    client.run(prompts, load.output_tokens)  # compiles kernels and captures graphs
    steps = client.run(prompts, load.output_tokens).steps
    full = [when for when, brought in steps if brought == batch]
    gaps = [after - before for before, after in pairwise(full)]
    if not gaps:
        raise RuntimeError(f"no two steps brought tokens to all {batch} sequences; make outputs longer")
    median = statistics.median(gaps)
    return {
        "median_ms": 1000 * median,
        "mean_ms": 1000 * statistics.fmean(gaps),
        "steps": len(gaps),
        "tokens_per_s": batch / median,
        "weights_gigabytes_per_s": loaded.num_bytes / median / 1e9,
    }


def beside_prompts(loaded: LoadedModel, load: Load, graphs: bool) -> dict[str, Any]:
    """Milliseconds between the tokens of a batch while each step also computes a prompt."""
    batch, size, outputs = load.batches[1], load.input_tokens, 4 * load.output_tokens
    options = {"max_running": batch + SPARE_ROWS, "max_step_tokens": batch + size, "cuda_graphs": graphs}
    client = Client(loaded, EngineConfig(**{**load.options, **options}))
    try:
        prompts = random_prompts(batch + outputs, size, loaded.spec.vocab_size, seed=3000)
        limits = [outputs] * batch + [1] * outputs
        for _ in range(2):  # the first compiles kernels and captures graphs
            steps = client.run(prompts, limits).steps
    finally:
        client.close()
    gaps = [after[0] - before[0] for before, after in pairwise(steps) if min(before[1], after[1]) > batch]
    if not gaps:
        raise RuntimeError(f"no two steps brought tokens to {batch} sequences and a prompt; make outputs longer")
    return {"batch": batch, "prompt": size, "median_ms": 1000 * statistics.median(gaps), "steps": len(gaps)}


def prefill(client: Client, load: Load, loaded: LoadedModel) -> float:
    """Tokens per second of prompts that are sent together, the median of the runs."""
    rates = []
    for run in range(load.runs + 1):
        prompts = random_prompts(load.prompts, load.prompt_tokens, loaded.spec.vocab_size, seed=1000 + run)
        last = client.run(prompts, 1).steps[-1][0]
        rates.append(load.prompts * load.prompt_tokens / last)
    return statistics.median(rates[1:])


def requests(generate: Generate, load: Load, vocab_size: int) -> dict[str, Any]:
    """Seconds until a batch of requests is done; one run before is not counted."""
    seconds = []
    for run in range(load.runs + 1):
        prompts = random_prompts(load.requests, load.request_input, vocab_size, seed=2000 + run)
        began = time.perf_counter()
        outputs = generate(prompts, load.request_output)
        seconds.append(time.perf_counter() - began)
        if [len(output) for output in outputs] != [load.request_output] * load.requests:
            raise RuntimeError("not every request got its tokens")
    median = statistics.median(seconds[1:])
    return {
        "shape": f"{load.requests} x ({load.request_input} -> {load.request_output})",
        "median_s": median,
        "runs_s": seconds[1:],
        "output_tokens_per_s": load.requests * load.request_output / median,
    }


def same_tokens(load: Load, save: Save) -> dict[str, Any]:
    """Whether graphs change what is generated: a small model in float32, sequences of many lengths that come and go.

    Rows of a padded batch are multiplied by other kernels of the device's library, so log-probabilities may differ by
    rounding, and a token where two are as probable; what was read from a stale place differs from the start.
    """
    most = min(load.options["max_context"], SHAPES["tiny"]["max_position_embeddings"])
    options = {**load.options, "max_context": most}
    device = choose_device(EngineConfig(**options))
    loaded = random_model(SHAPES["tiny"], torch.float32, device)
    limits = [3 + 5 * i % load.request_output for i in range(load.requests)]
    lengths = [1 + 37 * i % (most - load.request_output - 3) for i in range(load.requests)]
    prompts = [random_prompts(1, n, loaded.spec.vocab_size, seed=i)[0] for i, n in enumerate(lengths)]
    params = [
        (
            SamplingParams(temperature=0.0, logprobs=0),
            SamplingParams(seed=i, top_p=0.9, logprobs=0),
            SamplingParams(seed=i, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=0),
        )[i % 3]
        for i in range(load.requests)
    ]
    counts: dict[str, Any] = {}
    runs = []
    for graphs in (True, False):
        client = Client(loaded, EngineConfig(**{**options, "cuda_graphs": graphs}))
        try:
            for _ in range(3 if graphs else 1):  # the first has no graph yet, the second captures
                both = [client.run(prompts[:n], limits[:n], params[:n]) for n in (1, len(prompts))]
            runs.append(both)
            if graphs:
                counts["graphs"] = client.graphs
        finally:
            client.close()
    with_graphs, without = (
        [pair for run in both for pair in zip(run.tokens, run.logprobs, strict=True)] for both in runs
    )
    same, largest = 0, 0.0
    for (tokens, logprobs), (wanted, wanted_logprobs) in zip(with_graphs, without, strict=True):
        same += tokens == wanted
        first = next((i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), len(tokens))
        pairs = zip(logprobs[:first], wanted_logprobs[:first], strict=True)
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
    found = {"sequences": len(without), "same": same, "largest_difference_of_logprobs": largest, **counts}
    save(found)
    if same < 0.9 * len(without) or not largest < 1e-3:
        raise RuntimeError(f"graphs change what is generated: {found}")
    if device.type == "cuda" and not (counts["graphs"] and counts["graphs"]["replayed"]):
        raise RuntimeError(f"no graph was replayed: {found}")
    return found


def transformers_requests(name: str, load: Load, save: Save) -> dict[str, Any]:
    """The batch of requests by transformers' continuous batching, on random weights of the same shape."""
    import transformers

    device = choose_device(EngineConfig(**load.options))
    raw = {key: value for key, value in SHAPES[name].items() if key not in ("architectures", "eos_token_id")}
    kind = raw.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **raw)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=load.dtype, attn_implementation="sdpa")
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        how = transformers.GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = model.generate_batch(prompts, generation_config=how, persistent_manager=True)
        return [list(output.generated_tokens) for output in outputs.values()]

    found = {"transformers": transformers.__version__, **requests(generate, load, int(config.vocab_size))}
    save(found)
    return found
