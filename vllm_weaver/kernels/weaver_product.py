# SPDX-License-Identifier: Apache-2.0
"""Device functions of the Weaver head's matrix products: [norm](x) · Wᵀ for the columns of one program.

Two ways to one result. Both begin before the kernel may read what others write (see `pdl`), as weights depend
on no other kernel:

    held      a program's weights are loaded ahead of its turn, into registers; what is left to do then is to
              read x and to multiply
    streamed  weights are asked into L2 ahead of the turn, and pass through a pipeline after it

A product waits for the one before it and hardly for memory, so the first is faster as long as most of its
programs find a place beside those of the kernel before: for few rows and not too large a matrix."""

from __future__ import annotations

import triton
import triton.language as tl

HELD_ROWS = 8
"""Rows up to which weights are held."""
HELD_WIDTH = 2048
"""Width K up to which weights are held: 16 columns of a 16-bit dtype are 64 registers in 8 warps."""
HELD_PROGRAMS = 256
"""Programs up to which weights are held."""
_EPS = tl.constexpr(1e-6)


@triton.jit
def _weight_rows(w_ptr, first, apart, K: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    """Pointers to the weight rows of a program: COLUMNS from `first` on, and in a second group `apart`."""
    column = tl.arange(0, GROUPS * COLUMNS)
    row = first + column % COLUMNS + (column // COLUMNS) * apart
    return w_ptr + row.to(tl.int64) * K


@triton.jit
def ahead(
    w_ptr,  # [*, K]
    norm_ptr,  # [K]
    first,  # weight row of the first column
    apart,  # distance to the second group
    count,  # columns that exist from `first` on
    K: tl.constexpr,
    NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,  # parts of K, one a warp
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """What a program may do before its turn. Returns its weights [SPLIT, GROUPS · COLUMNS, BLOCK_K] and the
    norm's [SPLIT, BLOCK_K] for `product`; placeholders where they are not held."""
    rows = _weight_rows(w_ptr, first, apart, K, COLUMNS, GROUPS)
    live = tl.arange(0, GROUPS * COLUMNS) % COLUMNS < count
    weights = tl.zeros((1, 1, 1), tl.float32)
    norm = tl.zeros((1, 1), tl.float32)
    if HELD:
        k = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        inside = k < K
        weights = tl.load(
            rows[None, :, None] + k[:, None, :], mask=live[None, :, None] & inside[:, None, :], other=0.0
        )
        if NORM:
            norm = tl.load(norm_ptr + k, mask=inside, other=0.0)
    elif PDL:
        _prefetch(tl.where(live, rows, w_ptr), K)
    return weights, norm


@triton.jit
def _prefetch(rows, K: tl.constexpr):
    """Asks for weight rows to be brought into L2."""
    LINE: tl.constexpr = 64  # columns; at least one request for every 128 bytes in a 16-bit dtype
    LINES: tl.constexpr = triton.next_power_of_2((K + LINE - 1) // LINE)
    column = tl.minimum(tl.arange(0, LINES) * LINE, K - 1)
    address = rows[:, None] + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def product(
    x_ptr,  # [M, K], or a table [*, K]
    index_ptr,  # [M] rows of the table
    norm_ptr,  # [K]
    w_ptr,  # [*, K]
    M,
    first,  # as for `ahead`
    apart,
    count,
    weights,  # from `ahead`
    norm,  # from `ahead`
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    SPLIT: tl.constexpr,  # parts of K, one a warp
    STAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """[BLOCK_M, GROUPS · COLUMNS] in fp32: [norm](x) · Wᵀ without the norm's shift, of the rows of this
    program's tile. Missing weight rows and rows from M on yield zeros."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < M
    source = row.to(tl.int64)
    if GATHER:
        source = tl.load(index_ptr + row, mask=live, other=0).to(tl.int64)
    x_rows = x_ptr + source * K
    offset = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    squares = tl.zeros((SPLIT, BLOCK_M, BLOCK_K), dtype=tl.float32)
    # A tensor core takes 16 rows of its first operand and 8 of the second: few rows of x come second.
    FIRST: tl.constexpr = BLOCK_M if BLOCK_M >= 16 else GROUPS * COLUMNS
    SECOND: tl.constexpr = GROUPS * COLUMNS if BLOCK_M >= 16 else BLOCK_M
    parts = tl.zeros((SPLIT, FIRST, SECOND), dtype=tl.float32)
    if HELD:
        inside = (offset < K)[:, None, :]
        x = tl.load(x_rows[None, :, None] + offset[:, None, :], mask=live[None, :, None] & inside, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares = wide * wide
            x = (wide * norm.to(tl.float32)[:, None, :]).to(x.dtype)
        parts = _dot(x.to(DOT_DTYPE), weights.to(DOT_DTYPE), parts, BLOCK_M)
    else:
        w_rows = _weight_rows(w_ptr, first, apart, K, COLUMNS, GROUPS)
        w_live = tl.arange(0, GROUPS * COLUMNS) % COLUMNS < count
        for start in tl.range(0, K, SPLIT * BLOCK_K, num_stages=STAGES):
            column = start + offset
            inside = (column < K)[:, None, :]
            x = tl.load(
                x_rows[None, :, None] + column[:, None, :], mask=live[None, :, None] & inside, other=0.0
            )
            w = tl.load(
                w_rows[None, :, None] + column[:, None, :], mask=w_live[None, :, None] & inside, other=0.0
            )
            if NORM:
                scale = tl.load(norm_ptr + column, mask=column < K, other=0.0).to(tl.float32)
                wide = x.to(tl.float32)
                squares += wide * wide
                x = (wide * scale[:, None, :]).to(x.dtype)
            parts = _dot(x.to(DOT_DTYPE), w.to(DOT_DTYPE), parts, BLOCK_M)
    total = tl.sum(parts, axis=0)
    if BLOCK_M < 16:
        total = tl.permute(total, (1, 0))
    if NORM:
        mean = tl.sum(tl.sum(squares, axis=2), axis=0) / K
        total = total * tl.rsqrt(mean + _EPS)[:, None]
    return total


@triton.jit
def _dot(x, w, parts, BLOCK_M: tl.constexpr):
    """parts + x · Wᵀ, or its transpose for few rows."""
    if BLOCK_M >= 16:
        parts = tl.dot(x, tl.permute(w, (0, 2, 1)), parts, input_precision="ieee")
    else:
        parts = tl.dot(w, tl.permute(x, (0, 2, 1)), parts, input_precision="ieee")
    return parts


@triton.jit
def pairs(total, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """The two groups [BLOCK_M, COLUMNS] of a product of two."""
    return tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, COLUMNS)), (0, 2, 1)))
