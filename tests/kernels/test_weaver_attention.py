# SPDX-License-Identifier: Apache-2.0
"""Weaver attention, plain and by path, against dense attention in float64 over exactly the visible keys."""

import pytest
import torch
import triton

from tests.kernels import settle
from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import ancestors, mixed_batch
from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.kernels.weaver_attention import attend, path_attention
from vllm_weaver.spec_decode.tree import Tree


def inputs(
    num_requests: int, rows: int, heads: int, dim: int, prefix: int, slots: int, seed: int
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (rows, heads, dim),
        (prefix, heads, dim),
        (prefix, heads, dim),
        (slots, heads, dim),
        (slots, heads, dim),
    ]
    return tuple(torch.randn(num_requests, *shape, generator=generator) for shape in shapes)


def attention_by_hand(args: tuple[torch.Tensor, ...], slots: torch.Tensor, tree: Tree) -> torch.Tensor:
    """One row and head at a time, in float64, over the listed keys only."""
    q, prefix_k, prefix_v, node_k, node_v = (a.double() for a in args)
    out = torch.zeros_like(q)
    for r in range(q.shape[0]):
        for i, slot in enumerate(slots[r].tolist()):
            path = []
            while slot >= 0:
                path.append(slot)
                slot = int(tree.parents[r, slot])
            keys, values = (
                torch.cat((prefix[r], node[r, path]))
                for prefix, node in ((prefix_k, node_k), (prefix_v, node_v))
            )
            for head in range(q.shape[2]):
                weights = torch.softmax(keys[:, head] @ q[r, i, head] * q.shape[-1] ** -0.5, 0)
                out[r, i, head] = weights @ values[:, head]
    return out


def paths_of(tree: Tree, offset: int, length: int) -> torch.Tensor:
    """Cache rows from the root to every node, −1 behind."""
    paths = torch.full((*tree.tokens.shape, length), -1, dtype=torch.int32)
    for r, parents in enumerate(tree.parents.tolist()):
        for node in range(int(tree.num_nodes[r])):
            path = ancestors(parents, node)
            paths[r, node, : len(path)] = torch.tensor(path) + offset
    return paths


@pytest.mark.parametrize("heads, dim", [(1, 32), (3, 20)])
@pytest.mark.parametrize("n, prefix", [(1, 2), (7, 8), (33, 16), (65, 5)])
@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_rows_of_a_round(
    device: torch.device, n: int, prefix: int, heads: int, dim: int, early: bool
) -> None:
    """Every cache row that no node sees holds NaN, slots past the tree included; one row has no node."""
    tree = mixed_batch(n, 4, 300, seed=n)
    length = triton.next_power_of_2(int(tree.depths.max()) + 1)
    slots = torch.stack([torch.arange(3) + max(0, int(count) - 3) for count in tree.num_nodes])
    slots = torch.where(slots < tree.num_nodes[:, None], slots, 0)
    args = inputs(4, 3, heads, dim, prefix, slots=n, seed=n)
    expected = attention_by_hand(args, slots, tree)
    paths = paths_of(tree, prefix, length)
    slots[2, 1], expected[2, 1] = -1, attention_by_hand(args, torch.full_like(slots, -1), tree)[2, 1]
    for r in range(4):
        seen = {
            p - prefix for slot in slots[r].tolist() if slot >= 0 for p in paths[r, slot].tolist() if p >= 0
        }
        for node in args[3:]:
            node[r, [j for j in range(n) if j not in seen]] = float("nan")
    cache = torch.stack((torch.cat((args[1], args[3]), 1), torch.cat((args[2], args[4]), 1)))
    places = torch.where(slots >= 0, slots + prefix, -1).int().flatten()
    given = [x.to(device) for x in (args[0].flatten(0, 1), cache, places, paths)]
    settle(device)
    out = path_attention(given[0], given[1], prefix, *given[2:], early=early)
    torch.testing.assert_close(out.view(expected.shape).double().cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_prompt_is_causal(device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (a.to(dtype) for a in inputs(3, 6, 2, 16, 6, 0, seed=1)[:3])
    cache = torch.full((2, 3, 9, 2, 16), float("nan"), dtype=dtype)
    cache[0, :, :6], cache[1, :, :6] = k, v
    wide = [a.double() for a in (q, k[:, :0], v[:, :0], k, v)]
    expected = attend(*wide, torch.ones(6, 6).tril().bool())
    out = path_attention(q.flatten(0, 1).to(device), cache.to(device), 6)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.view(expected.shape).double().cpu(), expected, rtol=tolerance, atol=tolerance
    )


def test_attend_is_attention_over_the_visible_rows() -> None:
    tree = mixed_batch(19, 4, 300, seed=3)
    slots = torch.zeros(4, 1, dtype=torch.int64)
    args = inputs(4, 1, 2, 8, 3, 19, seed=3)
    visible = unpack_mask(tree.mask_words(), 19)[:, :1]
    expected = attention_by_hand(args, slots, tree)
    args[3][:, 1:], args[4][:, 1:] = float("nan"), float("nan")
    torch.testing.assert_close(attend(*(a.double() for a in args), visible), expected)


def test_row_that_sees_nothing_is_zero() -> None:
    args = inputs(1, 2, 2, 8, prefix=0, slots=5, seed=1)
    visible = torch.tensor([[[0] * 5, [0, 0, 1, 0, 0]]]).bool()
    out = attend(*args, visible)
    assert out[0, 0].eq(0).all()
    torch.testing.assert_close(out[0, 1], args[4][0, 2])


def test_gradient_ignores_unseen_rows() -> None:
    args = tuple(a.double().requires_grad_() for a in inputs(1, 3, 1, 4, 2, 3, seed=3))
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0]]).bool()
    assert torch.autograd.gradcheck(lambda *a: attend(*a, visible), args)
    attend(*args, visible).sum().backward()
    assert args[3].grad is not None and args[3].grad[0, 2].eq(0).all() and args[3].grad[0, 0].ne(0).any()


def test_wrong_arguments_are_named() -> None:
    q, cache = torch.zeros(4, 2, 8), torch.zeros(2, 2, 6, 2, 8)
    places, paths = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="cache has 6 rows a request; it must have at least 7"):
        path_attention(q, cache, 3, places, paths)
    with pytest.raises(ValueError, match="places"):
        path_attention(q, cache, 2, places.long(), paths)
    with pytest.raises(ValueError, match="cache"):
        path_attention(q, cache[..., :4], 2, places, paths)
