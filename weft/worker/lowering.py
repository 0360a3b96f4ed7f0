"""From a step's numbers to the model's input: which token or vector each query token stands for.

Owns the resolution of `token_ids`, `token_slots` and `embed_slots`. The attention metadata is lowered by
`weft.kernels.batch.lower`; ranges were checked by `checks`.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from weft.core.step import I32, ForwardBatch
from weft.models.base import LanguageModel
from weft.worker.drawing import I64
from weft.worker.transfer import upload


def input_embeddings(forward: ForwardBatch, model: LanguageModel, last_tokens: Tensor, embed_table: Tensor) -> Tensor:
    """The input of the first layer, [T, hidden size].

    `last_tokens` [slots] int64 holds the token last sampled into each device slot, `embed_table` [embedding slots,
    hidden size] the stored vectors. The host never learns the tokens.
    """
    device = last_tokens.device
    token_ids = upload(np.maximum(forward.token_ids, 0), device, np.int64)
    missing = forward.token_ids < 0
    if forward.token_slots is not None:
        index = np.flatnonzero(missing & (forward.token_slots >= 0))
        _replace(token_ids, index, last_tokens, forward.token_slots)
        missing[index] = False
    x = model.embed(token_ids)
    if forward.embed_slots is not None:
        _replace(x, np.flatnonzero(missing), embed_table, forward.embed_slots)
    return x


def _replace(target: Tensor, index: I64, table: Tensor, slots: I32) -> None:
    if len(index):
        found = table.index_select(0, upload(slots[index], table.device))
        target.index_copy_(0, upload(index, target.device), found)


def is_every_row(index: I64, num_rows: int) -> bool:
    """Whether these are all of `num_rows` rows, in order."""
    return len(index) == num_rows and bool((index == np.arange(num_rows)).all())


def rows_of(x: Tensor, index: I64) -> Tensor:
    """Rows `index` of x, without a copy when they are all of them in order."""
    if is_every_row(index, x.shape[0]):
        return x
    return x.index_select(0, upload(index, x.device))
