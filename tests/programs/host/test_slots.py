"""The sandbox is as large as the host's configuration says, and what cannot be is refused where it is configured."""

import pytest

from weft.abi.errors import ConfigError
from weft.config import MAX_RUNS, ProgramsConfig
from weft.programs.host.process import guests_for
from weft.programs.sandbox import sandbox as module
from weft.programs.sandbox.fibers import Pool
from weft.programs.sandbox.turns import Turns


def test_there_is_a_slot_for_each_run_that_there_may_be() -> None:
    assert guests_for(ProgramsConfig(max_runs=1500))._config == module.SandboxConfig(slots=1500)


def test_the_most_runs_that_may_be_configured_fit_into_a_process() -> None:
    if not _has_fibers():
        pytest.skip("needs fibers")
    pools = [Pool(MAX_RUNS, 1 << 30, 0.01, Turns(0.01), components=components) for components in (True, False)]
    for pool in pools:
        pool.close()
    with pytest.raises(ConfigError, match="max_runs must be at most 8192"):
        ProgramsConfig(max_runs=MAX_RUNS + 1)


def _has_fibers() -> bool:
    from weft.programs.sandbox.backend import choose

    return choose("auto", 1, 1 << 20, 0.01).name == "fibers"
