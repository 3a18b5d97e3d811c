# SPDX-License-Identifier: Apache-2.0
"""Paged attention of tree nodes to the committed prefix and to their own ancestors.

Node i of a request sees every position below base = seq_len - query_len, and position base + j exactly where
bit j of its ancestor row is set (itself included):

    o_i = sum_p softmax_p(softcap(scale (q_i . k_p))) v_p      over the visible positions p

in fp32, softcap(x) = cap tanh(x / cap) when cap > 0. The step's own K/V rows are already in the cache.

Buffers: packed token rows [T, Hq, D]; paged caches [num_blocks, block_size, Hkv, D]. Neither scores nor a
dense mask reach memory: tiles of (node, query head of the group) rows by 32 positions live in registers, with
a running maximum and sum.

Floor for one request of n nodes on a prefix of L tokens: (L + n) Hkv 2 D cache elements and n Hq D queries
read, n Hq D outputs written; 2 n (L + n) Hq D multiply-adds. A KV head's cache is read once for every 64 rows
(32 rows above D = 128).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.ancestors import num_mask_words, unpack_mask
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CACHES = (*_FLOATS, torch.float8_e4m3fn)


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
    k_scale: float,
    v_scale: float,
    causal_rows: bool,
) -> None:
    """`tree_attention` in plain PyTorch, fp32, a loop over requests.

    causal_rows: whether rows of requests that are not trees are computed too, as a causal chain.
    """
    heads, dim = q.shape[1:]
    num_blocks, block_size, kv_heads = k_cache.shape[:3]
    group = heads // kv_heads
    starts = query_start_loc.tolist()
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
        else:
            tail = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            valid = None
        hidden = ~known.expand(n, -1)
        hidden[:, base:] |= ~tail

        at = block.where(known, 0), position % block_size
        keys, values = (  # [Hkv, 1, L, D]; a position that nobody may see can hold anything, NaN included
            (cache[at].float() * factor).masked_fill(~known[:, None, None], 0).transpose(0, 1)[:, None]
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        queries = q[rows].float().view(n, kv_heads, group, dim).permute(1, 2, 0, 3)
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
def _attend_tile(
    queries,
    accumulated,
    largest,
    total,
    k_ptr,
    v_ptr,
    block_table_ptr,
    position,
    visible,
    dim,
    k_stride_block,
    k_stride_row,
    v_stride_block,
    v_stride_row,
    scale,
    softcap,
    num_blocks,
    M,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One step of the running softmax: a tile of rows over a tile of positions."""
    column = position // PAGE
    block = tl.load(block_table_ptr + column, mask=column < M, other=0).to(tl.int64)
    wanted = visible & ((block > 0) & (block < num_blocks))[None, :]
    # Positions that no row of the tile sees are not loaded: what they hold, NaN included, must not matter.
    loaded = (tl.max(wanted.to(tl.int32), axis=0) > 0)[:, None] & (dim < D)[None, :]
    row = position % PAGE
    keys = tl.load(k_ptr + (block * k_stride_block + row * k_stride_row)[:, None], mask=loaded, other=0.0)
    values = tl.load(v_ptr + (block * v_stride_block + row * v_stride_row)[:, None], mask=loaded, other=0.0)

    scores = tl.dot(queries, tl.trans(keys.to(DOT_DTYPE)), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
    scores = tl.where(wanted, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet
    weights = tl.exp(scores - shift[:, None])
    rescale = tl.exp(largest - shift)
    total = total * rescale + tl.sum(weights, axis=1)
    accumulated = accumulated * rescale[:, None]
    accumulated += tl.dot(weights.to(DOT_DTYPE), values.to(DOT_DTYPE), input_precision="ieee")
    return accumulated, new_largest, total


@triton.jit
def _tree_attention_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, PAGE, Hkv, D]
    v_ptr,  # [num_blocks, PAGE, Hkv, D]
    block_table_ptr,  # [R, M]
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    num_nodes_ptr,  # [R]
    ancestors_ptr,  # [R, N, WORDS]
    out_ptr,  # [T, Hq, D]
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
    scale,
    softcap,
    v_scale,
    num_blocks,
    M,
    N,
    WORDS,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    kv_head, r = tl.program_id(1), tl.program_id(2)
    n = tl.load(num_nodes_ptr + r)
    if n <= 0:
        return
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + r + 1) - first).to(tl.int32)
    base = tl.load(seq_lens_ptr + r) - query_len
    length = tl.minimum(query_len, N)
    n = tl.minimum(n, length)
    if (tl.program_id(0) * BLOCK_M >= length * GROUP) | (base < 0):
        return

    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = m // GROUP
    head = kv_head * GROUP + m % GROUP
    dim = tl.arange(0, BLOCK_D)
    in_p = tl.arange(0, BLOCK_P)
    ancestor_row = ancestors_ptr + (r.to(tl.int64) * N + node) * WORDS
    own_word = tl.load(ancestor_row + (node >> 5), mask=node < n, other=0)
    valid = ((own_word >> (node & 31)) & 1) != 0
    queries = tl.load(
        q_ptr + (first + node)[:, None] * q_stride_t + head[:, None] * q_stride_h + dim[None, :],
        mask=valid[:, None] & (dim < D)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    k_ptr += kv_head * k_stride_h + dim[None, :] * k_stride_d
    v_ptr += kv_head * v_stride_h + dim[None, :] * v_stride_d
    block_table_ptr += r.to(tl.int64) * table_stride

    accumulated = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, base, BLOCK_P):
        position = start + in_p
        accumulated, largest, total = _attend_tile(
            queries, accumulated, largest, total, k_ptr, v_ptr, block_table_ptr,
            position, valid[:, None] & (position < base)[None, :], dim,
            k_stride_block, k_stride_row, v_stride_block, v_stride_row, scale, softcap, num_blocks, M,
            PAGE, D, HAS_SOFTCAP, DOT_DTYPE,
        )  # fmt: skip
    for start in range(0, n, BLOCK_P):
        j = start + in_p
        word = tl.load(
            ancestor_row[:, None] + (j >> 5)[None, :], mask=valid[:, None] & (j < n)[None, :], other=0
        )
        accumulated, largest, total = _attend_tile(
            queries, accumulated, largest, total, k_ptr, v_ptr, block_table_ptr,
            base + j, ((word >> (j & 31)[None, :]) & 1) != 0, dim,
            k_stride_block, k_stride_row, v_stride_block, v_stride_row, scale, softcap, num_blocks, M,
            PAGE, D, HAS_SOFTCAP, DOT_DTYPE,
        )  # fmt: skip

    output = accumulated * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(
        out_ptr + (first + node)[:, None] * out_stride_t + head[:, None] * out_stride_h + dim[None, :],
        tl.where(valid[:, None], output, 0.0).to(out_ptr.dtype.element_ty),
        mask=(node < length)[:, None] & (dim < D)[None, :],
    )


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    causal_rows: bool = False,
    impl: Impl = "auto",
) -> None:
    """Attention outputs of every tree node into `out`.

    q, out [T, Hq, D]; k_cache, v_cache views [num_blocks, block_size, Hkv, D] of any strides, fp32, bf16,
    fp16 or fp8 e4m3 (values times k_scale, v_scale); block_table int32 [R, M]; query_start_loc int32 [R+1];
    seq_lens int32 [R], committed tokens plus query length; num_nodes int32 [R]; ancestors int32 [R, N,
    ceil(N/32)].

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
    expect("q", q, (tokens, heads, dim), device=q.device, dtypes=_FLOATS)
    expect("out", out, (tokens, heads, dim), device=q.device, dtypes=_FLOATS)
    expect("k_cache", k_cache, (num_blocks, page, kv_heads, dim), device=q.device, dtypes=_CACHES)
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
    if not use_triton(q, impl):
        tree_attention_reference(
            q, k_cache, v_cache, block_table, query_start_loc, seq_lens, num_nodes, ancestors, out,
            scale=scale, softcap=softcap, k_scale=k_scale, v_scale=v_scale, causal_rows=causal_rows,
        )  # fmt: skip
        return
    if causal_rows:
        raise ValueError("causal_rows=True needs the PyTorch reference; the Triton kernel has no such rows")
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(dim))
    # Shared memory of the smallest supported GPU (99 KiB on sm_120) holds a K and a V tile of these sizes.
    wide = block_d > 128 and q.dtype == torch.float32
    block_m = min(64 if block_d <= 128 else 32, max(16, triton.next_power_of_2(slots * group)))
    # The interpreter multiplies bf16 tiles as if they were integers; there products are taken in fp32.
    narrow = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16} if q.is_cuda else {}
    _tree_attention_kernel[(triton.cdiv(slots * group, block_m), kv_heads, requests)](
        q, k_cache, v_cache, block_table, query_start_loc, seq_lens, num_nodes, ancestors, out,
        *q.stride()[:2], *k_cache.stride(), *v_cache.stride(), *out.stride()[:2], block_table.stride(0),
        scale * k_scale, softcap, v_scale, num_blocks, block_table.shape[1], slots, num_mask_words(slots),
        GROUP=group,
        PAGE=page,
        D=dim,
        HAS_SOFTCAP=softcap > 0,
        DOT_DTYPE=narrow.get(q.dtype, tl.float32),
        BLOCK_M=block_m,
        BLOCK_P=16 if wide else 32,
        BLOCK_D=block_d,
    )  # fmt: skip
