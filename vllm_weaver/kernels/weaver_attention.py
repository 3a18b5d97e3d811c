# SPDX-License-Identifier: Apache-2.0
"""Attention of Weaver node rows to the whole prompt and to the nodes that a bit mask names.

    out = softmax(q · [prefix_k; node_k visible to the row]ᵀ · h^-0.5) · [prefix_v; node_v visible to the row]

Layout: q [R, n, H, h]; prefix keys and values [R, T, H, h] (T = D + 1 prompt rows); node keys and values [R,
M, H, h] by node slot; mask words int32 [R, n, W], bit j % 32 of word j // 32 for slot j. Softmax in fp32.

Floor: 4·h multiply-adds for each visible key, and the keys and values that are visible read once a row; a
node slot whose bit is unset is not even loaded, so it may hold anything. Neither a score matrix nor an
expanded mask is ever materialised: each program takes one row and one head and folds in 32 keys (one mask
word) at a time with a running maximum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, use_triton


def attend(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, node_k: Tensor, node_v: Tensor, visible: Tensor
) -> Tensor:
    """The same in plain PyTorch with a boolean mask; differentiable, and used for training.

    visible bool [R, n, M] or [n, M]; the rest as in `weaver_attention`. Softmax in fp64 for fp64 input. Node
    slots that no row sees may hold anything, NaN included. A row that sees nothing at all yields zeros."""
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
def _fold_keys(
    query,  # [BLOCK_H], scaled
    k_ptr,  # [keys, h] of one request and head
    v_ptr,  # [keys, h] of one request and head
    k_stride,
    v_stride,
    key,  # [32] indices
    seen,  # [32]
    h,
    top,
    total,
    out,
    BLOCK_H: tl.constexpr,
):
    """Folds 32 keys into the running softmax (largest score, sum, weighted values)."""
    column = tl.arange(0, BLOCK_H)
    mask = seen[:, None] & (column < h)[None, :]
    keys = tl.load(k_ptr + key[:, None] * k_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    values = tl.load(v_ptr + key[:, None] * v_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    score = tl.where(seen, tl.sum(keys * query[None, :], axis=1), float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet
    weight = tl.exp(score - base)
    decay = tl.exp(top - base)
    total = total * decay + tl.sum(weight, axis=0)
    out = out * decay + tl.sum(weight[:, None] * values, axis=0)
    return new_top, total, out


@triton.jit
def _weaver_attention_kernel(
    q_ptr,  # [R, n, H, h]
    prefix_k_ptr,  # [R, T, H, h]
    prefix_v_ptr,  # [R, T, H, h]
    node_k_ptr,  # [R, M, H, h]
    node_v_ptr,  # [R, M, H, h]
    words_ptr,  # [R, n, W]
    out_ptr,  # [R, n, H, h]
    q_stride_r,
    q_stride_n,
    q_stride_h,
    prefix_k_stride_r,
    prefix_k_stride_t,
    prefix_k_stride_h,
    prefix_v_stride_r,
    prefix_v_stride_t,
    prefix_v_stride_h,
    node_k_stride_r,
    node_k_stride_m,
    node_k_stride_h,
    node_v_stride_r,
    node_v_stride_m,
    node_v_stride_h,
    n,
    H,
    h,
    T,
    M,
    W,
    scale,
    BLOCK_H: tl.constexpr,  # a power of two >= h
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    request = (row // n).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    q_ptr += request * q_stride_r + (row % n) * q_stride_n + head * q_stride_h
    query = tl.load(q_ptr + column, mask=column < h, other=0.0).to(tl.float32) * scale
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    out = tl.zeros((BLOCK_H,), dtype=tl.float32)
    bit = tl.arange(0, 32)
    k_ptr = prefix_k_ptr + request * prefix_k_stride_r + head * prefix_k_stride_h
    v_ptr = prefix_v_ptr + request * prefix_v_stride_r + head * prefix_v_stride_h
    for start in range(0, T, 32):
        key = start + bit
        top, total, out = _fold_keys(
            query,
            k_ptr,
            v_ptr,
            prefix_k_stride_t,
            prefix_v_stride_t,
            key,
            key < T,
            h,
            top,
            total,
            out,
            BLOCK_H,
        )
    k_ptr = node_k_ptr + request * node_k_stride_r + head * node_k_stride_h
    v_ptr = node_v_ptr + request * node_v_stride_r + head * node_v_stride_h
    for word in range(W):
        bits = tl.load(words_ptr + row.to(tl.int64) * W + word)
        if bits != 0:
            key = word * 32 + bit
            seen = (((bits >> bit) & 1) != 0) & (key < M)
            top, total, out = _fold_keys(
                query, k_ptr, v_ptr, node_k_stride_m, node_v_stride_m, key, seen, h, top, total, out, BLOCK_H
            )
    out = out / tl.where(total > 0, total, 1.0)
    out_ptr += (row.to(tl.int64) * H + head) * h
    tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=column < h)


def weaver_attention(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    node_k: Tensor,
    node_v: Tensor,
    mask_words: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Attention output [R, n, H, h] in q's dtype; shapes as in the header, mask_words int32 [R, n, W] with
    W·32 >= M − 1.

    Slots past the last word are unseen. The last dimension of all but mask_words must be contiguous.
    `ValueError` for wrong shapes, dtypes, devices or strides."""
    num_requests, num_rows, num_heads, head_dim = q.shape
    for name, tensor in (
        ("prefix_k", prefix_k),
        ("prefix_v", prefix_v),
        ("node_k", node_k),
        ("node_v", node_v),
    ):
        expect(name, tensor, (num_requests, None, num_heads, head_dim), device=q.device)
        expect_dense_last(name, tensor)
    expect("mask_words", mask_words, (num_requests, num_rows, None), device=q.device, dtypes=(torch.int32,))
    expect_dense_last("q", q)
    if not use_triton(q, impl):
        return attend(q, prefix_k, prefix_v, node_k, node_v, unpack_mask(mask_words, node_k.shape[1]))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel():
        _weaver_attention_kernel[(num_requests * num_rows, num_heads)](
            q,
            prefix_k,
            prefix_v,
            node_k,
            node_v,
            mask_words.contiguous(),
            out,
            *q.stride()[:3],
            *prefix_k.stride()[:3],
            *prefix_v.stride()[:3],
            *node_k.stride()[:3],
            *node_v.stride()[:3],
            num_rows,
            num_heads,
            head_dim,
            prefix_k.shape[1],
            node_k.shape[1],
            mask_words.shape[2],
            head_dim**-0.5,
            BLOCK_H=triton.next_power_of_2(head_dim),
        )
    return out
