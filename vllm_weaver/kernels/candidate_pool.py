# SPDX-License-Identifier: Apache-2.0
"""Candidate pools: the P largest logits of every row with their ids, and the row's logsumexp.

    pool = the first P of the finite logits below vocab_size, by descending value, ties by ascending id.

Layout: logits [M, >= vocab_size] in; values fp32 [M, P] (−inf: no candidate), ids int64 [M, P] (−1: no
candidate) and logsumexp fp32 [M] (over the finite logits; −inf if there are none) out.

Every logit becomes an integer key of 32 value bits above its reversed id, so that all keys differ and their
order is the order wanted, ties included. A program holds one block of keys in registers, finds its P-th
largest key bit by bit (one count a bit) and passes on the keys that reach it. Blocks of survivors are reduced
the same way until one is left, which a last program sorts by counting, for every key, the larger ones.

Floor: reads the logits once; the keys passed on are 8·P bytes a block of 4096. No full sort, no
full-vocabulary copy of the logits in another type, and no softmax over the vocabulary is ever materialised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, use_triton

_MAX_POOL = 1024
_VALUE_BITS = 32


def candidate_pool_reference(
    logits: Tensor, pool_size: int, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule of `candidate_pool` in plain PyTorch, in fp32 (fp64 for fp64 logits)."""
    rows = logits[:, :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    rows = rows.masked_fill(~rows.isfinite(), float("-inf"))
    ordered, ids = torch.sort(rows, dim=-1, descending=True, stable=True)
    missing = max(0, pool_size - vocab_size)
    values = torch.nn.functional.pad(ordered[:, :pool_size], (0, missing), value=float("-inf"))
    ids = torch.nn.functional.pad(ids[:, :pool_size], (0, missing), value=-1)
    return values, ids.masked_fill(values == float("-inf"), -1), torch.logsumexp(rows, dim=-1)


@triton.jit
def _keep_largest(
    keys,  # [BLOCK] int64, distinct, negative: no key
    out_ptr,  # [P]
    P,
    BITS,
    BLOCK_P: tl.constexpr,  # a power of two >= P
):
    """Stores the P largest keys in any order, then -1."""
    threshold = tl.full((), 0, tl.int64)
    for step in range(BITS):
        higher = threshold | (tl.full((), 1, tl.int64) << (BITS - 1 - step))
        enough = tl.sum((keys >= higher).to(tl.int32), axis=0) >= P
        threshold = tl.where(enough, higher, threshold)
    kept = keys >= threshold
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(out_ptr + place, keys, mask=kept)
    rest = tl.arange(0, BLOCK_P)
    none = tl.full((BLOCK_P,), -1, tl.int64)
    tl.store(out_ptr + rest, none, mask=(rest >= tl.sum(kept.to(tl.int32), axis=0)) & (rest < P))


@triton.jit
def _select_logits_kernel(
    logits_ptr,  # [M, >= vocab_size]
    keys_ptr,  # [M, S, P] out
    max_ptr,  # [M, S] out, largest finite logit of the block
    sum_ptr,  # [M, S] out, sum of exp(logit - max) over the block
    logits_stride,
    vocab_size,
    S,
    P,
    ID_BITS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row * logits_stride + column, mask=column < vocab_size, other=float("-inf"))
    value = value.to(tl.float32)
    finite = tl.abs(value) < float("inf")  # false for NaN
    value = tl.where(value == 0, 0.0, value)  # -0.0 and 0.0 are equal
    bits = value.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    reversed_id = ((1 << ID_BITS) - 1 - column).to(tl.int64)
    keys = tl.where(finite, (ordered << ID_BITS) | reversed_id, -1)
    at = row * S + block
    _keep_largest(keys, keys_ptr + at * P, P, BITS, BLOCK_P)
    top = tl.max(tl.where(finite, value, float("-inf")), axis=0)
    top_or_zero = tl.where(top > float("-inf"), top, 0.0)
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(tl.where(finite, tl.exp(value - top_or_zero), 0.0), axis=0))


@triton.jit
def _select_keys_kernel(
    keys_ptr,  # [M, n]
    out_ptr,  # [M, S, P] out
    n,
    S,
    P,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * n + at, mask=at < n, other=-1)
    _keep_largest(keys, out_ptr + (row * S + block) * P, P, BITS, BLOCK_P)


@triton.jit
def _finish_kernel(
    keys_ptr,  # [M, P]
    max_ptr,  # [M, S]
    sum_ptr,  # [M, S]
    values_ptr,  # [M, P] out
    ids_ptr,  # [M, P] out
    logsumexp_ptr,  # [M] out
    S,
    P,
    ID_BITS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # a power of two >= S
    BLOCK_P: tl.constexpr,  # a power of two >= P
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_P)
    keys = tl.load(keys_ptr + row * P + at, mask=at < P, other=-1)
    rank = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for start in range(0, P, CHUNK):
        other = start + tl.arange(0, CHUNK)
        rival = tl.load(keys_ptr + row * P + other, mask=other < P, other=-1)
        rank += tl.sum((rival[None, :] > keys[:, None]).to(tl.int32), axis=1)
    found = keys >= 0
    ordered = ((keys >> ID_BITS) - 0x80000000).to(tl.int32)
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    mask = (1 << ID_BITS) - 1
    tl.store(values_ptr + row * P + rank, value, mask=found)
    tl.store(ids_ptr + row * P + rank, mask - (keys & mask), mask=found)
    empty = (at >= tl.sum(found.to(tl.int32), axis=0)) & (at < P)
    tl.store(values_ptr + row * P + at, tl.full((BLOCK_P,), float("-inf"), tl.float32), mask=empty)
    tl.store(ids_ptr + row * P + at, tl.full((BLOCK_P,), -1, tl.int64), mask=empty)

    block = tl.arange(0, BLOCK_S)
    part = tl.load(max_ptr + row * S + block, mask=block < S, other=float("-inf"))
    top = tl.max(part, axis=0)
    top_or_zero = tl.where(top > float("-inf"), top, 0.0)
    total = tl.load(sum_ptr + row * S + block, mask=block < S, other=0.0)
    total = tl.sum(total * tl.exp(part - top_or_zero), axis=0)
    tl.store(
        logsumexp_ptr + row, tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    )


def candidate_pool(
    logits: Tensor, pool_size: int, vocab_size: int | None = None, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [M, P], ids [M, P] and logsumexp [M] of logits [M, >= vocab_size] in any float dtype, P =
    pool_size.

    vocab_size defaults to the width of the logits. NaN and infinite logits are no candidates. `ValueError`
    for a pool size outside [1, 1024], a vocabulary wider than the logits, or rows that are not contiguous.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    expect("logits", logits, (None, None), device=logits.device)
    expect_dense_last("logits", logits)
    if not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be in [1, {logits.shape[1]}], the width of the logits"
        )
    if not 1 <= pool_size <= _MAX_POOL:
        raise ValueError(f"the candidate pool size is {pool_size}; it must be in [1, {_MAX_POOL}]")
    if not use_triton(logits, impl):
        return candidate_pool_reference(logits, pool_size, vocab_size)
    num_rows, device = len(logits), logits.device
    values = torch.empty(num_rows, pool_size, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, pool_size, dtype=torch.int64, device=device)
    logsumexp = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return values, ids, logsumexp
    block_p = triton.next_power_of_2(pool_size)
    block = max(4096, 4 * block_p)
    id_bits = max(1, (vocab_size - 1).bit_length())
    bits = _VALUE_BITS + id_bits
    meta = {"BITS": bits, "BLOCK": block, "BLOCK_P": block_p}
    num_blocks = triton.cdiv(vocab_size, block)
    largest = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    sums = torch.empty_like(largest)
    keys = torch.empty(num_rows, num_blocks, pool_size, dtype=torch.int64, device=device)
    _select_logits_kernel[(num_rows, num_blocks)](
        logits,
        keys,
        largest,
        sums,
        logits.stride(0),
        vocab_size,
        num_blocks,
        pool_size,
        ID_BITS=id_bits,
        **meta,
    )
    while keys.shape[1] > 1:
        count = keys.shape[1] * pool_size
        fewer = torch.empty(num_rows, triton.cdiv(count, block), pool_size, dtype=torch.int64, device=device)
        _select_keys_kernel[(num_rows, fewer.shape[1])](keys, fewer, count, fewer.shape[1], pool_size, **meta)
        keys = fewer
    _finish_kernel[(num_rows,)](
        keys,
        largest,
        sums,
        values,
        ids,
        logsumexp,
        num_blocks,
        pool_size,
        ID_BITS=id_bits,
        BLOCK_S=triton.next_power_of_2(num_blocks),
        BLOCK_P=block_p,
        CHUNK=16,
    )
    return values, ids, logsumexp
