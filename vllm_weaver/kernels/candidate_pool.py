# SPDX-License-Identifier: Apache-2.0
"""Candidate pools: the P largest logits of every row with their ids, and the row's logsumexp.

    pool = the first P of the finite logits below vocab_size, by descending value, ties by ascending id.

Layout: logits [M, >= vocab_size] in; values fp32 [M, P] (−inf: no candidate), ids int64 [M, P] (−1: no
candidate) and logsumexp fp32 [M] (over the finite logits; −inf if there are none) out.

Every logit becomes a signed 32-bit key in the order of the values. Four launches:

    groups    the largest key of every 32 logits that follow one another
    bound     the P-th largest of these, found bit by bit (16 bits decide for bf16): P logits are not below it
    collect   what is not below the bound, in any order; a block that has more than P of them passes its P
              largest on, ties to the lower id
    order     every key that was collected counts those that go before it, which is its place

The bound leaves some P and a third of a row that is not sorted. In the worst case (the P largest in a few
groups) P logits of every block are collected, and the last launch, quadratic in what it gets, is slow but
right.

Floor: reads the logits once; the second reading comes from L2. Group keys are 1/8 of a bf16 row. No full
sort, no full-vocabulary copy of the logits in another type, and no softmax over the vocabulary is ever
materialised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect_logits, use_triton
from vllm_weaver.kernels.pdl import launch_options, take_turn

_MAX_POOL = 1024
_BLOCK = 4096  # logits of a program
_GROUP = 32
_ORDERED = 64  # keys that a program puts into their places at once
_RIVALS = 512
_BITS = {torch.bfloat16: 16, torch.float16: 19}  # leading bits of the fp32 value that can differ; else 32
_NONE = tl.constexpr(-(1 << 31))  # below the key of every finite logit


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
def _threshold(keys, P, BITS: tl.constexpr):
    """The P-th largest of the keys, or the lowest number where there are fewer, as far as BITS bits go."""
    threshold = tl.full((), -(1 << 31), tl.int32)
    for step in range(BITS):
        higher = threshold ^ (tl.full((), 1, tl.int32) << (31 - step))  # the order's bit, as 1 above 0
        enough = tl.sum((keys >= higher).to(tl.int32), axis=0) >= P
        threshold = tl.where(enough, higher, threshold)
    return threshold


@triton.jit
def _load_keys(logits_ptr, column, vocab_size):
    """Values in fp32 and keys of the logits there; _NONE for what is no candidate."""
    value = tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    value = tl.where(value == 0, 0.0, value)  # -0.0 and 0.0 are equal
    bits = value.to(tl.int32, bitcast=True)
    finite = tl.abs(value) < float("inf")  # false for NaN
    return tl.where(finite, value, float("-inf")), tl.where(finite, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE)


@triton.jit
def _groups_kernel(
    logits_ptr,  # [M, >= vocab_size]
    group_keys_ptr,  # [M, S * BLOCK / GROUP] out
    max_ptr,  # [M, S] out, largest finite logit of the block
    sum_ptr,  # [M, S] out, sum of exp(logit - max) over the block
    logits_stride,
    vocab_size,
    S,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    GROUPS: tl.constexpr = BLOCK // GROUP
    group = tl.arange(0, GROUPS)
    column = block * BLOCK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value, keys = _load_keys(logits_ptr + row * logits_stride, column, vocab_size)
    at = row * S + block
    tl.store(group_keys_ptr + at * GROUPS + group, tl.max(keys, axis=1))
    top = tl.max(tl.max(value, axis=1), axis=0)
    top_or_zero = tl.where(top > float("-inf"), top, 0.0)
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(tl.sum(tl.exp(value - top_or_zero), axis=1), axis=0))


@triton.jit
def _bound_kernel(
    group_keys_ptr,  # [M, G]
    max_ptr,  # [M, S]
    sum_ptr,  # [M, S]
    bound_ptr,  # [M] out
    count_ptr,  # [M] out, zeros
    logsumexp_ptr,  # [M] out
    G,
    S,
    P,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= G
    BLOCK_S: tl.constexpr,  # a power of two >= S
    PDL: tl.constexpr,
):
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keys = tl.load(group_keys_ptr + row * G + at, mask=at < G, other=_NONE)
    tl.store(bound_ptr + row, _threshold(keys, P, BITS))
    tl.store(count_ptr + row, 0)
    block = tl.arange(0, BLOCK_S)
    part = tl.load(max_ptr + row * S + block, mask=block < S, other=float("-inf"))
    top = tl.max(part, axis=0)
    top_or_zero = tl.where(top > float("-inf"), top, 0.0)
    total = tl.load(sum_ptr + row * S + block, mask=block < S, other=0.0)
    total = tl.sum(total * tl.exp(part - top_or_zero), axis=0)
    logsumexp = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(logsumexp_ptr + row, logsumexp)


@triton.jit
def _collect_kernel(
    logits_ptr,  # [M, >= vocab_size]
    bound_ptr,  # [M]
    count_ptr,  # [M] in and out: keys collected so far
    keys_ptr,  # [M, S * P] out
    ids_ptr,  # [M, S * P] out
    logits_stride,
    vocab_size,
    S,
    P,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Before the turn: the launches since the logits were written each took theirs.
    _, keys = _load_keys(logits_ptr + row * logits_stride, column, vocab_size)
    take_turn(PDL)
    kept = (keys >= tl.load(bound_ptr + row)) & (keys > _NONE)
    count = tl.sum(kept.to(tl.int32), axis=0)
    if count > P:
        leading = keys >> (32 - BITS)
        threshold = _threshold(keys, P, BITS) >> (32 - BITS)
        above = leading > threshold
        level = (leading == threshold) & (keys > _NONE)
        spare = P - tl.sum(above.to(tl.int32), axis=0)
        kept = above | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= spare))
        count = tl.sum(kept.to(tl.int32), axis=0)
    if count > 0:
        place = tl.atomic_add(count_ptr + row, count) + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(keys_ptr + row * S * P + place, keys, mask=kept)
        tl.store(ids_ptr + row * S * P + place, column, mask=kept)


@triton.jit
def _order_kernel(
    keys_ptr,  # [M, S * P]
    collected_ptr,  # [M, S * P] ids
    count_ptr,  # [M]
    values_ptr,  # [M, P] out
    ids_ptr,  # [M, P] out
    S,
    P,
    OWN: tl.constexpr,
    RIVALS: tl.constexpr,
    PDL: tl.constexpr,
):
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + row)
    keys_ptr += row * S * P
    collected_ptr += row * S * P
    for start in range(tl.program_id(1) * OWN, tl.maximum(count, P), tl.num_programs(1) * OWN):
        own = start + tl.arange(0, OWN)
        found = own < count
        key = tl.load(keys_ptr + own, mask=found, other=_NONE)
        token = tl.load(collected_ptr + own, mask=found, other=-1)
        rank = tl.zeros((OWN,), dtype=tl.int32)
        for at in range(0, count, RIVALS):
            other = at + tl.arange(0, RIVALS)
            rival = tl.load(keys_ptr + other, mask=other < count, other=_NONE)[None, :]
            rival_token = tl.load(collected_ptr + other, mask=other < count, other=-1)[None, :]
            before = (rival > key[:, None]) | ((rival == key[:, None]) & (rival_token < token[:, None]))
            rank += tl.sum(before.to(tl.int32), axis=1)
        value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        place = tl.where(found, rank, own)
        tl.store(values_ptr + row * P + place, tl.where(found, value, float("-inf")), mask=place < P)
        tl.store(ids_ptr + row * P + place, token.to(tl.int64), mask=place < P)


def candidate_pool(
    logits: Tensor, pool_size: int, vocab_size: int | None = None, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [M, P], ids [M, P] and logsumexp [M] of logits [M, >= vocab_size] in any float dtype, P =
    pool_size.

    vocab_size defaults to the width of the logits. NaN and infinite logits are no candidates. `ValueError`
    for a pool size outside [1, 1024], a vocabulary wider than the logits, or rows that are not contiguous.
    """
    vocab_size = expect_logits(logits, vocab_size)
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
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    num_groups = num_blocks * (_BLOCK // _GROUP)
    bits = _BITS.get(logits.dtype, 32)
    largest = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    sums = torch.empty_like(largest)
    group_keys = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    bound, count = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    keys, collected = torch.empty(2, num_rows, num_blocks * pool_size, dtype=torch.int32, device=device)
    source, launch = (logits.stride(0), vocab_size, num_blocks), launch_options(logits)
    _groups_kernel[(num_rows, num_blocks)](
        logits, group_keys, largest, sums, *source, BLOCK=_BLOCK, GROUP=_GROUP, num_warps=4, **launch
    )
    _bound_kernel[(num_rows,)](
        group_keys, largest, sums, bound, count, logsumexp, num_groups, num_blocks, pool_size,
        BITS=bits,
        BLOCK=triton.next_power_of_2(num_groups),
        BLOCK_S=triton.next_power_of_2(num_blocks),
        num_warps=8,
        **launch,
    )  # fmt: skip
    _collect_kernel[(num_rows, num_blocks)](
        logits,
        bound,
        count,
        keys,
        collected,
        *source,
        pool_size,
        BITS=bits,
        BLOCK=_BLOCK,
        num_warps=8,
        **launch,
    )
    _order_kernel[(num_rows, triton.cdiv(2 * pool_size, _ORDERED))](
        keys, collected, count, values, ids, num_blocks, pool_size,
        OWN=_ORDERED,
        RIVALS=min(_RIVALS, max(16, triton.next_power_of_2(pool_size))),
        num_warps=8,
        **launch,
    )  # fmt: skip
    return values, ids, logsumexp
