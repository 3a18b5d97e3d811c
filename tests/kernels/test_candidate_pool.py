# SPDX-License-Identifier: Apache-2.0
"""Candidate pools against a sort in plain Python: sizes around the blocks, ties, hostile rows, padded
vocabularies."""

import math

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from vllm_weaver.kernels.candidate_pool import candidate_pool

IMPLS = ("torch", "triton")


def pool_by_hand(row: list[float], size: int) -> tuple[list[float], list[int]]:
    """Values and ids of one row, padded."""
    found = sorted((-value, index) for index, value in enumerate(row) if math.isfinite(value))[:size]
    missing = size - len(found)
    return [-v for v, _ in found] + [-math.inf] * missing, [i for _, i in found] + [-1] * missing


def check(logits: torch.Tensor, size: int, vocab: int, device: torch.device, impl: str) -> None:
    values, ids, logsumexp = candidate_pool(logits.to(device), size, vocab, impl=impl)
    assert tuple(values.shape) == tuple(ids.shape) == (len(logits), size)
    for m, row in enumerate(logits[:, :vocab].double()):
        expected_values, expected_ids = pool_by_hand(row.tolist(), size)
        assert ids[m].tolist() == expected_ids, f"ids of row {m}"
        assert values[m].tolist() == expected_values, f"values of row {m}"
        expected = (
            torch.logsumexp(row[row.isfinite()], 0) if row.isfinite().any() else torch.tensor(-math.inf)
        )
        torch.testing.assert_close(logsumexp[m].double().cpu(), expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [1, 7, 64, 512])
@pytest.mark.parametrize("vocab", [1, 37, 511, 4096, 4097, 9001])
def test_sizes(device: torch.device, vocab: int, size: int, impl: str) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab + size)) * 10
    check(logits, size, vocab, device, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_many_blocks(device: torch.device, impl: str) -> None:
    """Twelve blocks. In the second row most logits are ties; in the third one the best stand side by side, so
    that whole blocks are above the bound and pass 512 on each."""
    logits = torch.randn(3, 12 * 4096 - 5, generator=torch.Generator().manual_seed(1))
    logits[1] = logits[1].round()
    logits[2] = logits[2].sort().values
    check(logits, 512, logits.shape[1], device, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ties_go_to_the_lower_id(device: torch.device, dtype: torch.dtype, impl: str) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3)).mul(3).round().div(2).to(dtype)
    logits[0] = 1.0
    logits[1, ::2], logits[1, 1::2] = 0.0, -0.0
    assert logits[2].unique().numel() < 60
    check(logits, 100, 5000, device, impl)


@pytest.mark.filterwarnings("ignore:overflow encountered in subtract")  # the interpreter, at -3e38 - 3e38
@pytest.mark.parametrize("impl", IMPLS)
def test_hostile_rows(device: torch.device, impl: str) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.randn(7, 4500, generator=torch.Generator().manual_seed(5))
    logits[0] = nan
    logits[1] = -inf
    logits[2] = inf
    logits[3, ::3], logits[3, 1::3] = nan, inf
    logits[4], logits[4, 4444], logits[4, 17] = nan, -3e38, 3e38
    logits[5] = -3.4e38
    logits[6, 10:] = -inf
    check(logits, 64, 4500, device, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_padded_vocabulary_and_strided_rows(device: torch.device, impl: str) -> None:
    wide = torch.randn(3, 700, generator=torch.Generator().manual_seed(6))
    wide[:, 601:] = 1e9
    values, ids, _ = candidate_pool(wide.to(device)[:, 20:], 600, 581, impl=impl)
    assert int(ids.max()) == 580 and ids[:, 581:].eq(-1).all() and values[:, 581:].eq(-math.inf).all()
    check(wide[:, 20:].contiguous(), 600, 581, device, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(device: torch.device, impl: str) -> None:
    values, ids, logsumexp = candidate_pool(torch.zeros(0, 9, device=device), 4, impl=impl)
    assert tuple(values.shape) == tuple(ids.shape) == (0, 4) and len(logsumexp) == 0


@pytest.mark.parametrize(
    "size, vocab, message", [(0, 9, "is 0"), (1025, 9, "is 1025"), (4, 10, "vocab_size is 10")]
)
def test_wrong_arguments_are_named(size: int, vocab: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidate_pool(torch.zeros(2, 9), size, vocab)
