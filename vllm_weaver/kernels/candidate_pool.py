# SPDX-License-Identifier: Apache-2.0
"""Candidate pools: the P largest logits of every row with their ids, and the row's logsumexp.

    pool = the first P of the finite logits below vocab_size, by descending value, ties by ascending id.

Layout: logits [M, >= vocab_size] in; values fp32 [M, P] (−inf: no candidate), ids int64 [M, P] (−1: no
candidate) and logsumexp fp32 [M] (over the finite logits; −inf if there are none) out.

Every logit becomes a signed 32-bit key in the order of the values. A program holds a block of keys in
registers and finds its P-th largest value bit by bit (one count a bit; 16 bits decide for bf16), keeps what
is larger and the first ones that are equal, and passes them on in the order of their ids. One more program a
row does the same with what the blocks kept (so that order among equals is still that of the ids) and puts
every key into its place by counting those that go before it.

Floor: reads the logits once; the keys passed on are 8·P bytes a block. Two launches. No full sort, no
full-vocabulary copy of the logits in another type, and no softmax over the vocabulary is ever materialised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect_logits, use_triton
from vllm_weaver.kernels.pdl import launch_options, take_turn

_MAX_POOL = 1024
_SMALLEST_BLOCK = 4096
_LARGEST_BLOCK = 16384
_FINAL_KEYS = 16384  # what the last program of a row should hold at most
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
def _largest(
    keys,  # [BLOCK]
    P,
    BITS: tl.constexpr,
):
    """Which of the keys are the P largest, ties to the earlier ones, and the place of each among these."""
    threshold = tl.full((), -(1 << 31), tl.int32)
    for step in range(BITS):
        higher = threshold ^ (tl.full((), 1, tl.int32) << (31 - step))  # the order's bit, as 1 above 0
        enough = tl.sum((keys >= higher).to(tl.int32), axis=0) >= P
        threshold = tl.where(enough, higher, threshold)
    threshold = threshold >> (32 - BITS)
    leading = keys >> (32 - BITS)
    above = leading > threshold
    level = (leading == threshold) & (keys > _NONE)
    # One scan counts both: those above (fewer than P <= 1024) in the low bits, those level in the others.
    counts = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 12), axis=0)
    spare = P - tl.sum(above.to(tl.int32), axis=0)
    level_count = counts >> 12
    kept = above | (level & (level_count <= spare))
    place = (counts & 0xFFF) + tl.minimum(level_count, spare) - 1
    return kept, place


@triton.jit
def _select_logits_kernel(
    logits_ptr,  # [M, >= vocab_size]
    keys_ptr,  # [M, S, P] out, then the lowest number
    ids_ptr,  # [M, S, P] out, undefined beside the lowest number
    max_ptr,  # [M, S] out, largest finite logit of the block
    sum_ptr,  # [M, S] out, sum of exp(logit - max) over the block
    logits_stride,
    vocab_size,
    S,
    P,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,  # a power of two >= P
    PDL: tl.constexpr,
):
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row * logits_stride + column, mask=column < vocab_size, other=float("-inf"))
    value = value.to(tl.float32)
    finite = tl.abs(value) < float("inf")  # false for NaN
    at = row * S + block
    top = tl.max(tl.where(finite, value, float("-inf")), axis=0)
    top_or_zero = tl.where(top > float("-inf"), top, 0.0)
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(tl.where(finite, tl.exp(value - top_or_zero), 0.0), axis=0))
    value = tl.where(value == 0, 0.0, value)  # -0.0 and 0.0 are equal
    bits = value.to(tl.int32, bitcast=True)
    keys = tl.where(finite, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE)
    kept, place = _largest(keys, P, BITS)
    tl.store(keys_ptr + at * P + place, keys, mask=kept)
    tl.store(ids_ptr + at * P + place, column, mask=kept)
    rest = tl.arange(0, BLOCK_P)
    empty = (rest >= tl.sum(kept.to(tl.int32), axis=0)) & (rest < P)
    tl.store(keys_ptr + at * P + rest, tl.full((BLOCK_P,), _NONE, tl.int32), mask=empty)


@triton.jit
def _finish_kernel(
    keys_ptr,  # [M, S * P]
    block_ids_ptr,  # [M, S * P]
    kept_ptr,  # [M, 2, P] scratch: keys that are kept, and where they were
    max_ptr,  # [M, S]
    sum_ptr,  # [M, S]
    values_ptr,  # [M, P] out
    ids_ptr,  # [M, P] out
    logsumexp_ptr,  # [M] out
    S,
    P,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= S * P
    BLOCK_S: tl.constexpr,  # a power of two >= S
    BLOCK_P: tl.constexpr,  # a power of two >= P
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    kept_ptr += row * 2 * P
    keys = tl.load(keys_ptr + row * S * P + at, mask=at < S * P, other=_NONE)
    kept, place = _largest(keys, P, BITS)
    count = tl.sum(kept.to(tl.int32), axis=0)
    tl.store(kept_ptr + place, keys, mask=kept)
    tl.store(kept_ptr + P + place, at, mask=kept)
    tl.debug_barrier()  # they are read back by other threads than wrote them
    own = tl.arange(0, BLOCK_P)
    found = own < count
    key = tl.load(kept_ptr + own, mask=found, other=_NONE)
    rank = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for start in range(0, P, CHUNK):
        other = start + tl.arange(0, CHUNK)
        rival = tl.load(kept_ptr + other, mask=other < count, other=_NONE)[:, None]
        earlier = other[:, None] < own[None, :]
        before = (rival > key[None, :]) | ((rival == key[None, :]) & earlier)
        rank += tl.sum(before.to(tl.int32), axis=0)
    source = tl.load(kept_ptr + P + own, mask=found, other=0)
    token = tl.load(block_ids_ptr + row * S * P + source, mask=found, other=-1)
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    rank = tl.where(found, rank, own)
    tl.store(values_ptr + row * P + rank, tl.where(found, value, float("-inf")), mask=own < P)
    tl.store(ids_ptr + row * P + rank, token.to(tl.int64), mask=own < P)

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
    block_p = triton.next_power_of_2(pool_size)
    block = triton.next_power_of_2(triton.cdiv(vocab_size * pool_size, _FINAL_KEYS))
    block = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 2 * block_p, block))
    num_blocks = triton.cdiv(vocab_size, block)
    final = triton.next_power_of_2(num_blocks * pool_size)
    bits = _BITS.get(logits.dtype, 32)
    largest = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    sums = torch.empty_like(largest)
    keys = torch.empty(num_rows, num_blocks, pool_size, dtype=torch.int32, device=device)
    block_ids = torch.empty_like(keys)
    _select_logits_kernel[(num_rows, num_blocks)](
        logits,
        keys,
        block_ids,
        largest,
        sums,
        logits.stride(0),
        vocab_size,
        num_blocks,
        pool_size,
        BITS=bits,
        BLOCK=block,
        BLOCK_P=block_p,
        num_warps=min(32, block // 512),
        **launch_options(logits),
    )
    _finish_kernel[(num_rows,)](
        keys,
        block_ids,
        torch.empty(num_rows, 2, pool_size, dtype=torch.int32, device=device),
        largest,
        sums,
        values,
        ids,
        logsumexp,
        num_blocks,
        pool_size,
        BITS=bits,
        BLOCK=final,
        BLOCK_S=triton.next_power_of_2(num_blocks),
        BLOCK_P=block_p,
        CHUNK=min(32, block_p),
        num_warps=min(16, max(4, final // 1024)),
        **launch_options(logits),
    )
    return values, ids, logsumexp
