# SPDX-License-Identifier: Apache-2.0
"""Moves the rows of each request along its accepted path, so that what follows sees an ordinary chain.

    rows[start_r + i] <- rows[start_r + path[r, i]]   for i below the usable length of path r, in ascending i.

Layout: rows [T, C] (hidden states, logits), request r owns rows start_r .. start_{r+1} - 1; path int32 [R,
N] of node indices, root first, padded with -1. The move is in place and needs no second buffer: a path
ascends, so path[i] >= i, and a source is read before any later step can overwrite it. What is a usable path
says `accepted_path.py`.

Floor: reads and writes one row for every accepted node that is not already in place, twice the row's bytes;
nothing else is touched. Each program owns a block of columns of one request in one tensor and goes down the
path in tiles of 16 nodes, each read as a whole before any of it is written. One launch moves the rows of
several tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

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


@triton.jit(do_not_specialize=["N"])
def _gather_rows_kernel(
    rows_ptrs,  # each [T, C], of one dtype
    row_strides,
    columns,  # the C of each
    row_starts_ptr,  # [R + 1]
    path_ptr,  # [R, N]
    path_stride,
    N,
    BLOCK_N: tl.constexpr,  # a power of two >= N
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(row_starts_ptr + request).to(tl.int64)
    count = tl.load(row_starts_ptr + request + 1).to(tl.int64) - start
    path_ptr += request * path_stride
    length = load_path_length(path_ptr, N, count, N, BLOCK_N)
    if length <= 1:
        return
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    for i in tl.static_range(len(rows_ptrs)):
        if tl.program_id(2) == i:
            rows_ptr = rows_ptrs[i] + start * row_strides[i]
            for at in range(1, length, BLOCK_D):  # the root is in place
                d = at + tl.arange(0, BLOCK_D)
                node = tl.load(path_ptr + d, mask=d < length, other=-1).to(tl.int64)
                # A path ascends: a tile reads nothing that an earlier tile has written.
                mask = ((d < length) & (node != d))[:, None] & (column < columns[i])[None, :]
                tile = tl.load(rows_ptr + node[:, None] * row_strides[i] + column[None, :], mask=mask)
                tl.debug_barrier()  # the tile has been read before any of it is overwritten
                to = d.to(tl.int64)[:, None] * row_strides[i]
                tl.store(rows_ptr + to + column[None, :], tile, mask=mask)
                tl.debug_barrier()


def gather_rows(
    rows: Tensor | Sequence[Tensor], row_starts: Tensor, path: Tensor, *, impl: Impl = "auto"
) -> None:
    """Moves `rows` in place along the paths; rows past a path's end, and rows of no request, stay as they
    are.

    rows: a tensor [T, C] of any dtype, or several of one dtype (each with its own C), contiguous in C (a row
    stride is allowed); row_starts int32 or int64 [R + 1], ascending; path int32 [R, N]. Raises `ValueError`
    for wrong shapes, dtypes, devices or strides."""
    tensors = (rows,) if isinstance(rows, Tensor) else tuple(rows)
    if not tensors:
        raise ValueError("gather_rows was given no rows; it needs at least one tensor")
    device = tensors[0].device
    for tensor in tensors:
        expect("rows", tensor, (None, None), device=device, dtypes=(tensors[0].dtype,))
        expect_dense_last("rows", tensor)
    expect("path", path, (None, None), device=device, dtypes=(torch.int32,))
    expect("row_starts", row_starts, (len(path) + 1,), device=device, dtypes=(torch.int32, torch.int64))
    expect_dense_last("path", path)
    if not use_triton(path, impl):
        for tensor in tensors:
            gather_rows_reference(tensor, row_starts, path)
        return
    columns = max(tensor.shape[1] for tensor in tensors)
    block = min(256, triton.next_power_of_2(columns))
    _gather_rows_kernel[(len(path), triton.cdiv(columns, block), len(tensors))](
        tensors,
        tuple(tensor.stride(0) for tensor in tensors),
        tuple(tensor.shape[1] for tensor in tensors),
        row_starts.contiguous(),
        path,
        path.stride(0),
        path.shape[1],
        BLOCK_N=triton.next_power_of_2(path.shape[1]),
        BLOCK_D=16,
        BLOCK_C=block,
    )
