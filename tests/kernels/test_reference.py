"""The reference against the rules written out one number at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.batches import literal_attention, random_case
from weft.kernels import reference

ROWS = [(5, 5), (1, 19), (4, 11), (0, 3), (1, 1), (3, 8), (2, 1)]
OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "visibility": {"visibility": True},
    "masks": {"masks": True},
    "everything": {"causal": False, "visibility": True, "masks": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_attention(options, window, heads):
    rng = np.random.default_rng(11)
    case = random_case(rng, ROWS, heads=heads[0], kv_heads=heads[1], dtype=torch.float64, **options)
    got = reference.attention(case.q, case.kv, case.batch, 0.3, window)
    np.testing.assert_allclose(got.numpy(), literal_attention(case, 0.3, window), atol=1e-12)


def test_a_query_that_sees_nothing_gets_zeros():
    case = random_case(np.random.default_rng(0), [(2, 1)])
    got = reference.attention(case.q, case.kv, case.batch, 1.0)
    assert (got[0] == 0).all()
    assert (got[1] != 0).all()


def test_rms_norm_and_silu_mul_agree_with_torch():
    x, weight = torch.randn(5, 12), torch.randn(12)
    expected = torch.nn.functional.rms_norm(x, (12,), weight, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected)
    torch.testing.assert_close(reference.silu_mul(x), torch.nn.functional.silu(x[:, :6]) * x[:, 6:])


def test_rotation_turns_pairs_of_components():
    x, angles = torch.randn(7, 3, 10, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    turned = reference.rotate(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), -1))
