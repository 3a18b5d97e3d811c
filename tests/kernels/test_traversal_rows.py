# SPDX-License-Identifier: Apache-2.0
"""Row statistics, bonus rows and their place: odd sizes, poisoned outputs, rows without any probability."""

from __future__ import annotations

import math

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from vllm_weaver.kernels.traversal_rows import bonus_rows, place_bonus, row_statistics

IMPLS = ("torch", "triton")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width, vocab", [(1, 1), (37, 37), (40, 37), (8192, 8192), (20001, 20000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics(device: torch.device, dtype: torch.dtype, width: int, vocab: int, impl: str) -> None:
    logits = (torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 4).to(dtype)
    logits[:, vocab:] = 1e9  # the padded tail of a vocabulary has no probability
    logits[1, : vocab // 2] = -INF
    rows = logits[:, :vocab].double()
    found = row_statistics(logits.to(device), vocab, impl=impl)
    assert found.best.tolist() == rows.numpy().argmax(1).tolist()
    assert found.support.tolist() == [vocab, vocab - vocab // 2, vocab, vocab, vocab]
    torch.testing.assert_close(found.logsumexp.cpu().double(), rows.logsumexp(1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_statistics_of_hostile_rows(device: torch.device, impl: str) -> None:
    logits = torch.full((5, 9000), -INF)
    logits[0] = NAN
    logits[2, [10, 8500]] = torch.tensor([NAN, -5.0])
    logits[3, [8300, 8301]] = torch.tensor([INF, 1.0])
    logits[4, [4, 8200]] = 2.0  # a tie across blocks goes to the lower id
    found = row_statistics(logits.to(device), impl=impl)
    assert found.best.tolist() == [0, 0, 8500, 8300, 4]
    assert found.support.tolist() == [0, 0, 1, 2, 2]
    assert found.logsumexp.tolist()[:3] == [-INF, -INF, -5.0]
    assert math.isfinite(found.logsumexp[3]) and abs(found.logsumexp[4] - 2 - math.log(2)) < 1e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab", [1, 37, 4096, 9001])
def test_bonus_rows_and_their_place(device: torch.device, vocab: int, impl: str) -> None:
    logits = torch.randn(6, vocab + 3, generator=torch.Generator().manual_seed(vocab))[:, :vocab]
    excluded = torch.tensor([[0, vocab - 1, 7], [0, 1, 2], [-1, vocab, 2**62], [0, -1, -1]])
    counts = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    final = torch.tensor([5, 0, 3, -1])
    found = bonus_rows(
        logits.to(device), final.to(device), excluded.to(device), counts.to(device), impl=impl
    ).cpu()
    expected = logits[[5, 0, 3, 0]].clone()
    expected[0, [0, vocab - 1]] = -INF
    expected[3] = -INF
    assert found.equal(expected)
    choices = torch.arange(6, device=device)
    place_bonus(choices, final.to(device), torch.tensor([70, 80, 90, 99], device=device), impl=impl)
    assert choices.tolist() == [80, 1, 2, 90, 4, 70]
