# SPDX-License-Identifier: Apache-2.0
"""The noise that vLLM samples with, vectorised: its kernel takes minutes for many rows in the interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def mixed_words(words: list[Tensor]) -> Tensor:
    """murmur3 of 32-bit words in int64 tensors, with a zero seed."""

    def rotated(x: Tensor, by: int) -> Tensor:
        return ((x << by) & LOW) | (x >> (32 - by))

    h = torch.zeros_like(words[0])
    for word in words:
        h = h ^ (rotated(word * 0xCC9E2D51 & LOW, 15) * 0x1B873593 & LOW)
        h = rotated(h, 13) * 5 + 0xE6546B64 & LOW
    h = h ^ (4 * len(words))
    h = (h ^ (h >> 16)) * 0x85EBCA6B & LOW
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & LOW
    return h ^ (h >> 16)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The noise (float64) of `tokens` where the token at `positions` is the last one known, for requests with
    these seeds; int64 tensors that broadcast. The largest sum of it and a log-probability is chosen."""
    seeds, positions, tokens = torch.broadcast_tensors(seeds, positions, tokens)
    hashed = mixed_words([seeds & LOW, (seeds >> 32) & LOW, positions & LOW, tokens])
    return -(-torch.log1p(-(hashed.double() + 0.5) * 2.0**-32)).log()
