"""Selection of kernels, and what it says of itself."""

from __future__ import annotations

import pytest
import torch

from weft.core.errors import ConfigError
from weft.kernels import dispatch, reference
from weft.kernels.base import Kernels


def test_reference_is_the_last_resort_everywhere():
    for operation, variants in dispatch.REGISTRY.items():
        assert variants[-1].function is getattr(reference.KERNELS, operation)
        assert variants[-1].supports(torch.device("cuda"), torch.float16)
    assert tuple(dispatch.REGISTRY) == Kernels._fields


def test_prefer_one_operation_or_all():
    assert dispatch.select(prefer={"*": "reference"}) == reference.KERNELS
    mixed = dispatch.select(prefer={"linear": "reference"})
    assert mixed.linear is reference.linear
    assert mixed.pack_weight is reference.pack_weight
    assert mixed.attention is not reference.attention


@pytest.mark.parametrize(
    ("prefer", "named"), [({"linear": "magic"}, "magic"), ({"lineer": "torch"}, "lineer"), ({"*": "magic"}, "magic")]
)
def test_unknown_names_are_refused(prefer, named):
    with pytest.raises(ConfigError, match=named):
        dispatch.select(prefer=prefer)


def test_describe_names_what_select_takes():
    for choice in dispatch.describe("cpu", torch.bfloat16):
        chosen = dispatch.select("cpu", torch.bfloat16, prefer={choice.operation: choice.chosen})
        assert chosen == dispatch.select("cpu", torch.bfloat16)
        assert choice.available[-1] == "reference"


def test_computes_well():
    assert dispatch.computes_well("cpu", torch.float32)
    assert dispatch.computes_well("cpu", torch.float64)
    assert not dispatch.computes_well("cpu", torch.float16)
