# SPDX-License-Identifier: Apache-2.0
"""Second and third launch of the Gated DeltaNet tree verify: products of node pairs, then the solve.

With the diagonal tiles T_tt = (I + L_tt)^-1 of 16 nodes, the second launch makes

    L_ij = beta_i e^{c_i - c_j} (k_i . k_j)  (j a proper ancestor of i),   A_ij = e^{c_i - c_j} (q_i . k_j)

for every pair of tiles at once, T_tt in the place of L_tt. The third one holds the committed state's tile
[K, BLOCK_V] and a block of right-hand sides beta_i (v_i - e^{c_i} S0^T k_i), takes what earlier blocks
contribute, and then goes through the block's tiles: u_t = T_tt rhs_t, rhs -= L_{:,t} u_t, out += A_{:,t} u_t.
All of it is products on tensor cores but for T, which is forward substitution in fp32 within one warp: a
product form of the inverse cancels badly where keys repeat.

L and A are the only matrices of node pairs and lie in `GdnScratch`. Floor for n nodes a value head: K V state
elements, n (K + V) activations and n^2 elements of L and A read, n V outputs and n V fp32 u written;
4 n K V + n^2 (2 K + 2 V) multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_weaver.kernels.gdn_dots import bf16_parts, dot_activations, dot_parts


@triton.jit
def gdn_pairs_kernel(
    q_ptr,  # [rows, HV / HEADS_PER_KEY, K]
    k_ptr,  # [rows, HV / HEADS_PER_KEY, K]
    q_scale_ptr,  # [rows, HV / HEADS_PER_KEY]
    k_scale_ptr,  # [rows, HV / HEADS_PER_KEY]
    c_ptr,  # [rows, HV]
    beta_ptr,  # [rows, HV]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    ancestors_ptr,  # [R, N, MASK_WORDS]
    lower_ptr,  # [HV, rows, PITCH]
    attend_ptr,  # [HV, rows, PITCH]
    rows,
    N,
    MASK_WORDS,
    PITCH: tl.constexpr,
    HV: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head, r = tl.program_id(0), tl.program_id(2)
    pair = tl.program_id(1)
    n = tl.load(num_nodes_ptr + r)
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    n = tl.minimum(n, tl.minimum(tl.load(query_start_loc_ptr + r + 1) - first, N).to(tl.int32))
    # The pair-th entry of the lower triangle by rows; the root may be off by one when it is rounded.
    tile_i = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    tile_i = tl.where(tile_i * (tile_i + 1) // 2 > pair, tile_i - 1, tile_i)
    tile_i = tl.where((tile_i + 1) * (tile_i + 2) // 2 <= pair, tile_i + 1, tile_i)
    tile_j = pair - tile_i * (tile_i + 1) // 2
    if tile_i * TILE >= n:
        return
    in_tile = tl.arange(0, TILE)
    i, j = tile_i * TILE + in_tile, tile_j * TILE + in_tile
    dim = tl.arange(0, BLOCK_K)
    KEY_HEADS: tl.constexpr = HV // HEADS_PER_KEY
    at_i = (first + i) * KEY_HEADS + head // HEADS_PER_KEY
    at_j = (first + j) * KEY_HEADS + head // HEADS_PER_KEY
    mask_i, mask_j, mask_k = i < n, j < n, dim < K
    tile_mask_i = mask_i[:, None] & mask_k[None, :]
    keys_i = tl.load(k_ptr + at_i[:, None] * K + dim[None, :], mask=tile_mask_i, other=0.0)
    queries_i = tl.load(q_ptr + at_i[:, None] * K + dim[None, :], mask=tile_mask_i, other=0.0)
    keys_j = tl.load(
        k_ptr + at_j[None, :] * K + dim[:, None], mask=mask_j[None, :] & mask_k[:, None], other=0.0
    )
    k_scale_i = tl.load(k_scale_ptr + at_i, mask=mask_i, other=0.0)
    q_scale_i = tl.load(q_scale_ptr + at_i, mask=mask_i, other=0.0)
    k_scale_j = tl.load(k_scale_ptr + at_j, mask=mask_j, other=0.0)
    c_i = tl.load(c_ptr + (first + i) * HV + head, mask=mask_i, other=0.0)
    c_j = tl.load(c_ptr + (first + j) * HV + head, mask=mask_j, other=0.0)
    beta = tl.load(beta_ptr + (first + i) * HV + head, mask=mask_i, other=0.0)
    words = ancestors_ptr + (r.to(tl.int64) * N + i) * MASK_WORDS + tile_j * TILE // 32
    bits = tl.load(words, mask=mask_i, other=0)

    seen = ((bits[:, None] >> (j & 31)[None, :]) & 1) != 0
    decay = tl.exp(tl.where(seen, c_i[:, None] - c_j[None, :], float("-inf"))) * k_scale_j[None, :]
    attend = decay * q_scale_i[:, None] * dot_activations(queries_i, keys_j, PRECISION, PARTS)
    lower = decay * (beta * k_scale_i)[:, None] * dot_activations(keys_i, keys_j, PRECISION, PARTS)
    at = (head.to(tl.int64) * rows + first + i)[:, None] * PITCH + j[None, :]
    tl.store(attend_ptr + at, attend, mask=mask_i[:, None])
    if tile_i == tile_j:
        lower = tl.where(in_tile[:, None] > in_tile[None, :], lower, 0.0)
        inverse = tl.where(in_tile[:, None] == in_tile[None, :], 1.0, 0.0)
        for t in tl.static_range(0, TILE - 1):  # row t is final once rows 0..t-1 have been subtracted from it
            solved = tl.sum(tl.where(in_tile[:, None] == t, inverse, 0.0), axis=0)
            column = tl.sum(tl.where(in_tile[None, :] == t, lower, 0.0), axis=1)
            inverse -= column[:, None] * solved[None, :]
        lower = inverse
    tl.store(lower_ptr + at, lower, mask=mask_i[:, None])


@triton.jit
def gdn_solve_kernel(
    q_ptr,  # [rows, HV / HEADS_PER_KEY, K]
    k_ptr,  # [rows, HV / HEADS_PER_KEY, K]
    q_scale_ptr,  # [rows, HV / HEADS_PER_KEY]
    k_scale_ptr,  # [rows, HV / HEADS_PER_KEY]
    v_ptr,  # [rows, HV, V]
    c_ptr,  # [rows, HV]
    beta_ptr,  # [rows, HV]
    lower_ptr,  # [HV, rows, PITCH]
    attend_ptr,  # [HV, rows, PITCH]
    state_ptr,  # [slots, HV, K, V]
    state_indices_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    out_ptr,  # [T, HV, V]
    u_ptr,  # [rows, HV, V]
    state_indices_stride,
    state_stride_slot,
    state_stride_h,
    state_stride_k,
    state_stride_v,
    out_stride_t,
    out_stride_h,
    num_slots,
    rows,
    N,
    PITCH: tl.constexpr,
    HV: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes whose right-hand sides are held at a time, a multiple of TILE
    PULL: tl.constexpr,  # solved nodes whose contributions are taken at a time
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    v_tile, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(num_nodes_ptr + r)
    if n <= 0:
        return
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    length = tl.minimum(tl.load(query_start_loc_ptr + r + 1) - first, N).to(tl.int32)
    n = tl.minimum(n, length)
    in_block = tl.arange(0, BLOCK)
    in_tile = tl.arange(0, TILE)
    dim_k = tl.arange(0, BLOCK_K)
    dim_v = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = dim_k < K, dim_v < V
    KEY_HEADS: tl.constexpr = HV // HEADS_PER_KEY
    TILES: tl.constexpr = BLOCK // TILE
    lower_ptr += (head.to(tl.int64) * rows + first) * PITCH
    attend_ptr += (head.to(tl.int64) * rows + first) * PITCH
    u_ptr += (first * HV + head) * V
    out_ptr += first * out_stride_t + head * out_stride_h

    slot = tl.load(state_indices_ptr + r * state_indices_stride).to(tl.int64)
    has_state = (slot > 0) & (slot < num_slots)
    slot = tl.where(has_state, slot, 0)
    start = tl.load(
        state_ptr
        + slot * state_stride_slot
        + head * state_stride_h
        + dim_k[:, None] * state_stride_k
        + dim_v[None, :] * state_stride_v,
        mask=(dim_k < tl.where(has_state, K, 0))[:, None] & mask_v[None, :],
        other=0.0,
    ).to(tl.float32)
    if PARTS > 0:
        parts = bf16_parts(start)

    num_blocks = tl.cdiv(n, BLOCK)
    for block in range(0, num_blocks):
        i = block * BLOCK + in_block
        in_tree = i < n
        at_key = (first + i) * KEY_HEADS + head // HEADS_PER_KEY
        at_value = (first + i) * HV + head
        tile_k = in_tree[:, None] & mask_k[None, :]
        tile_v = in_tree[:, None] & mask_v[None, :]
        queries = tl.load(q_ptr + at_key[:, None] * K + dim_k[None, :], mask=tile_k, other=0.0)
        keys = tl.load(k_ptr + at_key[:, None] * K + dim_k[None, :], mask=tile_k, other=0.0)
        values = tl.load(v_ptr + at_value[:, None] * V + dim_v[None, :], mask=tile_v, other=0.0)
        q_scale = tl.load(q_scale_ptr + at_key, mask=in_tree, other=0.0)
        k_scale = tl.load(k_scale_ptr + at_key, mask=in_tree, other=0.0)
        from_start = tl.exp(tl.load(c_ptr + at_value, mask=in_tree, other=0.0))
        beta = tl.load(beta_ptr + at_value, mask=in_tree, other=0.0)
        if PARTS > 0:
            key_start = dot_parts(keys, parts, PARTS)
            query_start = dot_parts(queries, parts, PARTS)
        else:
            key_start = tl.dot(keys.to(tl.float32), start, input_precision=PRECISION)
            query_start = tl.dot(queries.to(tl.float32), start, input_precision=PRECISION)
        rhs = beta[:, None] * (values.to(tl.float32) - (from_start * k_scale)[:, None] * key_start)
        output = (from_start * q_scale)[:, None] * query_start

        for at in range(0, block * BLOCK, PULL):
            j = at + tl.arange(0, PULL)
            solved = j < block * BLOCK
            pairs = i[:, None] * PITCH + j[None, :]
            lower = tl.load(lower_ptr + pairs, mask=in_tree[:, None] & solved[None, :], other=0.0)
            attend = tl.load(attend_ptr + pairs, mask=in_tree[:, None] & solved[None, :], other=0.0)
            u = tl.load(
                u_ptr + j[:, None] * (HV * V) + dim_v[None, :],
                mask=solved[:, None] & mask_v[None, :],
                other=0.0,
            )
            rhs -= tl.dot(lower, u, input_precision=PRECISION)
            output += tl.dot(attend, u, input_precision=PRECISION)

        for t in range(0, tl.minimum(TILES, tl.cdiv(n - block * BLOCK, TILE))):
            j = block * BLOCK + t * TILE + in_tile
            inverse = tl.load(lower_ptr + j[:, None] * PITCH + j[None, :], mask=(j < n)[:, None], other=0.0)
            if TILES == 1:
                own = rhs
            else:
                which = tl.arange(0, TILES)[:, None, None]
                own = tl.sum(tl.where(which == t, tl.reshape(rhs, [TILES, TILE, BLOCK_V]), 0.0), axis=0)
            u = tl.dot(inverse, own, input_precision=PRECISION)
            tl.store(
                u_ptr + j[:, None] * (HV * V) + dim_v[None, :], u, mask=(j < n)[:, None] & mask_v[None, :]
            )
            pairs = i[:, None] * PITCH + j[None, :]
            below = in_tree & (in_block // TILE >= t)
            attend = tl.load(attend_ptr + pairs, mask=below[:, None], other=0.0)
            output += tl.dot(attend, u, input_precision=PRECISION)
            if TILES > 1:
                below = in_tree & (in_block // TILE > t)
                lower = tl.load(lower_ptr + pairs, mask=below[:, None], other=0.0)
                rhs -= tl.dot(lower, u, input_precision=PRECISION)
        tl.store(
            out_ptr + i[:, None] * out_stride_t + dim_v[None, :],
            output.to(out_ptr.dtype.element_ty),
            mask=(i < length)[:, None] & mask_v[None, :],
        )
        tl.debug_barrier()  # later blocks read u back

    for block in range(num_blocks, tl.cdiv(length, BLOCK)):
        i = block * BLOCK + in_block
        tl.store(
            out_ptr + i[:, None] * out_stride_t + dim_v[None, :],
            tl.zeros([BLOCK, BLOCK_V], dtype=out_ptr.dtype.element_ty),
            mask=(i < length)[:, None] & mask_v[None, :],
        )
