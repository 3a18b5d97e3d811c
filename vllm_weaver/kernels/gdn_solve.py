# SPDX-License-Identifier: Apache-2.0
"""Second and third launch of the Gated DeltaNet tree verify: products of node pairs, then the solve.

Every node has the root above it. So the third launch first takes the committed state S0 over the root, one
step of the recurrence, and the tree hangs from that state S:

    rhs_i = beta_i (v_i - e^{c_i - c_0} S^T k_i)      for the nodes 1..n-1, in tiles

Of a budget of 32, 64 or 128 nodes that leaves whole tiles. With T_tt = (I + L_tt)^-1 - I, the second launch
makes

    L_ij = beta_i e^{c_i - c_j} (k_i . k_j)  (j a proper ancestor of i),   A_ij = e^{c_i - c_j} (q_i . k_j)

for every pair of tiles at once, T_tt in the place of L_tt. The third one holds a tile of S [K, BLOCK_V] and
goes through the nodes' tiles: what earlier tiles contribute is taken from the right-hand sides, then u_t =
rhs_t + T_tt rhs_t, in which the larger term is not rounded. All of it is products on tensor cores but for T
of 16 nodes: forward substitution in fp32 within one warp (two of them and the product between give T of 32).
A product form of the inverse cancels badly where keys repeat.

L and A are the only matrices of node pairs and lie in `GdnScratch`, whose columns start at node 1. Floor for
n nodes a value head: K V state elements, n (K + V) activations and n^2 elements of L and A read, n V outputs
and n V fp32 u written; 4 n K V + n^2 (2 K + 2 V) multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_weaver.kernels.gdn_dots import bf16_parts, dot_activations, dot_parts
from vllm_weaver.kernels.pdl import take_turn


@triton.jit
def _inverse(lower, PRECISION: tl.constexpr, TILE: tl.constexpr):
    """(I + lower)^-1 - I of a strictly lower triangular [TILE, TILE], TILE 16 or 32."""
    PIECE: tl.constexpr = 16
    PIECES: tl.constexpr = TILE // PIECE
    tl.static_assert(PIECES == 1 or PIECES == 2)
    tiles = tl.permute(tl.reshape(lower, (PIECES, PIECE, PIECES, PIECE)), (0, 2, 1, 3))
    block_i = tl.arange(0, PIECES)[:, None, None, None]
    block_j = tl.arange(0, PIECES)[None, :, None, None]
    diagonal = tl.sum(tl.where(block_i == block_j, tiles, 0.0), axis=1)
    row, column = tl.arange(0, PIECE)[None, :, None], tl.arange(0, PIECE)[None, None, :]
    inverse = tl.where((row == column) & (tl.arange(0, PIECES) >= 0)[:, None, None], 1.0, 0.0)
    for t in tl.static_range(0, PIECE - 1):  # row t is final once rows 0..t-1 have been subtracted from it
        solved = tl.sum(tl.where(row == t, inverse, 0.0), axis=1)
        factor = tl.sum(tl.where(column == t, diagonal, 0.0), axis=2)
        inverse -= factor[:, :, None] * solved[:, None, :]
    strict = tl.where(row == column, 0.0, inverse)
    if PIECES == 1:
        return tl.reshape(strict, (TILE, TILE))
    piece = tl.arange(0, PIECES)[:, None, None]
    upper_left = tl.sum(tl.where(piece == 0, inverse, 0.0), axis=0)
    lower_right = tl.sum(tl.where(piece == 1, inverse, 0.0), axis=0)
    below = tl.sum(tl.sum(tl.where(block_i > block_j, tiles, 0.0), axis=1), axis=0)
    below = tl.dot(below, upper_left, input_precision=PRECISION)
    below = -tl.dot(lower_right, below, input_precision=PRECISION)
    whole = tl.where(block_i == block_j, strict[:, None, :, :], 0.0)
    whole = tl.where(block_i > block_j, below[None, None, :, :], whole)
    return tl.reshape(tl.permute(whole, (0, 2, 1, 3)), (TILE, TILE))


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
    PDL: tl.constexpr,
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
    if 1 + tile_i * TILE >= n:
        take_turn(PDL)
        return
    in_tile = tl.arange(0, TILE)
    i, j = 1 + tile_i * TILE + in_tile, 1 + tile_j * TILE + in_tile
    dim = tl.arange(0, BLOCK_K)
    KEY_HEADS: tl.constexpr = HV // HEADS_PER_KEY
    at_i = (first + i) * KEY_HEADS + head // HEADS_PER_KEY
    at_j = (first + j) * KEY_HEADS + head // HEADS_PER_KEY
    mask_i, mask_j, mask_k = i < n, j < n, dim < K
    tile_mask_i = mask_i[:, None] & mask_k[None, :]
    words = ancestors_ptr + (r.to(tl.int64) * N + i[:, None]) * MASK_WORDS + (j // 32)[None, :]
    bits = tl.load(words, mask=mask_i[:, None] & mask_j[None, :], other=0)
    take_turn(PDL)
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

    seen = ((bits >> (j & 31)[None, :]) & 1) != 0
    decay = tl.exp(tl.where(seen, c_i[:, None] - c_j[None, :], float("-inf"))) * k_scale_j[None, :]
    lower = decay * (beta * k_scale_i)[:, None] * dot_activations(keys_i, keys_j, PRECISION, PARTS)
    attend = decay * q_scale_i[:, None] * dot_activations(queries_i, keys_j, PRECISION, PARTS)
    at = (head.to(tl.int64) * rows + first + i)[:, None] * PITCH + (tile_j * TILE + in_tile)[None, :]
    tl.store(attend_ptr + at, attend, mask=mask_i[:, None])
    if tile_i == tile_j:
        lower = _inverse(tl.where(in_tile[:, None] > in_tile[None, :], lower, 0.0), PRECISION, TILE)
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
    PULL: tl.constexpr,  # solved nodes whose contributions are taken at a time
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AHEAD: tl.constexpr,  # what needs no L or A of the launch before, which takes its turn, runs beside it
    PDL: tl.constexpr,
):
    v_tile, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(num_nodes_ptr + r)
    if n <= 0:
        return
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    length = tl.minimum(tl.load(query_start_loc_ptr + r + 1) - first, N).to(tl.int32)
    n = tl.minimum(n, length)
    in_tile = tl.arange(0, TILE)
    dim_k = tl.arange(0, BLOCK_K)
    dim_v = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = dim_k < K, dim_v < V
    KEY_HEADS: tl.constexpr = HV // HEADS_PER_KEY
    key_head = head // HEADS_PER_KEY
    lower_ptr += (head.to(tl.int64) * rows + first) * PITCH
    attend_ptr += (head.to(tl.int64) * rows + first) * PITCH
    u_ptr += (first * HV + head) * V
    out_ptr += first * out_stride_t + head * out_stride_h

    slot = tl.load(state_indices_ptr + r * state_indices_stride).to(tl.int64)
    has_state = (slot > 0) & (slot < num_slots)
    slot = tl.where(has_state, slot, 0)
    state = tl.load(
        state_ptr
        + slot * state_stride_slot
        + head * state_stride_h
        + dim_k[:, None] * state_stride_k
        + dim_v[None, :] * state_stride_v,
        mask=(dim_k < tl.where(has_state, K, 0))[:, None] & mask_v[None, :],
        other=0.0,
    ).to(tl.float32)
    if not AHEAD:
        take_turn(PDL)  # the state is not another launch's work

    # The root, one step of the recurrence. Of an invalid root k, v and q are zero.
    at_root = first * KEY_HEADS + key_head
    key = tl.load(k_ptr + at_root * K + dim_k, mask=mask_k, other=0.0).to(tl.float32)
    query = tl.load(q_ptr + at_root * K + dim_k, mask=mask_k, other=0.0).to(tl.float32)
    key *= tl.load(k_scale_ptr + at_root)
    query *= tl.load(q_scale_ptr + at_root)
    c_root = tl.load(c_ptr + first * HV + head)
    value = tl.load(v_ptr + (first * HV + head) * V + dim_v, mask=mask_v, other=0.0).to(tl.float32)
    state *= tl.exp(c_root)
    u_root = tl.load(beta_ptr + first * HV + head) * (value - tl.sum(state * key[:, None], axis=0))
    output_root = tl.sum(state * query[:, None], axis=0) + tl.sum(key * query, axis=0) * u_root
    tl.store(u_ptr + dim_v, u_root, mask=mask_v)
    tl.store(out_ptr + dim_v, output_root.to(out_ptr.dtype.element_ty), mask=mask_v)
    state += key[:, None] * u_root[None, :]
    if PARTS > 0:
        parts = bf16_parts(state)

    num_tiles = tl.cdiv(n - 1, TILE)
    for tile in range(0, num_tiles):
        i = 1 + tile * TILE + in_tile
        in_tree = i < n
        at_key = (first + i) * KEY_HEADS + key_head
        at_value = (first + i) * HV + head
        tile_k = in_tree[:, None] & mask_k[None, :]
        tile_v = in_tree[:, None] & mask_v[None, :]
        queries = tl.load(q_ptr + at_key[:, None] * K + dim_k[None, :], mask=tile_k, other=0.0)
        keys = tl.load(k_ptr + at_key[:, None] * K + dim_k[None, :], mask=tile_k, other=0.0)
        values = tl.load(v_ptr + at_value[:, None] * V + dim_v[None, :], mask=tile_v, other=0.0)
        q_scale = tl.load(q_scale_ptr + at_key, mask=in_tree, other=0.0)
        k_scale = tl.load(k_scale_ptr + at_key, mask=in_tree, other=0.0)
        # Never above 1 below a root; an invalid node has c = 0 and takes no part.
        from_root = tl.exp(tl.minimum(tl.load(c_ptr + at_value, mask=in_tree, other=0.0) - c_root, 0.0))
        beta = tl.load(beta_ptr + at_value, mask=in_tree, other=0.0)
        if PARTS > 0:
            key_state = dot_parts(keys, parts, 3)  # the state keeps what comes of it
            query_state = dot_parts(queries, parts, PARTS)
        else:
            key_state = tl.dot(keys.to(tl.float32), state, input_precision=PRECISION)
            query_state = tl.dot(queries.to(tl.float32), state, input_precision=PRECISION)
        rhs = beta[:, None] * (values.to(tl.float32) - (from_root * k_scale)[:, None] * key_state)
        output = (from_root * q_scale)[:, None] * query_state

        if AHEAD:
            take_turn(PDL)  # returns at once after the first tile
        own = i[:, None] * PITCH + (tile * TILE + in_tile)[None, :]
        inverse = tl.load(lower_ptr + own, mask=in_tree[:, None], other=0.0)
        own_attend = tl.load(attend_ptr + own, mask=in_tree[:, None], other=0.0)
        for at in range(0, tile * TILE, PULL):
            j = at + tl.arange(0, PULL)
            solved = j < tile * TILE
            pairs = i[:, None] * PITCH + j[None, :]
            pairs_mask = in_tree[:, None] & solved[None, :]
            lower = tl.load(lower_ptr + pairs, mask=pairs_mask, other=0.0)
            attend = tl.load(attend_ptr + pairs, mask=pairs_mask, other=0.0)
            u = tl.load(
                u_ptr + (1 + j[:, None]) * (HV * V) + dim_v[None, :],
                mask=solved[:, None] & mask_v[None, :],
                other=0.0,
            )
            rhs -= tl.dot(lower, u, input_precision=PRECISION)
            output += tl.dot(attend, u, input_precision=PRECISION)

        u = rhs + tl.dot(inverse, rhs, input_precision=PRECISION)
        tl.store(u_ptr + i[:, None] * (HV * V) + dim_v[None, :], u, mask=tile_v)
        output += tl.dot(own_attend, u, input_precision=PRECISION)
        tl.store(
            out_ptr + i[:, None] * out_stride_t + dim_v[None, :],
            output.to(out_ptr.dtype.element_ty),
            mask=(i < length)[:, None] & mask_v[None, :],
        )
        tl.debug_barrier()  # later tiles read u back

    if AHEAD:
        take_turn(PDL)  # a root alone has not waited yet
    for tile in range(num_tiles, tl.cdiv(length - 1, TILE)):
        i = 1 + tile * TILE + in_tile
        tl.store(
            out_ptr + i[:, None] * out_stride_t + dim_v[None, :],
            tl.zeros([TILE, BLOCK_V], dtype=out_ptr.dtype.element_ty),
            mask=(i < length)[:, None] & mask_v[None, :],
        )
