# SPDX-License-Identifier: Apache-2.0
"""Splits of tree attention: which positions a split has, and the second launch, which joins their outputs.

Per head of a node, with o_s and l_s the output and the log2 of the sum of weights of split s:

    o = sum_s 2^(l_s - max l) o_s / sum_s 2^(l_s - max l)

Buffers: see `tree_attention`. Floor: the outputs of the splits that hold positions, fp32, read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_weaver.kernels.pdl import wait_for_inputs


@triton.jit
def load_request(
    query_start_loc_ptr,
    seq_lens_ptr,
    num_nodes_ptr,
    r,
    R,
    N,
    capacity,
    shares,
    max_splits,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Request r: its first row, rows, nodes (0: nothing to do), base, tiles of positions and tiles a split.

    A split is as long as an even division of all trees' positions into `shares`, so that a long request among
    short ones gets more of the splits. Both kernels work this out for themselves.
    """
    first = tl.load(query_start_loc_ptr + r)
    length = tl.load(query_start_loc_ptr + r + 1) - first
    base = tl.minimum(tl.load(seq_lens_ptr + r) - length, 1 << 30)  # no position overflows
    n = tl.load(num_nodes_ptr + r)
    every = tl.arange(0, BLOCK_R)
    is_tree = tl.load(num_nodes_ptr + every, mask=every < R, other=0) > 0
    reach = tl.load(seq_lens_ptr + every, mask=(every < R) & is_tree, other=0)
    reach = tl.minimum(tl.maximum(reach, 0), capacity)

    length = tl.minimum(length, N)
    n = tl.where(base < 0, 0, tl.minimum(n, length))
    prefix = tl.minimum(tl.maximum(base, 0), capacity)
    tiles = tl.cdiv(prefix, BLOCK_P) + tl.cdiv(n, BLOCK_P)
    step_tiles = tl.sum(tl.cdiv(reach, BLOCK_P).to(tl.int64))
    per_split = tl.maximum(tl.cdiv(step_tiles, shares).to(tl.int32), MIN_TILES)
    per_split = tl.maximum(per_split, tl.cdiv(tiles, max_splits))
    return first.to(tl.int64), length, n, base, tiles, per_split


@triton.jit(do_not_specialize=["R", "N", "WORDS", "capacity", "shares", "max_splits"])
def combine_kernel(
    partial_ptr,  # [R, N, Hq, max_splits, D]
    partial_lse_ptr,  # [R, N, Hq, max_splits]
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    num_nodes_ptr,  # [R]
    ancestors_ptr,  # [R, N, WORDS]
    out_ptr,  # [T, Hq, D]
    out_stride_t,
    out_stride_h,
    R,
    N,
    WORDS,
    capacity,
    shares,
    max_splits,
    D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits' outputs of one head of one node, weighted by their sums."""
    head, node, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, length, n, _, tiles, per_split = load_request(
        query_start_loc_ptr, seq_lens_ptr, num_nodes_ptr, r, R, N, capacity, shares, max_splits,
        BLOCK_R, BLOCK_P, MIN_TILES,
    )  # fmt: skip
    wait_for_inputs(PDL)  # every program: what follows this kernel takes its end for that of the one before
    if (n <= 0) | (node >= length) | (tiles <= per_split):
        return
    row = r.to(tl.int64) * N + node
    own_word = tl.load(ancestors_ptr + row * WORDS + (node >> 5), mask=node < n, other=0)
    valid = ((own_word >> (node & 31)) & 1) != 0
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    written = split * per_split < tl.where(valid, tiles, 0)
    slot = (row * tl.num_programs(0) + head) * max_splits + split
    lse = tl.load(partial_lse_ptr + slot, mask=written, other=float("-inf"))
    parts = tl.load(
        partial_ptr + slot[:, None] * D + dim[None, :],
        mask=written[:, None] & (dim < D)[None, :],
        other=0.0,
    )
    largest = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    output = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(
        out_ptr + (first + node) * out_stride_t + head * out_stride_h + dim,
        output.to(out_ptr.dtype.element_ty),
        mask=dim < D,
    )
