# SPDX-License-Identifier: Apache-2.0
"""The Weaver's two tables from a target in whatever format it is, and the ids that may be drafted.

Embedding and lm_head are only ever used through their own quantization methods (`embedding`, `apply`), so no
format is known here and nothing is dequantized as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.eagle.utils import get_target_lm_head

from vllm_weaver.hooks.base import logger
from vllm_weaver.spec_decode.weaver import WeaverHead

# Largest number of the activation formats that have a static scale.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_LARGEST_NVFP4 = 6.0 * 448.0
_CHECKED_ROWS = 1 << 12  # of a table at a time


class TargetEnds(NamedTuple):
    """First and last layer of a target."""

    embedding: Any
    lm_head: Any


def target_ends(target_model: Any) -> TargetEnds:
    """Embedding and lm_head of a target, of its language model where it is wrapped; for tied embeddings the
    lm_head may be the embedding itself."""
    language_model = (
        target_model.get_language_model() if hasattr(target_model, "get_language_model") else target_model
    )
    embedding = getattr(language_model, "model", language_model).embed_tokens
    return TargetEnds(embedding, get_target_lm_head(target_model, language_model))


def usable_vocabulary(draft_vocab_size: int, ends: TargetEnds) -> int:
    """Ids below this have a row in the draft's logits, the target's embedding and the target's lm_head.

    Rows that only pad a layer do not count, however many of them either side has: an id at or above this must
    never become a candidate."""
    return min(draft_vocab_size, ends.embedding.org_vocab_size, ends.lm_head.org_vocab_size)


def raw_logits(lm_head: Any) -> Callable[[Tensor], Tensor]:
    """A function of rows [n, d] to raw logits [n, padded vocabulary] by the lm_head's own method.

    A head that quantizes its inputs with a scale calibrated on hidden states would lose other rows to
    rounding, or cut them off. Its rows are brought to the size it expects by a power of two, and the logits
    back by the same."""
    largest = _largest_input(lm_head)

    def logits(rows: Tensor) -> Tensor:
        if largest is None:
            return lm_head.quant_method.apply(lm_head, rows)
        peak = float(rows.abs().max())
        shift = math.floor(math.log2(largest / peak)) if peak > 0 else 0
        return lm_head.quant_method.apply(lm_head, rows * 2.0**shift) * 2.0**-shift

    return logits


def _largest_input(lm_head: Any) -> float | None:
    """The input that a static activation scale maps to the largest number; None where there is no such
    scale."""
    nvfp4 = getattr(lm_head, "input_global_scale", None)
    if nvfp4 is not None:
        return float(nvfp4.max()) * _LARGEST_NVFP4
    scale = getattr(lm_head, "input_scale", None)
    if scale is None:
        return None
    largest = _LARGEST.get(lm_head.weight.dtype)
    return None if largest is None else float(scale.max()) * largest


def build_tables(head: WeaverHead, ends: TargetEnds) -> tuple[Tensor, Tensor]:
    """Token table [V, r] and residual table [padded V, r] of a target, in the head's dtype.

    Both are computed in slices; what that took besides the tables is logged."""
    device = head.token_in.weight.device
    embedding = ends.embedding
    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    tables = (
        head.token_table(
            lambda ids: embedding.quant_method.embedding(embedding, ids), embedding.org_vocab_size
        ),
        head.residual_table(raw_logits(ends.lm_head)),
    )
    rows = min(embedding.org_vocab_size, ends.lm_head.org_vocab_size)
    for name, table in zip(("embedding", "lm_head"), tables, strict=True):
        # In slices: of a whole table it would take twice the table's memory.
        if not all(bool(part.isfinite().all()) for part in table[:rows].split(_CHECKED_ROWS)):
            raise ValueError(
                f"the Weaver table of the target's {name} has numbers that are not finite; "
                "a scale of the target's checkpoint is missing or damaged"
            )
    size = sum(table.nbytes for table in tables)
    peak = torch.cuda.max_memory_allocated(device) - before - size if on_gpu else None
    logger.info(
        "Weaver tables for %d ids: %.1f MiB in %s; while they were built, %s",
        embedding.org_vocab_size,
        size / 2**20,
        head.dtype,
        "memory was not measured (no CUDA device)" if peak is None else f"{peak / 2**20:.1f} MiB more",
    )
    return tables
