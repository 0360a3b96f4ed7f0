from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs.sandbox.help import opened_with
from weft.programs.sandbox.sandbox import Sandbox


@pytest.fixture(scope="session", params=["fibers", "threads"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    opened = opened_with(request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def fibers() -> Iterator[Sandbox]:
    opened = opened_with("fibers")
    yield opened
    opened.close()
