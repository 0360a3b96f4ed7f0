"""One engine and host for each file of tests."""

from collections.abc import Iterator

import pytest

from tests.examples.help import Lab
from tests.examples.help import lab as opened


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with opened() as made:
        yield made
