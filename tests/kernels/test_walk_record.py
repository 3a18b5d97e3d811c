# SPDX-License-Identifier: Apache-2.0
"""The record of walks: against a count over dictionaries, on random trees and paths."""

import random

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import SIZES, mixed_batch
from vllm_weaver.kernels.walk_record import record_walks

IMPLS = ("torch", "triton")


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[0] > 0:
        path.insert(0, parents[path[0]])
    return path


def first_branch(parents: list[int], path: list[int]) -> int:
    for depth, node in enumerate(path):
        if node > 0 and parents[node] in parents[1:node]:
            return depth
    return 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n", SIZES)
def test_random_paths(device: torch.device, n: int, impl: str) -> None:
    """Requests without a path lie between the others; what their rows hold plays no part."""
    rng = random.Random(n)
    tree = mixed_batch(n, 4, 311, n)
    paths = torch.full((4, n), -1, dtype=torch.int32)
    counts = torch.zeros(4, dtype=torch.int32)
    expected, totals = [], [10, 20, 30, 40]
    for r in range(4):
        nodes = int(tree.num_nodes[r])
        if r == n % 4:
            expected.append([0, 0])
            continue
        parents = tree.parents[r].tolist()
        path = path_to(parents, rng.randrange(nodes))
        paths[r, : len(path)] = torch.tensor(path)
        counts[r] = len(path)
        branch = first_branch(parents, path)
        expected.append([nodes - 1, branch])
        for i, more in enumerate((1, len(path) - 1, len(path) > 1, branch > 0)):
            totals[i] += more
    found = torch.tensor([10, 20, 30, 40], device=device)
    args = (a.to(device) for a in (paths, counts, tree.parents, tree.num_nodes))
    record = record_walks(*args, found, impl=impl)
    assert record.dtype == torch.int32 and record.tolist() == expected
    assert found.tolist() == totals


@pytest.mark.parametrize("impl", IMPLS)
def test_where_a_path_branches(device: torch.device, impl: str) -> None:
    """At its third node, at its second, nowhere, and a root alone."""
    parents = torch.tensor([[-1, 0, 1, 1, 3, 0]] * 4, dtype=torch.int32)
    paths = torch.tensor([[0, 1, 3, 4, -1, -1], [0, 5] + [-1] * 4, [0, 1, 2] + [-1] * 3, [0] + [-1] * 5])
    lengths = torch.tensor([4, 2, 3, 1], dtype=torch.int32)
    nodes = torch.full((4,), 6, dtype=torch.int32)
    totals = torch.zeros(4, dtype=torch.int64, device=device)
    args = (a.to(device) for a in (paths.to(torch.int32), lengths, parents, nodes))
    record = record_walks(*args, totals, impl=impl)
    assert record.tolist() == [[5, 2], [5, 1], [5, 0], [5, 0]]
    assert totals.tolist() == [4, 6, 3, 2]


def test_wrong_arguments_are_named() -> None:
    path, one = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="parents"):
        record_walks(path, one, path[:, :3], one, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="totals"):
        record_walks(path, one, path, one, torch.zeros(3, dtype=torch.int64))
