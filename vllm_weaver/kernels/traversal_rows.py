# SPDX-License-Identifier: Apache-2.0
"""The target's rows as `traversal_walk` needs them: three numbers of every row before the walk, one whole row
of every request after it.

    before:  best id, logsumexp, and support: how many tokens have a probability above 0
    after:   the row of the node at which the walk ended, without the tokens of that node's children

A logit of NaN counts as -inf, one of +inf as 3e38; the walk applies the same rule. Floor: `row_statistics`
reads the logits once and keeps 20 bytes for each 8192 of them; `bonus_rows` copies one row a request. No
probabilities are materialised."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_logits, use_triton

_STATISTICS_BLOCK = 8192
_COPY_BLOCK = 4096
LARGEST_LOGIT = 3.0e38


class RowStatistics(NamedTuple):
    """What `traversal_walk` knows of every row of the target."""

    best: Tensor
    """int64 [T]: the most likely token, the lowest id of several; 0 for a row without any."""
    logsumexp: Tensor
    """float32 [T]; -inf for a row without any token."""
    support: Tensor
    """int32 [T]: tokens whose logit is above -inf."""


def usable_logits(logits: Tensor) -> Tensor:
    """The module's rule for NaN and +inf, in float32."""
    logits = logits.float()
    return logits.masked_fill(logits.isnan(), float("-inf")).clamp(max=LARGEST_LOGIT)


def row_statistics_reference(logits: Tensor, vocab_size: int) -> RowStatistics:
    """`row_statistics` in plain PyTorch."""
    rows = usable_logits(logits[:, :vocab_size])
    support = (rows > float("-inf")).sum(1).to(torch.int32)
    return RowStatistics(rows.argmax(1), rows.logsumexp(1), support)


def bonus_rows_reference(
    logits: Tensor, final_rows: Tensor, excluded: Tensor, num_excluded: Tensor
) -> Tensor:
    """`bonus_rows` in plain PyTorch."""
    rows = logits[final_rows.clamp(min=0)] if len(logits) else logits.new_zeros(len(final_rows), 0)
    rows = rows.masked_fill((final_rows < 0)[:, None], float("-inf"))
    inside = torch.arange(excluded.shape[1], device=excluded.device) < num_excluded[:, None]
    inside &= (excluded >= 0) & (excluded < rows.shape[1])
    # Column V takes the entries that exclude nothing.
    wide = torch.cat([rows, rows.new_zeros(len(rows), 1)], dim=1)
    wide.scatter_(1, torch.where(inside, excluded, rows.shape[1]), float("-inf"))
    return wide[:, :-1].contiguous()


@triton.jit
def _block_statistics_kernel(
    logits_ptr,  # [T, >= vocab_size]
    values_ptr,  # [T, S] fp32, the best logit of each block
    ids_ptr,  # [T, S] int64, its id
    sums_ptr,  # [T, S] fp32, sum of exp(logit - best)
    supports_ptr,  # [T, S] int32
    logits_stride,
    vocab_size,
    S,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    logit = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    logit = tl.minimum(tl.where(logit == logit, logit, float("-inf")), LARGEST)
    known = logit > float("-inf")
    best = tl.max(logit, axis=0)
    first = tl.min(tl.where((logit == best) & inside, column, vocab_size), axis=0)
    total = tl.sum(tl.where(known, tl.exp(tl.where(known, logit - best, 0.0)), 0.0), axis=0)
    tl.store(values_ptr + row * S + block, best)
    tl.store(ids_ptr + row * S + block, first.to(tl.int64))
    tl.store(sums_ptr + row * S + block, total)
    tl.store(supports_ptr + row * S + block, tl.sum(known.to(tl.int32), axis=0))


@triton.jit
def _merge_statistics_kernel(
    values_ptr,  # [T, S]
    ids_ptr,  # [T, S]
    sums_ptr,  # [T, S]
    supports_ptr,  # [T, S]
    best_ptr,  # [T] out
    logsumexp_ptr,  # [T] out
    support_ptr,  # [T] out
    S,
    BLOCK: tl.constexpr,  # a power of two >= S
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    inside = block < S
    value = tl.load(values_ptr + row * S + block, mask=inside, other=float("-inf"))
    total = tl.load(sums_ptr + row * S + block, mask=inside, other=0.0)
    support = tl.sum(tl.load(supports_ptr + row * S + block, mask=inside, other=0), axis=0)
    best = tl.max(value, axis=0)
    first = tl.min(tl.where((value == best) & inside, block, BLOCK), axis=0)
    known = value > float("-inf")
    total = tl.sum(tl.where(known, total * tl.exp(tl.where(known, value - best, 0.0)), 0.0), axis=0)
    logsumexp = tl.where(support > 0, best + tl.log(tl.maximum(total, 1.0)), float("-inf"))
    tl.store(best_ptr + row, tl.load(ids_ptr + row * S + first))
    tl.store(logsumexp_ptr + row, logsumexp)
    tl.store(support_ptr + row, support)


@triton.jit
def _bonus_rows_kernel(
    logits_ptr,  # [T, V]
    final_rows_ptr,  # [R]
    excluded_ptr,  # [R, N]
    num_excluded_ptr,  # [R]
    out_ptr,  # [R, V] out
    logits_stride,
    vocab_size,
    N,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(final_rows_ptr + request)
    inside = column < vocab_size
    at = tl.maximum(row, 0) * logits_stride + column
    logit = tl.load(logits_ptr + at, mask=inside, other=float("-inf"))
    logit = tl.where(row >= 0, logit, float("-inf"))
    count = tl.load(num_excluded_ptr + request)
    at = tl.full((), 0, tl.int32)
    while at < count:
        token = tl.load(excluded_ptr + request * N + at)
        logit = tl.where(column == token, float("-inf"), logit)
        at += 1
    tl.store(out_ptr + request * vocab_size + column, logit, mask=inside)


@triton.jit
def _place_bonus_kernel(
    choices_ptr,  # [T] in and out
    final_rows_ptr,  # [R]
    bonus_ptr,  # [R]
):
    request = tl.program_id(0)
    row = tl.load(final_rows_ptr + request)
    tl.store(choices_ptr + row, tl.load(bonus_ptr + request), mask=row >= 0)


def row_statistics(logits: Tensor, vocab_size: int | None = None, *, impl: Impl = "auto") -> RowStatistics:
    """Best id, logsumexp and support of every row of logits [T, >= vocab_size], any float dtype, rows
    contiguous; vocab_size defaults to the width. `ValueError` for wrong shapes or strides."""
    vocab_size = expect_logits(logits, vocab_size)
    if not use_triton(logits, impl):
        return row_statistics_reference(logits, vocab_size)
    device, num_rows, num_blocks = logits.device, len(logits), triton.cdiv(vocab_size, _STATISTICS_BLOCK)
    blocks = [
        torch.empty(num_rows, num_blocks, dtype=dtype, device=device)
        for dtype in (torch.float32, torch.int64, torch.float32, torch.int32)
    ]
    found = RowStatistics(
        *(
            torch.empty(num_rows, dtype=dtype, device=device)
            for dtype in (torch.int64, torch.float32, torch.int32)
        )
    )
    if num_rows:
        _block_statistics_kernel[(num_rows, num_blocks)](
            logits, *blocks, logits.stride(0), vocab_size, num_blocks,
            LARGEST=LARGEST_LOGIT, BLOCK=_STATISTICS_BLOCK, num_warps=8,
        )  # fmt: skip
        _merge_statistics_kernel[(num_rows,)](
            *blocks, *found, num_blocks, BLOCK=triton.next_power_of_2(num_blocks), num_warps=1
        )
    return found


def bonus_rows(
    logits: Tensor, final_rows: Tensor, excluded: Tensor, num_excluded: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Rows [R, V] of logits [T, V] from which the bonus tokens are drawn, as a new tensor of the same dtype.

    final_rows int64 [R]: the row of each request, -1 for a row of -inf; excluded int64 [R, N] and
    num_excluded int32 [R]: leading entries of a request's list whose tokens get -inf (ids outside [0, V) are
    ignored). `ValueError` for shapes, dtypes or strides that do not fit."""
    num_requests, device = len(final_rows), logits.device
    expect("logits", logits, (None, None), device=device)
    expect_dense_last("logits", logits)
    expect("final_rows", final_rows, (None,), device=device, dtypes=(torch.int64,))
    expect("excluded", excluded, (num_requests, None), device=device, dtypes=(torch.int64,))
    expect("num_excluded", num_excluded, (num_requests,), device=device, dtypes=(torch.int32,))
    if not use_triton(logits, impl):
        return bonus_rows_reference(logits, final_rows, excluded, num_excluded)
    vocab_size = logits.shape[1]
    rows = torch.empty(num_requests, vocab_size, dtype=logits.dtype, device=device)
    if num_requests and vocab_size:
        _bonus_rows_kernel[(num_requests, triton.cdiv(vocab_size, _COPY_BLOCK))](
            logits, final_rows.contiguous(), excluded.contiguous(), num_excluded.contiguous(), rows,
            logits.stride(0), vocab_size, excluded.shape[1], BLOCK=_COPY_BLOCK, num_warps=4,
        )  # fmt: skip
    return rows


def place_bonus(choices: Tensor, final_rows: Tensor, bonus: Tensor, *, impl: Impl = "auto") -> None:
    """Writes bonus int64 [R] into choices int64 [T] at final_rows int64 [R], in place; -1 writes nothing.
    `ValueError` for shapes or dtypes that do not fit."""
    long = (torch.int64,)
    expect("choices", choices, (None,), device=choices.device, dtypes=long)
    expect("final_rows", final_rows, (None,), device=choices.device, dtypes=long)
    expect("bonus", bonus, (len(final_rows),), device=choices.device, dtypes=long)
    expect_dense_last("choices", choices)
    if not use_triton(choices, impl):
        known = final_rows >= 0
        choices[final_rows[known]] = bonus[known]
    elif len(final_rows):
        _place_bonus_kernel[(len(final_rows),)](
            choices, final_rows.contiguous(), bonus.contiguous(), num_warps=1
        )
