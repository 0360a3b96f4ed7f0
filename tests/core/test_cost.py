"""Cost models: what is fitted, predicted, corrected and kept. Times are made up; nothing waits."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.abi.errors import ConfigError
from weft.core.cost.fit import (
    MoveSample,
    Sample,
    SwapSample,
    fit_beside,
    fit_forward,
    fit_swap,
    relative_errors,
    split_samples,
    summarise,
)
from weft.core.cost.model import MOST_PAGES, CostModel, ForwardModel, MoveBudget, StepShape, SwapModel
from weft.core.cost.nnls import nnls
from weft.core.cost.profile import Identity, Measurements, decode_profile, encode_profile, make_profile
from weft.core.step import ForwardBatch

TRUE = ForwardModel(0.03, 0.002, 1e-4, 5e-5, 1e-6, 2e-6, 1e-8, (32,), (0.0, 0.001))
IDENTITY = Identity(
    model="Shape 1", dtype="float32", device="a processor", threads=2, page_size=16, kernels=["all: plain"], software=[]
)


def shapes() -> list[tuple[str, StepShape]]:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    found = [("chunk", StepShape.chunk(n, before, n % 2)) for n in sizes for before in (0, 200, 1500)]
    found += [("decode", StepShape.decodes(n, n * kv)) for n in sizes[:14] for kv in (40, 300, 1200)]
    for n, rows in itertools.product((8, 32, 100, 400), (1, 7, 40)):
        found.append(("mixed", StepShape.chunk(n, 64, 1).plus(StepShape.decodes(rows, rows * 150))))
    return found


def samples(model: ForwardModel = TRUE, noise: float = 0.0, outliers: int = 0) -> list[Sample]:
    random = np.random.default_rng(1)
    made = [Sample(kind, s, model.predict_s(s) * float(random.lognormal(0, noise))) for kind, s in shapes()]
    for index in random.permutation(len(made))[:outliers]:
        made[index] = Sample(made[index].kind, made[index].shape, 3 * made[index].seconds)
    return made


def swaps(noise: float = 0.0) -> list[SwapSample]:
    random = np.random.default_rng(2)
    return [SwapSample(n, (1e-4 + 2e-5 * n) * float(random.lognormal(0, noise))) for n in (1, 2, 4, 8, 16, 64, 256)]


def cost_model(swap: SwapModel | None = None) -> CostModel:
    return CostModel(TRUE, swap, swap, 29)


class TestNnls:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 10))
    def test_no_subset_of_columns_is_better(self, seed: int, columns: int, more: int):
        random = np.random.default_rng(seed)
        matrix = random.normal(size=(columns + more, columns)) * 10.0 ** random.integers(-8, 8, columns)
        target = random.normal(size=columns + more)
        x = nnls(matrix, target)
        assert (x >= 0).all()
        best = float(target @ target)
        for chosen in itertools.product((False, True), repeat=columns):
            part = matrix[:, np.array(chosen)]
            scale = np.linalg.norm(part, axis=0)
            y = np.linalg.lstsq(part / scale, target, rcond=None)[0]
            if (y >= 0).all():
                residual = target - part / scale @ y
                best = min(best, float(residual @ residual))
        residual = target - matrix @ x
        assert float(residual @ residual) == pytest.approx(best, rel=1e-6, abs=1e-9)

    def test_equal_and_empty_columns(self):
        x = nnls(np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]]), np.array([3.0, 6.0]))
        assert x[0] + x[1] == pytest.approx(3.0)
        assert x[2] == 0.0
        assert nnls(np.empty((3, 0)), np.ones(3)).shape == (0,)


class TestShapes:
    def test_a_batch_is_the_sum_of_its_rows(self):
        rows = [(1, 100), (5, 0), (1, 7), (3, 40)]
        ends = np.cumsum([0, *(q for q, _ in rows)]).astype(np.int32)
        batch = ForwardBatch(
            token_ids=np.zeros(10, np.int32),
            positions=np.zeros(10, np.int32),
            write_slots=np.zeros(10, np.int32),
            q_indptr=ends,
            kv_indptr=np.zeros(5, np.int32),
            kv_page_ids=np.empty(0, np.int32),
            kv_lens=np.array([q + before for q, before in rows], np.int32),
            output_tokens=np.array([0, 9], np.int32),
        )
        expected = StepShape(0, 0, 2, 0, 0, 0)
        for tokens, before in rows:
            expected = expected.plus(StepShape.chunk(tokens, before))
        assert StepShape.of(batch) == expected
        assert expected.chunk_pairs == (1 + 2 + 3 + 4 + 5) + (41 + 42 + 43)

    def test_decoding_rows_only(self):
        count = 300
        batch = ForwardBatch(
            token_ids=np.zeros(count, np.int32),
            positions=np.zeros(count, np.int32),
            write_slots=np.zeros(count, np.int32),
            q_indptr=np.arange(count + 1, dtype=np.int32),
            kv_indptr=np.zeros(count + 1, np.int32),
            kv_page_ids=np.empty(0, np.int32),
            kv_lens=np.full(count, 10_000_000, np.int32),
            output_tokens=np.arange(count, dtype=np.int32),
        )
        assert StepShape.of(batch) == StepShape.decodes(count, count * 10_000_000)


class TestAdded:
    """Vectorised over chunks, and the same as two predictions each."""

    @given(
        beside=st.sampled_from([StepShape(0, 0, 0, 0, 0, 0), StepShape.decodes(3, 500), StepShape.decodes(90, 9000)]),
        chunks=st.lists(st.tuples(st.integers(2, 20_000), st.integers(0, 100_000)), min_size=1, max_size=5),
        knots=st.sampled_from([(), (64,), (16, 64, 4096)]),
    )
    def test_a_chunk_adds_the_difference_of_two_steps(
        self, beside: StepShape, chunks: list[tuple[int, int]], knots: tuple[int, ...]
    ):
        slopes = tuple(1e-5 * (2 + index) for index in range(len(knots) + 1))
        forward = ForwardModel(0.01, 0.001, 1e-5, 1e-5, 1e-7, 2e-7, 1e-9, knots, slopes)
        model = CostModel(forward, None, None, 64)
        alone = 0.0 if beside.num_rows == 0 else model.predict_forward_s(beside)
        expected = [model.predict_forward_s(beside.plus(StepShape.chunk(*chunk))) - alone for chunk in chunks]
        num_tokens, kv_before = np.array(chunks, np.float64).T
        assert model.predict_added_s(beside, num_tokens, kv_before) == pytest.approx(expected, rel=1e-9)

    def test_the_correction_holds_for_it_too(self):
        model, one = cost_model(), np.ones(1)
        before = model.predict_added_s(StepShape.decodes(1, 1), 100 * one, one)
        for _ in range(200):
            model.observe(self.shape, 2 * TRUE.predict_s(self.shape))
        after = model.predict_added_s(StepShape.decodes(1, 1), 100 * one, one)
        assert after == pytest.approx(2 * before, rel=0.02)

    shape = StepShape.decodes(64, 64_000)


class TestFit:
    def test_known_coefficients_come_back(self):
        fitted = fit_forward(samples())
        assert relative_errors(fitted, samples()).max() < 1e-6
        assert fitted.slopes[-1] == pytest.approx(0.001, rel=1e-3)

    def test_through_noise_and_disturbed_samples(self):
        fitted = fit_forward(samples(noise=0.05, outliers=8))
        errors = relative_errors(fitted, samples())
        assert np.median(errors) < 0.03
        assert np.quantile(errors, 0.9) < 0.08
        assert fitted.slopes[-1] == pytest.approx(0.001, rel=0.1)
        assert fitted.per_decode_kv_s == pytest.approx(1e-6, rel=0.2)

    def test_the_knee_is_found(self):
        # From 32 tokens on the device is busy: 0.9 of its best rate is reached a little before.
        truth = ForwardModel(0.032, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (32,), (0.0, 0.001))
        assert truth.saturation_tokens(512) == 29
        assert fit_forward(samples(truth, noise=0.03)).saturation_tokens(512) == pytest.approx(29, abs=5)

    def test_a_device_that_is_never_saturated(self):
        flat = ForwardModel(0.03, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), (0.0,))
        assert flat.saturation_tokens(100) == 90

    def test_a_line_gets_no_knots(self):
        truth = ForwardModel(0.01, 0.001, 1e-4, 5e-5, 1e-6, 2e-6, 1e-8, (), (0.001,))
        assert fit_forward(samples(truth, noise=0.02)).knots == ()

    def test_a_curve_that_bends_twice_gets_knots(self):
        truth = ForwardModel(0.01, 0.0, 1e-4, 0.0, 1e-6, 2e-6, 1e-8, (8, 128), (0.002, 0.0002, 0.002))
        fitted = fit_forward(samples(truth, noise=0.01))
        assert len(fitted.knots) > 1
        assert np.median(relative_errors(fitted, samples(truth))) < 0.03

    def test_predictions_are_costs_whatever_was_measured(self):
        random = np.random.default_rng(3)
        made = [Sample(kind, shape, float(random.uniform(0.001, 1.0))) for kind, shape in shapes()]
        fitted = fit_forward(made)
        assert min(*fitted.fixed, *fitted.slopes) >= 0
        for before in (0, 100, 1000):
            times = [fitted.predict_s(StepShape.chunk(n, before, 1)) for n in range(2, 600)]
            assert times[0] >= 0
            assert times == sorted(times)
        deeper = [fitted.predict_s(StepShape.chunk(50, before)) for before in range(0, 3000, 100)]
        assert deeper == sorted(deeper)
        more = [fitted.predict_s(StepShape.decodes(n, 100 * n)) for n in range(1, 300)]
        assert more == sorted(more)

    def test_held_out_samples_are_never_fitted(self):
        made = samples(noise=0.05)
        split = split_samples(made)
        assert not set(split.fitted) & set(split.held_out)
        assert sorted(split.fitted + split.held_out) == list(range(len(made)))
        assert {made[i].kind for i in split.held_out} == {"chunk", "decode", "mixed"}
        assert len(split.held_out) == pytest.approx(len(made) / 4, abs=3)
        # Whatever the held-out times are, the model is the same; only its errors differ.
        wrong = list(made)
        for index in split.held_out:
            wrong[index] = Sample(made[index].kind, made[index].shape, 100.0)
        first, second = (make_profile(IDENTITY, "m", Measurements(s, [], [])) for s in (made, wrong))
        assert first.forward == second.forward
        assert first.errors[0].median < 0.1 < 0.9 < second.errors[0].median

    def test_errors_are_told_by_kind(self):
        made = [Sample("chunk", StepShape.chunk(n), TRUE.predict_s(StepShape.chunk(n)) * 2) for n in (4, 8)]
        made.append(Sample("decode", StepShape.decodes(3, 30), TRUE.predict_s(StepShape.decodes(3, 30))))
        whole, chunk, decode = summarise(TRUE, made)
        assert [whole.kind, whole.count, whole.median] == ["all", 3, pytest.approx(0.5)]
        assert [chunk.kind, chunk.median, decode.kind] == ["chunk", pytest.approx(0.5), "decode"]
        assert decode.p90 == pytest.approx(0.0)

    def test_too_few_samples(self):
        with pytest.raises(ValueError, match="3 samples are too few"):
            fit_forward(samples()[:3])

    def test_swaps(self):
        model = fit_swap(swaps(noise=0.02))
        assert model is not None
        assert (model.base_s, model.per_page_s) == (pytest.approx(1e-4, rel=0.1), pytest.approx(2e-5, rel=0.1))
        assert model.predict_s(0) == 0.0
        assert fit_swap(swaps()[:1]) is None


class TestCorrection:
    shape = StepShape.decodes(8, 1000)

    def test_a_drift_is_followed(self):
        model = cost_model()
        before = model.predict_forward_s(self.shape)
        for _ in range(150):
            model.observe(self.shape, 2 * before)
        assert model.predict_forward_s(self.shape) == pytest.approx(2 * before, rel=0.02)
        for _ in range(150):
            model.observe(self.shape, before)
        assert model.factor == pytest.approx(1.0, rel=0.02)

    def test_noise_leaves_the_factor_where_it_is(self):
        model = cost_model()
        random = np.random.default_rng(4)
        for _ in range(500):
            model.observe(self.shape, TRUE.predict_s(self.shape) * float(random.lognormal(0, 0.1)))
        assert model.factor == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize("times", [1e-6, 0.01, 100.0, 1e6])
    def test_one_outlier_says_next_to_nothing(self, times: float):
        model = cost_model()
        ratio = model.observe(self.shape, times * TRUE.predict_s(self.shape))
        assert ratio == pytest.approx(times)
        assert model.factor == pytest.approx(1.0, abs=0.025)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
    def test_what_is_no_time_is_left_out(self, seconds: float):
        model = cost_model()
        assert model.observe(self.shape, seconds) is None
        assert model.factor == 1.0

    def test_swaps_are_not_corrected(self):
        model = cost_model(SwapModel(0.001, 0.0001))
        for _ in range(50):
            model.observe(self.shape, 1.0)
        assert model.predict_swap_s(num_out=10, num_in=20) == pytest.approx(0.005)
        assert model.predict_swap_s() == 0.0
        assert cost_model().predict_swap_s(num_in=1) is None
        assert model.saturation_tokens == 29


class TestMoves:
    shape = StepShape.decodes(8, 1000)
    out, into = SwapModel(0.002, 2e-4), SwapModel(0.001, 4e-4)
    beside_out, beside_in = SwapModel(1e-4, 1e-5), SwapModel(2e-4, 5e-5)

    def model(self) -> CostModel:
        return CostModel(TRUE, self.out, self.into, 29, self.beside_out, self.beside_in)

    def test_a_step_takes_the_longer_of_forward_and_link(self):
        model = self.model()
        forward_s = model.predict_forward_s(self.shape)
        assert model.predict_step_s(self.shape) == forward_s
        assert model.predict_step_s(self.shape, 10, 4) == pytest.approx(forward_s + 2e-4 + 4e-4)
        assert model.predict_step_s(self.shape, 1000, 0) == pytest.approx(0.002 + 0.2)
        assert cost_model().predict_step_s(self.shape) == TRUE.predict_s(self.shape)
        assert cost_model(self.out).predict_step_s(self.shape, 1) is None

    @settings(max_examples=60, deadline=None)
    @given(
        st.tuples(*[st.sampled_from([0.0, 1e-5, 1e-3, 0.1])] * 8),
        st.sampled_from([0.0, 0.03, 0.5]),
        st.sampled_from([0.5, 1.0, 3.0]),
    )
    def test_free_pages_keep_to_the_fraction_however_they_are_split(
        self, costs: tuple[float, ...], fraction: float, drift: float
    ):
        models = [SwapModel(base, per_page) for base, per_page in zip(costs[::2], costs[1::2], strict=True)]
        model = CostModel(TRUE, models[0], models[1], 29, models[2], models[3])
        for _ in range(100):
            model.observe(self.shape, drift * TRUE.predict_s(self.shape))
        allowed_s = (1 + fraction) * model.predict_forward_s(self.shape)
        count = model.free_pages(self.shape, fraction)
        assert count is not None
        budget = model.move_budget(self.shape, fraction)
        assert budget is not None
        assert budget.pages >= max(1, count)
        assert budget.steps >= 1
        whole = min(count, 10_000)
        for num_out in {0, 1, whole // 2, whole}:
            if num_out <= whole:
                predicted_s = model.predict_step_s(self.shape, num_out, whole - num_out)
                assert predicted_s is not None
                assert predicted_s <= allowed_s * (1 + 1e-9)
        if count < 10_000:  # and one more, in the worse direction, would not: of two that move, both bases count
            both_s = [
                models[0].base_s + models[1].base_s + (count + 1) * max(models[0].per_page_s, models[1].per_page_s),
                model.predict_forward_s(self.shape)
                + model.factor * (models[2].base_s + models[3].base_s)
                + model.factor * (count + 1) * max(models[2].per_page_s, models[3].per_page_s),
            ]
            assert max(both_s) > allowed_s * (1 - 1e-9)

    def test_steps_save_for_as_many_pages_as_make_up_for_the_fixed_time(self):
        forward_s = self.model().predict_forward_s(self.shape)
        assert self.model().move_budget(self.shape, 0.01) == MoveBudget(6, math.ceil(6e-4 / (0.01 * forward_s)))
        enough = 7.01e-4 / forward_s
        assert self.model().move_budget(self.shape, enough) == MoveBudget(8, 1)
        assert self.model().free_pages(self.shape, enough) == 8
        slow = CostModel(TRUE, SwapModel(forward_s, 0.0), self.into, 29, self.beside_out, self.beside_in)
        pages, steps = slow.move_budget(self.shape, 0.03) or (0, 0)
        longer_s = slow.predict_swap_s(pages, 0) - forward_s
        assert steps * 0.03 * forward_s >= longer_s

    def test_without_fixed_time_every_step_moves_even_if_one_page_is_too_many(self):
        free, dear = SwapModel(0.0, 0.0), SwapModel(0.0, 1.0)
        assert CostModel(TRUE, free, free, 29, free, free).move_budget(self.shape, 0.03) == MoveBudget(MOST_PAGES, 1)
        assert CostModel(TRUE, free, free, 29, dear, dear).move_budget(self.shape, 0.03) == MoveBudget(1, 1)

    def test_nothing_is_free_where_nothing_was_measured(self):
        assert cost_model().free_pages(self.shape, 0.03) is None
        assert cost_model().move_budget(self.shape, 0.03) is None
        assert CostModel(TRUE, self.out, self.into, 29).free_pages(self.shape, 0.03) is None

    def test_what_the_link_decides_corrects_nothing(self):
        model = self.model()
        assert model.observe(self.shape, 0.2, 1000, 0) is None
        assert model.factor == 1.0
        predicted_s = model.predict_step_s(self.shape, 4, 4)
        assert predicted_s is not None
        assert model.observe(self.shape, 1.2 * predicted_s, 4, 4) == pytest.approx(1.2)
        assert model.factor > 1.0

    def moves(self, noise: float = 0.0) -> list[MoveSample]:
        random = np.random.default_rng(5)
        model, made = self.model(), []
        for rows, (num_out, num_in) in itertools.product(
            (1, 8, 30), ((4, 0), (0, 4), (8, 8), (64, 0), (0, 64), (30, 9))
        ):
            shape = StepShape.decodes(rows, 500 * rows)
            seconds = model.predict_step_s(shape, num_out, num_in)
            assert seconds is not None
            noisy = (float(random.lognormal(0, noise)) for _ in range(2))
            forward_s, seconds = (a * b for a, b in zip((TRUE.predict_s(shape), seconds), noisy, strict=True))
            made.append(MoveSample(shape, num_out, num_in, forward_s, seconds))
        return made

    def test_what_pages_cost_beside_a_forward_is_found(self):
        found = fit_beside(self.moves(), self.out, self.into)
        assert found is not None
        for one, true in zip(found, (self.beside_out, self.beside_in), strict=True):
            assert (one.base_s, one.per_page_s) == (pytest.approx(true.base_s), pytest.approx(true.per_page_s))
        noisy = fit_beside(self.moves(noise=0.003), self.out, self.into)
        assert noisy is not None
        assert noisy[1].per_page_s == pytest.approx(self.beside_in.per_page_s, rel=0.2)

    def test_samples_that_the_link_decides_do_not_tell(self):
        many = [one for one in self.moves() if one.num_out + one.num_in >= 64]
        slow = SwapModel(1.0, 0.0)
        assert fit_beside(self.moves(), slow, slow) is None
        assert fit_beside(many[:3], self.out, self.into) is None
        assert fit_beside([one for one in self.moves() if not one.num_in], self.out, self.into) is None
        assert fit_beside(self.moves(), None, self.into) is None

    def test_the_profile_has_them_and_their_errors(self):
        measured = Measurements(samples(), [], [], self.moves())
        without = make_profile(IDENTITY, "m", measured)
        assert (without.moves.beside_out, without.errors[-1].kind) == (None, "mixed")
        out, into = ([SwapSample(n, one.predict_s(n)) for n in (1, 4, 16)] for one in (self.out, self.into))
        profile = make_profile(IDENTITY, "m", Measurements(samples(), out, into, self.moves()))
        assert (profile.errors[-1].kind, profile.errors[-1].count) == ("moves", 4)
        assert profile.errors[-1].p90 < 1e-6
        assert decode_profile(encode_profile(profile)) == profile
        expected = self.model().free_pages(self.shape, 0.03)
        assert profile.cost_model().free_pages(self.shape, 0.03) == pytest.approx(expected, abs=1)


class TestFiles:
    def profile(self) -> Any:
        return make_profile(IDENTITY, "a model", Measurements(samples(noise=0.02), swaps(), swaps()))

    def test_a_profile_survives_and_is_always_the_same(self):
        profile = self.profile()
        data = encode_profile(profile)
        assert decode_profile(data) == profile
        assert encode_profile(self.profile()) == data
        assert profile.key == IDENTITY.key
        assert profile.saturation_tokens == profile.forward.saturation_tokens(512)
        assert sum(residual.held_out for residual in profile.residuals) == profile.errors[0].count
        shape = StepShape.chunk(100)
        assert profile.cost_model().predict_forward_s(shape) == profile.forward.predict_s(shape)

    def test_what_weft_profile_writes_to_a_file_is_read_too(self):
        profile = self.profile()
        record = {"machine": {"cpu": "x"}, "profile": json.loads(encode_profile(profile))}
        assert decode_profile(json.dumps(record).encode()) == profile
        with pytest.raises(ConfigError, match="no cost profile"):
            decode_profile(json.dumps(record | {"profile": {"format": "x"}}).encode())

    def test_the_key_is_that_of_everything_that_matters(self):
        keys = {IDENTITY.key}
        for name in IDENTITY.__struct_fields__:
            other = json.loads(json.dumps({f: getattr(IDENTITY, f) for f in IDENTITY.__struct_fields__}))
            other[name] = 3 if isinstance(other[name], int) else ["x"] if isinstance(other[name], list) else "x"
            keys.add(Identity(**other).key)
        assert len(keys) == 1 + len(IDENTITY.__struct_fields__)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"format": 99}, "its format is 99"),
            ({"format": 1}, "its format is 1, not 2; run `weft profile` again"),
            ({"key": "0" * 32}, "its key is not that of its identity"),
            ({"saturation_tokens": 10**6}, "outside of what was measured"),
            ({"surprise": 1}, "no cost profile, or a damaged one"),
            ({"forward": {}}, "no cost profile, or a damaged one"),
        ],
    )
    def test_what_is_damaged_is_refused(self, change: dict[str, Any], said: str):
        content = json.loads(encode_profile(self.profile())) | change
        with pytest.raises(ConfigError, match=said):
            decode_profile(json.dumps(content).encode())

    @pytest.mark.parametrize(
        ("name", "value"), [("base_s", -1.0), ("slopes", [1.0] * 9), ("knots", [8, 4]), ("per_row_s", 1e999)]
    )
    def test_models_that_cannot_be_are_refused(self, name: str, value: Any):
        content = json.loads(encode_profile(self.profile()))
        content["forward"][name] = value
        with pytest.raises(ConfigError, match="run `weft profile` again"):
            decode_profile(json.dumps(content).encode())

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"format"', b"\xff\x00", b'{"format": 2}'])
    def test_what_is_something_else_is_refused(self, data: bytes):
        with pytest.raises(ConfigError, match="no cost profile"):
            decode_profile(data)

    def test_what_was_cut_off_is_refused(self):
        data = encode_profile(self.profile())
        with pytest.raises(ConfigError, match="damaged"):
            decode_profile(data[: len(data) // 2])
