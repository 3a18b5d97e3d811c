# SPDX-License-Identifier: Apache-2.0
"""Moves the rows of each request along its accepted path, so that what follows sees an ordinary chain.

    rows[start_r + i] <- rows[start_r + path[r, i]]   for i below the usable length of path r, in ascending i.

Layout: rows [T, C] (hidden states, logits), request r owns rows start_r .. start_{r+1} - 1; path int32 [R,
N] of node indices, root first, padded with -1. The move is in place and needs no second buffer: a path
ascends, so path[i] >= i, and a source is read before any later step can overwrite it. What is a usable path
says `accepted_path.py`.

Floor: reads and writes one row for every accepted node that is not already in place, twice the row's bytes;
nothing else is touched. Each program owns a block of columns of one request and goes down the path in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.accepted_path import load_path_length, path_lengths
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, use_triton


def gather_rows_reference(rows: Tensor, row_starts: Tensor, path: Tensor) -> None:
    """The rule of `gather_rows` in plain PyTorch, without a host synchronisation."""
    count = row_starts[1:] - row_starts[:-1]
    length = path_lengths(path, torch.full_like(count, path.shape[1]), count)
    index = torch.arange(path.shape[1], device=path.device)
    move = index < length.unsqueeze(1)
    # The entry past the last row takes the writes of unused path entries, whose number is not known here.
    source = torch.arange(len(rows) + 1, device=rows.device)
    at = torch.where(move, row_starts[:-1, None] + index, len(rows)).to(torch.int64)
    source.scatter_(0, at.flatten(), (row_starts[:-1, None] + path).to(torch.int64).flatten())
    rows.copy_(rows[source[:-1]])


@triton.jit
def _gather_rows_kernel(
    rows_ptr,  # [T, C]
    row_starts_ptr,  # [R + 1]
    path_ptr,  # [R, N]
    row_stride,
    path_stride,
    C,
    N,
    BLOCK_N: tl.constexpr,  # a power of two >= N
    BLOCK_C: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(row_starts_ptr + request).to(tl.int64)
    count = tl.load(row_starts_ptr + request + 1).to(tl.int64) - start
    path_ptr += request * path_stride
    length = load_path_length(path_ptr, N, count, N, BLOCK_N)
    rows_ptr += start * row_stride + column
    i = 1  # the root is in place
    while i < length:
        node = tl.load(path_ptr + i).to(tl.int64)
        if node != i:
            # The same lanes read and write a column in every round, so program order is enough.
            row = tl.load(rows_ptr + node * row_stride, mask=column < C)
            tl.store(rows_ptr + i * row_stride, row, mask=column < C)
        i += 1


def gather_rows(rows: Tensor, row_starts: Tensor, path: Tensor, *, impl: Impl = "auto") -> None:
    """Moves `rows` in place along the paths; rows past a path's end, and rows of no request, stay as they
    are.

    rows [T, C] of any dtype, contiguous in C (a row stride is allowed); row_starts int32 or int64 [R + 1],
    ascending; path int32 [R, N]. `ValueError` for wrong shapes, dtypes, devices or strides."""
    expect("rows", rows, (None, None), device=rows.device)
    expect("path", path, (None, None), device=rows.device, dtypes=(torch.int32,))
    expect("row_starts", row_starts, (len(path) + 1,), device=rows.device, dtypes=(torch.int32, torch.int64))
    expect_dense_last("rows", rows)
    expect_dense_last("path", path)
    if not use_triton(rows, impl):
        gather_rows_reference(rows, row_starts, path)
        return
    columns = rows.shape[1]
    block = min(1024, triton.next_power_of_2(columns))
    _gather_rows_kernel[(len(path), triton.cdiv(columns, block))](
        rows,
        row_starts.contiguous(),
        path,
        rows.stride(0),
        path.stride(0),
        columns,
        path.shape[1],
        BLOCK_N=triton.next_power_of_2(path.shape[1]),
        BLOCK_C=block,
    )
