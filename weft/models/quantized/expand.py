"""Computes the numbers of quantized matrices, or puts them in blocks, a few rows at a time.

An integer of 8 bits times a scale in float16 is exact in float32; other products are rounded once, to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from weft.gguf.types import GROUPS
from weft.kernels.quantized_blocks import GROUP_HEADER
from weft.models.checkpoint import PIECE_NUMBERS, Piece
from weft.models.quantized.matrix import QuantizedMatrix, StoredTensor

ONES = {4: 0x11111111, 8: 0x01010101}
"""A word that has 1 in each of its numbers, by their bits."""
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where in a word the eight consecutive outputs of AWQ are: even ones in the lower half, odd ones in the upper."""
AWQ_OUTPUTS = len(AWQ_SHIFTS)


def expand(weight: QuantizedMatrix, read: Callable[[StoredTensor], Tensor]) -> Iterator[Piece]:
    """The rows of a matrix in pieces of about `PIECE_NUMBERS` numbers, float32. `read` gives a view of a tensor.

    Raises `ModelLoadError` for scales that are not finite and for groups that there are not.
    """
    outputs, inputs = weight.shape
    stored, scales, zeros, groups = read(weight.numbers), _scales(weight, read), _zeros(weight, read), None
    if weight.groups is not None:
        groups = _groups(weight, weight.groups, read)
    for rows in _pieces_of_rows(outputs, inputs):
        values = _NUMBERS[weight.layout](stored, rows, weight.bits)[:, :inputs].to(torch.float32)
        blocks = torch.arange(rows.start, rows.stop) // weight.block[0]
        if weight.zero:
            values.sub_(weight.zero)
        offsets = None if zeros is None else zeros[blocks]
        yield Piece(weight.name, rows.start, _scaled(values, scales[blocks], offsets, weight.block[1], groups))


def in_blocks(weight: QuantizedMatrix, kind: str, read: Callable[[StoredTensor], Tensor]) -> Iterator[Piece]:
    """As `expand`, in blocks of type `kind`, one of `GROUPS`: uint8 [rows, bytes of a row]."""
    outputs, inputs = weight.shape
    numbers, block_bytes = GROUPS[kind].numbers, GROUPS[kind].num_bytes
    stored, scales, zeros = read(weight.numbers), _scales(weight, read), _zeros(weight, read)
    if weight.groups is not None:
        _groups(weight, weight.groups, read)  # raises unless they are in order
    columns = torch.arange(0, inputs, numbers) // weight.block[1]
    for rows in _pieces_of_rows(outputs, inputs):
        values = _NUMBERS[weight.layout](stored, rows, weight.bits)[:, :inputs].to(torch.uint8)
        halves = values.reshape(len(values), -1, 2, 16)
        blocks = torch.zeros(len(values), len(columns), block_bytes, dtype=torch.uint8)
        blocks[..., :4] = scales[rows][:, columns, None].view(torch.uint8)
        blocks[..., 4] = weight.zero if zeros is None else zeros[rows][:, columns].to(torch.uint8)
        blocks[..., GROUP_HEADER:] = (halves[:, :, 0] | halves[:, :, 1] << 4).view(len(values), len(columns), -1)
        yield Piece(weight.name, rows.start, blocks.flatten(1))


def _pieces_of_rows(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, PIECE_NUMBERS // max(1, inputs) // AWQ_OUTPUTS) * AWQ_OUTPUTS
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))


def _scaled(values: Tensor, scales: Tensor, zeros: Tensor | None, size: int, groups: Tensor | None) -> Tensor:
    """values [n, I], scales and zeros [n, groups] -> (values - zeros) * scales; `values` is consumed."""
    inputs = values.shape[1]
    if groups is None and inputs % size == 0:
        shaped = values.view(len(values), -1, size)
        scales, zeros = scales[..., None], None if zeros is None else zeros[..., None]
    else:
        shaped, columns = values, torch.arange(inputs) // size if groups is None else groups
        scales, zeros = scales[:, columns], None if zeros is None else zeros[:, columns]
    if zeros is not None:
        shaped.sub_(zeros)
    shaped.mul_(scales)
    return values


def _scales(weight: QuantizedMatrix, read: Callable[[StoredTensor], Tensor]) -> Tensor:
    """[rows of blocks, columns of blocks] float32."""
    stored = read(weight.scales)
    scales = (stored.T if weight.inputs_first else stored).to(torch.float32).reshape(weight.grid)
    if not bool(scales.isfinite().all()):
        raise weight.scales.error("has a scale that is NaN or infinite; the file is damaged")
    return scales


def _zeros(weight: QuantizedMatrix, read: Callable[[StoredTensor], Tensor]) -> Tensor | None:
    """As the scales."""
    if weight.zeros is None:
        return None
    stored = read(weight.zeros)
    if weight.zero_layout == "plain":
        return stored.to(torch.float32).reshape(weight.grid)
    if weight.zero_layout == "awq":
        found = _awq_fields(stored).transpose(1, 2).flatten(1).T
    elif weight.zero_layout == "rows":
        found = _unpack(stored.T, weight.bits).T
    else:
        # Writers of the first version subtract whole words, where a 0 borrows from its neighbour: sums restore both.
        whole = stored + ONES[weight.bits] if weight.zero_layout == "gptq_v1" else stored
        found = _unpack(whole, weight.bits).T
    return found[: weight.shape[0]].to(torch.float32)


def _groups(weight: QuantizedMatrix, part: StoredTensor, read: Callable[[StoredTensor], Tensor]) -> Tensor | None:
    """For each input the column of its scale [I] int64; None: they are in order."""
    found, count = read(part).to(torch.int64), weight.grid[1]
    in_order = torch.arange(weight.shape[1]) // weight.block[1]
    # compressed-tensors reserves the tensor with -1 and may not fill it.
    if torch.equal(found, in_order) or (weight.layout == "rows" and bool((found == -1).all())):
        return None
    if not weight.any_order:
        raise part.error("has groups that are not in the order of the inputs, and desc_act in config.json is false")
    if bool(((found < 0) | (found >= count)).any()):
        raise part.error(f"has groups from {int(found.min())} to {int(found.max())}, and there are {count}")
    return found


def _unpack(stored: Tensor, bits: int) -> Tensor:
    """Words [n, k] int32, numbers from the lowest bits up -> [n, k * 32 / bits] uint8."""
    octets = stored.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def _awq_fields(stored: Tensor) -> Tensor:
    """Words [n, k] int32 -> the outputs of each, [n, 8, k] int32."""
    shifts = torch.tensor(AWQ_SHIFTS, dtype=torch.int32)
    return stored[:, None] >> shifts[:, None] & 15


def _gptq(stored: Tensor, rows: slice, bits: int) -> Tensor:
    return _unpack(stored[:, rows].T, bits)


def _awq(stored: Tensor, rows: slice, bits: int) -> Tensor:
    taken = stored[:, rows.start // AWQ_OUTPUTS : rows.stop // AWQ_OUTPUTS]
    return _awq_fields(taken.T.contiguous()).flatten(0, 1)


def _rows(stored: Tensor, rows: slice, bits: int) -> Tensor:
    return _unpack(stored[rows], bits)


def _plain(stored: Tensor, rows: slice, bits: int) -> Tensor:
    return stored[rows]


_NUMBERS: Mapping[str, Callable[[Tensor, slice, int], Tensor]] = {
    "gptq": _gptq,
    "awq": _awq,
    "rows": _rows,
    "plain": _plain,
}
"""By layout: tensor, outputs, bits -> the numbers of these outputs [n, I or more]."""
