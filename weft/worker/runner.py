"""What a step does, from its first copy to its last token, on the thread that calls it.

Owns the loop over layers, the embedding slots and the order of effects. Issues work and never waits for the device:
on a GPU everything here returns while the device is still busy. Does not know threads, launches or other steps
(`executor` does).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.core.protocols import WorkerSpec
from weft.core.step import ForwardBatch, LateInputs, SamplingBatch, Step
from weft.kernels.dispatch import host_sampling
from weft.models.base import LanguageModel, lower
from weft.worker.drawing import I64
from weft.worker.graphs import GraphOptions, StepGraphs
from weft.worker.kv_store import KVStore
from weft.worker.logprobs import score_tokens, top_tokens
from weft.worker.lowering import input_embeddings, is_every_row, rows_of
from weft.worker.sampler import StepSampler
from weft.worker.slots import SlotTable
from weft.worker.transfer import upload


class Halfway(NamedTuple):
    """What the forward half leaves for the sampling half."""

    logits: Tensor | None
    """[O, V]; None when there are no output rows."""
    hidden_sums: Tensor | None
    """[G, hidden size] float64."""


class StepRunner:
    """One model with its pools, slots and sampler."""

    def __init__(self, model: LanguageModel, kv: KVStore, spec: WorkerSpec, device: torch.device, threads: int):
        """`spec` gives the sizes; the model's weights and `kv` are on `device`. `threads` are those of a CPU."""
        self._model = model
        self._kv = kv
        self._page_size = spec.page_size
        self._device = device
        self._slots = SlotTable(spec.num_slots, spec.vocab_size, spec.max_context, device)
        kernels = host_sampling() if device.type == "cpu" else None
        self._sampler = StepSampler(self._slots, threads=threads, kernels=kernels)
        shape = (spec.num_embed_slots, spec.hidden_size)
        self._embeddings = torch.zeros(shape, dtype=model.spec.dtype, device=device)
        self.graphs: StepGraphs | None = None
        """What carries out the passes that it takes."""

    def use_graphs(self, options: GraphOptions, max_context: int) -> None:
        """From now on, carry out passes as graphs."""
        sizes = {"page_size": self._page_size, "max_context": max_context}
        self.graphs = StepGraphs(self._model, self._kv.layers, self._slots.tokens, options, **sizes)

    def forward_half(self, step: Step) -> Halfway:
        """Everything up to the logits."""
        self._kv.move(step)
        if step.forward is None and (len(step.swap_outs) or len(step.swap_ins)):
            self._kv.wait_for_link()  # there is nothing to move pages beside
        for state in step.slot_sets:
            self._slots.set(state)
        if step.embed is not None:
            embedded = self._model.embed(upload(step.embed.token_ids, self._device, np.int64))
            self._embeddings.index_copy_(0, upload(step.embed.slots, self._device, np.int64), embedded)
        if self.graphs is not None and step.forward is not None and step.head is None:
            logits = self.graphs.logits(step.forward)
            if logits is not None:
                return Halfway(logits, None)
        states: list[Tensor] = []
        hidden_sums = None
        if step.forward is not None:
            outputs, hidden_sums = self._forward(step.forward)
            states.append(outputs)
        if step.head is not None:
            slots = upload(step.head.embed_slots, self._device, np.int64)
            states.append(self._embeddings.index_select(0, slots))
        states = [part for part in states if len(part)]
        logits = self._model.head(torch.cat(states) if len(states) > 1 else states[0]) if states else None
        return Halfway(logits, hidden_sums)

    def sampling_half(self, step: Step, halfway: Halfway, late: LateInputs) -> dict[str, Tensor]:
        """Everything after the logits. Returns what goes back to the host, on the device, by name (see `results`)."""
        found: dict[str, Tensor] = {}
        if halfway.hidden_sums is not None:
            found["hidden_sums"] = halfway.hidden_sums
        if step.sampling is not None and halfway.logits is not None:
            self._sample(halfway.logits, step.sampling, late, found)
        return found

    def _forward(self, forward: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The final hidden states of the output tokens [O, hidden size], and the sums."""
        model = self._model
        outputs, hidden, stores = forward.output_tokens, forward.hidden_tokens, forward.store_tokens
        wanted = np.concatenate((outputs, hidden, stores)).astype(np.int64)
        every = None if self.graphs is None else self.graphs.hidden(forward)
        x = self._layers(forward, wanted) if every is None else rows_of(every, wanted)
        final = model.final_norm(x) if len(x) else x
        output_states, hidden_states, store_states = torch.split(final, [len(outputs), len(hidden), len(stores)])
        if len(stores):
            self._embeddings.index_copy_(0, upload(forward.store_slots, self._device, np.int64), store_states)
        sums = None
        if len(hidden):
            groups = upload(forward.hidden_groups, self._device, np.int64)
            shape = (int(forward.hidden_groups.max()) + 1, final.shape[1])
            # float64, so that the order of addition, which a GPU does not fix, does not show.
            sums = torch.zeros(shape, dtype=torch.float64, device=self._device)
            sums.index_add_(0, groups, hidden_states.to(torch.float64))
        return output_states, sums

    def _layers(self, forward: ForwardBatch, wanted: I64) -> Tensor:
        """The hidden states of the tokens `wanted` after the last layer [W, hidden size]."""
        model, last = self._model, len(self._model.layers) - 1
        batch = lower(forward, self._page_size, self._device)
        x = input_embeddings(forward, model, self._slots.tokens, self._embeddings)
        for index, layer in enumerate(model.layers):
            weights, kv = model.provider.layer(index), self._kv.layers[index]
            if index < last or is_every_row(wanted, forward.num_tokens):
                x = layer.forward(x, weights, batch, kv)
                continue
            # With it, all KV is written; what follows concerns each token alone, so only those that are wanted.
            x = rows_of(layer.attend(x, weights, batch, kv), wanted)
            if len(x):
                x = layer.feed_forward(x, weights)
        return x

    def _sample(self, logits: Tensor, batch: SamplingBatch, late: LateInputs, found: dict[str, Tensor]) -> None:
        tokens = self._sampler.sample(logits, batch, late)
        found["tokens"] = tokens
        asked = np.flatnonzero(batch.num_logprobs >= 0)
        if len(asked):
            rows = upload(batch.rows[asked], self._device, np.int64)
            scores = score_tokens(logits, rows, tokens[upload(asked, self._device)].clamp(min=0))
            top = top_tokens(logits, rows, int(batch.num_logprobs.max()))
            found |= {"logprobs": scores.logprobs, "ranks": scores.ranks}
            found |= {"top_ids": top.ids, "top_logprobs": top.logprobs}
        if len(batch.score_rows):
            rows = upload(batch.score_rows, self._device, np.int64)
            scores = score_tokens(logits, rows, upload(batch.score_targets, self._device, np.int64))
            found |= {"score_logprobs": scores.logprobs, "score_ranks": scores.ranks}
            if batch.score_top:
                top = top_tokens(logits, rows, batch.score_top)
                found |= {"score_top_ids": top.ids, "score_top_logprobs": top.logprobs}
        if len(batch.dist_rows):
            top = top_tokens(logits, upload(batch.dist_rows, self._device, np.int64), batch.dist_top)
            found |= {"dist_ids": top.ids, "dist_logprobs": top.logprobs}
