"""A worker around a real tiny model: what steps compute, and what becomes of them when something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.worker import oracle
from tests.worker.sampling_help import late_inputs, sampling_batch
from tests.worker.step_help import dist, forward, greedy, ints, run, set_slots, step
from weft.abi.errors import WeftError
from weft.core.sampling import SamplingParams
from weft.core.step import EmbedBatch, HeadBatch, LateInputs, SlotSet, Step
from weft.models.base import LanguageModel, lower
from weft.worker.errors import StepError
from weft.worker.executor import TorchWorker

PROMPT = [5, 17, 3, 42, 8, 30, 21, 9, 11, 2, 60, 7, 33, 12, 4, 19, 25, 1, 50, 6]
PAGES = [7, 3, 12, 30]


def reference_logits(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """The model alone, in one pass over a fresh KV: [tokens, V]."""
    spec = model.kv_spec()
    pages = list(range(-(-len(tokens) // 8)))
    batch = lower(forward([(tokens, 0, pages)]), 8)
    with torch.inference_mode():
        x = model.embed(torch.tensor(tokens))
        for i, layer in enumerate(model.layers):
            weights = model.provider.layer(i)
            kv = torch.zeros(spec.layer_shape(i, len(pages), 8), dtype=spec.dtype)
            x = layer.feed_forward(layer.attend(x, weights, batch, kv), weights)
        return model.head(model.final_norm(x))


def reference_greedy(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def logprobs_by_id(result, row: int) -> np.ndarray:
    ids, values = result.dist.ids[row], result.dist.logprobs[row]
    return values[np.argsort(ids)]


def test_whole_prompt_gives_the_models_distribution(worker: TorchWorker, model: LanguageModel):
    vocab_size = worker.spec.vocab_size
    result = run(worker, step(forward=forward([(PROMPT, 0, PAGES)]), sampling=dist([0], vocab_size)))
    expected = reference_logits(model, PROMPT)[-1].log_softmax(-1).numpy()
    np.testing.assert_allclose(logprobs_by_id(result, 0), expected, atol=1e-6)
    assert (np.diff(result.dist.logprobs[0]) <= 0).all()
    assert result.device_s > 0
    assert len(result.tokens) == 0


@pytest.mark.parametrize("cuts", [(3,), (8, 16), (1, 2, 9, 19)])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(worker: TorchWorker, model: LanguageModel, cuts):
    bounds = [0, *cuts, len(PROMPT)]
    for begin, end in pairwise(bounds):
        batch = forward([(PROMPT[begin:end], begin, PAGES)])
        result = run(worker, step(forward=batch, sampling=dist([0], worker.spec.vocab_size)))
    expected = reference_logits(model, PROMPT)[-1].log_softmax(-1).numpy()
    np.testing.assert_allclose(logprobs_by_id(result, 0), expected, atol=1e-6)


def decode_step_of(slot: int, length: int) -> Step:
    """One more token of a sequence whose last token only the device knows."""
    batch = forward([([-1], length, PAGES)], token_slots=ints([slot]))
    return step(forward=batch, sampling=sampling_batch([0], [slot], [0.37], num_logprobs=ints([0])))


def test_tokens_chain_on_the_device(worker: TorchWorker, model: LanguageModel):
    params = SamplingParams(temperature=1.5)
    batch = forward([(PROMPT, 0, PAGES)])
    first = step(slot_sets=set_slots(4, params=params), forward=batch, sampling=sampling_batch([0], [4], [0.7]))
    handles = [worker.launch(s) for s in [first, *(decode_step_of(4, len(PROMPT) + i) for i in range(6))]]
    for handle in handles:
        worker.bind(handle, LateInputs())
    results = [handle.wait() for handle in handles]
    tokens = [int(result.tokens[0]) for result in results]
    assert len(set(tokens)) > 3
    # The host computes the same sequence in one pass, now that it knows the tokens.
    expected = reference_logits(model, PROMPT + tokens).log_softmax(-1)
    for i, result in enumerate(results[1:], start=1):
        row = len(PROMPT) + i - 1
        np.testing.assert_allclose(result.logprobs[0], expected[row, tokens[i]], atol=1e-6)
        weights = (expected[row] / 1.5).softmax(-1)
        assert tokens[i] == oracle.draw(weights.tolist(), 0.37)


def test_rows_may_be_marked_as_causal(worker: TorchWorker, model: LanguageModel):
    one = step(
        slot_sets=set_slots(0),
        forward=forward([(PROMPT, 0, PAGES)], causal=np.array([True])),
        sampling=greedy([0], [0], num_logprobs=ints([2])),
    )
    assert run(worker, one).tokens.tolist() == reference_greedy(model, PROMPT, 1)


def test_a_batch_gives_each_row_what_it_gives_alone(worker: TorchWorker, model: LanguageModel):
    prompts = [PROMPT, PROMPT[:9], PROMPT[4:7]]
    pages = [[0, 1, 2], [9, 5], [20]]
    batch = forward([(tokens, 0, own) for tokens, own in zip(prompts, pages, strict=True)])
    one = step(slot_sets=set_slots(0, 1, 2), forward=batch, sampling=greedy([2, 0, 1], [0, 1, 2]))
    expected = [reference_greedy(model, tokens, 1)[0] for tokens in prompts]
    assert run(worker, one).tokens.tolist() == [expected[2], expected[0], expected[1]]


def test_logprobs_are_those_of_the_model(worker: TorchWorker, model: LanguageModel):
    batch = forward([(PROMPT, 0, PAGES)], output_tokens=ints(range(len(PROMPT))))
    last = len(PROMPT) - 1
    sampling = greedy(
        [last, last, 0],
        [0, 1, 2],
        num_logprobs=ints([3, -1, 1]),
        score_rows=ints(range(last)),
        score_targets=ints(PROMPT[1:]),
        score_top=2,
    )
    result = run(worker, step(slot_sets=set_slots(0, 1, 2), forward=batch, sampling=sampling))
    expected = reference_logits(model, PROMPT).log_softmax(-1)
    top = expected.sort(dim=-1, descending=True, stable=True)
    np.testing.assert_allclose(result.logprobs[[0, 2]], top.values[[last, 0], 0], atol=1e-6)
    assert np.isnan(result.logprobs[1])
    assert result.ranks.tolist() == [1, 0, 1]
    assert result.top.ids.tolist() == [top.indices[last, :3].tolist(), [-1] * 3, top.indices[0, :3].tolist()]
    targets = torch.tensor(PROMPT[1:])
    scored = expected[torch.arange(last), targets]
    np.testing.assert_allclose(result.score_logprobs, scored, atol=1e-6)
    assert result.score_ranks.tolist() == ((expected[:last] > scored[:, None]).sum(-1) + 1).tolist()
    assert result.score_top.ids.tolist() == top.indices[:last, :2].tolist()


def test_embeddings_hidden_sums_and_head(worker: TorchWorker, model: LanguageModel):
    spec = worker.spec
    # The prompt's tokens come in through embedding slots but for two, and its last hidden state goes out to a slot.
    embed = EmbedBatch(ints(PROMPT[:6]), ints(range(6)))
    tokens = ints([-1] * 6 + PROMPT[6:])
    slots = ints([*range(6), *[-1] * (len(PROMPT) - 6)])
    batch = forward(
        [(PROMPT, 0, PAGES)],
        token_ids=tokens,
        embed_slots=slots,
        output_tokens=ints([]),
        hidden_tokens=ints([19, 0, 4]),
        hidden_groups=ints([0, 1, 1]),
        store_tokens=ints([19, 3]),
        store_slots=ints([15, 2]),
    )
    head = HeadBatch(ints([15, 2]))
    result = run(worker, step(embed=embed, forward=batch, head=head, sampling=dist([0, 1], spec.vocab_size)))
    expected = reference_logits(model, PROMPT).log_softmax(-1).numpy()
    np.testing.assert_allclose(logprobs_by_id(result, 0), expected[19], atol=1e-6)
    np.testing.assert_allclose(logprobs_by_id(result, 1), expected[3], atol=1e-6)
    assert result.hidden_sums.shape == (2, spec.hidden_size)
    head_of_sum = model.head(torch.tensor(result.hidden_sums[:1], dtype=torch.float64))
    np.testing.assert_allclose(head_of_sum.log_softmax(-1)[0], expected[19], atol=1e-5)
    later = run(worker, step(head=HeadBatch(ints([2])), sampling=dist([0], spec.vocab_size)))
    np.testing.assert_allclose(logprobs_by_id(later, 0), expected[3], atol=1e-6)


def test_inputs_of_all_three_kinds_in_one_batch(worker: TorchWorker, model: LanguageModel):
    first = step(slot_sets=set_slots(2), forward=forward([(PROMPT, 0, PAGES)]), sampling=greedy([0], [2]))
    token = int(run(worker, first).tokens[0])
    # Slot numbers are given for every token; the first kind of input that is there counts.
    batch = forward(
        [([5, -1, -1], 0, [11])], token_slots=ints([2, 2, -1]), embed_slots=ints([4, 4, 4]), output_tokens=ints([2])
    )
    embed = EmbedBatch(ints([33]), ints([4]))
    result = run(worker, step(embed=embed, forward=batch, sampling=dist([0], worker.spec.vocab_size)))
    np.testing.assert_allclose(logprobs_by_id(result, 0), expected_after(model, [5, token, 33]), atol=1e-6)


def fill(worker: TorchWorker, tokens: list[int], pages: list[int]) -> None:
    run(worker, step(forward=forward([(tokens, 0, pages)], output_tokens=ints([]))))


def after(worker: TorchWorker, tokens: list[int], pages: list[int], **moves: np.ndarray) -> np.ndarray:
    """The distribution after `tokens`, of which all but the last have their KV in `pages`."""
    batch = forward([(tokens[-1:], len(tokens) - 1, pages)])
    result = run(worker, step(forward=batch, sampling=dist([0], worker.spec.vocab_size), **moves))
    return logprobs_by_id(result, 0)


def expected_after(model: LanguageModel, tokens: list[int]) -> np.ndarray:
    return reference_logits(model, tokens)[-1].log_softmax(-1).numpy()


def test_pages_go_to_the_host_and_back_while_others_overwrite_them(worker: TorchWorker, model: LanguageModel):
    tokens = PROMPT[:17]
    expected = expected_after(model, tokens)
    fill(worker, tokens[:16], [7, 3])
    # One step: out to scattered host pages, then overwritten by another sequence.
    noise = forward([(PROMPT[4:20], 0, [7, 3])], output_tokens=ints([]))
    run(worker, step(swap_outs=ints([[7, 4], [3, 1]]), forward=noise))
    assert not np.allclose(after(worker, tokens, [7, 3, 9]), expected, atol=1e-4)
    back = after(worker, tokens, [20, 21, 22], swap_ins=ints([[4, 20], [1, 21]]))
    np.testing.assert_allclose(back, expected, atol=1e-6)
    # And out, overwritten by a copied page, and in, within one step.
    moves = {"swap_outs": ints([[20, 5]]), "page_copies": ints([[7, 20]]), "swap_ins": ints([[5, 33]])}
    np.testing.assert_allclose(after(worker, tokens, [33, 21, 22], **moves), expected, atol=1e-6)
    assert not np.allclose(after(worker, tokens, [20, 21, 22]), expected, atol=1e-4)


def test_copied_pages_and_tokens_serve_as_the_originals(worker: TorchWorker, model: LanguageModel):
    tokens = PROMPT[:14]
    expected = expected_after(model, tokens)
    fill(worker, tokens[:13], [7, 3])
    copied = after(worker, tokens, [30, 31], page_copies=ints([[7, 30], [3, 31]]))
    np.testing.assert_allclose(copied, expected, atol=1e-6)
    # Five tokens of the second page are copied one by one into a page of noise.
    fill(worker, PROMPT[:8], [36])
    assert not np.allclose(after(worker, tokens, [30, 36]), expected, atol=1e-4)
    copies = ints([[3 * 8 + i, 36 * 8 + i] for i in range(5)])
    np.testing.assert_allclose(after(worker, tokens, [30, 36], token_copies=copies), expected, atol=1e-6)


def test_a_late_mask_bound_from_another_thread(worker: TorchWorker):
    one = step(
        slot_sets=set_slots(0),
        forward=forward([(PROMPT, 0, PAGES)]),
        sampling=greedy([0], [0], late_mask=np.array([True])),
    )
    handle = worker.launch(one)
    assert not handle.done()
    mask = np.zeros((1, worker.spec.vocab_size), np.bool_)
    mask[0, 13] = True
    thread = threading.Thread(target=worker.bind, args=(handle, late_inputs([0], mask)))
    thread.start()
    assert handle.wait().tokens.tolist() == [13]
    assert handle.wait().tokens.tolist() == [13]
    assert handle.done()
    thread.join()


def test_a_step_without_sampling_needs_no_bind(worker: TorchWorker):
    handle = worker.launch(step(forward=forward([(PROMPT, 0, PAGES)])))
    handle.wait()
    worker.bind(handle, LateInputs())
    with pytest.raises(StepError, match="twice"):
        worker.bind(handle, LateInputs())


def test_an_empty_step_completes(worker: TorchWorker):
    assert run(worker, step()).tokens.tolist() == []


class Breaking:
    """A model whose first layer fails, once, when told to."""

    def __init__(self, model: LanguageModel):
        self._model = model
        self.broken = False

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.broken:
            self.broken = False
            raise MemoryError("no room")
        return self._model.embed(token_ids)


def test_a_failed_step_takes_the_worker_with_it(make_worker: Callable[..., TorchWorker], model: LanguageModel):
    breaking = Breaking(model)
    worker = make_worker(breaking)
    run(worker, step(forward=forward([(PROMPT, 0, PAGES)])))
    breaking.broken = True
    sampled = greedy([0], [0])
    steps = [step(slot_sets=set_slots(0), forward=forward([(PROMPT, 0, PAGES)]), sampling=sampled) for _ in range(3)]
    first, second, third = (worker.launch(s) for s in steps)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            first.wait()
    with pytest.raises(WeftError, match=rf"step {first.step_id} failed \(MemoryError: no room\)") as caught:
        second.wait()
    assert isinstance(caught.value.__cause__, MemoryError)
    worker.close()
    with pytest.raises(WeftError, match="failed"):
        third.wait()


def test_a_contradiction_found_while_sampling_fails_the_step(worker: TorchWorker):
    handle = worker.launch(step(forward=forward([(PROMPT, 0, PAGES)]), sampling=greedy([0], [3])))
    worker.bind(handle, LateInputs())
    with pytest.raises(StepError, match="no SlotSet"):
        handle.wait()


def test_close_finishes_bound_steps_and_fails_the_others(worker: TorchWorker, model: LanguageModel):
    first = worker.launch(
        step(slot_sets=set_slots(0), forward=forward([(PROMPT, 0, PAGES)]), sampling=greedy([0], [0]))
    )
    worker.bind(first, LateInputs())
    unbound = worker.launch(decode_step_of(0, len(PROMPT)))
    behind = worker.launch(decode_step_of(0, len(PROMPT) + 1))
    worker.close()
    worker.close()
    assert first.wait().tokens.tolist() == reference_greedy(model, PROMPT, 1)
    with pytest.raises(StepError, match="not bound before the worker closed"):
        unbound.wait()
    with pytest.raises(WeftError):
        behind.wait()
    with pytest.raises(StepError, match="closed worker"):
        worker.launch(step())


def good(**changes) -> Step:
    return step(forward=forward([(PROMPT, 0, PAGES)], **changes))


BAD_STEPS = {
    "write_slots": lambda: good(write_slots=ints([320] * len(PROMPT))),
    "kv_page_ids": lambda: good(kv_page_ids=ints([0, 1, -1])),
    "more KV entries": lambda: good(kv_lens=ints([25])),
    "q_indptr": lambda: good(q_indptr=ints([0, 3])),
    "kv_indptr": lambda: good(kv_indptr=ints([1, 3])),
    "no input": lambda: good(token_ids=ints([-1] * len(PROMPT))),
    "token_ids": lambda: good(token_ids=ints([100_000] * len(PROMPT))),
    "token_slots": lambda: good(token_slots=ints([8] * len(PROMPT))),
    "output_tokens": lambda: good(output_tokens=ints([20])),
    "positions": lambda: good(positions=ints([-1] * len(PROMPT))),
    "different lengths": lambda: good(positions=ints([0])),
    "store_slots": lambda: good(store_tokens=ints([0]), store_slots=ints([16])),
    "visibility": lambda: good(visibility=np.zeros(2, np.uint32)),
    "mask": lambda: good(mask_bits=np.zeros(7, np.uint8), mask_indptr=ints([0, 7])),
    "go together": lambda: good(mask_bits=np.zeros(7, np.uint8)),
    "swap_outs destination": lambda: step(swap_outs=ints([[0, 6]])),
    "swap_ins source": lambda: step(swap_ins=ints([[-1, 0]])),
    "another copy's source": lambda: step(page_copies=ints([[0, 1], [1, 2]])),
    "two copies": lambda: step(token_copies=ints([[0, 9], [1, 9]])),
    r"not \[n, 2\]": lambda: step(page_copies=ints([1, 2])),
    "SlotSet names slot": lambda: step(slot_sets=set_slots(8)),
    "embed.slots": lambda: step(embed=EmbedBatch(ints([0]), ints([16]))),
    "head.embed_slots": lambda: step(head=HeadBatch(ints([-1]))),
    "sampling.rows": lambda: step(slot_sets=set_slots(0), sampling=greedy([0], [0])),
    "sampling.slots": lambda: step(forward=forward([(PROMPT, 0, PAGES)]), sampling=greedy([0], [9])),
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(worker: TorchWorker, message: str):
    bad = BAD_STEPS[message]()
    with pytest.raises(StepError, match=message) as caught:
        worker.launch(bad)
    assert str(caught.value).startswith(f"step {bad.step_id}: ")
    run(worker, step(forward=forward([(PROMPT, 0, PAGES)])))


def test_stop_ids_beyond_the_vocabulary_are_let_pass(worker: TorchWorker) -> None:
    """A tokenizer may name others as the end of a text."""
    state = SlotSet(0, SamplingParams(temperature=0.0), stop_ids=[2, 10**6, -1])
    run(worker, step(slot_sets=[state], forward=forward([(PROMPT, 0, PAGES)]), sampling=greedy([0], [0])))
