# SPDX-License-Identifier: Apache-2.0
"""The Tree layout: validation, truncation at any node, chains, and trees kept by request state index."""

import math
import random

import pytest
import torch

from tests.trees import KINDS, SIZES, make_batch, make_tree, mixed_batch
from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.spec_decode.tree import Tree, TreeBuffers

FIELDS = ("tokens", "parents", "depths", "logprobs", "num_nodes")
VOCAB = 300
NO_CHAINS = torch.zeros(9, dtype=torch.int32)


def same(left: Tree, right: Tree) -> bool:
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in FIELDS)


def clone(tree: Tree) -> Tree:
    return Tree(*(getattr(tree, name).clone() for name in FIELDS))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_built_trees_are_valid(kind: str, n: int) -> None:
    rng = random.Random(n)
    tree = make_batch([make_tree(kind, n, rng)], n, VOCAB, rng)
    tree.validate(VOCAB, n)
    if n > 2 and kind == "chain":
        with pytest.raises(
            ValueError, match=f"request 0, node {n - 1}: depth must be at most {n - 2}.*found {n - 1}"
        ):
            tree.validate(VOCAB, n - 2)


@pytest.mark.parametrize(
    "field, place, value, message",
    [
        ("tokens", (1, 3), VOCAB, "request 1, node 3: tokens must be in"),
        ("tokens", (0, 0), -1, "request 0, node 0: tokens must be in"),
        ("tokens", (1, 16), 5, "request 1, node 16: tokens of an invalid node must be -1"),
        ("parents", (0, 4), 4, "request 0, node 4: a parent must precede its node, but found 4"),
        ("parents", (0, 4), -1, "request 0, node 4: a parent must precede its node, but found -1"),
        ("parents", (2, 0), 0, "request 2, node 0: the root's parent must be -1"),
        ("parents", (1, 16), 3, "request 1, node 16: parents of an invalid node"),
        ("depths", (0, 2), 9, "request 0, node 2: depth must be the parent's plus 1, but found 9"),
        ("depths", (0, 0), 1, "request 0, node 0: the root's depth must be 0"),
        ("depths", (1, 12), 1, "request 1, node 12: depths of an invalid node"),
        ("logprobs", (0, 5), math.nan, "request 0, node 5: a log-probability must be finite"),
        (
            "logprobs",
            (0, 5),
            0.5,
            "request 0, node 5: a log-probability must be finite and at most the parent's",
        ),
        ("logprobs", (0, 0), -1.0, "request 0, node 0: the root's log-probability must be 0"),
        ("logprobs", (1, 12), 0.0, "request 1, node 12: logprobs of an invalid node"),
        ("num_nodes", (3,), 18, r"request 3: num_nodes must be in \[0, 17\], but found 18"),
        ("num_nodes", (3,), -1, "request 3: num_nodes must be in"),
    ],
)
def test_each_violation_is_named(field: str, place: tuple[int, ...], value: float, message: str) -> None:
    tree = mixed_batch(17, 4, VOCAB, seed=3)
    tree.validate(VOCAB, 17)
    getattr(tree, field)[place] = value
    with pytest.raises(ValueError, match=message):
        tree.validate(VOCAB, 17)


def test_equal_siblings_are_refused() -> None:
    tree = make_batch([[-1, 0, 0, 1]], 4, VOCAB, random.Random(0))
    tree.tokens[0, 3] = tree.tokens[0, 2]  # cousins may share a token
    tree.validate(VOCAB, 4)
    tree.tokens[0, 2] = tree.tokens[0, 1]
    with pytest.raises(ValueError, match="request 0, node 2: siblings must have different tokens"):
        tree.validate(VOCAB, 4)


def test_wrong_layout_is_named() -> None:
    tree = mixed_batch(5, 2, VOCAB, seed=0)
    tree.parents = tree.parents.long()
    with pytest.raises(ValueError, match="parents is torch.int64"):
        tree.validate(VOCAB, 5)


@pytest.mark.parametrize("n", SIZES)
def test_any_prefix_is_a_tree(n: int) -> None:
    tree = mixed_batch(n, 4, VOCAB, seed=n)
    before = clone(tree)
    for cut in sorted({0, 1, n // 2, n - 1, n, n + 3}):
        limits = torch.tensor([cut, n, cut, 0])
        shorter = tree.truncate(limits)
        shorter.validate(VOCAB, n)
        assert shorter.num_nodes.tolist() == torch.minimum(tree.num_nodes, limits).tolist()
        kept = shorter.valid()
        for name in FIELDS[:-1]:
            assert torch.equal(getattr(shorter, name)[kept], getattr(tree, name)[kept]), name
    assert same(tree, before)
    assert tree.truncate(torch.tensor([-5, n, n, n])).num_nodes[0] == 0


def test_chain() -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [9, 1, 2, 3]])
    tree = Tree.chain(tokens, torch.tensor([4, 2]))
    tree.validate(10, 3)
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert tree.tokens.tolist() == [[5, 6, 7, 8], [9, 1, -1, -1]]
    assert torch.equal(unpack_mask(tree.mask_words(), 4)[0], torch.ones(4, 4, dtype=torch.bool).tril())


def test_buffers_follow_the_state_index() -> None:
    """Rows of a batch move between steps; padding rows keep nothing, but get their drafts like all others."""
    buffers = TreeBuffers(6, 17, "cpu")
    first = mixed_batch(17, 4, VOCAB, seed=1)
    drafts = torch.full((4, 16), -7)
    buffers.store(first, torch.tensor([4, -1, 0, 6]), drafts, NO_CHAINS[:4])
    assert torch.equal(drafts.to(torch.int32), first.tokens[:, 1:].to(torch.int32))
    for index, source in ((4, 0), (0, 2)):
        for name in FIELDS:
            assert torch.equal(getattr(buffers.trees, name)[index], getattr(first, name)[source]), name
    assert buffers.trees.num_nodes[[1, 2, 3, 5]].tolist() == [0, 0, 0, 0]
    second = mixed_batch(17, 1, VOCAB, seed=2)
    buffers.store(second, torch.tensor([4]), drafts[:1], NO_CHAINS[:1])
    assert torch.equal(buffers.nodes()[0][4], second.tokens[0])
    buffers.clear(4)
    assert buffers.nodes()[3].tolist() == [int(first.num_nodes[2]), 0, 0, 0, 0, 0]


def test_buffers_keep_their_memory() -> None:
    """A captured graph reads the same addresses in every step."""
    buffers = TreeBuffers(3, 5, "cpu")
    addresses = [getattr(buffers.trees, name).data_ptr() for name in FIELDS]
    drafts = torch.empty(3, 4, dtype=torch.int64)
    buffers.store(mixed_batch(5, 3, VOCAB, seed=1), torch.tensor([2, 1, 0]), drafts, NO_CHAINS[:3])
    buffers.clear(1)
    assert [getattr(buffers.trees, name).data_ptr() for name in FIELDS] == addresses
    with pytest.raises(ValueError, match="hold 5 slots a request, but the tree has 9"):
        buffers.store(mixed_batch(9, 1, VOCAB, seed=1), torch.tensor([0]), drafts[:1], NO_CHAINS[:1])
