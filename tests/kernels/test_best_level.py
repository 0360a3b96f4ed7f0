"""Which of the levels that a machine runs is used."""

import pytest

from weft.kernels.cpu import library
from weft.kernels.cpu.library import Level


class Machine:
    """A library on a processor that takes this many seconds for a probe of each level, by its own clock."""

    def __init__(self, **seconds):
        self.seconds = {Level[name.upper()]: each for name, each in seconds.items()}
        self.now = 0.0
        self.probed = []

    def weft_has_level(self, level):
        return level in self.seconds

    def weft_probe_product(self, level, dtype, data, rounds, threads):
        assert data % 64 == 0
        self.probed.append(level)
        self.now += self.seconds[level]
        return 1e6


@pytest.fixture
def best_level(monkeypatch):
    def best(machine):
        monkeypatch.setattr(library.time, "perf_counter", lambda: machine.now)
        monkeypatch.delenv(library.VARIABLE, raising=False)
        return library.wanted_level(machine)

    return best


@pytest.mark.parametrize(
    ("pairs_s", "expected"), [(1.0, Level.AVX512), (2.2, Level.AVX512), (2.6, Level.AVX512F), (4.0, Level.AVX512F)]
)
def test_pairs_of_bfloat16_are_left_where_floats_are_clearly_faster(best_level, pairs_s, expected):
    machine = Machine(portable=9.0, avx2=4.0, avx512f=2.0, avx512=pairs_s)
    assert best_level(machine) == expected
    assert set(machine.probed) == {Level.AVX512, Level.AVX512F}
    assert len(machine.probed) <= 10
    assert best_level(machine) == expected
    assert len(machine.probed) <= 10, "a process finds it out once"


@pytest.mark.parametrize("levels", [{"amx": 1.0, "avx512": 4.0, "avx512f": 2.0}, {"avx512f": 1.0, "avx2": 2.0}])
def test_elsewhere_the_highest_level_is_used(best_level, levels):
    machine = Machine(**levels)
    assert best_level(machine) == max(machine.seconds)
    assert not machine.probed


def test_a_level_that_is_named_is_used_as_it_is(monkeypatch):
    machine = Machine(avx512f=1.0, avx512=4.0)
    monkeypatch.setenv(library.VARIABLE, "avx512")
    assert library.wanted_level(machine) == Level.AVX512
    assert not machine.probed
