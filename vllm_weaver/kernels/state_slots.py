# SPDX-License-Identifier: Apache-2.0
"""Looks up the blocks that a step's recurrent states lie in, in the block tables of all groups at once.

Blocks of `size` tokens; row r of group g's table [S, M] has a request's block ids by position. With `end`
tokens at the end of the step's rows (drafts included), b of them computed before and p nodes on its path:

    column = (max(end, 1) - 1) // size          the working block is table[r, column]
    last = (b + p) // size                      block ends at or before the path's end
    crossed = last * size > b  and  last - 1 != column      (never without a path)
    boundary = table[r, last - 1], reached after last * size - b nodes, where crossed; else 0 and 0

Columns outside the tables are never read: such a request works in block 0 (vLLM's null block) and crosses
nothing. Results go into buffers at fixed addresses, which a replayed CUDA graph reads; groups are reached
through a table of pointers.

Floor: 4 bytes a group and some 40 bytes a request read and written, a few kilobytes: a launch each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton


@dataclass(frozen=True)
class SlotBuffers:
    """The block tables of G groups and what is found in them, for up to S requests in batch order.

    tables: int32 [S, M] each, rows dense; they stay where they are. working, boundary: int32 [S, 1] each.
    columns int32 [S]: the working block's column, -1 where it has none. boundary_path int32 [S]: nodes up to
    the boundary. source, target int32 [S], by request state index: columns to copy a state from (-1: none)
    and to, as vLLM's copy kernel reads them. pointers int64 [G, 4]: addresses of table, working and boundary,
    and the table's row stride.
    """

    tables: tuple[Tensor, ...]
    working: tuple[Tensor, ...]
    boundary: tuple[Tensor, ...]
    columns: Tensor
    boundary_path: Tensor
    source: Tensor
    target: Tensor
    pointers: Tensor
    block_size: int

    @classmethod
    def allocate(cls, tables: Sequence[Tensor], block_size: int) -> SlotBuffers:
        """Buffers in which no request has a block; copies addresses to the device, so not for use within a
        step. Raises `ValueError` without a table, for tables of two shapes, or for a block size below 1."""
        if not tables or block_size < 1:
            raise ValueError(
                f"{len(tables)} block tables with blocks of {block_size} tokens; at least one of each"
            )
        device = tables[0].device
        for table in tables:
            expect("block_table", table, tuple(tables[0].shape), device=device, dtypes=(torch.int32,))
            expect_dense_last("block_table", table)
        requests = len(tables[0])

        def full(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        working, boundary = (tuple(full(requests, 1) for _ in tables) for _ in range(2))
        addresses = [
            (table.data_ptr(), now.data_ptr(), end.data_ptr(), table.stride(0))
            for table, now, end in zip(tables, working, boundary, strict=True)
        ]
        return cls(
            tuple(tables),
            working,
            boundary,
            columns=full(requests, value=-1),
            boundary_path=full(requests),
            source=full(requests, value=-1),
            target=full(requests),
            pointers=torch.tensor(addresses, dtype=torch.int64, device=device),
            block_size=block_size,
        )


def locate_states_reference(buffers: SlotBuffers, seq_lens: Tensor) -> None:
    """`locate_states` in plain PyTorch."""
    rows, width = len(seq_lens), buffers.tables[0].shape[1]
    column = (seq_lens.clamp(min=1) - 1) // buffers.block_size
    known = column < width
    buffers.columns.fill_(-1)
    buffers.columns[:rows] = column.where(known, -1)
    index = column.where(known, 0).long()[:, None]
    for table, working in zip(buffers.tables, buffers.working, strict=True):
        working.zero_()
        working[:rows] = table[:rows].gather(1, index).where(known[:, None], 0)


@triton.jit(do_not_specialize=["R", "S", "M"])
def _locate_states_kernel(
    pointers_ptr,  # [G, 4] addresses of table [S, M], working [S] out and boundary [S], row stride
    seq_lens_ptr,  # [R]
    columns_ptr,  # [S] out
    R,
    S,
    M,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    table_ptr = tl.load(pointers_ptr + group * 4).to(tl.pointer_type(tl.int32))
    working_ptr = tl.load(pointers_ptr + group * 4 + 1).to(tl.pointer_type(tl.int32))
    stride = tl.load(pointers_ptr + group * 4 + 3)
    end = tl.load(seq_lens_ptr + row, mask=row < R, other=0)
    column = (tl.maximum(end, 1) - 1) // SIZE
    known = (row < R) & (column < M)
    block = tl.load(table_ptr + row * stride + column, mask=known, other=0)
    tl.store(working_ptr + row, block, mask=row < S)
    if group == 0:
        tl.store(columns_ptr + row, tl.where(known, column, -1), mask=row < S)


def locate_states(buffers: SlotBuffers, seq_lens: Tensor, *, impl: Impl = "auto") -> None:
    """Fills `working` and `columns` for the batch's R requests, and clears them for rows behind.

    seq_lens int32 [R], R <= S: tokens at the end of each request's rows. `ValueError` if it does not fit."""
    rows, requests = len(seq_lens), len(buffers.columns)
    expect_indices(buffers.columns.device, ("seq_lens", seq_lens, (None,)))
    _expect_room(rows, requests)
    if not use_triton(seq_lens, impl):
        locate_states_reference(buffers, seq_lens)
        return
    block = 64
    _locate_states_kernel[(triton.cdiv(requests, block), len(buffers.tables))](
        buffers.pointers, seq_lens, buffers.columns, rows, requests, buffers.tables[0].shape[1],
        SIZE=buffers.block_size,
        BLOCK=block,
        num_warps=1,
    )  # fmt: skip


def find_boundaries_reference(
    buffers: SlotBuffers, base: Tensor, num_path: Tensor, idx_mapping: Tensor
) -> None:
    """`find_boundaries` in plain PyTorch."""
    rows, size, width = len(base), buffers.block_size, buffers.tables[0].shape[1]
    working, state = buffers.columns[:rows], idx_mapping.long()
    known = (state >= 0) & (state < len(buffers.source))
    last = (base + num_path).clamp(min=0) // size
    crossed = (last * size > base) & (last - 1 != working)
    crossed &= (last > 0) & (last <= width) & (working >= 0) & known
    column = (last - 1).where(crossed, 0)
    buffers.boundary_path[:rows] = (last * size - base).where(crossed, 0)
    for table, boundary in zip(buffers.tables, buffers.boundary, strict=True):
        boundary[:rows] = table[:rows].gather(1, column[:, None]).where(crossed[:, None], 0)
    # Without reading on the host which states are known: the entry past the last takes what has none.
    index = state.where(known, len(buffers.source))
    for array, values in ((buffers.source, working.where(crossed, -1)), (buffers.target, column)):
        padded = torch.nn.functional.pad(array, (0, 1)).scatter_(0, index, values.to(array.dtype))
        array.copy_(padded[:-1])


@triton.jit(do_not_specialize=["R", "S", "M"])
def _find_boundaries_kernel(
    pointers_ptr,  # [G, 4] addresses of table [S, M], working [S] and boundary [S] out, row stride
    base_ptr,  # [R]
    num_path_ptr,  # [R]
    columns_ptr,  # [S]
    idx_mapping_ptr,  # [R]
    boundary_path_ptr,  # [S] out
    source_ptr,  # [S] out
    target_ptr,  # [S] out
    R,
    S,
    M,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = row < R
    table_ptr = tl.load(pointers_ptr + group * 4).to(tl.pointer_type(tl.int32))
    boundary_ptr = tl.load(pointers_ptr + group * 4 + 2).to(tl.pointer_type(tl.int32))
    stride = tl.load(pointers_ptr + group * 4 + 3)
    base = tl.load(base_ptr + row, mask=mine, other=0).to(tl.int64)
    nodes = tl.load(num_path_ptr + row, mask=mine, other=0)
    working = tl.load(columns_ptr + row, mask=mine, other=-1)
    state = tl.load(idx_mapping_ptr + row, mask=mine, other=-1)
    known = (state >= 0) & (state < S)
    last = tl.maximum(base + nodes, 0) // SIZE
    crossed = (last * SIZE > base) & (last - 1 != working)
    crossed &= (last > 0) & (last <= M) & (working >= 0) & known
    block = tl.load(table_ptr + row * stride + last - 1, mask=crossed, other=0)
    tl.store(boundary_ptr + row, block, mask=mine)
    if group == 0:
        tl.store(boundary_path_ptr + row, tl.where(crossed, last * SIZE - base, 0).to(tl.int32), mask=mine)
        tl.store(source_ptr + state, tl.where(crossed, working, -1), mask=known)
        tl.store(target_ptr + state, tl.where(crossed, last - 1, 0).to(tl.int32), mask=known)


def find_boundaries(
    buffers: SlotBuffers, base: Tensor, num_path: Tensor, idx_mapping: Tensor, *, impl: Impl = "auto"
) -> None:
    """Fills `boundary` and `boundary_path` for the R requests that `locate_states` was called for, and
    `source` and `target` for their state indices; other entries stay as they are.

    base int64 [R]; num_path int32 [R], the length of the accepted path; idx_mapping int32 or int64
    [R], distinct state indices (a request with one outside [0, S) crosses nothing). `ValueError` for
    arguments that do not fit.
    """
    rows, requests = len(base), len(buffers.columns)
    device = buffers.columns.device
    expect("base", base, (None,), device=device, dtypes=(torch.int64,))
    expect_dense_last("base", base)
    expect_indices(device, ("num_path", num_path, (rows,)))
    expect("idx_mapping", idx_mapping, (rows,), device=device, dtypes=(torch.int32, torch.int64))
    expect_dense_last("idx_mapping", idx_mapping)
    _expect_room(rows, requests)
    if not use_triton(base, impl):
        find_boundaries_reference(buffers, base, num_path, idx_mapping)
        return
    block = 64
    _find_boundaries_kernel[(triton.cdiv(max(rows, 1), block), len(buffers.tables))](
        buffers.pointers, base, num_path, buffers.columns, idx_mapping, buffers.boundary_path, buffers.source,
        buffers.target, rows, requests, buffers.tables[0].shape[1],
        SIZE=buffers.block_size,
        BLOCK=block,
        num_warps=1,
    )  # fmt: skip


def _expect_room(rows: int, requests: int) -> None:
    if rows > requests:
        raise ValueError(f"the step has {rows} requests; the block tables have {requests} rows")
