# SPDX-License-Identifier: Apache-2.0
"""Weaver attention against dense attention in float64 over exactly the visible keys."""

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import SIZES, mixed_batch
from vllm_weaver.kernels.weaver_attention import attend, weaver_attention
from vllm_weaver.spec_decode.tree import Tree

IMPLS = ("torch", "triton")


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


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads, dim", [(1, 32), (3, 20)])
@pytest.mark.parametrize("n", SIZES)
def test_rows_of_a_round(device: torch.device, n: int, heads: int, dim: int, impl: str) -> None:
    """Every slot that a row must not see holds NaN, the spare one included."""
    tree = mixed_batch(n, 4, 300, seed=n)
    rows = min(n, 3)
    slots = torch.stack([torch.arange(rows) + max(0, int(count) - rows) for count in tree.num_nodes])
    slots = torch.where(slots < tree.num_nodes[:, None], slots, 0)
    args = inputs(4, rows, heads, dim, prefix=16, slots=n + 1, seed=n)
    words = tree.mask_words()
    mask = words[torch.arange(4)[:, None], slots]
    expected = attention_by_hand(args, slots, tree)
    for r in range(4):
        seen = {j for slot in slots[r].tolist() for j in range(n) if words[r, slot, j // 32] >> (j % 32) & 1}
        for node in args[3:]:
            node[r, [j for j in range(n + 1) if j not in seen]] = float("nan")
    out = weaver_attention(*(a.to(device) for a in args), mask.to(device), impl=impl)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("prefix", [0, 1, 31, 33])
def test_prefix_lengths_and_views(device: torch.device, prefix: int, impl: str) -> None:
    """Keys that are views of a wider projection, and bits past the last slot."""
    tree = Tree.chain(torch.arange(40)[None].expand(2, -1), torch.tensor([40, 40]))
    args = inputs(2, 2, 2, 16, prefix, 41, seed=prefix)
    slots = torch.tensor([[38, 39], [0, 5]])
    mask = tree.mask_words()[torch.arange(2)[:, None], slots]
    mask[..., 1] |= -(1 << 20)  # slots 52 to 63 do not exist
    expected = attention_by_hand(args, slots, tree)
    wide = [torch.cat((a, torch.full_like(a, float("nan"))), dim=-1).to(device)[..., :16] for a in args]
    out = weaver_attention(*wide, mask.to(device), impl=impl)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_row_that_sees_nothing_is_zero(device: torch.device, impl: str) -> None:
    args = inputs(1, 2, 2, 8, prefix=0, slots=5, seed=1)
    mask = torch.tensor([[[0], [0b100]]], dtype=torch.int32)
    out = weaver_attention(*(a.to(device) for a in args), mask.to(device), impl=impl).cpu()
    assert out[0, 0].eq(0).all()
    torch.testing.assert_close(out[0, 1], args[4][0, 2])


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16(device: torch.device, impl: str) -> None:
    tree = mixed_batch(33, 2, 300, seed=2)
    args = tuple(a.bfloat16() for a in inputs(2, 5, 2, 64, 16, 34, seed=2))
    slots = torch.tensor([[0, 3, 17, 31, 32], [0, 1, 2, 9, 15]])
    mask = tree.mask_words()[torch.arange(2)[:, None], slots]
    out = weaver_attention(*(a.to(device) for a in args), mask.to(device), impl=impl)
    assert out.dtype == torch.bfloat16
    expected = attention_by_hand(args, slots, tree)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-2, atol=1e-2)


def test_gradient_ignores_unseen_rows() -> None:
    args = tuple(a.double().requires_grad_() for a in inputs(1, 3, 1, 4, 2, 3, seed=3))
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0]]).bool()
    assert torch.autograd.gradcheck(lambda *a: attend(*a, visible), args)
    attend(*args, visible).sum().backward()
    assert args[3].grad is not None and args[3].grad[0, 2].eq(0).all() and args[3].grad[0, 0].ne(0).any()


def test_wrong_arguments_are_named() -> None:
    args = list(inputs(1, 2, 2, 8, 3, 5, seed=1))
    mask = torch.zeros(1, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="mask_words"):
        weaver_attention(*args, mask.long())
    with pytest.raises(ValueError, match="node_v"):
        weaver_attention(*args[:4], args[4][..., :4], mask)
