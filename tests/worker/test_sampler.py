"""Sampling against a plain oracle, and the promises about independence and contradictions."""

from __future__ import annotations

import copy
import itertools

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker import oracle
from tests.worker.sampling_help import late_inputs, sample, sampling_batch, slot_set, table_of, ways
from weft.core.sampling import SamplingParams
from weft.core.step import LateInputs
from weft.worker.errors import StepError
from weft.worker.sampler import StepSampler

V = 61
FOUND = ways()
WAYS = pytest.mark.parametrize("way", FOUND.values(), ids=FOUND)


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    def maybe(value, default):
        return value if rng.random() < 0.4 else default

    def tokens(count):
        return rng.integers(0, vocab_size, count).tolist()

    bad_words = [tokens(int(rng.integers(1, 4))) for _ in range(int(rng.integers(1, 6)))]
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=maybe(int(rng.integers(1, vocab_size + 5)), 0),
        top_p=maybe(float(rng.uniform(0.05, 0.999)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.3)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-1, 1)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-1, 1)), 0.0),
        logit_bias=maybe({t: float(rng.uniform(-5, 5)) for t in tokens(4)}, {}),
        allowed_token_ids=maybe(tokens(30), None),
        bad_words=maybe(bad_words, []),
    )


class Case:
    """A row with everything that decides its token."""

    def __init__(self, rng: np.random.Generator, vocab_size: int = V):
        self.params = random_params(rng, vocab_size)
        # Few different logits, so that ties are everywhere.
        self.logits = np.round(rng.normal(size=vocab_size) * 3, int(rng.integers(0, 3)) * 4)
        self.prompt = rng.integers(0, vocab_size, 12).tolist()
        self.output = rng.integers(0, vocab_size, int(rng.integers(0, 9))).tolist()
        self.stop_ids = rng.integers(0, vocab_size, 2).tolist()
        self.suppress = bool(rng.random() < 0.3)
        self.mask = rng.random(vocab_size) < 0.7 if rng.random() < 0.3 else None
        self.uniform = float(rng.random())

    def expected(self) -> list[float] | None:
        stop_ids = self.stop_ids if self.suppress else ()
        try:
            return oracle.probabilities(self.logits, self.params, self.prompt, self.output, stop_ids, self.mask)
        except (ZeroDivisionError, ValueError):
            return None


def run_cases(cases: list[Case], **options) -> list[int]:
    sets = [slot_set(i, c.params, c.prompt, c.output, c.stop_ids) for i, c in enumerate(cases)]
    masked = [i for i, c in enumerate(cases) if c.mask is not None]
    late = late_inputs(masked, [cases[i].mask for i in masked]) if masked else LateInputs()
    batch = sampling_batch(
        range(len(cases)),
        range(len(cases)),
        [c.uniform for c in cases],
        suppress_stop=np.array([c.suppress for c in cases]),
        late_mask=np.array([c.mask is not None for c in cases]),
    )
    logits = torch.tensor(np.array([c.logits for c in cases]))
    vocab_size = logits.shape[1]
    return sample(table_of(*sets, vocab_size=vocab_size), logits, batch, late, **options)


def is_drawn(case: Case, token: int, rounding: float) -> bool:
    """Whether a token is the oracle's, or that of parameters that differ by less than `rounding`: two correct sums may
    differ in the last bits, and a draw, or the end of a nucleus, may lie between them."""
    distribution = case.expected()
    if distribution is None or oracle.draw(distribution, case.uniform) == token:
        return True
    shifts = (-rounding, 0.0, rounding)
    for top_p, min_p in itertools.product(shifts, shifts):
        near = copy.copy(case)
        near.params = msgspec.structs.replace(
            case.params,
            top_p=case.params.top_p + top_p if case.params.top_p < 1 else 1.0,
            min_p=case.params.min_p + min_p if case.params.min_p > 0 else 0.0,
        )
        other = near.expected()
        if other is not None and token in {oracle.draw(other, min(max(case.uniform + u, 0), 1)) for u in shifts}:
            return True
    return False


@WAYS
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tokens_are_the_oracles(way, seed):
    rng = np.random.default_rng(seed)
    rounding = 1e-12
    cases = [Case(rng) for _ in range(24)]
    if "dtype" in way:  # in float32
        rounding = 1e-5
        for case in cases:
            case.logits = case.logits.astype(np.float32)
    tokens = run_cases(cases, **way)
    for case, token in zip(cases, tokens, strict=True):
        assert is_drawn(case, token, rounding), case.params


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_and_among_others_gives_the_same_token(way, dtype):
    rng = np.random.default_rng(5)
    cases = [Case(rng, 1000) for _ in range(64)]
    options = {**way, "dtype": dtype}
    together = run_cases(cases, **options)
    order = rng.permutation(64).tolist()
    shuffled = run_cases([cases[i] for i in order], **options, block_elements=7000)
    assert [shuffled[order.index(i)] for i in range(64)] == together
    assert [run_cases([case], **options)[0] for case in cases] == together


@pytest.mark.parametrize("vocab_size", [127, 5000, 40_000])
def test_all_agree_on_large_rows(vocab_size):
    rng = np.random.default_rng(9)
    cases = [Case(rng, vocab_size) for _ in range(48)]
    found = {name: run_cases(cases, **{**way, "dtype": torch.float32}) for name, way in FOUND.items()}
    for name, tokens in found.items():
        assert tokens == found["numpy"], name


@WAYS
def test_draws_follow_the_distribution(way):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=V) * 2
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
    count = 20_000
    # Stratified and shuffled numbers would hide a wrong order of tokens as little as random ones; these are fixed.
    table = table_of(*(slot_set(i, params) for i in range(500)), vocab_size=V)
    uniforms = rng.random(count)
    observed = np.zeros(V)
    for part in uniforms.reshape(-1, 500):
        batch = sampling_batch([0] * 500, range(500), part)
        np.add.at(observed, sample(table, torch.tensor(logits[None]), batch, **way), 1)
    expected = np.array(oracle.probabilities(logits, params)) * count
    kept = expected > 0
    assert observed[~kept].sum() == 0
    chi_square = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@WAYS
def test_top_k_of_one_is_greedy_even_with_ties(way):
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0, 5.0]])
    table = table_of(slot_set(0, SamplingParams(top_k=1)), slot_set(1, SamplingParams(temperature=0)), vocab_size=5)
    assert sample(table, logits, sampling_batch([0, 0], [0, 1], [0.99, 0.99]), **way) == [1, 1]


def test_penalties_and_bad_words_follow_sampled_tokens_without_the_host():
    rng = np.random.default_rng(3)
    params = SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        bad_words=[[3, 4], [5, 6, 7]],
    )
    prompt, output = [1, 2, 5], [6]
    table = table_of(slot_set(7, params, prompt, output), vocab_size=8)
    sampler = StepSampler(table)
    for _ in range(60):
        logits, uniform = rng.normal(size=8), float(rng.random())
        token = sampler.sample(torch.tensor(logits[None]), sampling_batch([0], [7], [uniform]), LateInputs()).item()
        assert token == oracle.draw(oracle.probabilities(logits, params, prompt, output), uniform)
        output.append(token)
        assert table.tokens[7].item() == token


def test_a_slot_starts_anew_when_it_is_set():
    params = SamplingParams(temperature=0, frequency_penalty=2.0, bad_words=[[0, 1]], logit_bias={2: 3.0})
    table = table_of(slot_set(0, params, [], [0]), vocab_size=4)
    logits = torch.tensor([[1.0, 2.0, 0.0, 0.5]])
    batch = sampling_batch([0], [0], [0.5])
    assert sample(table, logits, batch) == [2]
    table.set(slot_set(0, SamplingParams(temperature=0)))
    assert sample(table, logits, batch) == [1]
    table.set(slot_set(0, SamplingParams(temperature=0, frequency_penalty=2.0), [], []))
    assert sample(table, logits, batch) == [1]
    assert sample(table, logits, batch) == [0]


def test_a_longer_bad_word_keeps_the_history_of_others():
    short = slot_set(0, SamplingParams(temperature=0, bad_words=[[1, 2]]), [1])
    long = slot_set(1, SamplingParams(temperature=0, bad_words=[[0, 1, 2, 3, 2]]), [0, 1, 2], [3])
    table = table_of(short, long, vocab_size=4)
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0]])
    assert sample(table, logits, sampling_batch([0, 0], [0, 1], [0, 0])) == [3, 3]


def test_stop_ids_are_suppressed_only_while_asked():
    table = table_of(slot_set(0, SamplingParams(temperature=0), stop_ids=[2, 3]), vocab_size=4)
    logits = torch.tensor([[0.0, 1.0, 8.0, 9.0]])
    assert sample(table, logits, sampling_batch([0], [0], [0], suppress_stop=np.array([True]))) == [1]
    assert sample(table, logits, sampling_batch([0], [0], [0])) == [3]


def test_one_row_feeds_several_samplers():
    table = table_of(*(slot_set(i, SamplingParams()) for i in range(4)), vocab_size=4)
    batch = sampling_batch([1, 1, 1, 0], range(4), [0.1, 0.4, 0.9, 0.4])
    assert sample(table, torch.tensor([[9.0, -9, -9, -9], [0.0, 0, 0, 0]]), batch) == [0, 1, 3, 0]


@WAYS
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
def test_when_masks_leave_nothing_the_weakest_lose_first(way, temperature):
    logits = torch.tensor([[5.0, 4, 3, 2, 1, 0]] * 3)
    params = SamplingParams(temperature=temperature, allowed_token_ids=[1, 2], bad_words=[[1], [2]])
    sets = [
        slot_set(0, params),  # bad words give way to allowed tokens
        slot_set(1, params),  # allowed tokens give way to the late mask
        slot_set(2, SamplingParams(temperature=temperature), stop_ids=[5]),  # a stop id gives way to the late mask
    ]
    masks = np.zeros((2, 6), np.bool_)
    masks[0, [3, 4]] = True
    masks[1, 5] = True
    batch = sampling_batch(
        range(3), range(3), [0.6] * 3, late_mask=np.array([False, True, True]), suppress_stop=np.array([0, 0, 1], bool)
    )
    tokens = sample(table_of(*sets, vocab_size=6), logits, batch, late_inputs([1, 2], masks), **way)
    assert tokens[0] in (1, 2)
    assert tokens[1] in (3, 4)
    assert tokens[2] == 5


@WAYS
@pytest.mark.parametrize("fill", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hopeless_logits_give_no_token_and_leave_other_rows_alone(way, fill, temperature):
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1)
    masked = SamplingParams(temperature=temperature, allowed_token_ids=[2])
    table = table_of(slot_set(0, params), slot_set(1, params), slot_set(2, masked), vocab_size=6)
    logits = torch.full((3, 6), fill)
    logits[1] = torch.tensor([0.0, 0, 0, 50, 0, 0])
    tokens = sample(table, logits, sampling_batch(range(3), range(3), [0.5] * 3), **way)
    assert tokens == [-1, 3, -1]


def test_an_empty_late_mask_is_ignored_among_the_masked():
    table = table_of(slot_set(0, SamplingParams(temperature=0)), vocab_size=6)
    late = late_inputs([0], np.zeros((1, 6), np.bool_))
    assert sample(table, torch.zeros(1, 6), sampling_batch([0], [0], [0.0], late_mask=np.array([True])), late) == [0]


def test_samplers_that_need_no_mask_after_all_are_free():
    params = SamplingParams(temperature=0)
    table = table_of(slot_set(0, params), slot_set(1, params), vocab_size=6)
    logits = torch.tensor([[0.0, 0, 9, 0, 0, 0]] * 2)
    waiting = sampling_batch([0, 1], [0, 1], [0.0] * 2, late_mask=np.array([True, True]))
    one = late_inputs([0], np.eye(6, dtype=np.bool_)[[4]])
    late = LateInputs(one.samplers, one.masks, np.array([1], np.int32))
    assert sample(table, logits, waiting, late) == [4, 2]
    assert sample(table, logits, waiting, LateInputs(free=np.array([0, 1], np.int32))) == [2, 2]


@pytest.mark.parametrize("vocab_size", [1, 31, 128, 129])
def test_vocabularies_of_odd_sizes(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(1, vocab_size))
    table = table_of(slot_set(0, SamplingParams()), vocab_size=vocab_size)
    for uniform in [0.0, 0.5, float(np.nextafter(1, 0))]:
        expected = oracle.draw(oracle.probabilities(logits[0], SamplingParams()), uniform)
        assert sample(table, torch.tensor(logits), sampling_batch([0], [0], [uniform])) == [expected]


def test_steps_that_contradict_themselves_are_refused():
    table = table_of(slot_set(0, SamplingParams()), vocab_size=40)
    logits = torch.zeros(1, 40)
    with pytest.raises(StepError, match="no SlotSet"):
        sample(table, logits, sampling_batch([0], [1], [0.5]))
    with pytest.raises(StepError, match="share a slot"):
        sample(table, logits, sampling_batch([0, 0], [0, 0], [0.5, 0.5]))
    waiting = sampling_batch([0], [0], [0.5], late_mask=np.array([True]))
    with pytest.raises(StepError, match="wait for a late mask"):
        sample(table, logits, waiting)
    with pytest.raises(StepError, match="words"):
        sample(table, logits, waiting, LateInputs(np.zeros(1, np.int32), np.zeros((1, 1), np.uint32)))
    for params, prompt in (
        (SamplingParams(presence_penalty=1.0), [40]),
        (SamplingParams(logit_bias={40: 1.0}), []),
        (SamplingParams(bad_words=[[3, 40]]), []),
    ):
        with pytest.raises(StepError, match="outside the vocabulary"):
            table.set(slot_set(0, params, prompt))


def test_an_end_that_the_vocabulary_lacks_is_no_stop_id():
    table = table_of(*(slot_set(i, SamplingParams(temperature=0), stop_ids=[1, 3]) for i in range(2)), vocab_size=3)
    batch = sampling_batch([0, 1], [0, 1], [0.0] * 2, suppress_stop=np.array([True, True]))
    assert sample(table, torch.tensor([[0.0, 9, 1], [2.0, 9, 1]]), batch) == [2, 0]


@WAYS
def test_a_draw_on_the_edge_of_a_token_falls_on_the_next(way):
    table = table_of(*(slot_set(i, SamplingParams()) for i in range(4)), vocab_size=512)
    uniforms = [0.0, 0.25, 0.5, 0.5 + 1 / 512]
    batch = sampling_batch([0] * 4, range(4), uniforms)
    assert sample(table, torch.zeros(1, 512), batch, **way) == [0, 128, 256, 257]


@WAYS
def test_a_top_p_of_0_takes_the_most_probable_token(way):
    logits = torch.zeros(2, 3000)
    logits[0, 7] = logits[0, 9] = 1.0
    table = table_of(*(slot_set(i, SamplingParams(top_p=0.0, temperature=5.0)) for i in range(2)), vocab_size=3000)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert sample(table, logits, sampling_batch([0, 1], [0, 1], [uniform] * 2), **way) == [7, 0]


@WAYS
@pytest.mark.parametrize("temperature", [1e-4, 0.01, 0.1, 10.0])
def test_extreme_temperatures(way, temperature):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(1, 3000)) * 8
    params = SamplingParams(temperature=temperature, top_p=0.99)
    table = table_of(slot_set(0, params), vocab_size=3000)
    distribution = oracle.probabilities(logits[0], params)
    for uniform in rng.random(5):
        batch = sampling_batch([0], [0], [uniform])
        assert sample(table, torch.tensor(logits), batch, **way) == [oracle.draw(distribution, uniform)]


def test_late_masks_find_their_samplers_in_any_order():
    table = table_of(*(slot_set(i, SamplingParams(temperature=0)) for i in range(3)), vocab_size=70)
    masks = np.zeros((2, 70), np.bool_)
    masks[0, 69] = masks[1, 33] = True
    batch = sampling_batch([0] * 3, range(3), [0] * 3, late_mask=np.array([True, False, True]))
    assert sample(table, torch.zeros(1, 70), batch, late_inputs([2, 0], masks)) == [33, 0, 69]


def test_slots_that_are_set_again_and_again_take_no_more_memory():
    params = SamplingParams(presence_penalty=1.0, bad_words=[[1, 2]])
    table = table_of(vocab_size=10, num_slots=6)
    for i in range(40):
        table.set(slot_set(i % 6, params))
    assert (len(table.counts.data), len(table.recent.data)) == (6, 6)
    for slot in range(6):
        table.set(slot_set(slot, SamplingParams()))
    assert (table.counts.row_of_slot == -1).all()


@WAYS
def test_edits_that_overflow_leave_the_most_probable_token(way):
    params = SamplingParams(repetition_penalty=0.01, top_p=0.5, top_k=3, min_p=0.1)
    table = table_of(slot_set(0, params, prompt=[2, 5]), slot_set(1, SamplingParams()), vocab_size=200)
    logits = torch.zeros(2, 200, dtype=torch.float32)
    logits[0, [2, 5]] = 3e38
    logits[1, 7] = 90.0
    assert sample(table, logits, sampling_batch([0, 1], [0, 1], [0.9, 0.9]), **way) == [2, 7]
