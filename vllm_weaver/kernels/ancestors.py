# SPDX-License-Identifier: Apache-2.0
"""Ancestor bit masks of draft trees, and what a usable parent list is.

    word[r, i, j // 32] has bit j % 32 set  <=>  node j is an ancestor of node i, or i itself.

Layout: parents int32 [R, N] in, mask words int32 [R, N, ceil(N / 32)] out (bit 31 is the sign bit). Node 0 is
the root, parents precede their children. A parent outside [0, i) ends the tree: node i and everything after
it get all-zero rows and are in nobody's row, so that no hostile parent list can lead to an index out of
range.

Floor: reads 4·R·N bytes, writes 4·R·N·ceil(N / 32) bytes, depth + 1 loop rounds; the boolean [N, N] matrix is
never materialised by the kernel. Each row climbs its own parents, so no row waits for another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, use_triton


def num_mask_words(num_slots: int) -> int:
    """Words of a mask row over `num_slots` nodes."""
    return -(-num_slots // 32)


def pack_mask(visible: Tensor) -> Tensor:
    """Boolean rows [..., N] to int32 words [..., ceil(N / 32)]."""
    n = visible.shape[-1]
    padded = torch.nn.functional.pad(visible, (0, -n % 32)).unflatten(-1, (-1, 32)).to(torch.int64)
    return (padded << torch.arange(32, device=visible.device)).sum(-1).to(torch.int32)


def unpack_mask(words: Tensor, num_slots: int) -> Tensor:
    """int32 words [..., W] to boolean rows [..., num_slots]; slots past the last word are unset."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    visible = bits.flatten(-2).bool()
    missing = num_slots - visible.shape[-1]
    return torch.nn.functional.pad(visible, (0, missing)) if missing > 0 else visible[..., :num_slots]


def count_usable_nodes(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Length int32 [R] of the leading part of each node list that is a tree: `num_nodes` [R], cut at the
    first node i >= 1 whose parent in `parents` [R, N] lies outside [0, i)."""
    index = torch.arange(parents.shape[1], device=parents.device)
    good = ((parents >= 0) & (parents < index)) | (index == 0)
    good &= index < num_nodes.unsqueeze(1)
    return good.int().cumprod(1).sum(1).to(torch.int32)


def ancestor_mask_reference(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Boolean [R, N, N] mask: entry (i, j) is set when j is an ancestor of i, or i itself. Synchronises with
    the host."""
    n = parents.shape[1]
    index = torch.arange(n, device=parents.device)
    usable = index < count_usable_nodes(parents, num_nodes).unsqueeze(1)
    visible = torch.zeros(*parents.shape, n, dtype=torch.bool, device=parents.device)
    current = torch.where(usable, index, -1)
    while bool((current >= 0).any()):
        visible |= current.unsqueeze(-1) == index
        parent = parents.gather(1, current.clamp(min=0)).to(torch.int64)
        current = torch.where(current > 0, parent, -1)
    return visible


@triton.jit
def load_usable_count(
    parents_ptr,  # [N] this request's row
    num_nodes,
    N,
    BLOCK: tl.constexpr,  # a power of two >= N
):
    """`count_usable_nodes` of one request."""
    index = tl.arange(0, BLOCK)
    parent = tl.load(parents_ptr + index, mask=index < N, other=-1)
    good = ((parent >= 0) & (parent < index)) | (index == 0)
    return tl.min(tl.where(good & (index < num_nodes) & (index < N), BLOCK, index), axis=0)


@triton.jit
def climb_ancestors(
    parents_ptr,  # [N] this request's row
    num_nodes,
    row,  # [ROWS] nodes
    N,
    BLOCK: tl.constexpr,  # a power of two >= N
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # a power of two >= ceil(N / 32)
):
    """Mask words [ROWS, WORDS] of some nodes of one request."""
    usable = load_usable_count(parents_ptr, num_nodes, N, BLOCK)
    word = tl.arange(0, WORDS)
    current = tl.where(row < usable, row, -1)
    words = tl.zeros((ROWS, WORDS), dtype=tl.int32)
    while tl.max(current, axis=0) >= 0:
        at = tl.maximum(current, 0)
        bit = tl.full((ROWS,), 1, tl.int32) << (at % 32)
        hit = (current >= 0)[:, None] & ((at // 32)[:, None] == word[None, :])
        words |= tl.where(hit, bit[:, None], 0)
        # The root's parent is -1, which ends its climb; parents of usable nodes are smaller than the node.
        parent = tl.load(parents_ptr + at, mask=current > 0, other=-1)
        current = tl.where(current > 0, parent, -1)
    return words


@triton.jit
def _ancestor_mask_kernel(
    parents_ptr,  # [R, N]
    num_nodes_ptr,  # [R]
    words_ptr,  # [R, N, W]
    parents_stride,
    N,
    W,
    BLOCK: tl.constexpr,  # a power of two >= N
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # a power of two >= W
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    num_nodes = tl.load(num_nodes_ptr + request)
    words = climb_ancestors(parents_ptr + request * parents_stride, num_nodes, row, N, BLOCK, ROWS, WORDS)
    at = (request * N + row)[:, None] * W + word[None, :]
    tl.store(words_ptr + at, words, mask=(row < N)[:, None] & (word < W)[None, :])


def ancestor_mask_words(parents: Tensor, num_nodes: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Ancestor bit masks int32 [R, N, ceil(N / 32)] of parents int32 [R, N], num_nodes int32 [R] valid nodes
    each.

    parents may be a view with any row stride. `ValueError` for wrong shapes, dtypes or devices.
    """
    num_requests, num_slots = parents.shape
    expect("parents", parents, (None, None), device=parents.device, dtypes=(torch.int32,))
    expect("num_nodes", num_nodes, (num_requests,), device=parents.device, dtypes=(torch.int32,))
    expect_dense_last("parents", parents)
    if not use_triton(parents, impl):
        return pack_mask(ancestor_mask_reference(parents, num_nodes))
    num_words = num_mask_words(num_slots)
    words = torch.empty(num_requests, num_slots, num_words, dtype=torch.int32, device=parents.device)
    rows = 32
    _ancestor_mask_kernel[(num_requests, triton.cdiv(num_slots, rows))](
        parents,
        num_nodes.contiguous(),
        words,
        parents.stride(0),
        num_slots,
        num_words,
        BLOCK=triton.next_power_of_2(num_slots),
        ROWS=rows,
        WORDS=triton.next_power_of_2(num_words),
        num_warps=1,
    )
    return words
