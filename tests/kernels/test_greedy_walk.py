# SPDX-License-Identifier: Apache-2.0
"""Greedy walk and row argmax: against a walk over dictionaries, with hostile trees, ids and rows."""

import random

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import KINDS, SIZES, make_batch, make_tree, mixed_batch
from vllm_weaver.kernels.greedy_walk import Walk, greedy_walk, row_argmax
from vllm_weaver.spec_decode.tree import Tree

IMPLS = ("torch", "triton")
VOCAB = 311


def walk_by_hand(choices: list[int], tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Path and committed tokens of one request."""
    children = {
        (parent, token): i
        for i, (parent, token) in reversed(list(enumerate(zip(parents, tokens, strict=True))))
    }
    path, sampled = [0], [choices[0]]
    while (child := children.get((path[-1], sampled[-1]))) is not None:
        path.append(child)
        sampled.append(choices[child])
    return path, sampled


def lead_through(tree: Tree, r: int, choices: torch.Tensor, rng: random.Random) -> None:
    """Makes the target agree with the way to a random node of request r."""
    node = rng.randrange(int(tree.num_nodes[r]))
    while node > 0:
        parent = int(tree.parents[r, node])
        choices[parent] = tree.tokens[r, node]
        node = parent


def check(walk: Walk, expected: list[tuple[list[int], list[int]]], num_slots: int) -> None:
    for r, (path, sampled) in enumerate(expected):
        assert walk.path[r].tolist() == path + [-1] * (num_slots - len(path)), f"path of request {r}"
        assert walk.num_path[r].item() == len(path), f"num_path of request {r}"
        assert walk.num_sampled[r].item() == len(sampled), f"num_sampled of request {r}"
        padded = sampled + [-1] * (num_slots - len(sampled))
        assert walk.sampled_token_ids[r].tolist() == padded, f"tokens of request {r}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_tree(device: torch.device, kind: str, n: int, impl: str) -> None:
    rng = random.Random(n)
    tree = make_batch([make_tree(kind, n, rng)], n, VOCAB, rng)
    choices = torch.tensor([rng.randrange(VOCAB) for _ in range(n)])
    lead_through(tree, 0, choices, rng)
    starts = torch.tensor([0, n], dtype=torch.int32)
    args = (choices, starts, tree.tokens, tree.parents, tree.num_nodes)
    walk = greedy_walk(*(a.to(device) for a in args), VOCAB, impl=impl)
    check(walk, [walk_by_hand(choices.tolist(), tree.tokens[0].tolist(), tree.parents[0].tolist())], n)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(4))
def test_batch_with_ragged_rows(device: torch.device, seed: int, impl: str) -> None:
    """Rows of prefill chunks and padding lie between the requests' trees; one request has no rows at all."""
    rng = random.Random(seed)
    tree = mixed_batch(33, 4, VOCAB, seed)
    tree.num_nodes[3] = 0
    rows = [int(tree.num_nodes[0]), int(tree.num_nodes[1]) + 5, int(tree.num_nodes[2]), 0]
    starts = torch.tensor([7, *(7 + torch.tensor(rows).cumsum(0)).tolist()])
    choices = torch.tensor([rng.randrange(VOCAB) for _ in range(7 + sum(rows))])
    for r in range(3):
        lead_through(tree, r, choices[starts[r] :], rng)
    args = (choices, starts, tree.tokens, tree.parents, tree.num_nodes)
    walk = greedy_walk(*(a.to(device) for a in args), VOCAB, impl=impl)
    expected = []
    for r in range(3):
        n = int(tree.num_nodes[r])
        own = choices[starts[r] : starts[r + 1]].tolist()
        expected.append(walk_by_hand(own, tree.tokens[r, :n].tolist(), tree.parents[r, :n].tolist()))
    assert max(len(path) for path, _ in expected) > 1
    check(walk, [*expected, ([], [])], 33)


@pytest.mark.parametrize("impl", IMPLS)
def test_sibling_that_is_not_first(device: torch.device, impl: str) -> None:
    tokens = torch.tensor([[9, 4, 5, 6, 7, 8]])
    parents = torch.tensor([[-1, 0, 0, 2, 2, 4]], dtype=torch.int32)
    choices = torch.tensor([5, 0, 7, 0, 8, 3])
    args = (choices, torch.tensor([0, 6]), tokens, parents, torch.tensor([6], dtype=torch.int32))
    walk = greedy_walk(*(a.to(device) for a in args), VOCAB, impl=impl)
    check(walk, [([0, 2, 4, 5], [5, 7, 8, 3])], 6)


@pytest.mark.parametrize("impl", IMPLS)
def test_given_outputs(device: torch.device, impl: str) -> None:
    """A winding path, one of first children, a root alone, a request that is no tree, one without rows."""
    tokens = torch.tensor([[9, 4, 5, 6], [9, 4, 5, 6], [9, 4, 5, 6], [9, 4, 5, 6], [9, 4, 5, 6]])
    parents = torch.tensor([[-1, 0, 0, 2]] * 5, dtype=torch.int32)
    nodes = torch.tensor([4, 4, 4, 0, 4], dtype=torch.int32)
    choices = torch.tensor([5, 0, 6, 1] + [4, 2, 0, 0] + [7, 0, 0, 0] + [5])
    starts = torch.tensor([0, 4, 8, 12, 13, 13])
    path = (
        torch.full((5, 4), 77, dtype=torch.int32, device=device),
        torch.full((5,), 77, dtype=torch.int32, device=device),
    )
    args = (choices, starts, tokens, parents, nodes)
    walk = greedy_walk(*(a.to(device) for a in args), VOCAB, path=path, impl=impl)
    check(walk, [([0, 2, 3], [5, 6, 1]), ([0, 1], [4, 2]), ([0], [7])], 4)
    assert walk.path is path[0] and walk.num_path is path[1]
    assert walk.path[3:].tolist() == [[-1] * 4] * 2 and walk.num_path[3:].tolist() == [0, 0]
    assert walk.num_sampled[3:].tolist() == [1, 0] and walk.sampled_token_ids[3].tolist() == [5, -1, -1, -1]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_nodes, rows", [(2, 6), (6, 2), (2, 2)], ids=lambda v: str(v))
def test_tree_ends_at_nodes_and_rows(device: torch.device, num_nodes: int, rows: int, impl: str) -> None:
    tree = Tree.chain(torch.arange(6)[None], torch.tensor([6]))
    choices = torch.tensor([1, 2, 3, 4, 5, 6])[:rows]
    nodes = torch.tensor([num_nodes], dtype=torch.int32)
    args = (choices, torch.tensor([0, rows]), tree.tokens, tree.parents, nodes)
    walk = greedy_walk(*(a.to(device) for a in args), VOCAB, impl=impl)
    check(walk, [([0, 1], [1, 2])], 6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hostile", [-1, VOCAB, 2**62, -(2**63)], ids=lambda v: f"id={v}")
def test_hostile_ids(device: torch.device, hostile: int, impl: str) -> None:
    """A draft token outside the vocabulary is never accepted, and a choice outside it counts as token 0."""
    tokens = torch.tensor([[3, hostile, 0, hostile]])
    parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32)
    choices = torch.tensor([hostile, 1, hostile, 2])
    args = (choices, torch.tensor([0, 4]), tokens, parents, torch.tensor([4], dtype=torch.int32))
    walk = greedy_walk(*(a.to(device) for a in args), VOCAB, impl=impl)
    check(walk, [([0, 2], [0, 0])], 4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hostile", [-1, -9, 2, 3, 2**31 - 1, -(2**31)], ids=lambda v: f"parent={v}")
def test_hostile_parents(device: torch.device, hostile: int, impl: str) -> None:
    tokens = torch.tensor([[3, 5, 5, 6]])
    parents = torch.tensor([[-1, 0, hostile, 1]], dtype=torch.int32)
    choices = torch.tensor([5, 6, 5, 5])
    args = (choices, torch.tensor([0, 4]), tokens, parents, torch.tensor([4], dtype=torch.int32))
    walk = greedy_walk(*(a.to(device) for a in args), VOCAB, impl=impl)
    check(walk, [([0, 1], [5, 6])], 4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width, vocab", [(1, 1), (37, 37), (40, 37), (8192, 8192), (20001, 20000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax(device: torch.device, dtype: torch.dtype, width: int, vocab: int, impl: str) -> None:
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    logits[:, vocab:] = 1e9  # the padded tail of a vocabulary must not win
    expected = logits[:, :vocab].double().numpy().argmax(1).tolist()
    assert row_argmax(logits.to(device), vocab, impl=impl).tolist() == expected


@pytest.mark.parametrize("impl", IMPLS)
def test_argmax_of_hostile_rows(device: torch.device, impl: str) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.zeros(7, 9000)
    logits[0] = nan
    logits[1] = -inf
    logits[2], logits[2, 8500] = nan, -5.0
    logits[3, 10], logits[3, 8999] = nan, 1.0
    logits[4, 8300] = inf
    logits[5, 4], logits[5, 8200] = 2.0, 2.0  # a tie across blocks goes to the lower id
    logits[6], logits[6, 3] = -inf, nan
    assert row_argmax(logits.to(device), impl=impl).tolist() == [0, 0, 8500, 8999, 8300, 4, 0]


@pytest.mark.parametrize("impl", IMPLS)
def test_argmax_reads_a_strided_view(device: torch.device, impl: str) -> None:
    wide = torch.full((3, 50), 7.0)
    wide[:, 5:15] = torch.eye(10)[[4, 0, 9]]
    assert row_argmax(wide.to(device)[:, 5:15], impl=impl).tolist() == [4, 0, 9]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="vocab_size is 4"):
        row_argmax(torch.zeros(2, 3), 4)
    tree = Tree.chain(torch.zeros(2, 3), torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="row_starts"):
        starts = torch.zeros(2, dtype=torch.int32)
        greedy_walk(torch.zeros(6, dtype=torch.int64), starts, tree.tokens, tree.parents, tree.num_nodes, 5)
