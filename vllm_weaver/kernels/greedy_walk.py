# SPDX-License-Identifier: Apache-2.0
"""Greedy verification of draft trees: the target's argmax of every row, and the walk that follows it.

    at node i:  choice = argmax of the target's row i;  go to the child of i whose token is `choice`, or stop.

The last choice is the bonus token, so a request commits one token at least. Layout: request r owns the rows
start_r .. start_{r+1} - 1 of the target's output, row start_r + i being node i; tokens int64 and parents
int32 [R, N]. NaN logits are never chosen; a row of nothing but NaN (or -inf) chooses token 0. Ties go to the
lowest id. A parent that does not precede its node ends the tree there (`ancestors.py`), as does the end of
the request's rows.

Floor: the argmax reads the logits once and keeps 12 bytes for each 8192 of them; the walk reads 12·R·N bytes
of tree and one id a level, in depth + 1 rounds with the whole node list in registers. Children lists are
never materialised."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.ancestors import count_usable_nodes, load_usable_count
from vllm_weaver.kernels.common import (
    Impl,
    expect,
    expect_dense_last,
    expect_indices,
    expect_logits,
    use_triton,
)

_ARGMAX_BLOCK = 8192


class Walk(NamedTuple):
    """Where the target went through each tree."""

    path: Tensor
    """int32 [R, N]: accepted node indices, root first, padded with −1."""
    num_path: Tensor
    """int32 [R]: nodes on the path, the root included; 0 for a request that is no tree or has no rows."""
    num_sampled: Tensor
    """int32 [R]: tokens that this step commits, accepted drafts plus the bonus token; 1 for a request with
    rows that is no tree, 0 for one without rows."""
    sampled_token_ids: Tensor
    """int64 [R, N]: those tokens in order, the bonus token last, padded with −1."""


def row_argmax_reference(logits: Tensor, vocab_size: int) -> Tensor:
    """The rule of `row_argmax` in plain PyTorch."""
    rows = logits[:, :vocab_size]
    return rows.masked_fill(rows.isnan(), float("-inf")).argmax(dim=-1)


def greedy_walk_reference(
    target_ids: Tensor,
    row_starts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    vocab_size: int,
) -> Walk:
    """The rule of `greedy_walk` in plain PyTorch; N loop rounds, no host synchronisation."""
    num_requests, num_slots = tokens.shape
    index = torch.arange(num_slots, device=tokens.device)
    rows = row_starts[1:] - row_starts[:-1]
    usable = torch.minimum(count_usable_nodes(parents, num_nodes), rows)
    reachable = index < usable.unsqueeze(1)
    path = torch.full((num_requests, num_slots), -1, dtype=torch.int32, device=tokens.device)
    sampled = torch.full((num_requests, num_slots), -1, dtype=torch.int64, device=tokens.device)
    current = torch.where(rows > 0, 0, -1)  # a request with rows always commits the root's choice
    for depth in range(num_slots):
        alive = current >= 0
        row = (row_starts[:-1] + current.clamp(min=0)).clamp(0, max(0, len(target_ids) - 1)).to(torch.int64)
        choice = target_ids[row] if len(target_ids) else row
        choice = torch.where((choice >= 0) & (choice < vocab_size), choice, 0)
        path[:, depth] = torch.where(alive, current, -1)
        sampled[:, depth] = torch.where(alive, choice, -1)
        below = reachable & (index > 0) & (parents == current.unsqueeze(1))
        child = torch.where(below & (tokens == choice.unsqueeze(1)), index, num_slots).amin(1)
        current = torch.where(alive & (child < num_slots), child, -1)
    num_sampled = (path >= 0).sum(1).to(torch.int32)
    is_tree = num_nodes > 0
    num_path = torch.where(is_tree, num_sampled, 0)
    path = path.masked_fill(~is_tree[:, None], -1)
    return Walk(path, num_path, num_sampled, sampled)


@triton.jit
def _block_argmax_kernel(
    logits_ptr,  # [T, >= vocab_size]
    values_ptr,  # [T, S] fp32, the best logit of each block
    ids_ptr,  # [T, S] int64, its id
    logits_stride,
    vocab_size,
    S,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    logit = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    logit = tl.where(logit == logit, logit, float("-inf"))
    best = tl.max(logit, axis=0)
    first = tl.min(tl.where((logit == best) & inside, column, vocab_size), axis=0)
    tl.store(values_ptr + row * S + block, best)
    tl.store(ids_ptr + row * S + block, first.to(tl.int64))


@triton.jit
def _merge_argmax_kernel(
    values_ptr,  # [T, S]
    ids_ptr,  # [T, S]
    out_ptr,  # [T]
    S,
    BLOCK: tl.constexpr,  # a power of two >= S
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    value = tl.load(values_ptr + row * S + block, mask=block < S, other=float("-inf"))
    best = tl.max(value, axis=0)
    first = tl.min(tl.where((value == best) & (block < S), block, BLOCK), axis=0)
    tl.store(out_ptr + row, tl.load(ids_ptr + row * S + first))


@triton.jit
def _greedy_walk_kernel(
    target_ids_ptr,  # [T]
    row_starts_ptr,  # [R + 1]
    tokens_ptr,  # [R, N]
    parents_ptr,  # [R, N]
    num_nodes_ptr,  # [R]
    path_ptr,  # [R, N] out
    num_path_ptr,  # [R] out
    num_sampled_ptr,  # [R] out
    sampled_ptr,  # [R, N] out
    tokens_stride,
    parents_stride,
    vocab_size,
    N,
    BLOCK: tl.constexpr,  # a power of two >= N
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    start = tl.load(row_starts_ptr + request).to(tl.int64)
    count = (tl.load(row_starts_ptr + request + 1) - start).to(tl.int32)
    parents_ptr += request * parents_stride
    num_nodes = tl.load(num_nodes_ptr + request)
    usable = load_usable_count(parents_ptr, tl.minimum(num_nodes, count), N, BLOCK)
    reachable = (index > 0) & (index < usable)
    parent = tl.load(parents_ptr + index, mask=reachable, other=-1)
    token = tl.load(tokens_ptr + request * tokens_stride + index, mask=reachable, other=-1)
    path = tl.full((BLOCK,), -1, tl.int32)
    sampled = tl.full((BLOCK,), -1, tl.int64)
    current = tl.where(count > 0, 0, -1)  # a request with rows always commits the root's choice
    depth = tl.full((), 0, tl.int32)
    while current >= 0:
        choice = tl.load(target_ids_ptr + start + current)
        choice = tl.where((choice >= 0) & (choice < vocab_size), choice, 0)
        path = tl.where(index == depth, current, path)
        sampled = tl.where(index == depth, choice, sampled)
        below = reachable & (parent == current)
        child = tl.min(tl.where(below & (token == choice), index, BLOCK), axis=0)
        current = tl.where(child < BLOCK, child, -1)
        depth += 1
    is_tree = num_nodes > 0
    num_path = tl.where(is_tree, depth, 0)
    tl.store(path_ptr + request * N + index, tl.where(is_tree, path, -1), mask=index < N)
    tl.store(sampled_ptr + request * N + index, sampled, mask=index < N)
    tl.store(num_path_ptr + request, num_path)
    tl.store(num_sampled_ptr + request, depth)


def row_argmax(logits: Tensor, vocab_size: int | None = None, *, impl: Impl = "auto") -> Tensor:
    """The target's choice at every row, int64 [T], each in [0, vocab_size).

    logits [T, >= vocab_size] in any float dtype, rows contiguous; vocab_size defaults to the width of the
    logits. `ValueError` for wrong shapes or strides."""
    vocab_size = expect_logits(logits, vocab_size)
    if not use_triton(logits, impl):
        return row_argmax_reference(logits, vocab_size)
    num_rows, num_blocks = len(logits), triton.cdiv(vocab_size, _ARGMAX_BLOCK)
    values = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    choice = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _block_argmax_kernel[(num_rows, num_blocks)](
            logits, values, ids, logits.stride(0), vocab_size, num_blocks, BLOCK=_ARGMAX_BLOCK, num_warps=8
        )
        _merge_argmax_kernel[(num_rows,)](
            values, ids, choice, num_blocks, BLOCK=triton.next_power_of_2(num_blocks), num_warps=1
        )
    return choice


def greedy_walk(
    target_ids: Tensor,
    row_starts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    vocab_size: int,
    *,
    path: tuple[Tensor, Tensor] | None = None,
    impl: Impl = "auto",
) -> Walk:
    """Follows the target's choices through the tree of every request.

    target_ids int64 [T] (`row_argmax`, or any sampler's choice; one outside [0, vocab_size) counts as 0);
    row_starts int32 or int64 [R + 1], ascending; tokens int64 [R, N], parents int32 [R, N], num_nodes int32
    [R], 0 for a request that is no tree: it commits its first row's choice. A request with more rows than
    nodes uses the first ones. `path`: where to write path int32 [R, N] and num_path int32 [R], contiguous
    (new tensors by default). `ValueError` for wrong shapes, dtypes or devices."""
    num_requests, num_slots = tokens.shape
    device = tokens.device
    expect("target_ids", target_ids, (None,), device=device, dtypes=(torch.int64,))
    expect("row_starts", row_starts, (num_requests + 1,), device=device, dtypes=(torch.int32, torch.int64))
    expect("tokens", tokens, (None, None), device=device, dtypes=(torch.int64,))
    expect("parents", parents, (num_requests, num_slots), device=device, dtypes=(torch.int32,))
    expect("num_nodes", num_nodes, (num_requests,), device=device, dtypes=(torch.int32,))
    expect_dense_last("tokens", tokens)
    expect_dense_last("parents", parents)
    if path is None:
        path = (
            torch.empty(num_requests, num_slots, dtype=torch.int32, device=device),
            torch.empty(num_requests, dtype=torch.int32, device=device),
        )
    expect_indices(device, ("path", path[0], (num_requests, num_slots)), ("path", path[1], (num_requests,)))
    if not use_triton(tokens, impl):
        walk = greedy_walk_reference(target_ids, row_starts, tokens, parents, num_nodes, vocab_size)
        path[0].copy_(walk.path)
        path[1].copy_(walk.num_path)
        return walk._replace(path=path[0], num_path=path[1])
    walk = Walk(
        *path,
        torch.empty(num_requests, dtype=torch.int32, device=device),
        torch.empty(num_requests, num_slots, dtype=torch.int64, device=device),
    )
    if num_requests:
        _greedy_walk_kernel[(num_requests,)](
            target_ids.contiguous(),
            row_starts.contiguous(),
            tokens,
            parents,
            num_nodes.contiguous(),
            *walk,
            tokens.stride(0),
            parents.stride(0),
            vocab_size,
            num_slots,
            BLOCK=triton.next_power_of_2(num_slots),
            num_warps=1,
        )
    return walk
