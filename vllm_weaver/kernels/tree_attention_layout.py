# SPDX-License-Identifier: Apache-2.0
"""How `tree_attention` is laid out on a GPU: tile sizes, and into how many splits positions are divided.

Everything here follows from shapes, dtypes and properties of the device, so that a captured graph stays right
whatever lengths it is replayed with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

MAX_SPLITS = 64  # of one request; the combining kernel holds all of them at once


@dataclass(frozen=True)
class Tiling:
    """How the kernel is laid out: rows and positions of a tile, warps, pipeline stages, the programs that a
    multiprocessor is expected to hold, and the fewest tiles of positions that make a split."""

    block_m: int
    block_p: int
    warps: int
    stages: int
    per_sm: int
    min_tiles: int


@functools.cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 1, 0  # the interpreter has nothing to gain from splits
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def choose_tiling(rows: int, block_d: int, cache_dtype: torch.dtype, shared_memory: int) -> Tiling:
    """The tiling for `rows` (node, head of a group) rows; shared_memory 0 stands for the interpreter."""
    if shared_memory == 0:
        return Tiling(64 if block_d <= 128 else 32, 32 if block_d <= 128 else 16, 4, 1, 1, 1)
    if cache_dtype == torch.float32:
        return Tiling(32, 16, 4, 1, 2, 4)
    large = shared_memory > 160 * 1024
    if block_d > 128:
        if large:
            return Tiling(128, 32, 8, 3, 1, 1) if rows > 64 else Tiling(64, 64, 8, 2, 1, 1)
        return Tiling(64, 32, 8, 2, 1, 2)
    if rows > 64:
        return Tiling(128, 64, 8, 3 if large else 2, 1, 1)
    return Tiling(64, 64, 4, 3 if large else 2, 2, 1)


def split_counts(requests: int, tiles: int, slots: int) -> tuple[int, int]:
    """(shares, max_splits) of a step whose requests have `tiles` (row tile, KV head) pairs each, on a GPU of
    `slots` programs at once: how many parts all positions make, and how many one request may have."""
    rounds = {shares: -(-shares * tiles // slots) / shares for shares in range(1, 17)}
    shares = next(n for n, time in rounds.items() if time <= 1.2 * min(rounds.values()))
    shares = max(shares, min(slots // tiles, MAX_SPLITS))
    if requests > shares:
        return shares, 1  # the requests fill the GPU by themselves
    # Lengths may differ: one request can take twice its part.
    return shares, min(shares, 2 * -(-shares // requests))
