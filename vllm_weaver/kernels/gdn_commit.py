# SPDX-License-Identifier: Apache-2.0
"""Moves the Gated DeltaNet states of all layers to the leaf of each request's accepted path, in one launch.

For the leaf l and the stash of the verify pass (`gdn_tree`), per value head, in fp32, k normalised:

    S <- e^{c_l} S + sum_{j on path} e^{c_l - c_j} k_j u_j^T

Buffers: states [slots, HV, K, V] or transposed, one tensor a layer, updated in place through a `LayerTable`;
stash rows are the packed rows of the step. No intermediate state is materialised.

Floor for a path of p nodes a layer: HV K V state elements read and written, p (HV + Hk K + HV V) stash
elements read; p K V multiply-adds a value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.accepted_path import load_path_length, path_lengths
from vllm_weaver.kernels.common import Impl, expect, expect_indices, use_triton
from vllm_weaver.kernels.gdn_buffers import (
    FLOATS,
    TL_DTYPES,
    GdnShape,
    GdnStash,
    LayerTable,
    StateLayout,
    load_layer_slot,
    state_as_kv,
)
from vllm_weaver.kernels.gdn_dots import bf16_parts, dot_options, dot_parts


def gdn_tree_commit_reference(
    stash: GdnStash,
    state_kv: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    path: Tensor,
    num_path: Tensor,
) -> None:
    """`gdn_tree_commit` of one layer in plain PyTorch, fp32, a loop over requests."""
    heads_per_key = stash.u.shape[1] // stash.k.shape[1]
    starts = query_start_loc.tolist()
    lengths = path_lengths(path, num_path, torch.minimum(num_nodes, query_start_loc.diff())).tolist()
    for r, (length, slot) in enumerate(zip(lengths, state_indices.tolist(), strict=True)):
        if length == 0 or not 0 < slot < state_kv.shape[0]:
            continue
        rows = starts[r] + path[r, :length].long()
        c = stash.c[rows].T
        weight = (c[:, -1:] - c).exp()[:, None, :]
        keys = stash.k[rows].float() * stash.k_scale[rows][..., None]
        keys = keys.permute(1, 2, 0).repeat_interleave(heads_per_key, 0)
        update = (weight * keys) @ stash.u[rows].transpose(0, 1)
        state_kv[slot] = (c[:, -1].exp()[:, None, None] * state_kv[slot].float() + update).to(state_kv.dtype)


@triton.jit
def _load_block(
    path_ptr,
    c_ptr,
    k_scale_ptr,
    k_ptr,
    u_ptr,
    first,  # row of the layer's and the request's node 0
    n,
    N,
    step,  # places on the path
    head,
    dim_k,
    dim_v,
    HV: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """c and k_scale [places], keys [K, places] and u [places, V] of the nodes there; of some node of the tree
    where there is none."""
    node = tl.load(path_ptr + step, mask=step < N, other=0)
    row = first + tl.minimum(tl.maximum(node, 0), n - 1)
    key = row * (HV // HEADS_PER_KEY) + head // HEADS_PER_KEY
    c = tl.load(c_ptr + row * HV + head)
    scale = tl.load(k_scale_ptr + key)
    keys = tl.load(k_ptr + key[None, :] * K + dim_k[:, None], mask=(dim_k < K)[:, None], other=0.0)
    at = (row[:, None] * HV + head) * V + dim_v[None, :]
    return c, scale, keys, tl.load(u_ptr + at, mask=(dim_v < V)[None, :], other=0.0)


@triton.jit
def _add_writes(state, c_leaf, c, scale, keys, u, on_path, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """state + the sum over the places on the path of e^{c_leaf - c} k u^T."""
    # Not only zero weights: what a node off the path holds, NaN included, must not reach the state.
    weight = tl.exp(tl.where(on_path, c_leaf - c, 0.0)) * scale
    u = tl.where(on_path[:, None], weight[:, None] * u, 0.0)
    keys = tl.where(on_path[None, :], keys, 0.0)
    if PARTS > 0:
        return state + dot_parts(keys, bf16_parts(u), PARTS)
    return state + tl.dot(keys.to(tl.float32), u, input_precision=PRECISION)


@triton.jit
def _gdn_commit_kernel(
    c_ptr,  # [layers, rows, HV]
    k_ptr,  # [layers, rows, Hk, K]
    k_scale_ptr,  # [layers, rows, Hk]
    u_ptr,  # [layers, rows, HV, V]
    pointers_ptr,  # [layers] addresses of states [slots, HV, K, V]
    index_pointers_ptr,  # [layers] addresses of state indices
    index_strides_ptr,  # [layers]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    path_ptr,  # [R, N]
    num_path_ptr,  # [R]
    state_stride_slot,
    state_stride_h,
    state_stride_k,
    state_stride_v,
    num_slots,
    rows,
    layers,
    N,
    HV: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    v_tile, head = tl.program_id(0), tl.program_id(1)
    layer, r = tl.program_id(2) % layers, tl.program_id(2) // layers
    n = tl.load(num_nodes_ptr + r)
    slot = load_layer_slot(index_pointers_ptr, index_strides_ptr, layer, r)
    if (n <= 0) | (slot <= 0) | (slot >= num_slots):
        return

    dim_k = tl.arange(0, BLOCK_K)
    dim_v = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = dim_k < K, dim_v < V
    state_ptr = tl.load(pointers_ptr + layer).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        state_ptr = tl.multiple_of(state_ptr, 16)
    state_ptr += slot * state_stride_slot + head * state_stride_h
    tile = state_ptr + dim_k[:, None] * state_stride_k + dim_v[None, :] * state_stride_v
    tile_mask = mask_k[:, None] & mask_v[None, :]
    before = tl.load(tile, mask=tile_mask, other=0.0)  # first of all: the path is walked while it arrives

    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    n = tl.minimum(n, (tl.load(query_start_loc_ptr + r + 1) - first).to(tl.int32))
    if n <= 0:
        return
    path_ptr += r.to(tl.int64) * N
    first += layer.to(tl.int64) * rows
    step = tl.arange(0, BLOCK_N)
    # Also before the path's length is known: most paths end within the first block, and what is loaded for
    # places behind the end (of some node of the tree) is not used.
    c, scale, keys, u = _load_block(
        path_ptr, c_ptr, k_scale_ptr, k_ptr, u_ptr, first, n, N, step, head, dim_k, dim_v,
        HV, HEADS_PER_KEY, K, V,
    )  # fmt: skip
    length = load_path_length(path_ptr, tl.load(num_path_ptr + r), n, N, BLOCK_PATH)
    if length == 0:
        return
    c_leaf = tl.sum(tl.where(step == length - 1, c, 0.0), axis=0)
    if length > BLOCK_N:
        c_leaf = tl.load(c_ptr + (first + tl.load(path_ptr + length - 1)) * HV + head)
    state = tl.exp(c_leaf) * before.to(tl.float32)
    state = _add_writes(state, c_leaf, c, scale, keys, u, step < length, PRECISION, PARTS)
    for at in range(BLOCK_N, length, BLOCK_N):
        c, scale, keys, u = _load_block(
            path_ptr, c_ptr, k_scale_ptr, k_ptr, u_ptr, first, n, N, at + step, head, dim_k, dim_v,
            HV, HEADS_PER_KEY, K, V,
        )  # fmt: skip
        state = _add_writes(state, c_leaf, c, scale, keys, u, at + step < length, PRECISION, PARTS)
    tl.store(tile, state.to(DTYPE), mask=tile_mask)


def gdn_tree_commit(
    stash: GdnStash,
    layers: LayerTable,
    query_start_loc: Tensor,
    path: Tensor,
    num_path: Tensor,
    *,
    num_nodes: Tensor,
    state_layout: StateLayout,
    impl: Impl = "auto",
    block_v: int = 16,
    num_warps: int = 2,
) -> None:
    """Commits the accepted path of every request to its recurrent state slot in every layer.

    stash: of all layers, [layers, rows, ...]; layers: the states [slots, HV, K, V] ("kv") or [slots, HV, V,
    K] ("vk"), any strides, updated in place, and their index columns; query_start_loc int32 [R+1], num_nodes
    int32 [R] as for `gdn_tree_verify`; path int32 [R, N] and num_path int32 [R] as `accepted_path` reads
    them. A request whose path is empty, or whose slot is <= 0 or out of range, changes nothing. Raises
    `ValueError` for shapes, dtypes or devices that do not fit.
    """
    shape = GdnShape(*stash.k.shape[2:], *stash.u.shape[2:])
    count, rows = len(layers.states), stash.c.shape[1]
    requests, slots = path.shape
    states = [state_as_kv(state, state_layout) for state in layers.states]
    state, device = states[0], states[0].device
    stash.check((count, rows), shape, device=device)
    expected = (None, shape.heads, shape.k_dim, shape.v_dim)
    expect("states (as [slots, HV, K, V])", state, expected, device=device, dtypes=FLOATS)
    layers.check_requests(requests)
    expect_indices(
        device,
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("num_nodes", num_nodes, (requests,)),
        ("path", path, (requests, slots)),
        ("num_path", num_path, (requests,)),
    )
    if not use_triton(state, impl):
        for i, (state, indices) in enumerate(zip(states, layers.indices, strict=True)):
            step = (indices[:requests], query_start_loc, num_nodes, path, num_path)
            gdn_tree_commit_reference(stash.layer(i), state, *step)
        return
    block_v = min(block_v, max(16, triton.next_power_of_2(shape.v_dim)))
    _gdn_commit_kernel[(triton.cdiv(shape.v_dim, block_v), shape.heads, count * requests)](
        stash.c, stash.k, stash.k_scale, stash.u,
        layers.pointers, layers.index_pointers, layers.index_strides,
        query_start_loc, num_nodes, path, num_path,
        *state.stride(), state.shape[0], rows, count, slots,
        HV=shape.heads,
        HEADS_PER_KEY=shape.heads // shape.key_heads,
        K=shape.k_dim,
        V=shape.v_dim,
        DTYPE=TL_DTYPES[state.dtype],
        ALIGNED=layers.aligned,
        **dot_options(device, stash.k.dtype, "tf32x3"),
        BLOCK_PATH=triton.next_power_of_2(slots),
        BLOCK_N=16,
        BLOCK_K=max(16, triton.next_power_of_2(shape.k_dim)),
        BLOCK_V=block_v,
        num_warps=num_warps,
    )  # fmt: skip
