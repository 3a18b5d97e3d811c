# SPDX-License-Identifier: Apache-2.0
"""Moves the Gated DeltaNet state of a request to the leaf of its accepted path, in its one slot.

For the leaf l and the stash of the verify pass (`gdn_tree`), per value head, in fp32:

    S <- e^{c_l} S + sum_{j on path} e^{c_l - c_j} k_j u_j^T

Buffers: state [slots, HV, K, V] or transposed, updated in place; stash rows are the packed rows of the step.
No intermediate state is materialised.

Floor for a path of p nodes: HV K V state elements read and written, p (HV + Hk K + HV V) stash elements read;
p K V multiply-adds a value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.accepted_path import load_path_length, path_lengths
from vllm_weaver.kernels.common import Impl, expect, expect_indices, use_triton
from vllm_weaver.kernels.gdn_tree import GdnStash, StateLayout, state_as_kv


def gdn_tree_commit_reference(
    stash: GdnStash,
    state_kv: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    path: Tensor,
    num_path: Tensor,
) -> None:
    """`gdn_tree_commit` in plain PyTorch, fp32, a loop over requests."""
    heads_per_key = stash.u.shape[1] // stash.k.shape[1]
    starts = query_start_loc.tolist()
    lengths = path_lengths(path, num_path, torch.minimum(num_nodes, query_start_loc.diff())).tolist()
    for r, (length, slot) in enumerate(zip(lengths, state_indices.tolist(), strict=True)):
        if length == 0 or not 0 < slot < state_kv.shape[0]:
            continue
        rows = starts[r] + path[r, :length].long()
        c = stash.c[rows].T
        weight = (c[:, -1:] - c).exp()[:, None, :]
        keys = stash.k[rows].float().permute(1, 2, 0).repeat_interleave(heads_per_key, 0)
        update = (weight * keys) @ stash.u[rows].float().transpose(0, 1)
        state_kv[slot] = (c[:, -1].exp()[:, None, None] * state_kv[slot].float() + update).to(state_kv.dtype)


@triton.jit
def _gdn_commit_kernel(
    c_ptr,  # [Tmax, HV]
    k_ptr,  # [Tmax, Hk, K]
    u_ptr,  # [Tmax, HV, V]
    state_ptr,  # [slots, HV, K, V]
    state_indices_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    path_ptr,  # [R, N]
    num_path_ptr,  # [R]
    state_indices_stride,
    state_stride_slot,
    state_stride_h,
    state_stride_k,
    state_stride_v,
    num_slots,
    N,
    HV: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    v_tile, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(state_indices_ptr + r * state_indices_stride).to(tl.int64)
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    n = tl.minimum(tl.load(num_nodes_ptr + r), tl.load(query_start_loc_ptr + r + 1) - first)
    path_ptr += r.to(tl.int64) * N
    length = load_path_length(path_ptr, tl.load(num_path_ptr + r), n, N, BLOCK_PATH)
    if (length == 0) | (slot <= 0) | (slot >= num_slots):
        return

    dim_k = tl.arange(0, BLOCK_K)
    dim_v = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = dim_k < K
    mask_v = dim_v < V
    state_ptr += slot * state_stride_slot + head * state_stride_h
    tile = state_ptr + dim_k[:, None] * state_stride_k + dim_v[None, :] * state_stride_v
    tile_mask = mask_k[:, None] & mask_v[None, :]

    c_leaf = tl.load(c_ptr + (first + tl.load(path_ptr + length - 1)) * HV + head)
    state = tl.exp(c_leaf) * tl.load(tile, mask=tile_mask, other=0.0).to(tl.float32)
    for at in range(0, length, BLOCK_N):
        step = at + tl.arange(0, BLOCK_N)
        on_path = step < length
        row = first + tl.load(path_ptr + step, mask=on_path, other=0)
        c = tl.load(c_ptr + row * HV + head, mask=on_path, other=0.0)
        weight = tl.where(on_path, tl.exp(c_leaf - c), 0.0)
        keys = tl.load(
            k_ptr + (row[:, None] * (HV // HEADS_PER_KEY) + head // HEADS_PER_KEY) * K + dim_k[None, :],
            mask=on_path[:, None] & mask_k[None, :],
            other=0.0,
        ).to(tl.float32)
        u = tl.load(
            u_ptr + (row[:, None] * HV + head) * V + dim_v[None, :],
            mask=on_path[:, None] & mask_v[None, :],
            other=0.0,
        ).to(tl.float32)
        state += tl.dot(tl.trans(weight[:, None] * keys), u, input_precision="ieee")
    tl.store(tile, state.to(state_ptr.dtype.element_ty), mask=tile_mask)


def gdn_tree_commit(
    stash: GdnStash,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    path: Tensor,
    num_path: Tensor,
    *,
    num_nodes: Tensor,
    state_layout: StateLayout,
    impl: Impl = "auto",
) -> None:
    """Commits the accepted path of every request to its recurrent state slot.

    stash, query_start_loc int32 [R+1], state_indices and num_nodes int32 [R]: those of `gdn_tree_verify`;
    state [slots, HV, K, V] ("kv") or [slots, HV, V, K] ("vk"), any strides, updated in place; path int32 [R,
    N] and num_path int32 [R] as `accepted_path` reads them. A request whose path is empty, or whose slot is
    <= 0 or out of range, changes nothing. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    heads, v_dim = stash.u.shape[1:]
    key_heads, k_dim = stash.k.shape[1:]
    requests, slots = path.shape
    state_kv = state_as_kv(state, state_layout)
    stash.check(key_heads, k_dim, heads, v_dim, device=state.device)
    expect("state (as [slots, HV, K, V])", state_kv, (None, heads, k_dim, v_dim), device=state.device)
    expect("state_indices", state_indices, (requests,), device=state.device, dtypes=(torch.int32,))
    expect_indices(
        state.device,
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("num_nodes", num_nodes, (requests,)),
        ("path", path, (requests, slots)),
        ("num_path", num_path, (requests,)),
    )
    if not use_triton(state, impl):
        gdn_tree_commit_reference(stash, state_kv, state_indices, query_start_loc, num_nodes, path, num_path)
        return
    block_v = min(32, max(16, triton.next_power_of_2(v_dim)))
    _gdn_commit_kernel[(triton.cdiv(v_dim, block_v), heads, requests)](
        stash.c, stash.k, stash.u, state_kv, state_indices, query_start_loc, num_nodes, path, num_path,
        state_indices.stride(0), *state_kv.stride(), state_kv.shape[0], slots,
        HV=heads,
        HEADS_PER_KEY=heads // key_heads,
        K=k_dim,
        V=v_dim,
        BLOCK_PATH=triton.next_power_of_2(slots),
        BLOCK_N=16,
        BLOCK_K=max(16, triton.next_power_of_2(k_dim)),
        BLOCK_V=block_v,
    )  # fmt: skip
