# SPDX-License-Identifier: Apache-2.0
"""The Weaver head's matrix products for a few rows: every weight is streamed once, the rest rides along.

    project:  out = [norm](x) · Wᵀ + bias [+ residual]                  proposal_in, o_proj, down_proj
    qkv:      q, k, v = norm(x) · Wᵀ; q and k rotated, k and v written to the cache
    gate_up:  out = silu(g) · u with (g, u) = norm(x) · Wᵀ + bias

    norm(x) = x / rms(x) · weight + shift, and as both factors commute with the product,
    norm(x) · Wᵀ = ((x · weight) · Wᵀ) / rms(x) + W · shift

so that one pass over x gives product and rms; `W · shift` is folded into the fp32 bias once, at load.

Layout: x [M, K], or a table [*, K] with a row index a row; W [N, K], K a multiple of 16; the cache is [2, R,
S, H, h], keys then values, with the D + 1 prompt rows before the node slots. Products in the dtype of the
weights with fp32 accumulation.

Floor: 2·N·K bytes of weights in a 16-bit dtype; x is read once a program (from L2), M <= 32 rows are one
tile. A program owns 16 to 64 rows of W (two groups for a rotated or gated pair) and all of K, which its warps
share out as the batch of a three-dimensional product: partial sums never leave the program. It uses at most
99 KiB of shared memory. Neither normed rows, unrotated keys nor the gate are ever materialised. How a program
comes by its weights: see `weaver_product`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import expect, expect_dense_last
from vllm_weaver.kernels.pdl import launch_options, take_turn
from vllm_weaver.kernels.weaver_product import HELD_PROGRAMS, HELD_ROWS, HELD_WIDTH, ahead, pairs, product

COLUMNS = 16
"""Least number of output columns of a program; `gate_up` pads its output with zeros to a multiple of it."""
_DOT_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _project_kernel(
    x_ptr,  # [M, K]
    norm_ptr,  # [K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N] fp32
    residual_ptr,  # [M, N], or a table [*, N]
    index_ptr,  # [M] rows of the table
    out_ptr,  # [M, N]
    M,
    N,
    K: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,  # depth of the pipeline of loads
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0) * COLUMNS
    weights, norm = ahead(
        w_ptr, norm_ptr, start, 0, N - start, K, NORM, COLUMNS, 1, BLOCK_K, SPLIT, HELD, PDL
    )  # fmt: skip
    column = start + tl.arange(0, COLUMNS)
    added = tl.load(bias_ptr + column, mask=column < N, other=0.0)[None, :]
    take_turn(PDL)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < M
    here = live[:, None] & (column < N)[None, :]
    if RESIDUAL:  # before the product, which need not wait for it
        source = row.to(tl.int64)
        if GATHER:
            source = tl.load(index_ptr + row, mask=live, other=0).to(tl.int64)
        residual = tl.load(residual_ptr + source[:, None] * N + column[None, :], mask=here, other=0.0)
        added = added + residual.to(tl.float32)
    total = product(
        x_ptr, x_ptr, norm_ptr, w_ptr, M, start, 0, N - start, weights, norm,
        K, NORM, False, COLUMNS, 1, BLOCK_M, BLOCK_K, HELD, SPLIT, STAGES, DOT_DTYPE,
    )  # fmt: skip
    out = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out, (total + added).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _qkv_kernel(
    x_ptr,  # [M, K], or a table [*, K]
    index_ptr,  # [M] rows of the table
    norm_ptr,  # [K]
    w_ptr,  # [3 * H * h, K]
    bias_ptr,  # [3 * H * h] fp32
    cos_ptr,  # [positions, h / 2] fp32
    sin_ptr,  # [positions, h / 2] fp32
    position_ptr,  # [M]
    place_ptr,  # [M] cache rows, negative: nothing is written
    q_ptr,  # [M, H, h] out
    cache_ptr,  # [2, R, S, H, h] out
    M,
    n,  # rows a request
    R,
    S,
    H,
    h,
    first_part,  # 0, or H where queries are not wanted
    tiles,  # groups of columns in half a head
    K: tl.constexpr,
    GATHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,  # depth of the pipeline of loads
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    part = first_part + tl.program_id(0) // tiles  # a head's q, k or v: heads of q, of k, of v
    half = h // 2
    start = (tl.program_id(0) % tiles) * COLUMNS
    count = half - start
    weights, norm = ahead(
        w_ptr, norm_ptr, part * h + start, half, count, K, True, COLUMNS, 2, BLOCK_K, SPLIT, HELD, PDL
    )  # fmt: skip
    column = start + tl.arange(0, COLUMNS)
    inside = column < half
    bias = bias_ptr + part * h + column
    first_bias = tl.load(bias, mask=inside, other=0.0)[None, :]
    second_bias = tl.load(bias + half, mask=inside, other=0.0)[None, :]
    take_turn(PDL)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < M
    total = product(
        x_ptr, index_ptr, norm_ptr, w_ptr, M, part * h + start, half, count, weights, norm,
        K, True, GATHER, COLUMNS, 2, BLOCK_M, BLOCK_K, HELD, SPLIT, STAGES, DOT_DTYPE,
    )  # fmt: skip
    first, second = pairs(total, BLOCK_M, COLUMNS)
    first += first_bias
    second += second_bias
    here = live[:, None] & inside[None, :]
    section = part // H
    if section < 2:
        position = tl.load(position_ptr + row, mask=live, other=0)
        at = position[:, None] * half + column[None, :]
        cos = tl.load(cos_ptr + at, mask=here, other=0.0)
        sin = tl.load(sin_ptr + at, mask=here, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    row = row.to(tl.int64)
    offset = ((part % H) * h + column)[None, :]
    dtype = q_ptr.dtype.element_ty
    if section == 0:
        out = q_ptr + row[:, None] * (H * h) + offset
    else:
        place = tl.load(place_ptr + row, mask=live, other=-1)
        here = here & ((place >= 0) & (place < S))[:, None]
        line = ((section - 1) * R + row // n) * S + place
        out = cache_ptr + line[:, None] * (H * h) + offset
    tl.store(out, first.to(dtype), mask=here)
    tl.store(out + half, second.to(dtype), mask=here)


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [M, K]
    norm_ptr,  # [K]
    w_ptr,  # [2 * N, K]
    bias_ptr,  # [2 * N] fp32
    out_ptr,  # [M, WIDTH] out
    M,
    N,
    WIDTH,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,  # depth of the pipeline of loads
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0) * COLUMNS
    weights, norm = ahead(
        w_ptr, norm_ptr, start, N, N - start, K, True, COLUMNS, 2, BLOCK_K, SPLIT, HELD, PDL
    )  # fmt: skip
    column = start + tl.arange(0, COLUMNS)
    inside = column < N
    gate_bias = tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    up_bias = tl.load(bias_ptr + N + column, mask=inside, other=0.0)[None, :]
    take_turn(PDL)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < M
    total = product(
        x_ptr, x_ptr, norm_ptr, w_ptr, M, start, N, N - start, weights, norm,
        K, True, False, COLUMNS, 2, BLOCK_M, BLOCK_K, HELD, SPLIT, STAGES, DOT_DTYPE,
    )  # fmt: skip
    gate, up = pairs(total, BLOCK_M, COLUMNS)
    gate += gate_bias
    up += up_bias
    out = tl.where(inside[None, :], gate * tl.sigmoid(gate) * up, 0.0)
    at = out_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (column < WIDTH)[None, :])


def _tiles(x: Tensor, weight: Tensor, num_rows: int, groups: int) -> tuple[int, dict[str, Any]]:
    """Row tiles, and the keyword arguments that all three kernels share, for programs of 1 or 2 groups."""
    width = weight.shape[1]
    rows = min(32, 8 * triton.next_power_of_2(triton.cdiv(num_rows, 8)))
    held = num_rows <= HELD_ROWS and width <= HELD_WIDTH and len(weight) <= HELD_PROGRAMS * COLUMNS
    if held:
        columns, stages, warps = COLUMNS // groups, 1, 8
        block_k = max(16, triton.next_power_of_2(width) // warps)
    else:
        # Fewer, wider programs are faster as long as their sums fit into registers.
        columns, stages, warps = COLUMNS, 5 if groups == 1 else 4, 4
        if groups == 2 and rows == 8:
            columns, stages = 2 * COLUMNS, 3
        block_k = min(64, 1024 // rows) * 2 // x.element_size()
    meta = {
        "K": width,
        "COLUMNS": columns,
        "BLOCK_M": rows,
        "BLOCK_K": block_k,
        "SPLIT": warps,
        "STAGES": stages,
        "HELD": held,
        "DOT_DTYPE": _DOT_DTYPES.get(x.dtype, tl.float32) if x.is_cuda else tl.float32,
        "num_warps": warps,
        **launch_options(x),
    }
    return triton.cdiv(num_rows, rows), meta


def _check(x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor | None) -> None:
    width = weight.shape[1]
    expect("x", x, (None, width), device=x.device, dtypes=(weight.dtype,))
    expect("weight", weight, (None, width), device=x.device)
    expect("bias", bias, (len(weight),), device=x.device, dtypes=(torch.float32,))
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (width,), device=x.device)
    for name, tensor in (("x", x), ("weight", weight)):
        expect_dense_last(name, tensor)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """`[norm](x) · weightᵀ + bias [+ residual]`, [M, N] in x's dtype.

    x [M, K]; weight [N, K]; bias fp32 [N], with the norm's shift folded in; residual [M, N], or a table [*,
    N] whose rows index int32 [M] (each a valid row) names."""
    _check(x, weight, bias, norm_weight)
    num_rows, width = len(x), len(weight)
    if residual is not None:
        expect("residual", residual, (None if index is not None else num_rows, width), device=x.device)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    row_tiles, meta = _tiles(x, weight, num_rows, 1)
    _project_kernel[(triton.cdiv(width, meta["COLUMNS"]), row_tiles)](
        x,
        x if norm_weight is None else norm_weight,
        weight,
        bias,
        x if residual is None else residual,
        x if index is None else index,
        out,
        num_rows,
        width,
        NORM=norm_weight is not None,
        RESIDUAL=residual is not None,
        GATHER=index is not None,
        **meta,
    )
    return out


def qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    places: Tensor,
    cache: Tensor,
    *,
    index: Tensor | None = None,
    queries: bool = True,
) -> Tensor | None:
    """Rotated queries [R · n, H, h] of n rows a request; their keys and values go to the cache [2, R, S, H,
    h].

    x [R · n, K], or a table [*, K] whose rows index int32 [R · n] names; rope: cosines and sines fp32
    [positions, h / 2]; positions int32 [R · n] are rows of these; places int32 [R · n]: cache rows, outside
    [0, S) for a row that must not be written. queries False computes keys and values only."""
    _check(x, weight, bias, norm_weight)
    num_rows = len(positions)
    num_requests, length, num_heads, head_dim = cache.shape[1:]
    expect("cache", cache, (2, None, None, None, None), device=x.device, dtypes=(x.dtype,))
    expect("weight", weight, (3 * num_heads * head_dim, None), device=x.device)
    expect("positions", positions, (num_rows,), device=x.device, dtypes=(torch.int32,))
    expect("places", places, (num_rows,), device=x.device, dtypes=(torch.int32,))
    q = torch.empty(num_rows, num_heads, head_dim, dtype=x.dtype, device=x.device) if queries else None
    row_tiles, meta = _tiles(x, weight, num_rows, 2)
    half_tiles = triton.cdiv(head_dim // 2, meta["COLUMNS"])
    first_part = 0 if queries else num_heads
    _qkv_kernel[((3 * num_heads - first_part) * half_tiles, row_tiles)](
        x,
        positions if index is None else index,
        norm_weight,
        weight,
        bias,
        *rope,
        positions,
        places,
        cache if q is None else q,
        cache,
        num_rows,
        num_rows // num_requests,
        num_requests,
        length,
        num_heads,
        head_dim,
        first_part,
        half_tiles,
        GATHER=index is not None,
        **meta,
    )
    return q


def gate_up(x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor) -> Tensor:
    """`silu(gate) · up` [M, width] of normed rows x [M, K], weight [2 · N, K] (gate first) and bias fp32 [2 ·
    N].

    width is N rounded up to a multiple of COLUMNS; the columns from N on are zero."""
    _check(x, weight, bias, norm_weight)
    size = len(weight) // 2
    padded = triton.cdiv(size, COLUMNS) * COLUMNS
    out = torch.empty(len(x), padded, dtype=x.dtype, device=x.device)
    row_tiles, meta = _tiles(x, weight, len(x), 2)
    _gate_up_kernel[(triton.cdiv(padded, meta["COLUMNS"]), row_tiles)](
        x, norm_weight, weight, bias, out, len(x), size, padded, **meta
    )
    return out
