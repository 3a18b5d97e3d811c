# SPDX-License-Identifier: Apache-2.0
"""Ancestor bit masks: every shape of tree, hostile parents, and the packing of bits into words."""

import random

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import KINDS, SIZES, ancestors, make_batch, make_tree, mixed_batch
from vllm_weaver.kernels.ancestors import (
    ancestor_mask_words,
    count_usable_nodes,
    num_mask_words,
    pack_mask,
    unpack_mask,
)

IMPLS = ("torch", "triton")


def visible_by_hand(parents: list[int], usable: int, num_slots: int) -> torch.Tensor:
    """The mask of one tree, built node by node."""
    visible = torch.zeros(num_slots, num_slots, dtype=torch.bool)
    for node in range(usable):
        visible[node, ancestors(parents, node)] = True
    return visible


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_tree(device: torch.device, kind: str, n: int, impl: str) -> None:
    parents = make_tree(kind, n, random.Random(n))
    tree = make_batch([parents], n, n + 5, random.Random(0), device)
    words = ancestor_mask_words(tree.parents, tree.num_nodes, impl=impl)
    assert words.dtype == torch.int32 and tuple(words.shape) == (1, n, num_mask_words(n))
    assert torch.equal(unpack_mask(words, n)[0].cpu(), visible_by_hand(parents, n, n))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_slots", [17, 33, 65])
def test_batch_of_different_trees(device: torch.device, num_slots: int, impl: str) -> None:
    tree = mixed_batch(num_slots, 4, 300, seed=num_slots, device=device)
    visible = unpack_mask(ancestor_mask_words(tree.parents, tree.num_nodes, impl=impl), num_slots).cpu()
    for r in range(4):
        expected = visible_by_hand(tree.parents[r].tolist(), int(tree.num_nodes[r]), num_slots)
        assert torch.equal(visible[r], expected), f"request {r}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [-1, -7, 5, 6, 10**9, -(2**31), 2**31 - 1], ids=lambda v: f"parent={v}")
def test_hostile_parent_ends_the_tree(device: torch.device, bad: int, impl: str) -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2, 4, 0]], dtype=torch.int32)
    parents[0, 5] = bad
    num_nodes = torch.tensor([8], dtype=torch.int32)
    words = ancestor_mask_words(parents.to(device), num_nodes.to(device), impl=impl).cpu()
    assert count_usable_nodes(parents, num_nodes).tolist() == [5]
    assert torch.equal(unpack_mask(words, 8)[0], visible_by_hand([-1, 0, 0, 1, 3], 5, 8))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_nodes, usable", [(-3, 0), (0, 0), (1, 1), (4, 4), (9, 6), (2**31 - 1, 6)])
def test_number_of_nodes_is_bounded(device: torch.device, num_nodes: int, usable: int, impl: str) -> None:
    parents = torch.tensor([[-1, 0, 1, 2, 3, 4]], dtype=torch.int32, device=device)
    words = ancestor_mask_words(
        parents, torch.tensor([num_nodes], dtype=torch.int32, device=device), impl=impl
    )
    assert words[0, :, 0].tolist() == [2 ** (i + 1) - 1 if i < usable else 0 for i in range(6)]


@pytest.mark.parametrize("impl", IMPLS)
def test_parents_may_be_a_view(device: torch.device, impl: str) -> None:
    wide = torch.full((2, 40), 10**6, dtype=torch.int32, device=device)
    wide[:, 3:10] = torch.tensor([-1, 0, 1, 0, 3, 3, 2], dtype=torch.int32)
    view = wide[:, 3:10]
    num_nodes = torch.tensor([7, 4], dtype=torch.int32, device=device)
    expected = ancestor_mask_words(view.contiguous(), num_nodes, impl="torch")
    assert torch.equal(ancestor_mask_words(view, num_nodes, impl=impl), expected)
    assert expected[0, 6, 0] == 0b1000111


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100])
def test_pack_and_unpack(n: int) -> None:
    visible = torch.rand(3, 4, n, generator=torch.Generator().manual_seed(n)) < 0.5
    visible[0, 0] = True
    words = pack_mask(visible)
    assert words.shape == (3, 4, num_mask_words(n))
    assert torch.equal(unpack_mask(words, n), visible)
    assert torch.equal(unpack_mask(words, n + 40)[..., :n], visible)
    assert not unpack_mask(words, n + 40)[..., n:].any()
    for j in range(n):
        assert torch.equal((words[..., j // 32].long() >> (j % 32)) & 1, visible[..., j].long())


def test_wrong_arguments_are_named() -> None:
    parents = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_nodes"):
        ancestor_mask_words(parents, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="parents.*int64"):
        ancestor_mask_words(parents.long(), torch.zeros(2, dtype=torch.int32))
