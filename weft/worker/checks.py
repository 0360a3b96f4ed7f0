"""Whether a step fits the worker it is launched on.

Every violation is a bug of the scheduler, caught before it can overwrite memory of another request. Vectorised: a few
microseconds per array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.protocols import WorkerSpec
from weft.core.step import I32, ForwardBatch, SamplingBatch, Step
from weft.worker.errors import StepError

MAX_POSITION = 2**31 - 1


def check_step(step: Step, spec: WorkerSpec) -> None:
    """Raise `StepError` unless every index of the step is inside its pool and its shapes agree."""
    try:
        _check_moves(step, spec)
        for state in step.slot_sets:
            _require(0 <= state.slot < spec.num_slots, f"SlotSet names slot {state.slot} of {spec.num_slots}")
        if step.embed is not None:
            _inside("embed.token_ids", step.embed.token_ids, 0, spec.vocab_size)
            _inside("embed.slots", step.embed.slots, 0, spec.num_embed_slots)
            _same_length("embed", step.embed.token_ids, step.embed.slots)
        num_outputs = 0
        if step.forward is not None:
            _check_forward(step.forward, spec)
            num_outputs += len(step.forward.output_tokens)
        if step.head is not None:
            _inside("head.embed_slots", step.head.embed_slots, 0, spec.num_embed_slots)
            num_outputs += len(step.head.embed_slots)
        if step.sampling is not None:
            _check_sampling(step.sampling, num_outputs, spec)
    except StepError as error:
        raise StepError(f"step {step.step_id}: {error}") from None


def _check_moves(step: Step, spec: WorkerSpec) -> None:
    device, host = spec.num_device_pages, spec.num_host_pages
    slots = device * spec.page_size
    limits = {
        "swap_outs": (device, host),
        "page_copies": (device, device),
        "token_copies": (slots, slots),
        "swap_ins": (host, device),
    }
    for name, (sources, destinations) in limits.items():
        pairs = getattr(step, name)
        if not len(pairs):
            continue
        _require(pairs.ndim == 2 and pairs.shape[1] == 2, f"{name} has shape {pairs.shape}, not [n, 2]")
        _inside(f"{name} source", pairs[:, 0], 0, sources)
        _inside(f"{name} destination", pairs[:, 1], 0, destinations)
        _require(len(np.unique(pairs[:, 1])) == len(pairs), f"{name} has two copies to one destination")
    if len(step.page_copies):
        chained = np.isin(step.page_copies[:, 1], step.page_copies[:, 0])
        _require(not chained.any(), "page_copies has a destination that is another copy's source")


def _check_forward(forward: ForwardBatch, spec: WorkerSpec) -> None:
    tokens, rows = len(forward.token_ids), len(forward.q_indptr) - 1
    _indptr("q_indptr", forward.q_indptr, rows, tokens)
    _indptr("kv_indptr", forward.kv_indptr, rows, len(forward.kv_page_ids))
    _same_length("forward", forward.token_ids, forward.positions, forward.write_slots)
    _require(len(forward.kv_lens) == rows, f"kv_lens has {len(forward.kv_lens)} rows, q_indptr {rows}")
    _inside("positions", forward.positions, 0, MAX_POSITION)
    _inside("write_slots", forward.write_slots, -1, spec.num_device_pages * spec.page_size)
    _inside("kv_page_ids", forward.kv_page_ids, 0, spec.num_device_pages)
    _inside("kv_lens", forward.kv_lens, 0, MAX_POSITION)
    room = np.diff(forward.kv_indptr) * spec.page_size
    _require(bool((forward.kv_lens <= room).all()), "a row has more KV entries than its pages hold")
    _check_inputs(forward, spec)
    for name in ("output_tokens", "hidden_tokens", "store_tokens"):
        _inside(name, getattr(forward, name), 0, tokens)
    _same_length("hidden", forward.hidden_tokens, forward.hidden_groups)
    _inside("hidden_groups", forward.hidden_groups, 0, max(1, len(forward.hidden_groups)))
    _same_length("store", forward.store_tokens, forward.store_slots)
    _inside("store_slots", forward.store_slots, 0, spec.num_embed_slots)
    for name, count in (("causal", rows), ("visibility", len(forward.kv_page_ids))):
        array = getattr(forward, name)
        _require(array is None or len(array) == count, f"{name} does not have {count} entries")
    _check_mask(forward, rows)


def _check_inputs(forward: ForwardBatch, spec: WorkerSpec) -> None:
    _inside("token_ids", forward.token_ids, -1, spec.vocab_size)
    missing = forward.token_ids < 0
    for name, limit in (("token_slots", spec.num_slots), ("embed_slots", spec.num_embed_slots)):
        slots = getattr(forward, name)
        if slots is not None:
            _same_length(name, forward.token_ids, slots)
            _inside(name, slots, -1, limit)
            missing = missing & (slots < 0)
    _require(not missing.any(), "a query token has no input: no token id, token slot or embedding slot")


def _check_mask(forward: ForwardBatch, rows: int) -> None:
    if forward.mask_bits is None and forward.mask_indptr is None:
        return
    if forward.mask_bits is None or forward.mask_indptr is None:
        raise StepError("mask_bits and mask_indptr go together")
    _indptr("mask_indptr", forward.mask_indptr, rows, len(forward.mask_bits))
    sizes = np.diff(forward.mask_indptr)
    expected = np.diff(forward.q_indptr) * ((forward.kv_lens + 7) // 8)
    _require(bool(((sizes == 0) | (sizes == expected)).all()), "a row's mask is not [query tokens, KV entries] bits")


def _check_sampling(sampling: SamplingBatch, num_outputs: int, spec: WorkerSpec) -> None:
    _same_length(
        "sampling",
        sampling.rows,
        sampling.slots,
        sampling.uniforms,
        sampling.num_logprobs,
        sampling.suppress_stop,
        sampling.late_mask,
    )
    _inside("sampling.slots", sampling.slots, 0, spec.num_slots)
    for name in ("rows", "score_rows", "dist_rows"):
        _inside(f"sampling.{name}", getattr(sampling, name), 0, num_outputs)
    _same_length("scores", sampling.score_rows, sampling.score_targets)
    _inside("sampling.score_targets", sampling.score_targets, 0, spec.vocab_size)


def _indptr(name: str, indptr: I32, rows: int, total: int) -> None:
    fits = len(indptr) == rows + 1 and rows >= 0 and indptr[0] == 0 and indptr[-1] == total
    _require(bool(fits), f"{name} does not divide {total} entries among {rows} rows")
    _require(bool((np.diff(indptr) >= 0).all()), f"{name} decreases")


def _inside(name: str, values: npt.NDArray[Any], low: int, high: int) -> None:
    if len(values) and not (values.min() >= low and values.max() < high):
        raise StepError(f"{name} has values {values.min()} to {values.max()}, allowed are {low} to {high - 1}")


def _same_length(name: str, *arrays: npt.NDArray[Any]) -> None:
    lengths = [len(array) for array in arrays]
    _require(len(set(lengths)) == 1, f"{name} has arrays of different lengths {lengths}")


def _require(fits: bool, message: str) -> None:
    if not fits:
        raise StepError(message)
