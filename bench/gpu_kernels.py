"""Correctness of the kernels on a device against the reference, and their speed.

Checks every operation of every variant in three dtypes; products of matrices are torch's in all of them and left out.
Those with weights of 4 bits are measured, beside torch's with the floats that they stand for.
Measures the device's ceilings (a copy of 1 GiB, a product of 8192 x 8192 matrices), then each operation in
bfloat16 at the sizes of a model with 32 heads, 8 KV heads of 128, hidden size 4096 and intermediate size 12,288, pages
of 16 tokens. A time is the median of some calls, each between two CUDA events, with the level-2 cache overwritten
before. What a variant prepares once per pass for all layers is not in it; a call that is shorter than its launches
takes as long as they do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.core.step import ForwardBatch, Step
from weft.kernels import dispatch, reference
from weft.kernels.base import HeadNorm, HeadShape, Kernels, MovePages
from weft.kernels.batch import AttentionBatch, lower
from weft.kernels.block_weights import PANEL, BlockPart, BlockWeight
from weft.kernels.quantize import block_kind, quantize
from weft.models.base import KVSpec, LayerKV
from weft.worker.kv_store import KVStore

Row = tuple[int, int]
"""Number of queries and of KV entries."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Largest permitted difference from the reference, relative to its largest value."""
PAGE = 16
MOVED_LAYERS = 4
GROUP = 256
"""Inputs of a block of 4 bits."""


class Sizes(NamedTuple):
    """The sizes of a model."""

    shape: HeadShape
    hidden: int
    intermediate: int


class Case(NamedTuple):
    """One operation on given inputs."""

    operation: str
    title: str
    run: Callable[[Kernels], list[Tensor]]
    """Returns all tensors that were computed or changed. Inputs that an operation consumes are not restored."""
    bytes: float = 0
    """Bytes that must be moved, each once."""
    flops: float = 0


class Ceilings(NamedTuple):
    """The highest rates of a device."""

    copy_gigabytes_per_s: float
    """Bytes read and written by a copy."""
    product_teraflops: float
    """Rate of matmul in bfloat16."""


class Measured(NamedTuple):
    """One line of the table."""

    operation: str
    title: str
    microseconds: dict[str, float]
    """Variant -> microseconds."""
    gigabytes_per_s: float
    teraflops: float
    share: float
    """Share of the nearer ceiling."""


class Scale(NamedTuple):
    """The sizes of the cases."""

    device: str
    runs: int
    cache_bytes: int
    """Bytes overwritten before each call: more than the level-2 cache of any device."""
    copied_bytes: int
    product: int
    sizes: Sizes
    rows: dict[str, tuple[Row, ...]]
    tokens: tuple[int, ...]
    dtype: torch.dtype
    block_rows: tuple[int, ...]
    """Rows that meet a weight of 4 bits."""


SMALL = (Sizes(HeadShape(6, 2, 48), 100, 72), Sizes(HeadShape(8, 1, 128), 256, 96), Sizes(HeadShape(3, 3, 256), 64, 32))
"""The sizes that are checked."""
LARGE = Sizes(HeadShape(32, 8, 128), 4096, 12288)
"""The sizes that are measured."""
TINY = SMALL[0]
CHECKED: tuple[Row, ...] = ((1, 20), (3, 300), (40, 130), (1, 700), (9, 9), (2, 1))
MEASURED: dict[str, tuple[Row, ...]] = {
    "decode, 64 rows of 4,096 entries": ((1, 4096),) * 64,
    "decode, 1 row of 32,768 entries": ((1, 32768),),
    "prefill, 8,192 tokens": ((8192, 8192),),
    "prefill, 512 tokens after 7,680": ((512, 8192),),
    "64 decoding rows of 1,024 and a chunk of 1,024": ((1, 1024),) * 64 + ((1024, 2048),),
}


LARGE_SCALE = Scale("cuda", 50, 256 << 20, 1 << 30, 8192, LARGE, MEASURED, (64, 8192), torch.bfloat16, (1, 8, 64, 512))
TINY_SCALE = Scale("cpu", 2, 1 << 10, 1 << 16, 64, TINY, {"two rows": ((1, 40), (3, 9))}, (20,), torch.float32, (2,))
"""Sizes for smoke tests."""


def make_batch(rows: tuple[Row, ...], device: str, generator: np.random.Generator, masked: bool) -> AttentionBatch:
    """Rows over scattered pages that fill the pool exactly; `masked`: with visibility words and one packed mask."""
    pages = [-(-k // PAGE) for _, k in rows]
    ids = generator.permutation(sum(pages)).astype(np.int32)
    begins = np.cumsum([0, *pages])
    positions = np.concatenate([np.arange(k - q, k) for q, k in rows])
    first = np.repeat(begins[:-1], [q for q, _ in rows])
    inside = np.maximum(positions, 0)
    slots = np.where(positions >= 0, ids[first + inside // PAGE] * PAGE + inside % PAGE, -1)
    options: dict[str, Any] = {}
    if masked:
        sizes = [q * -(-k // 8) if i == 0 else 0 for i, (q, k) in enumerate(rows)]
        options = {
            "visibility": generator.integers(0, 2**32, len(ids), dtype=np.uint32),
            "mask_bits": generator.integers(0, 256, sizes[0], dtype=np.uint8),
            "mask_indptr": np.cumsum([0, *sizes]).astype(np.int32),
        }
    forward = ForwardBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=inside.astype(np.int32),
        write_slots=slots.astype(np.int32),
        q_indptr=np.cumsum([0, *(q for q, _ in rows)]).astype(np.int32),
        kv_indptr=begins.astype(np.int32),
        kv_page_ids=ids,
        kv_lens=np.array([k for _, k in rows], np.int32),
        **options,
    )
    return lower(forward, PAGE, device)


def attention_cases(
    rows: tuple[Row, ...], shape: HeadShape, dtype: torch.dtype, device: str, title: str, *, options: bool
) -> Iterator[Case]:
    """Attention of these rows; with `options` also through a window and under masks."""
    heads, kv_heads, head_dim = shape
    seeded = np.random.default_rng(0)
    for masked, window in ((False, None), (False, 50), (True, None)) if options else ((False, None),):
        batch = make_batch(rows, device, seeded, masked)
        q = torch.randn(batch.num_tokens, heads, head_dim, dtype=dtype, device=device)
        kv = torch.randn(len(batch.kv_page_ids), 2, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        pairs = sum(q * k - q * (q - 1) // 2 for q, k in rows)
        entries = sum(k for _, k in rows)
        yield Case(
            "attention",
            title + (", masked" if masked else "") + (", window" if window else ""),
            lambda kernels, q=q, kv=kv, batch=batch, window=window: [  # type: ignore[misc]
                kernels.attention(q, kv, batch, head_dim**-0.5, window)
            ],
            bytes=(2 * entries * kv_heads * head_dim + 2 * q.numel()) * dtype.itemsize,
            flops=4.0 * pairs * heads * head_dim,
        )


def other_cases(tokens: int, sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """The operations on this number of tokens that are neither attention nor matmul."""
    (heads, kv_heads, head_dim), width = sizes.shape, dtype.itemsize
    batch = make_batch(((tokens, tokens),), device, np.random.default_rng(0), False)
    x = torch.randn(tokens, sizes.hidden, dtype=dtype, device=device)
    weight = torch.randn(sizes.hidden, dtype=dtype, device=device)
    gate_up = torch.randn(tokens, 2 * sizes.intermediate, dtype=dtype, device=device)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    angles = torch.randn(tokens, head_dim // 2, device=device)
    rotation = (angles.cos(), angles.sin())
    norm = HeadNorm(*torch.randn(2, head_dim, dtype=dtype, device=device), 1e-6)
    kv = torch.randn(-(-tokens // PAGE), 2, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
    order = torch.randperm(len(kv), device=device)
    sources, destinations = order[: len(kv) // 2], order[len(kv) // 2 : len(kv) // 2 * 2]
    slots = torch.randperm(len(kv) * PAGE, device=device)[:64]

    def rotate(kernels: Kernels) -> list[Tensor]:
        return [kernels.rotate_and_store(qkv, sizes.shape, rotation, norm, batch, kv), kv]

    def copy_pages(kernels: Kernels) -> list[Tensor]:
        kernels.copy_pages(kv, sources, destinations)
        return [kv]

    def copy_slots(kernels: Kernels) -> list[Tensor]:
        kernels.copy_slots(kv, slots[:-1], slots[1:])
        return [kv]

    layers = [kv.view(len(kv), -1).view(torch.uint8)] * MOVED_LAYERS
    staging = torch.empty(len(sources), sum(layer.shape[1] for layer in layers), dtype=torch.uint8, device=device)
    rows = torch.arange(len(sources), device=device)

    @cache
    def prepared(kernels: Kernels) -> MovePages:
        return kernels.prepare_move(layers, torch.split(staging, [layer.shape[1] for layer in layers], dim=1))

    def move_pages(kernels: Kernels) -> list[Tensor]:
        prepared(kernels)(sources, rows)
        return [staging.view(dtype)]

    title = f"{tokens:,} tokens"
    moved = sources.numel() * kv[0].numel() * 2 * width
    yield Case("rms_norm", title, lambda k: [k.rms_norm(x, weight, 1e-6)], bytes=2 * x.numel() * width)
    yield Case("silu_mul", title, lambda k: [k.silu_mul(gate_up)], bytes=1.5 * gate_up.numel() * width)
    yield Case("rotate_and_store", title, rotate, bytes=2 * qkv.numel() * width)
    yield Case("copy_pages", f"{len(sources):,} pages", copy_pages, bytes=moved)
    title_of_move = f"{len(sources):,} pages of {MOVED_LAYERS} layers"
    yield Case("prepare_move", title_of_move, move_pages, bytes=2 * staging.numel())
    yield Case("copy_slots", f"{len(slots) - 1} slots", copy_slots, bytes=4 * 63 * kv_heads * head_dim * width)


def block_cases(rows: int, sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """A product with a weight of 4 bits; a variant that cannot read blocks gets floats."""
    inputs, outputs = max(GROUP, sizes.hidden // GROUP * GROUP), max(PANEL, sizes.intermediate // PANEL * PANEL)
    floats = torch.randn(outputs, inputs, device=device)
    part = BlockPart(block_kind("int4", inputs), outputs)
    stored = quantize(floats, part.kind).flatten()
    blocks = BlockWeight.of(stored, [part], inputs)
    x = torch.randn(rows, inputs, dtype=dtype, device=device)

    @cache
    def weight_of(kernels: Kernels) -> Tensor:
        packed = kernels.pack_weight(blocks)
        return floats.to(dtype) if packed is blocks else packed

    title = f"{rows:,} rows, {inputs:,} to {outputs:,}, 4 bits"
    moved = stored.numel() + (x.numel() + rows * outputs) * dtype.itemsize
    yield Case("linear", title, lambda k: [k.linear(x, weight_of(k))], moved, 2.0 * rows * inputs * outputs)


def check(variants: dict[str, Kernels], device: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[str]:
    """Compare every variant with the reference. Returns one line per wrong case."""
    wrong = []
    for dtype in dtypes:
        for sizes in SMALL:
            expected = [outputs for _, outputs in _outputs(reference.KERNELS, sizes, dtype, device)]
            for name, kernels in variants.items():
                for (case, got), wanted in zip(_outputs(kernels, sizes, dtype, device), expected, strict=True):
                    if not all(_close(a, b) for a, b in zip(got, wanted, strict=True)):
                        wrong.append(f"{name}: {case.operation} ({case.title}) {dtype} {tuple(sizes.shape)}")
    return wrong


def check_tiers(device: str, steps: int = 200) -> list[str]:
    """Move pages to the host and back while others are written and the device is busy. Returns the errors found.

    A page holds one number everywhere, so what each should hold follows from the movements alone.
    """
    pages, spec = 48, KVSpec((LayerKV(8, 64),) * 3, torch.float32)
    chosen = dispatch.select(device, spec.dtype)
    store = KVStore(spec, chosen, PAGE, pages, pages, torch.device(device))
    seeded = np.random.default_rng(0)
    on_device, on_host = np.zeros(pages), np.zeros(pages)
    busy = torch.randn(256, 256, device=device)
    for number in range(1, steps + 1):
        count = int(seeded.integers(1, 12))
        sources, hosts, written = (seeded.permutation(pages)[:count] for _ in range(3))
        back, targets = (seeded.permutation(pages)[:count] for _ in range(2))
        for _ in range(int(seeded.integers(0, 20))):
            busy = busy @ busy / 256
        swap_outs, swap_ins = (np.stack(pair, 1).astype(np.int32) for pair in ((sources, hosts), (back, targets)))
        store.move(Step(number, swap_outs=swap_outs, swap_ins=swap_ins))
        on_host[hosts] = on_device[sources]
        on_device[targets] = on_host[back]
        if number % 2:
            store.settle()
        else:  # beside the link, as a forward that needs none of these pages
            written = written[~np.isin(written, targets)]
        for layer in store.layers:
            layer.index_fill_(0, torch.from_numpy(written).to(device), float(number))
        on_device[written] = number
    store.settle()
    expected = torch.from_numpy(on_device).to(device, torch.float32)[:, None]
    wrong = [i for i, layer in enumerate(store.layers) if not bool((layer.flatten(1) == expected).all())]
    return [f"pages moved to the host and back: layers {wrong} are wrong"] if wrong else []


def _outputs(kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[tuple[Case, list[Tensor]]]:
    torch.manual_seed(0)  # the same inputs for every variant, although some are consumed
    for case in (
        *attention_cases(CHECKED, sizes.shape, dtype, device, "rows of all kinds", options=True),
        *other_cases(200, sizes, dtype, device),
    ):
        # Cloned, because cases share what some of them change.
        yield case, [out.clone() for out in case.run(kernels)]


def _close(got: Tensor, expected: Tensor) -> bool:
    bound = BOUNDS[got.dtype] * expected.abs().max().float()
    return bool(((got.float() - expected.float()).abs() <= bound).all())  # false for NaN


def median_ms(call: Callable[[], object], scale: Scale) -> float:
    """The median time of some calls in ms on the device's clock, after three calls that are not counted."""
    cache = torch.empty(scale.cache_bytes, dtype=torch.uint8, device=scale.device)
    for _ in range(3):
        call()
    if scale.device == "cpu":
        return statistics.median(_host_ms(call) for _ in range(scale.runs))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(scale.runs)]
    for begin, end in events:
        cache.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def _host_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(1e-6, 1000 * (time.perf_counter() - began))


def ceilings(scale: Scale) -> Ceilings:
    """Measure a copy and a product of random matrices."""
    source = torch.ones(scale.copied_bytes, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, scale.product, scale.product, device=scale.device).bfloat16()
    return Ceilings(
        2 * source.numel() / median_ms(lambda: target.copy_(source), scale) / 1e6,
        2 * scale.product**3 / median_ms(lambda: a @ b, scale) / 1e9,
    )


def measure(variants: dict[str, Kernels], scale: Scale, most: Ceilings) -> Iterator[Measured]:
    """Measure every case with every variant; rates and share are those of the first."""
    torch.manual_seed(0)
    for case in large_cases(scale):
        times = {name: median_ms(lambda k=k, c=case: c.run(k), scale) for name, k in variants.items()}  # type: ignore[misc]
        first = next(iter(times.values()))
        gigabytes, teraflops = case.bytes / first / 1e6, case.flops / first / 1e9
        share = max(gigabytes / most.copy_gigabytes_per_s, teraflops / most.product_teraflops)
        microseconds = {name: 1000 * ms for name, ms in times.items()}
        yield Measured(case.operation, case.title, microseconds, gigabytes, teraflops, share)


def large_cases(scale: Scale) -> Iterator[Case]:
    """Yield the cases one at a time, because each fills memory of its own."""
    for title, rows in scale.rows.items():
        yield from attention_cases(rows, scale.sizes.shape, scale.dtype, scale.device, title, options=False)
    for tokens in scale.tokens:
        yield from other_cases(tokens, scale.sizes, scale.dtype, scale.device)
    for count in scale.block_rows:
        yield from block_cases(count, scale.sizes, scale.dtype, scale.device)


def header(names: list[str]) -> str:
    """The heading of the table."""
    columns = " ".join(f"{name + ', us':>10s}" for name in names)
    return f"{'operation':17s} {'case':48s} {columns} {'ratio':>7s} {'GB/s':>9s} {'TFLOP/s':>9s} {'share':>6s}"


def line(measured: Measured) -> str:
    """One line of the table: rates are those of the first variant, the ratio is the second's time to the first's."""
    times = [f"{us:10.1f}" for us in measured.microseconds.values()]
    first, *others = measured.microseconds.values()
    ratio = f"{others[0] / first:6.2f}x" if others else " " * 7
    rates = f"{measured.gigabytes_per_s:9.0f} {measured.teraflops:9.1f} {measured.share:6.1%}"
    return f"{measured.operation:17s} {measured.title:48s} {' '.join(times)} {ratio} {rates}"
