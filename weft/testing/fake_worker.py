"""`FakeWorker`: a worker without a model, whose tokens prove that the right KV was read.

Each KV slot holds (token, position, chain), where the chain is a hash of the sequence up to that token, made from the
chain that the *page table* leads to. So the next token is a function of the whole context as read through pages: a
page lost, shared wrongly, overwritten too early or copied too late gives another token, and a row whose pages do not
hold one contiguous chain raises at once. `expected_tokens` is the same function without pages.

Rows over explicit pages need not be contiguous: with `lenient`, a token's chain is made of what its row lets it see, in
order of position, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.core.protocols import WorkerSpec
from weft.core.step import ForwardBatch, LateInputs, SamplingBatch, Step, StepHandle, StepResult, TopTokens
from weft.sched.slots import uniforms

_M = (1 << 64) - 1
_SEED = 0x243F6A8885A308D3


def extend_chain(chain: int, token: int) -> int:
    """The hash of a sequence that continues one hashed as `chain` with `token`."""
    state = (chain ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _M
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _M
    return state ^ (state >> 31)


def next_token(chain: int, uniform: float, vocab_size: int) -> int:
    """The token sampled after a sequence."""
    return (chain ^ int(uniform * (1 << 40))) % vocab_size


def most_likely(tokens: list[int], vocab_size: int) -> int:
    """The first token of a fake worker's distribution after `tokens`."""
    chain = _SEED
    for token in tokens:
        chain = extend_chain(chain, token)
    return next_token(chain, 0.0, vocab_size)


def expected_tokens(prompt: list[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens that a fake worker samples after `prompt`, however it is scheduled."""
    chain = _SEED
    for token in prompt:
        chain = extend_chain(chain, token)
    tokens = []
    for index in range(count):
        uniform = float(uniforms(np.array([seed & _M], np.uint64), np.array([index], np.int64))[0])
        tokens.append(next_token(chain, uniform, vocab_size))
        chain = extend_chain(chain, tokens[-1])
    return tokens


class _Done:
    def __init__(self, worker: FakeWorker, step: Step):
        self._worker = worker
        self._step = step
        self._result: StepResult | None = None
        self.bound = False

    @property
    def step_id(self) -> int:
        return self._step.step_id

    def done(self) -> bool:
        return self.bound

    def wait(self) -> StepResult:
        if not self.bound:
            raise RuntimeError(f"step {self.step_id} was never bound")
        if self._result is None:
            self._result = self._worker.carry_out(self._step)
        return self._result


class FakeWorker:
    """Executes a step when it is waited for, as late as a real device may."""

    def __init__(
        self, spec: WorkerSpec, device_s: Callable[[Step], float] = lambda step: 0.0, *, lenient: bool = False
    ):
        """`device_s` is the reported device time of each step; no time passes."""
        self._lenient = lenient
        self._embed_tokens = np.full(spec.num_embed_slots, -1, np.int64)
        self._embed_chains = np.zeros(spec.num_embed_slots, np.uint64)
        self._spec = spec
        self._device_s = device_s
        size = spec.num_device_pages * spec.page_size
        self._tokens = np.full(size, -1, np.int64)
        self._positions = np.full(size, -1, np.int64)
        self._chains = np.zeros(size, np.uint64)
        host = spec.num_host_pages * spec.page_size
        self._host = (np.full(host, -1, np.int64), np.full(host, -1, np.int64), np.zeros(host, np.uint64))
        self._last = np.full(spec.num_slots, -1, np.int64)
        self._last_step = 0
        self.fail_at_step: int | None = None
        self.invalid_slots: set[int] = set()
        """Slots whose logits are NaN."""
        self.invalid_scores = False
        """Whether every log-probability, distribution and hidden state is NaN."""
        self.closed = False

    @property
    def spec(self) -> WorkerSpec:
        """The spec that the worker was given."""
        return self._spec

    def launch(self, step: Step) -> StepHandle:
        """Record the step; its result is computed when awaited."""
        return _Done(self, step)

    def bind(self, handle: StepHandle, late: LateInputs) -> None:
        """Allow the step to be waited for."""
        if not isinstance(handle, _Done) or handle.bound:
            raise RuntimeError("a step must be bound exactly once, by the worker that launched it")
        handle.bound = True

    def close(self) -> None:
        """Do nothing: the worker holds no resources."""
        self.closed = True

    def carry_out(self, step: Step) -> StepResult:
        """Execute a step, in the order given in its docstring. Steps must arrive in launch order."""
        if step.step_id != self._last_step + 1:
            raise RuntimeError(f"step {step.step_id} after step {self._last_step}")
        self._last_step = step.step_id
        if step.step_id == self.fail_at_step:
            raise RuntimeError("the device failed, as the test requested")
        self._copy(step)
        if step.embed is not None:
            self._embed_tokens[step.embed.slots] = step.embed.token_ids
        chains = self._forward(step.forward) if step.forward is not None else np.empty(0, np.uint64)
        if step.head is not None:
            chains = np.concatenate((chains, self._embed_chains[step.head.embed_slots]))
        if step.sampling is None:
            return StepResult(step.step_id, hidden_sums=self._hidden_sums(step), device_s=self._device_s(step))
        return self._sample(step, step.sampling, chains)

    def _copy(self, step: Step) -> None:
        device = (self._tokens, self._positions, self._chains)
        self._move(device, self._host, step.swap_outs)
        if len(set(step.page_copies[:, 1].tolist())) != len(step.page_copies):
            raise RuntimeError("a page is the destination of two copies")
        if set(step.page_copies[:, 1].tolist()) & set(step.page_copies[:, 0].tolist()):
            raise RuntimeError("a page is the destination of one copy and the source of another")
        self._move(device, device, step.page_copies)
        for source, target in step.token_copies.tolist():
            for array in device:
                array[target] = array[source]
        self._move(self._host, device, step.swap_ins)

    def _move(self, source: tuple[np.ndarray, ...], target: tuple[np.ndarray, ...], pairs: np.ndarray) -> None:
        size = self._spec.page_size
        for a, b in pairs.tolist():
            for src, dst in zip(source, target, strict=True):
                dst[b * size : (b + 1) * size] = src[a * size : (a + 1) * size].copy()

    def _forward(self, batch: ForwardBatch) -> np.ndarray:
        out = np.zeros(batch.num_tokens, np.uint64)
        if self._lenient:
            self._write_all(batch)
        for row in range(batch.num_rows):
            begin, end = int(batch.q_indptr[row]), int(batch.q_indptr[row + 1])
            pages = batch.kv_page_ids[int(batch.kv_indptr[row]) : int(batch.kv_indptr[row + 1])]
            slots = (pages[:, None] * self._spec.page_size + np.arange(self._spec.page_size)).ravel()
            if self._lenient:
                self._explicit_row(batch, row, slots, out)
                continue
            length = int(batch.kv_lens[row])
            start = length - (end - begin)
            self._check_row(slots[:start], start)
            chain = int(self._chains[slots[start - 1]]) if start else _SEED
            for index in range(begin, end):
                position = start + index - begin
                if int(batch.positions[index]) != position or int(batch.write_slots[index]) != slots[position]:
                    raise RuntimeError(f"token {index} is not written where its row reads it")
                token = int(batch.token_ids[index])
                if token < 0:
                    if batch.token_slots is None:
                        raise RuntimeError(f"token {index} comes from nowhere")
                    token = int(self._last[batch.token_slots[index]])
                chain = extend_chain(chain, token)
                self._tokens[slots[position]] = token
                self._positions[slots[position]] = position
                self._chains[slots[position]] = np.uint64(chain)
                out[index] = np.uint64(chain)
        self._embed_chains[batch.store_slots] = out[batch.store_tokens]
        return out[batch.output_tokens]

    def _explicit_row(self, batch: ForwardBatch, row: int, slots: np.ndarray, out: np.ndarray) -> None:
        begin, end = int(batch.q_indptr[row]), int(batch.q_indptr[row + 1])
        slots = slots[: int(batch.kv_lens[row])]
        for index in range(begin, end):
            seen = self._seen(batch, row, index - begin, slots)
            chain = _SEED
            for slot in sorted(seen.tolist(), key=lambda slot: (int(self._positions[slot]), slot)):
                if self._tokens[slot] < 0:
                    raise RuntimeError(f"token {index} sees place {slot}, where nothing was ever written")
                chain = extend_chain(chain, int(self._tokens[slot]))
            out[index] = np.uint64(chain)
            if (slot := int(batch.write_slots[index])) >= 0:
                self._chains[slot] = np.uint64(chain)

    def _write_all(self, batch: ForwardBatch) -> None:
        """As on a device, where each layer writes all KV of the batch before any row reads."""
        written = batch.write_slots[batch.write_slots >= 0]
        if len(np.unique(written)) != len(written):
            raise RuntimeError("a place is written twice by one forward")
        for index in range(batch.num_tokens):
            token = int(batch.token_ids[index])
            if token < 0 and batch.token_slots is not None and batch.token_slots[index] >= 0:
                token = int(self._last[batch.token_slots[index]])
            elif token < 0 and batch.embed_slots is not None:
                token = int(self._embed_tokens[batch.embed_slots[index]])
            if (slot := int(batch.write_slots[index])) >= 0:
                self._tokens[slot], self._positions[slot] = token, int(batch.positions[index])

    def _seen(self, batch: ForwardBatch, row: int, query: int, slots: np.ndarray) -> np.ndarray:
        """The places that a row's query sees."""
        entries = np.arange(len(slots))
        shown = np.ones(len(slots), np.bool_)
        if batch.causal is None or batch.causal[row]:
            count = int(batch.q_indptr[row + 1] - batch.q_indptr[row])
            shown &= entries <= len(slots) - count + query
        if batch.visibility is not None:
            words = batch.visibility[int(batch.kv_indptr[row]) + entries // self._spec.page_size]
            shown &= (words >> (entries % self._spec.page_size).astype(np.uint32) & 1).astype(np.bool_)
        if batch.mask_bits is not None and batch.mask_indptr is not None:
            packed = batch.mask_bits[int(batch.mask_indptr[row]) : int(batch.mask_indptr[row + 1])]
            if len(packed):
                row_bytes = -(-len(slots) // 8)
                bits = np.unpackbits(packed[query * row_bytes : (query + 1) * row_bytes], bitorder="little")
                shown &= bits[: len(slots)].astype(np.bool_)
        return slots[shown]

    def _check_row(self, slots: np.ndarray, length: int) -> None:
        if not np.array_equal(self._positions[slots], np.arange(length)):
            raise RuntimeError(f"a row reads positions {self._positions[slots].tolist()}")
        chain = _SEED
        for slot in slots.tolist():
            chain = extend_chain(chain, int(self._tokens[slot]))
            if chain != int(self._chains[slot]):
                raise RuntimeError("a row reads KV of another sequence")

    def _sample(self, step: Step, sampling: SamplingBatch, chains: np.ndarray) -> StepResult:
        tokens = np.empty(len(sampling.rows), np.int32)
        for index, (row, uniform) in enumerate(zip(sampling.rows, sampling.uniforms, strict=True)):
            tokens[index] = next_token(int(chains[row]), float(uniform), self._spec.vocab_size)
            self._last[sampling.slots[index]] = tokens[index]
            if int(sampling.slots[index]) in self.invalid_slots:
                tokens[index] = -1
        count = len(sampling.score_rows)
        dist = None
        if len(sampling.dist_rows):
            # The k tokens from the one that would be drawn at 0 on, each half as likely as the one before.
            first = np.array([next_token(int(chains[row]), 0.0, self._spec.vocab_size) for row in sampling.dist_rows])
            ids = (first[:, None] + np.arange(sampling.dist_top)) % self._spec.vocab_size
            logprobs = np.broadcast_to(-np.log(2.0) * np.arange(1, sampling.dist_top + 1), ids.shape)
            dist = TopTokens(ids.astype(np.int32), logprobs.astype(np.float32))
        top = max(sampling.score_top, int(sampling.num_logprobs.max(initial=0)))
        fake_top = TopTokens(
            np.zeros((max(count, len(tokens)), top), np.int32), np.zeros((max(count, len(tokens)), top), np.float32)
        )
        if self.invalid_scores:
            return StepResult(
                step.step_id,
                tokens=tokens,
                score_logprobs=np.full(count, np.nan, np.float32),
                score_ranks=np.ones(count, np.int32),
                score_top=fake_top,
                dist=None if dist is None else TopTokens(dist.ids, np.full_like(dist.logprobs, np.nan)),
                hidden_sums=self._hidden_sums(step),
            )
        return StepResult(
            step.step_id,
            tokens=tokens,
            logprobs=np.full(len(tokens), -1.0, np.float32),
            ranks=np.ones(len(tokens), np.int32),
            top=fake_top,
            score_logprobs=-sampling.score_targets.astype(np.float32),
            score_ranks=np.ones(count, np.int32),
            score_top=fake_top,
            dist=dist,
            hidden_sums=self._hidden_sums(step),
            device_s=self._device_s(step),
        )

    def _hidden_sums(self, step: Step) -> np.ndarray | None:
        """Hidden states of ones; NaN with `invalid_scores`."""
        if step.forward is None or not len(step.forward.hidden_tokens):
            return None
        groups = int(step.forward.hidden_groups.max()) + 1
        sums = np.zeros((groups, self._spec.hidden_size), np.float32)
        np.add.at(sums, step.forward.hidden_groups, np.nan if self.invalid_scores else 1.0)
        return sums


def fake_spec(**changes: object) -> WorkerSpec:
    """The spec of a small worker, with `changes`."""
    values: dict[str, object] = {
        "vocab_size": 1000,
        "hidden_size": 4,
        "page_size": 16,
        "num_device_pages": 256,
        "num_host_pages": 0,
        "num_slots": 32,
        "num_embed_slots": 0,
        "max_context": 2048,
        "bytes_per_page": 1024,
        "device": "fake",
        "dtype": "none",
    }
    return WorkerSpec(**{**values, **changes})  # type: ignore[arg-type]
