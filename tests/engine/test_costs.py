"""What an engine makes of a cost model, and of the files that profiles lie in."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.driver import Driver
from weft.abi.errors import ConfigError
from weft.config import cache_directory
from weft.core.cost.fit import Sample
from weft.core.cost.model import CostModel, ForwardModel, StepShape, SwapModel
from weft.core.cost.profile import Identity, Measurements, Profile, encode_profile, make_profile
from weft.core.step import Step, StepResult
from weft.engine.costs import StepCosts
from weft.engine.profiles import find_profile, load_profile, profile_path, store_profile

TRUE = ForwardModel(0.01, 0.0, 0.0, 0.001, 1e-6, 1e-6, 1e-8, (), (0.001,))
IDENTITY = Identity(model="m", dtype="d", device="d", threads=1, page_size=16, kernels=[], software=[])


def step_s(step: Step) -> float:
    return 3 * TRUE.predict_s(StepShape.of(step.forward)) if step.forward is not None else 0.5


def profile(identity: Identity = IDENTITY) -> Profile:
    shapes = [StepShape.chunk(n, before) for n in range(1, 20) for before in (0, 100)]
    samples = [Sample("chunk", shape, TRUE.predict_s(shape)) for shape in shapes]
    return make_profile(identity, "a model", Measurements(samples, [], []))


class TestEngine:
    def drive(self, model: CostModel | None) -> Driver:
        driver = Driver(device_s=step_s, cost_model=model)
        for _ in range(3):
            driver.generate(driver.open([5] * 40), 200, eos=False)
        driver.run()
        driver.finish()
        return driver

    def test_predictions_follow_what_steps_take(self) -> None:
        engine = self.drive(CostModel(TRUE, None, None, 77)).engine
        stats = engine.stats()
        assert stats.cost_factor == pytest.approx(3.0, rel=0.02)
        assert stats.saturation_tokens == 77
        assert stats.cost_ratio is not None
        assert 0 < sum(stats.cost_ratio.counts) <= stats.steps
        costs = engine.costs.model
        assert costs is not None
        shape = StepShape.chunk(10, 30)
        assert costs.predict_forward_s(shape) == pytest.approx(3 * TRUE.predict_s(shape), rel=0.02)
        assert costs.predict_swap_s(num_in=3) is None
        assert costs.saturation_tokens == 77

    def test_without_a_profile_nothing_is_predicted(self) -> None:
        engine = self.drive(None).engine
        stats = engine.stats()
        assert (engine.costs.model, stats.cost_ratio, stats.cost_factor) == (None, None, None)


class TestStepCosts:
    def test_steps_whose_moves_were_not_measured_are_not_compared(self) -> None:
        costs = StepCosts(CostModel(TRUE, None, None, 1))
        driver = Driver()
        driver.generate(driver.open([5] * 20), 1)
        step = driver.engine.scheduler.schedule(0.0).step
        costs.launched(step)
        costs.finished(StepResult(step.step_id, device_s=1.0))
        assert costs.ratios.count == 1
        pairs = np.array([[0, 0]], np.int32)
        for changes in ({"swap_outs": pairs}, {"swap_ins": pairs}, {"page_copies": pairs}, {"forward": None}):
            costs.launched(msgspec.structs.replace(step, **changes))
            costs.finished(StepResult(step.step_id, device_s=1.0))
        costs.finished(StepResult(step.step_id, device_s=1.0))  # nobody launched it
        assert costs.ratios.count == 1

    def test_steps_that_swap_pages_correct_the_model(self) -> None:
        swap, beside = SwapModel(0.0, 0.002), SwapModel(0.0, 0.001)
        model = CostModel(TRUE, swap, swap, 1, beside, beside)
        costs = StepCosts(model)
        driver = Driver()
        driver.generate(driver.open([5] * 20), 1)
        step = driver.engine.scheduler.schedule(0.0).step
        forward_s = model.predict_forward_s(StepShape.of(step.forward))
        three = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
        costs.launched(msgspec.structs.replace(step, swap_outs=three, swap_ins=three[:1]))
        costs.finished(StepResult(step.step_id, device_s=forward_s + 4 * 0.001))
        assert costs.ratios.count == 1
        assert model.factor == pytest.approx(1.0)
        costs.launched(msgspec.structs.replace(step, swap_ins=three))
        costs.finished(StepResult(step.step_id, device_s=2 * (forward_s + 3 * 0.001)))
        assert model.factor > 1.01


class TestFiles:
    def test_kept_and_found(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        one = profile()
        assert find_profile(tmp_path, IDENTITY, "name") is None
        assert "`weft profile name` makes one" in caplog.text
        path = store_profile(tmp_path / "new", one)
        assert path == profile_path(tmp_path / "new", IDENTITY)
        assert find_profile(tmp_path / "new", IDENTITY, "name") == one
        assert [file.name for file in path.parent.iterdir()] == [f"{IDENTITY.key}.json"]
        assert not [record for record in caplog.records if record.levelname == "WARNING"]

    @pytest.mark.parametrize("content", [b"", b"{}", b"\x00\xff", b'{"format": 1}'])
    def test_damage_is_a_warning(self, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = store_profile(tmp_path, profile())
        path.write_bytes(content)
        assert find_profile(tmp_path, IDENTITY, "name") is None
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert str(path) in warning.message
        assert "run `weft profile` again" in warning.message
        with pytest.raises(ConfigError, match="is not used"):
            load_profile(path)

    def test_the_profile_of_another_identity_is_not_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = store_profile(tmp_path, profile())
        path.write_bytes(encode_profile(profile(msgspec.structs.replace(IDENTITY, threads=9))))
        assert find_profile(tmp_path, IDENTITY, "name") is None
        assert "it is for m, d, d, 9 threads" in caplog.text

    def test_what_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nothing\.json cannot be read"):
            load_profile(tmp_path / "nothing.json")

    def test_where_the_cache_is(self, tmp_path: Path) -> None:
        assert cache_directory({"WEFT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
        assert cache_directory({"WEFT_CACHE": "", "XDG_CACHE_HOME": "/b"}) == Path("/b/weft")
        assert cache_directory({}) == Path.home() / ".cache" / "weft"
