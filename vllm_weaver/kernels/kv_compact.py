# SPDX-License-Identifier: Apache-2.0
"""Moves the K/V rows of an accepted path into consecutive cache positions, in every layer at once.

Node i of a request's tree was written at cache position base + i. For d = 1, 2, ... along the path

    cache[base + d] = cache[base + path[d]]

(the root is already in place). path[d] >= d, because nodes are in topological order, so copying in ascending
order never overwrites a row that is still to be read.

Buffers: paged caches [num_blocks, block_size, ...], views that cover K and V of each layer, and the block
table [R, M] of the group that each belongs to; both are reached through a table of pointers that is made
once, so one launch serves all layers of all groups. Rows are copied as machine words, whatever their dtype.

Floor for a path of p nodes: p - 1 rows read and written in every cache. The kernel holds one tile of 16 rows
by 64 words; nothing else is materialised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.accepted_path import load_path_length, path_lengths
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TL_WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass(frozen=True)
class KvCompactPlan:
    """What `kv_compact` needs to know of a set of caches, worked out once.

    caches: the views themselves, [num_blocks, block_size, ...]; block_tables: theirs, int32 [R, M] that stay
    where they are. pointers int64 [caches, 4]: address, and address, row stride and M of the block table, on
    their device. word: bytes copied at a time. A row is `outer` runs of `inner` words; all strides are in
    words.
    """

    caches: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    pointers: Tensor
    word: int
    outer: int
    inner: int
    stride_block: int
    stride_row: int
    stride_outer: int
    stride_inner: int

    @classmethod
    def build(cls, caches: Sequence[Tensor], block_tables: Sequence[Tensor]) -> KvCompactPlan:
        """Makes the plan; copies the addresses to the device, so not for use within a step.

        block_tables: the table of every cache, often the same object. Raises `ValueError` when there is no
        cache, when the caches do not agree in shape, strides, dtype and device, when a row of them is not one
        run of elements or several runs at one stride, or when a block table does not fit.
        """
        if not caches:
            raise ValueError("kv_compact was given no cache; it needs at least one")
        first = caches[0]
        if first.ndim < 3:
            shape = list(first.shape)
            raise ValueError(f"cache 0 has shape {shape}; it must be [num_blocks, block_size, ...]")
        facts = [(cache.shape, cache.stride(), cache.dtype, cache.device) for cache in caches]
        for i, fact in enumerate(facts):
            if fact != facts[0]:
                raise ValueError(f"cache {i} (shape, strides, dtype, device) is {fact}; cache 0 {facts[0]}")

        if len(block_tables) != len(caches):
            raise ValueError(f"there are {len(block_tables)} block tables for {len(caches)} caches")
        for table in block_tables:
            expect("block_table", table, (None, None), device=first.device, dtypes=(torch.int32,))
            expect_dense_last("block_table", table)

        # The order of a row's elements does not matter to a copy: smallest stride first, dense ones merged.
        runs: list[tuple[int, int]] = []  # (stride, size)
        for stride, size in sorted(zip(first.stride()[2:], first.shape[2:], strict=True)):
            if runs and stride == runs[-1][0] * runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] * size)
            elif size > 1 or not runs:
                runs.append((stride, size))
        if len(runs) > 2:
            raise ValueError(f"cache 0 has strides {first.stride()}; its rows may have two strides at most")
        (stride_inner, inner), (stride_outer, outer) = (*runs, (0, 1))[:2]

        item = first.element_size()
        addresses = [cache.data_ptr() for cache in caches]
        strides = [item * x for x in (first.stride(0), first.stride(1), stride_outer)]
        # Only dense runs can be cut into words wider than their elements.
        word = gcd(8, item * inner if stride_inner == 1 else item, *strides, *addresses)
        return cls(
            caches=tuple(caches),
            block_tables=tuple(block_tables),
            pointers=torch.tensor(
                [
                    (address, table.data_ptr(), table.stride(0), table.shape[1])
                    for address, table in zip(addresses, block_tables, strict=True)
                ],
                dtype=torch.int64,
                device=first.device,
            ),
            word=word,
            outer=outer,
            inner=inner * item // word,
            stride_block=strides[0] // word,
            stride_row=strides[1] // word,
            stride_outer=strides[2] // word,
            stride_inner=stride_inner,
        )


def kv_compact_reference(
    plan: KvCompactPlan, base: Tensor, path: Tensor, num_path: Tensor, num_nodes: Tensor
) -> None:
    """`kv_compact` in plain PyTorch: gather everything, then scatter."""
    num_blocks, block_size = plan.caches[0].shape[:2]
    depth = torch.arange(path.shape[1], device=path.device)
    wanted = (depth > 0) & (depth < path_lengths(path, num_path, num_nodes)[:, None])
    request, d = wanted.nonzero(as_tuple=True)
    first = base[request].long()
    positions = torch.stack((first + path[request, d], first + d))  # from, to
    columns = positions // block_size
    for cache, table in zip(plan.caches, plan.block_tables, strict=True):
        known = (positions >= 0) & (columns < table.shape[1])
        blocks = table[request, columns.where(known, 0)].long()
        known &= (blocks > 0) & (blocks < num_blocks)
        use = known.all(0) & (positions[0] != positions[1])
        (from_block, to_block), (from_row, to_row) = blocks[:, use], (positions % block_size)[:, use]
        rows = cache.view(_WORDS[cache.element_size()])  # copied as bits: fp8 has no indexed copy everywhere
        rows[to_block, to_row] = rows[from_block, from_row]


@triton.jit
def _locate(position, block_table_ptr, M, num_blocks, BLOCK_SIZE: tl.constexpr, mask):
    """Block ids and whether they may be touched, of a vector of cache positions."""
    column = position // BLOCK_SIZE
    known = mask & (position >= 0) & (column < M)
    block = tl.load(block_table_ptr + column, mask=known, other=0).to(tl.int64)
    return block, known & (block > 0) & (block < num_blocks)


@triton.jit
def _kv_compact_kernel(
    pointers_ptr,  # [caches, 4] address of words, address of a block table [R, M], its row stride, M
    base_ptr,  # [R]
    path_ptr,  # [R, N]
    num_path_ptr,  # [R]
    num_nodes_ptr,  # [R]
    stride_block,
    stride_row,
    stride_outer,
    stride_inner,
    outer,
    inner,
    num_blocks,
    N,
    WORD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    r = tl.program_id(2)
    path_ptr += r.to(tl.int64) * N
    pointers_ptr += tl.program_id(1) * 4
    # All at once: on the way to the rows every load that waits for another one costs as much as the copy.
    cache = tl.load(pointers_ptr).to(tl.pointer_type(WORD))
    block_table_ptr = tl.load(pointers_ptr + 1).to(tl.pointer_type(tl.int32))
    block_table_ptr += r * tl.load(pointers_ptr + 2)
    M = tl.load(pointers_ptr + 3)
    base = tl.load(base_ptr + r).to(tl.int64)
    num_path, n = tl.load(num_path_ptr + r), tl.load(num_nodes_ptr + r)
    length = load_path_length(path_ptr, num_path, n, N, BLOCK_PATH)
    if length <= 1:
        return
    element = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    offset = (element // inner).to(tl.int64) * stride_outer + (element % inner) * stride_inner
    for at in range(1, length, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        wanted = d < length
        from_position = base + tl.load(path_ptr + d, mask=wanted, other=0)
        to_position = base + d
        from_block, readable = _locate(from_position, block_table_ptr, M, num_blocks, BLOCK_SIZE, wanted)
        to_block, writable = _locate(to_position, block_table_ptr, M, num_blocks, BLOCK_SIZE, wanted)
        from_row = from_block * stride_block + (from_position % BLOCK_SIZE) * stride_row
        to_row = to_block * stride_block + (to_position % BLOCK_SIZE) * stride_row
        move = readable & writable & (from_position != to_position)
        mask = move[:, None] & (element < outer * inner)[None, :]
        rows = tl.load(cache + from_row[:, None] + offset[None, :], mask=mask, other=0)
        tl.debug_barrier()  # the tile has been read before any of it is overwritten
        tl.store(cache + to_row[:, None] + offset[None, :], rows, mask=mask)
        tl.debug_barrier()


def kv_compact(
    plan: KvCompactPlan,
    base: Tensor,
    path: Tensor,
    num_path: Tensor,
    *,
    num_nodes: Tensor,
    impl: Impl = "auto",
) -> None:
    """Compacts the accepted path of every request in all caches of the plan, in place.

    base int32 or int64 [R], the position of node 0; path int32 [R, N], num_path and num_nodes int32 [R] as
    `accepted_path` reads them. The plan's block tables have R rows or more, in the same order.

    Block ids <= 0 (block 0 is vLLM's null block) or out of range, and positions outside the table, are never
    read or written: that row's copy is left out. Raises `ValueError` for arguments that do not fit.
    """
    requests, slots = path.shape
    device = plan.pointers.device
    expect("base", base, (requests,), device=device, dtypes=(torch.int32, torch.int64))
    expect_indices(
        device,
        ("path", path, (requests, slots)),
        ("num_path", num_path, (requests,)),
        ("num_nodes", num_nodes, (requests,)),
    )
    rows = min(len(table) for table in plan.block_tables)
    if rows < requests:
        raise ValueError(f"path has {requests} requests, but a block table of the plan has {rows} rows")
    if not use_triton(path, impl):
        kv_compact_reference(plan, base, path, num_path, num_nodes)
        return
    block_e = 64  # with 16 rows of 8-byte words: as many loads in flight as registers allow
    num_blocks, block_size = plan.caches[0].shape[:2]
    tiles = triton.cdiv(plan.outer * plan.inner, block_e)
    _kv_compact_kernel[(tiles, len(plan.caches), requests)](
        plan.pointers, base.contiguous(), path, num_path, num_nodes,
        plan.stride_block, plan.stride_row, plan.stride_outer, plan.stride_inner,
        plan.outer, plan.inner, num_blocks, slots,
        WORD=_TL_WORDS[plan.word],
        BLOCK_SIZE=block_size,
        BLOCK_PATH=triton.next_power_of_2(slots),
        BLOCK_D=16,
        BLOCK_E=block_e,
    )  # fmt: skip
