# SPDX-License-Identifier: Apache-2.0
"""Weaver's scores of the candidates of new nodes.

    score(c) = draft_logit(c) + R[c] · query,   query = norm(x) = x / rms(x) · weight + bias

Layout: rows x [R · n, r] of the head's last block; pool values fp32 and ids int64 [R, D, P] by mask position;
the residual table [V, r]. Scores fp32 [R, n, P], −inf where there is no candidate or no finite score.

Floor: P rows of the table a node, 2·P·r bytes in a 16-bit dtype (2 MB at P = 512, r = 2048). Programs of a
few candidates each spread one node's rows over the whole device, and gather them ahead of their turn where
`early` allows it; the query is recomputed in each of them (from a row that lies in L2) and, like the gathered
rows, never materialised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import expect
from vllm_weaver.kernels.frontier import Rows
from vllm_weaver.kernels.pdl import launch_options, take_turn

CANDIDATES = 8
"""Candidates of one program."""
_EPS = tl.constexpr(1e-6)


@triton.jit
def _scores_kernel(
    x_ptr,  # [R * n, K]
    norm_weight_ptr,  # [K]
    norm_bias_ptr,  # [K]
    table_ptr,  # [V, K]
    pool_values_ptr,  # [R, D, P]
    pool_ids_ptr,  # [R, D, P]
    positions_ptr,  # [R * n]
    places_ptr,  # [R * n]
    scores_ptr,  # [R * n, P] out
    n,
    D,
    P,
    V,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # everything but x may be read before the turn; one block is all of K
    PDL: tl.constexpr,
):
    if not EARLY:
        take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.program_id(1) * CANDIDATES + tl.arange(0, CANDIDATES)
    inside = candidate < tl.where(tl.load(places_ptr + row) >= 0, P, 0)
    pool = ((row // n) * D + tl.load(positions_ptr + row) - 1) * P + candidate
    ids = tl.load(pool_ids_ptr + pool, mask=inside, other=-1)
    known = (ids >= 0) & (ids < V)
    drafted = tl.load(pool_values_ptr + pool, mask=known, other=float("-inf"))
    k = tl.arange(0, BLOCK_K)
    line = table_ptr + ids[:, None] * K
    here = known[:, None] & (k < K)[None, :]
    if EARLY:
        lines = tl.load(line + k[None, :], mask=here, other=0.0)
        weight = tl.load(norm_weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        bias = tl.load(norm_bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        take_turn(PDL)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        query = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + _EPS) * weight + bias
        total = tl.sum(lines.to(tl.float32) * query[None, :], axis=1)
    else:
        squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            x = tl.load(x_ptr + row * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + _EPS)
        total = tl.zeros((CANDIDATES,), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            column = start + k
            mask = column < K
            x = tl.load(x_ptr + row * K + column, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(norm_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            query = x * scale * weight + tl.load(norm_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
            lines = tl.load(line + column[None, :], mask=known[:, None] & mask[None, :], other=0.0)
            total += tl.sum(lines.to(tl.float32) * query[None, :], axis=1)
    score = total + drafted
    score = tl.where(known & (tl.abs(score) < float("inf")), score, float("-inf"))
    tl.store(scores_ptr + row * P + candidate, score, mask=inside)


def candidate_scores(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    table: Tensor,
    pool_values: Tensor,
    pool_ids: Tensor,
    rows: Rows,
    *,
    early: bool = False,
) -> Tensor:
    """Scores fp32 [R, n, P] of the pool row `positions − 1` of each node; see the header.

    What a row without a node holds is undefined. Ids outside [0, V) are no candidates. early: the pool and
    the rows were complete before the launch before this one (see `pdl`), so that candidates can be gathered
    while that one runs."""
    num_requests, depth, pool_size = pool_values.shape
    num_rows, width = x.shape
    expect("norm_weight", norm_weight, (width,), device=x.device)
    expect("norm_bias", norm_bias, (width,), device=x.device)
    expect("table", table, (None, width), device=x.device)
    expect("pool_values", pool_values, (num_requests, depth, pool_size), device=x.device)
    expect("pool_ids", pool_ids, (num_requests, depth, pool_size), device=x.device, dtypes=(torch.int64,))
    expect("positions", rows.positions, (num_requests, num_rows // num_requests), device=x.device)
    for name, tensor in (("x", x), ("table", table), ("pool_values", pool_values), ("pool_ids", pool_ids)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    block_k = min(2048, triton.next_power_of_2(width))
    scores = torch.empty(*rows.places.shape, pool_size, dtype=torch.float32, device=x.device)
    _scores_kernel[(num_rows, triton.cdiv(pool_size, CANDIDATES))](
        x,
        norm_weight,
        norm_bias,
        table,
        pool_values,
        pool_ids,
        rows.positions,
        rows.places,
        scores,
        num_rows // num_requests,
        depth,
        pool_size,
        len(table),
        K=width,
        CANDIDATES=CANDIDATES,
        BLOCK_K=block_k,
        EARLY=early and block_k >= width,
        num_warps=4,
        **launch_options(x),
    )
    return scores
