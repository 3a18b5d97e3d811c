# SPDX-License-Identifier: Apache-2.0
"""Rows along accepted paths: in place, nothing else touched, hostile paths cut."""

import random

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import SIZES, ancestors, make_tree
from vllm_weaver.kernels.gather_rows import gather_rows

IMPLS = ("torch", "triton")


def expected_rows(rows: torch.Tensor, starts: list[int], paths: list[list[int]]) -> torch.Tensor:
    out = rows.clone()
    for start, path in zip(starts, paths, strict=True):
        for i, node in enumerate(path):
            out[start + i] = rows[start + node]
    return out


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "columns, dtype", [(1, torch.int64), (37, torch.float32), (1300, torch.bfloat16)], ids=str
)
def test_batch(device: torch.device, columns: int, dtype: torch.dtype, n: int, impl: str) -> None:
    """Four requests (random tree, chain, a prefill chunk with the root alone, one without rows) and padding
    rows."""
    rng = random.Random(n + columns)
    parents = make_tree("random", n, rng)
    paths = [ancestors(parents, rng.randrange(n)), list(range(max(1, n // 2))), [0], []]
    counts = [n, n, 5, 0]
    starts = [2, 2 + n, 2 + 2 * n, 7 + 2 * n]
    rows = torch.randn(10 + 2 * n, columns, generator=torch.Generator().manual_seed(n)).mul(100).to(dtype)
    table = torch.full((4, n), -1, dtype=torch.int32)
    for r, path in enumerate(paths):
        table[r, : len(path)] = torch.tensor(path, dtype=torch.int32)
    moved = rows.to(device, copy=True)
    gather_rows(
        moved, torch.tensor([*starts, starts[-1] + counts[-1]], device=device), table.to(device), impl=impl
    )
    assert torch.equal(moved.cpu(), expected_rows(rows, starts, paths))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "path, usable",
    [
        ([0, 2, 1, 3], [0, 2]),
        ([0, 2, 2, 3], [0, 2]),
        ([0, 2, 6, -1], [0, 2]),
        ([0, 3, 2**31 - 1, 4], [0, 3]),
        ([0, -5, 3, 4], [0]),
        ([1, 2, 3, 4], []),
        ([-1, 2, 3, 4], []),
    ],
    ids=str,
)
def test_hostile_path_is_cut(device: torch.device, path: list[int], usable: list[int], impl: str) -> None:
    rows = torch.arange(30.0).reshape(10, 3)
    moved = rows.to(device, copy=True)
    starts = torch.tensor([3, 9], dtype=torch.int32, device=device)
    gather_rows(moved, starts, torch.tensor([path], dtype=torch.int32, device=device), impl=impl)
    assert torch.equal(moved.cpu(), expected_rows(rows, [3], [usable]))


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_may_be_a_view(device: torch.device, impl: str) -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    moved = whole.to(device, copy=True)
    path = torch.tensor([[0, 3, 5]], dtype=torch.int32, device=device)
    gather_rows(moved[:, 2:7], torch.tensor([0, 6], device=device), path, impl=impl)
    expected = whole.clone()
    expected[1, 2:7], expected[2, 2:7] = whole[3, 2:7], whole[5, 2:7]
    assert torch.equal(moved.cpu(), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("count", [2, 6])
def test_several_tensors_in_one_call(device: torch.device, count: int, impl: str) -> None:
    """Widths and row strides of their own, and a path that takes more than one tile of nodes."""
    rng = random.Random(count)
    paths = [[0, *sorted(rng.sample(range(1, 60), 40))], [0, 1, 4]]
    table = torch.full((2, 60), -1, dtype=torch.int32)
    for r, path in enumerate(paths):
        table[r, : len(path)] = torch.tensor(path, dtype=torch.int32)
    whole = [torch.randn(70, 300 + 7 * i) for i in range(count)]
    moved = [rows.to(device, copy=True) for rows in whole]
    starts = torch.tensor([1, 61, 68], device=device)
    gather_rows([rows[:, : 290 - i] for i, rows in enumerate(moved)], starts, table.to(device), impl=impl)
    for i, (before, after) in enumerate(zip(whole, moved, strict=True)):
        expected = before.clone()
        expected[:, : 290 - i] = expected_rows(before, [1, 61], paths)[:, : 290 - i]
        assert torch.equal(after.cpu(), expected)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="row_starts"):
        gather_rows(
            torch.zeros(4, 2), torch.zeros(3, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        )
    with pytest.raises(ValueError, match="path.*int64"):
        gather_rows(
            torch.zeros(4, 2), torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)
        )
    with pytest.raises(ValueError, match="rows has dtype torch.float64"):
        gather_rows(
            [torch.zeros(4, 2), torch.zeros(4, 2).double()],
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(1, 2, dtype=torch.int32),
        )
    with pytest.raises(ValueError, match="no rows"):
        gather_rows([], torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))
