# SPDX-License-Identifier: Apache-2.0
"""Paged attention of tree nodes to the committed prefix and to their own ancestors.

Node i of a request sees every position below base = seq_len - query_len, and position base + j exactly where
bit j of its ancestor row is set (itself included):

    o_i = sum_p softmax_p(softcap(scale (q_i . k_p))) v_p      over the visible positions p

in fp32, softcap(x) = cap tanh(x / cap) when cap > 0. The step's own K/V rows are already in the cache.

Positions are divided into splits that run side by side. How many there can be follows from shapes and the
number of multiprocessors alone; how long they are, each program works out from the lengths on the device, and
a program without positions returns. Where a request has one split it writes the output, else a second kernel
combines the splits' (softmax sum, normalised output) pairs.

Buffers: packed token rows [T, Hq, D]; paged caches [num_blocks, block_size, Hkv, D]; a workspace of fp32
[R, N, Hq, splits, D]. Neither scores nor a dense mask reach memory: tiles of (node, query head of the group)
rows by 32 or 64 positions live in registers, with a running maximum and sum.

Floor for one request of n nodes on a prefix of L tokens: (L + n) Hkv 2 D cache elements and n Hq D queries
read, n Hq D outputs written; 2 n (L + n) Hq D multiply-adds. A KV head's cache is read once for every tile of
rows (from L2 after the first), and s > 1 splits write and read s n Hq D floats of workspace.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.ancestors import num_mask_words, unpack_mask
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton
from vllm_weaver.kernels.pdl import has_pdl, launch_options, let_next_start
from vllm_weaver.kernels.tree_attention_combine import combine_kernel, load_request
from vllm_weaver.kernels.tree_attention_layout import Tiling, choose_tiling, device_limits, split_counts

Scale = float | Tensor
"""What quantised values are multiplied by: a number, or a tensor on the device of 1 or Hkv elements."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = (*_FLOATS, torch.float8_e4m3fn)
_LOG2_E = 1.4426950408889634


def tree_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_nodes: Tensor,
    ancestors: Tensor,
    out: Tensor,
    *,
    scale: float,
    softcap: float,
    causal_rows: bool,
    q_scale: Scale = 1.0,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """`tree_attention` in plain PyTorch, fp32, a loop over requests.

    causal_rows: whether rows of requests that are not trees are computed too, as a causal chain.
    """
    heads, dim = q.shape[1:]
    num_blocks, block_size, kv_heads = k_cache.shape[:3]
    group = heads // kv_heads
    starts = query_start_loc.tolist()

    def per_head(factor: Scale) -> Tensor:
        return torch.as_tensor(factor, dtype=torch.float32, device=q.device).reshape(-1, 1)

    for r, (nodes, seq_len) in enumerate(zip(num_nodes.tolist(), seq_lens.tolist(), strict=True)):
        length = starts[r + 1] - starts[r]
        base = seq_len - length
        if nodes > 0:
            length = min(length, ancestors.shape[1])
            n = min(nodes, length)
        else:
            n = length if causal_rows else 0
        if n <= 0 or base < 0:
            continue
        rows = slice(starts[r], starts[r] + n)
        position = torch.arange(base + n, device=q.device)
        column = position // block_size
        block = block_table[r, column.clamp(max=block_table.shape[1] - 1)].long()
        known = (column < block_table.shape[1]) & (block > 0) & (block < num_blocks)

        if nodes > 0:
            tail = unpack_mask(ancestors[r, :n], n)
            valid = tail.diagonal()
            tail = tail & valid  # what is no node is seen by nobody
        else:
            tail = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            valid = None
        hidden = ~known.expand(n, -1)
        hidden[:, base:] |= ~tail

        at = block.where(known, 0), position % block_size
        keys, values = (  # [Hkv, 1, L, D]; a position that nobody may see can hold anything, NaN included
            (cache[at].float() * factor).masked_fill(~known[:, None, None], 0).transpose(0, 1)[:, None]
            for cache, factor in ((k_cache, per_head(k_scale)), (v_cache, per_head(v_scale)))
        )
        queries = (q[rows].float().view(n, kv_heads, group, dim) * per_head(q_scale)[:, None]).permute(
            1, 2, 0, 3
        )
        scores = queries @ keys.mT * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1).masked_fill(hidden, 0)
        result = (weights @ values).permute(2, 0, 1, 3).reshape(n, heads, dim)
        if valid is not None:
            result = result.masked_fill(~valid[:, None, None], 0)
            out[starts[r] + n : starts[r] + length] = 0
        out[rows] = result.to(out.dtype)


@triton.jit
def _load_blocks(block_table_ptr, start, M, PAGE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Block ids of the positions from `start`."""
    column = (start + tl.arange(0, BLOCK_P)) // PAGE
    return tl.load(block_table_ptr + column, mask=column < M, other=0)


@triton.jit
def _place(block, start, num_blocks, PAGE: tl.constexpr, BLOCK_P: tl.constexpr):
    """(block int64, row, known) of every position of a tile from its `_load_blocks`."""
    known = (block > 0) & (block < num_blocks)
    return tl.where(known, block, 0).to(tl.int64), (start + tl.arange(0, BLOCK_P)) % PAGE, known


@triton.jit
def _attend_tile(
    queries,
    accumulated,
    largest,
    total,
    k_ptr,
    v_ptr,
    block,
    row,
    visible,
    loaded,
    k_stride_block,
    k_stride_row,
    v_stride_block,
    v_stride_row,
    scale,
    softcap,
    D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One step of the running softmax (to the base 2): a tile of rows over a tile of positions."""
    loaded = loaded[:, None]
    if D != BLOCK_D:
        loaded &= (tl.arange(0, BLOCK_D) < D)[None, :]
    keys = tl.load(k_ptr + (block * k_stride_block + row * k_stride_row)[:, None], mask=loaded, other=0.0)
    values = tl.load(v_ptr + (block * v_stride_block + row * v_stride_row)[:, None], mask=loaded, other=0.0)

    scores = tl.dot(queries, tl.trans(keys.to(DOT_DTYPE)), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # here `scale` brings scores to units of softcap / 2 log2(e), `softcap` to base 2
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(largest - shift)
    total = total * rescale + tl.sum(weights, axis=1)
    accumulated = accumulated * rescale[:, None]
    accumulated = tl.dot(weights.to(DOT_DTYPE), values.to(DOT_DTYPE), accumulated, input_precision="ieee")
    return accumulated, new_largest, total


@triton.jit(do_not_specialize=["num_blocks", "M", "R", "N", "WORDS", "capacity", "shares", "max_splits"])
def _tree_attention_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, PAGE, Hkv, D]
    v_ptr,  # [num_blocks, PAGE, Hkv, D]
    block_table_ptr,  # [R, M]
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    num_nodes_ptr,  # [R]
    ancestors_ptr,  # [R, N, WORDS]
    q_scale_ptr,  # [1 or Hkv] or None, like the next two
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [R, N, Hq, max_splits, D] softmax over a split's positions times V
    partial_lse_ptr,  # [R, N, Hq, max_splits] log2 of the sum of exp2 that it was divided by
    q_stride_t,
    q_stride_h,
    k_stride_block,
    k_stride_row,
    k_stride_h,
    k_stride_d,
    v_stride_block,
    v_stride_row,
    v_stride_h,
    v_stride_d,
    out_stride_t,
    out_stride_h,
    table_stride,
    q_scale_stride,
    k_scale_stride,
    v_scale_stride,
    scale,
    softcap,
    v_scale,
    num_blocks,
    M,
    R,
    N,
    WORDS,
    capacity,
    shares,
    max_splits,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row_tiles = tl.cdiv(N * GROUP, BLOCK_M)
    kv_head = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    r, split = tl.program_id(1), tl.program_id(2)
    first, length, n, base, tiles, per_split = load_request(
        query_start_loc_ptr, seq_lens_ptr, num_nodes_ptr, r, R, N, capacity, shares, max_splits,
        BLOCK_R, BLOCK_P, MIN_TILES,
    )  # fmt: skip
    begin = split * per_split
    alone = tiles <= per_split
    rows = (length if alone else n) * GROUP  # the combining kernel writes the rows that are no node
    if (n <= 0) | (begin >= tiles) | (row_tile * BLOCK_M >= rows):
        return
    # A tile of rows without a node has nothing to look at.
    end = tl.where(row_tile * BLOCK_M < n * GROUP, tl.minimum(begin + per_split, tiles), begin)
    prefix = tl.minimum(base, capacity)
    prefix_tiles = tl.cdiv(prefix, BLOCK_P)

    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = m // GROUP
    head = kv_head * GROUP + m % GROUP
    dim = tl.arange(0, BLOCK_D)
    in_p = tl.arange(0, BLOCK_P)
    tail_ptr = ancestors_ptr + r.to(tl.int64) * N * WORDS
    ancestor_row = tail_ptr + node * WORDS
    own_word = tl.load(ancestor_row + (node >> 5), mask=node < n, other=0)
    valid = ((own_word >> (node & 31)) & 1) != 0
    queries = tl.load(
        q_ptr + (first + node)[:, None] * q_stride_t + head[:, None] * q_stride_h + dim[None, :],
        mask=valid[:, None] & (dim < D)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr + kv_head * q_scale_stride)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head * k_scale_stride)
    if v_scale_ptr is not None:
        v_scale *= tl.load(v_scale_ptr + kv_head * v_scale_stride)
    k_ptr += kv_head.to(tl.int64) * k_stride_h + dim[None, :] * k_stride_d
    v_ptr += kv_head.to(tl.int64) * v_stride_h + dim[None, :] * v_stride_d
    block_table_ptr += r.to(tl.int64) * table_stride

    accumulated = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Block ids are fetched one tile ahead: a load of keys never waits for the load of its own address.
    upcoming = _load_blocks(block_table_ptr, begin * BLOCK_P, M, PAGE, BLOCK_P)
    for tile in range(begin, tl.minimum(end, prefix_tiles)):
        start = tile * BLOCK_P
        block, row, known = _place(upcoming, start, num_blocks, PAGE, BLOCK_P)
        upcoming = _load_blocks(block_table_ptr, start + BLOCK_P, M, PAGE, BLOCK_P)
        live = known & (start + in_p < prefix)
        accumulated, largest, total = _attend_tile(
            queries, accumulated, largest, total, k_ptr, v_ptr, block, row, live[None, :], live,
            k_stride_block, k_stride_row, v_stride_block, v_stride_row, scale, softcap,
            D, HAS_SOFTCAP, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
    for tile in range(tl.maximum(begin, prefix_tiles), end):
        j = (tile - prefix_tiles) * BLOCK_P
        block = _load_blocks(block_table_ptr, base + j, M, PAGE, BLOCK_P)
        block, row, known = _place(block, base + j, num_blocks, PAGE, BLOCK_P)
        other = j + in_p
        # What is no node can hold anything, NaN included: nobody sees it.
        its_word = tl.load(tail_ptr + other * WORDS + (other >> 5), mask=other < n, other=0)
        live = known & (((its_word >> (other & 31)) & 1) != 0)
        word = tl.load(ancestor_row + (j >> 5), mask=valid, other=0)[:, None]
        if BLOCK_P > 32:
            later = tl.load(ancestor_row + (j >> 5) + 1, mask=valid & (j + 32 < n), other=0)
            word = tl.where((in_p < 32)[None, :], word, later[:, None])
        visible = live[None, :] & (((word >> (other & 31)[None, :]) & 1) != 0)
        accumulated, largest, total = _attend_tile(
            queries, accumulated, largest, total, k_ptr, v_ptr, block, row, visible, live,
            k_stride_block, k_stride_row, v_stride_block, v_stride_row, scale, softcap,
            D, HAS_SOFTCAP, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip

    safe = tl.where(total > 0.0, total, 1.0)
    output = accumulated * (v_scale / safe)[:, None]
    within = (dim < D)[None, :]
    if alone:
        tl.store(
            out_ptr + (first + node)[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :],
            tl.where(valid[:, None], output, 0.0).to(out_ptr.dtype.element_ty),
            mask=(node < length)[:, None] & within,
        )
    else:
        heads = tl.num_programs(0) // row_tiles * GROUP
        slot = ((r.to(tl.int64) * N + node) * heads + head) * max_splits + split
        tl.store(partial_ptr + slot[:, None] * D + dim[None, :], output, mask=(node < n)[:, None] & within)
        tl.store(partial_lse_ptr + slot, tl.log2(safe) + largest, mask=node < n)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_nodes: Tensor,
    ancestors: Tensor,
    *,
    scale: float,
    out: Tensor,
    softcap: float = 0.0,
    q_scale: Scale = 1.0,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    causal_rows: bool = False,
    impl: Impl = "auto",
    tiling: Tiling | None = None,
) -> None:
    """Attention outputs of every tree node into `out`.

    q, out [T, Hq, D]; k_cache, v_cache views [num_blocks, block_size, Hkv, D] of any strides; fp32, bf16 or
    fp16, q and the caches also fp8 e4m3 (values times q_scale, k_scale, v_scale); block_table int32 [R, M];
    query_start_loc int32 [R+1]; seq_lens int32 [R], committed tokens plus query length; num_nodes int32 [R];
    ancestors int32 [R, N, ceil(N/32)]. tiling: the kernel's layout, chosen from shapes and device if None.

    A tree request has at most N rows; those from num_nodes on, and nodes that lack their own ancestor bit,
    give zeros. Rows of a request with num_nodes 0 are left alone, unless `causal_rows` asks for a causal
    chain there (prefill chunks). Only the reference can do that: on CUDA such rows belong to vLLM's own
    attention backend. Positions whose block id is <= 0 (block 0 is vLLM's null block) or out of range are
    invisible; a row that sees nothing gives zeros. Raises `ValueError` for arguments that do not fit.
    """
    tokens, heads, dim = q.shape
    num_blocks, page, kv_heads = k_cache.shape[:3]
    requests, slots = ancestors.shape[:2]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads; it must have a multiple of the {kv_heads} heads of k_cache")
    expect("q", q, (tokens, heads, dim), device=q.device, dtypes=_FP8)
    expect("out", out, (tokens, heads, dim), device=q.device, dtypes=_FLOATS)
    expect("k_cache", k_cache, (num_blocks, page, kv_heads, dim), device=q.device, dtypes=_FP8)
    expect("v_cache", v_cache, (num_blocks, page, kv_heads, dim), device=q.device, dtypes=(k_cache.dtype,))
    expect("block_table", block_table, (requests, None), device=q.device, dtypes=(torch.int32,))
    expect_indices(
        q.device,
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("seq_lens", seq_lens, (requests,)),
        ("num_nodes", num_nodes, (requests,)),
        ("ancestors", ancestors, (requests, slots, num_mask_words(slots))),
    )
    for name, tensor in (("q", q), ("out", out), ("block_table", block_table)):
        expect_dense_last(name, tensor)
    for name, factor in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(factor, Tensor):
            if factor.numel() not in (1, kv_heads):
                raise ValueError(f"{name} has {factor.numel()} elements; it must have 1 or {kv_heads}")
            expect(name, factor, factor.shape, device=q.device, dtypes=(torch.float32,))
    if not use_triton(q, impl):
        tree_attention_reference(
            q, k_cache, v_cache, block_table, query_start_loc, seq_lens, num_nodes, ancestors, out,
            scale=scale, softcap=softcap, causal_rows=causal_rows,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return
    if causal_rows:
        raise ValueError("causal_rows=True needs the PyTorch reference; the Triton kernel has no such rows")
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(dim))
    processors, shared_memory = device_limits(q.device)
    tiling = tiling or choose_tiling(slots * group, block_d, k_cache.dtype, shared_memory)
    tiles = triton.cdiv(slots * group, tiling.block_m) * kv_heads
    shares, splits = split_counts(requests, tiles, processors * tiling.per_sm)
    # Inside a CUDA graph both come from the graph's pool; a single split never touches them.
    places = requests * slots * heads * splits if splits > 1 else 1
    partial = torch.empty(places * dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(places, dtype=torch.float32, device=q.device)

    numbers = [
        float(factor) if not isinstance(factor, Tensor) else 1.0 for factor in (q_scale, k_scale, v_scale)
    ]
    tensors = [factor if isinstance(factor, Tensor) else None for factor in (q_scale, k_scale, v_scale)]
    scale = scale * numbers[0] * numbers[1] * _LOG2_E
    # fp8 values are exact in fp16. The interpreter has no product of two bf16 tiles.
    dot = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(q.dtype, tl.float16)
    words = num_mask_words(slots)
    capacity = min(block_table.shape[1] * page, 2**30)
    shared = {
        "MIN_TILES": tiling.min_tiles,
        "BLOCK_R": triton.next_power_of_2(requests),
        "BLOCK_P": tiling.block_p,
        "BLOCK_D": block_d,
    }
    _tree_attention_kernel[(tiles, requests, splits)](
        q, k_cache, v_cache, block_table, query_start_loc, seq_lens, num_nodes, ancestors, *tensors, out,
        partial, partial_lse,
        *q.stride()[:2], *k_cache.stride(), *v_cache.stride(), *out.stride()[:2], block_table.stride(0),
        *(0 if factor is None or factor.numel() == 1 else factor.stride(0) for factor in tensors),
        scale * 2 / softcap if softcap > 0 else scale, softcap * _LOG2_E, numbers[2],
        num_blocks, block_table.shape[1], requests, slots, words, capacity, shares, splits,
        GROUP=group,
        PAGE=page,
        D=dim,
        HAS_SOFTCAP=softcap > 0,
        DOT_DTYPE=dot if q.is_cuda else tl.float32,
        BLOCK_M=tiling.block_m,
        PDL=has_pdl(q),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **shared,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(heads, slots, requests)](
            partial, partial_lse, query_start_loc, seq_lens, num_nodes, ancestors, out,
            *out.stride()[:2], requests, slots, words, capacity, shares, splits,
            D=dim,
            BLOCK_S=triton.next_power_of_2(splits),
            num_warps=4 if splits <= 32 else 8,
            **launch_options(q),
            **shared,
        )  # fmt: skip
