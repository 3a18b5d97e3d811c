# SPDX-License-Identifier: Apache-2.0
"""Attention of Weaver rows to the prompt and, for tree nodes, to their own path.

    out = softmax(q · [prompt_k; path_k]ᵀ · h^-0.5) · [prompt_v; path_v]

`attend` is the plain rule with a boolean mask. `path_attention` is the kernel of the proposal: a node sees
the whole prompt and the at most D + 1 nodes from the root to itself, so the keys of a row are a short list.

Layout: q [R · n, H, h]; the cache [2, R, S, H, h] holds keys, then values: T = D + 1 prompt rows, then one
row a node slot; paths int32 [R, N, A] list the cache rows from the root to each node, −1 behind. Softmax in
fp32.

Floor: 4·h multiply-adds and 4·h numbers read for each visible key, row and head: 0.26 MB a row at 16 heads of
128 and 32 keys. A program takes one row and one head with all its keys in registers; neither a mask nor a
score matrix is ever materialised, and a cache row that is not listed may hold anything."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import expect, expect_indices
from vllm_weaver.kernels.pdl import launch_options, take_turn


def attend(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, node_k: Tensor, node_v: Tensor, visible: Tensor
) -> Tensor:
    """Attention output [R, n, H, h] in plain PyTorch; differentiable, and used for training.

    q [R, n, H, h], prefix keys and values [R, T, H, h] that every row sees, node keys and values [R, M, H,
    h]; visible bool [R, n, M] or [n, M]. Softmax in fp64 for fp64 input. Node slots that no row sees may hold
    anything, NaN included. A row that sees nothing at all yields zeros."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    unseen = ~visible.any(dim=-2).expand(node_k.shape[:2])[..., None, None]
    keys = torch.cat((prefix_k, node_k.masked_fill(unseen, 0)), dim=1).to(dtype)
    values = torch.cat((prefix_v, node_v.masked_fill(unseen, 0)), dim=1).to(dtype)
    scores = torch.einsum("rnhd,rmhd->rhnm", q.to(dtype), keys) * q.shape[-1] ** -0.5
    hidden = torch.nn.functional.pad(~visible, (prefix_k.shape[1], 0))  # the prefix is always seen
    hidden = hidden.unsqueeze(-3)  # one mask for all heads
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(dtype).min), dim=-1).masked_fill(hidden, 0)
    return torch.einsum("rhnm,rmhd->rnhd", weights, values).to(q.dtype)


@triton.jit
def _path_attention_kernel(
    q_ptr,  # [R * n, H, h]
    cache_ptr,  # [2, R, S, H, h]
    places_ptr,  # [R * n] cache rows of the nodes, negative: the row sees the prompt only
    paths_ptr,  # [R, N, A]
    out_ptr,  # [R * n, H, h] out
    n,
    R,
    S,
    N,
    H,
    h,
    T,
    scale,
    CAUSAL: tl.constexpr,  # rows are the prompt's own: each sees those up to itself
    A: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,  # a power of two >= T, or T + A for nodes
    BLOCK_H: tl.constexpr,  # a power of two >= h
    EARLY: tl.constexpr,  # everything but q and a node's own cache row may be read before the turn
    PDL: tl.constexpr,
):
    if not EARLY:
        take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request = row // n
    key = tl.arange(0, BLOCK_KEYS)
    line = key
    own_line = -1
    if CAUSAL:
        seen = key <= row % n
    else:
        own_line = tl.load(places_ptr + row)
        known = (own_line >= T) & (own_line < T + N)
        path = paths_ptr + (request * N + tl.where(known, own_line - T, 0)) * A
        end = T + tl.where(known, A, 0)
        step = tl.load(path + key - T, mask=(key >= T) & (key < end), other=-1)
        line = tl.where(key < T, key, step)
        seen = (key < T) | ((step >= 0) & (step < S))
    column = tl.arange(0, BLOCK_H)
    here = column < h
    own = (row * H + head) * h + column
    keys_of = cache_ptr + (request * S * H + head) * h + column
    values_of = cache_ptr + ((R + request) * S * H + head) * h + column
    apart = H * h
    mask = seen[:, None] & here[None, :]
    if EARLY:  # all but the node's own row
        mask = mask & (line != own_line)[:, None]
    keys = tl.load(keys_of[None, :] + line[:, None] * apart, mask=mask, other=0.0)
    values = tl.load(values_of[None, :] + line[:, None] * apart, mask=mask, other=0.0)
    if EARLY:
        take_turn(PDL)
        exists = column < tl.where((own_line >= T) & (own_line < S), h, 0)
        own_key = tl.load(keys_of + own_line * apart, mask=exists, other=0.0)
        own_value = tl.load(values_of + own_line * apart, mask=exists, other=0.0)
        keys = tl.where((line == own_line)[:, None], own_key[None, :], keys)
        values = tl.where((line == own_line)[:, None], own_value[None, :], values)
    query = tl.load(q_ptr + own, mask=here, other=0.0).to(tl.float32) * scale
    score = tl.where(seen, tl.sum(keys.to(tl.float32) * query[None, :], axis=1), float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    out = tl.sum(weight[:, None] * values.to(tl.float32), axis=0) / tl.sum(weight, axis=0)
    tl.store(out_ptr + own, out.to(out_ptr.dtype.element_ty), mask=here)


def path_attention(
    q: Tensor,
    cache: Tensor,
    num_prompt: int,
    places: Tensor | None = None,
    paths: Tensor | None = None,
    *,
    early: bool = False,
) -> Tensor:
    """Attention output [R · n, H, h] in q's dtype; shapes as in the header.

    places int32 [R · n]: the cache row of each node, T + slot; one outside [T, T + N) sees the prompt only.
    Without places and paths the rows are the num_prompt prompt rows themselves, in order, under a causal
    mask. early, for nodes: the launch before this one wrote nothing of all this but q and the nodes' own
    cache rows, so that the rest can be read ahead of it (see `pdl`). All tensors contiguous. `ValueError` for
    wrong shapes, dtypes, devices or strides."""
    num_rows, num_heads, head_dim = q.shape
    num_requests, length = cache.shape[1:3]
    expect("cache", cache, (2, None, None, num_heads, head_dim), device=q.device, dtypes=(q.dtype,))
    for name, tensor in (("q", q), ("cache", cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    num_slots = path_length = 0
    if places is not None and paths is not None:
        expect_indices(
            q.device, ("places", places, (num_rows,)), ("paths", paths, (num_requests, None, None))
        )
        num_slots, path_length = paths.shape[1:]
    if length < num_prompt + num_slots:
        raise ValueError(f"cache has {length} rows a request; it must have at least {num_prompt + num_slots}")
    out = torch.empty_like(q)
    _path_attention_kernel[(num_rows, num_heads)](
        q,
        cache,
        q if places is None else places,
        q if paths is None else paths,
        out,
        num_rows // num_requests,
        num_requests,
        length,
        num_slots,
        num_heads,
        head_dim,
        num_prompt,
        head_dim**-0.5,
        CAUSAL=places is None,
        EARLY=early and places is not None,
        A=path_length,
        BLOCK_KEYS=triton.next_power_of_2(num_prompt + path_length),
        BLOCK_H=triton.next_power_of_2(head_dim),
        num_warps=4,
        **launch_options(q),
    )
    return out
