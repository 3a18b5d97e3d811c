# SPDX-License-Identifier: Apache-2.0
"""Candidate scores against the plain rule in float64: missing candidates, hostile ids, skipped rows."""

import math

import pytest
import torch

from tests.kernels import settle
from tests.poison import poisoned_memory  # noqa: F401
from vllm_weaver.kernels.frontier import Rows
from vllm_weaver.kernels.weaver_scores import candidate_scores

VOCAB, DEPTH = 50, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pool, width", [(1, 16), (13, 24), (40, 2100)])
@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_scores(device: torch.device, pool: int, width: int, dtype: torch.dtype, early: bool) -> None:
    generator = torch.Generator().manual_seed(pool)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, bias = randn(4, width).to(dtype), randn(width).to(dtype), randn(width).to(dtype)
    table = (randn(VOCAB, width) / width**0.5).to(dtype)
    values = randn(2, DEPTH, pool)
    ids = torch.randint(0, VOCAB, (2, DEPTH, pool), generator=generator)
    ids[0, 1, 0], ids[1, 0, -1] = -1, 1 << 40
    values[1, 2, 0] = math.nan
    x[3] = math.inf
    positions = torch.tensor([[1, 2], [3, 1]], dtype=torch.int32)
    places = torch.tensor([[4, 5], [6, 9]], dtype=torch.int32)
    rows = Rows(torch.zeros_like(places).to(device), positions.to(device), places.to(device))
    call = [t.to(device) for t in (x, weight, bias, table, values, ids)]
    settle(device)
    scores = candidate_scores(*call, rows, early=early).cpu()
    wide = x.double()
    query = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() + bias.double()
    for m in range(4):
        r, row = m // 2, int(positions.flatten()[m]) - 1
        known = (ids[r, row] >= 0) & (ids[r, row] < VOCAB)
        expected = values[r, row].double() + table[ids[r, row] * known].double() @ query[m]
        expected[~known | ~expected.isfinite()] = -math.inf
        torch.testing.assert_close(scores[r, m % 2].double(), expected, rtol=1e-4, atol=1e-4)
    assert scores[1, 1].eq(-math.inf).all()
    rows.places[0, 1] = -1
    settle(device)
    again = candidate_scores(*call, rows, early=early).cpu()
    assert again[0, 1].isnan().all() and torch.equal(again[1], scores[1])  # the poison is still there


def test_wrong_arguments_are_named() -> None:
    rows = Rows(*torch.ones(3, 2, 1, dtype=torch.int32).unbind())
    x, norm, table = torch.zeros(2, 8), torch.zeros(8), torch.zeros(9, 8)
    with pytest.raises(ValueError, match="pool_ids"):
        candidate_scores(x, norm, norm, table, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), rows)
    with pytest.raises(ValueError, match="table"):
        candidate_scores(
            x, norm, norm, table[:, :7], torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int64), rows
        )
