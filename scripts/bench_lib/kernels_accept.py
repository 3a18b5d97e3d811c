# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of what follows the target's pass beside the greedy walk: a sampled request's walk, the record
of walks for the metrics, and the state slots of mamba cache mode `align`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench_lib import kernels_floor as floor
from bench_lib.kernels_common import Case, Setting, Trees, relative_error, require, require_equal
from vllm_weaver.kernels.common import Impl
from vllm_weaver.kernels.state_slots import SlotBuffers, find_boundaries, locate_states
from vllm_weaver.kernels.traversal_rows import RowStatistics, bonus_rows, row_statistics
from vllm_weaver.kernels.traversal_walk import traversal_walk
from vllm_weaver.kernels.walk_record import COUNTERS, record_walks

NAMES = ("row_statistics", "traversal_walk", "bonus_rows", "walk_record", "state_slots")
GROUPS = 10  # of recurrent layers: what vLLM makes of 48 of them beside a draft of 5 attention layers
STATE_BLOCK = 784  # tokens of a recurrent state's block in that model
COLUMNS = 12
LIMIT = 1e-6  # of logsumexp: fp32 sums on either side


def statistics_case(setting: Setting, trees: Trees) -> Case:
    """Best id, logsumexp and support of every row; logits in fp32, as the sampler processes them."""
    vocab = setting.shape.vocab
    torch.manual_seed(trees.requests)
    work = floor.row_statistics(trees.rows, vocab)
    logits = [
        setting.randn(trees.rows, vocab, dtype=torch.float32) for _ in range(setting.copies(work.bytes))
    ]

    def check() -> dict[str, float]:
        got, want = (row_statistics(logits[0], vocab, impl=impl) for impl in (setting.impl, "torch"))
        require_equal("row_statistics", (got.best, got.support), (want.best, want.support))
        off = relative_error(got.logsumexp, want.logsumexp)
        return {"logsumexp": require("row_statistics: logsumexp", off, LIMIT)}

    calls = [partial(row_statistics, x, vocab, impl=setting.impl) for x in logits]
    return Case("row_statistics", f"{trees.rows} rows of {vocab}", work, calls, check)


def traversal_case(setting: Setting, trees: Trees) -> Case:
    """The walk of sampled requests; the drafts are likely enough that some are accepted."""
    device, requests = setting.device, trees.requests
    torch.manual_seed(trees.nodes)
    logits = setting.randn(trees.rows, setting.shape.vocab, dtype=torch.float32)
    above = trees.parents.clamp(min=0) + trees.nodes * torch.arange(requests, device=device)[:, None]
    logits[above[:, 1:].flatten(), trees.tokens[:, 1:].flatten()] = 12.0
    statistics = row_statistics(logits, impl="torch")
    args = (
        trees.query_start_loc, trees.tokens, trees.parents, trees.num_nodes, -trees.depths.float(),
        torch.arange(requests, device=device), torch.ones(requests, device=device),
        torch.arange(1, requests + 1, device=device), torch.full((requests,), 100, device=device),
    )  # fmt: skip

    def walk(impl: Impl) -> list[Tensor]:
        own = RowStatistics(*(part.clone() for part in statistics))
        return [*traversal_walk(logits, own, *args, impl=impl), own.best]

    calls = [partial(traversal_walk, logits, statistics, *args, impl=setting.impl)]
    return Case(
        "traversal_walk", f"{trees.nodes} nodes, R={requests}", floor.traversal_walk(trees.nodes, requests),
        calls, lambda: require_equal("traversal_walk", walk(setting.impl), walk("torch")),
    )  # fmt: skip


def bonus_case(setting: Setting, trees: Trees) -> Case:
    """The row that each request's bonus token is drawn from."""
    vocab, requests = setting.shape.vocab, trees.requests
    work = floor.bonus_rows(requests, vocab)
    logits = [
        setting.randn(trees.rows, vocab, dtype=torch.float32) for _ in range(setting.copies(work.bytes))
    ]
    final = trees.query_start_loc[:-1].long() + 1
    args = (final, trees.tokens, torch.full_like(trees.num_nodes, min(3, trees.nodes)))

    def check() -> dict[str, float]:
        got, want = (bonus_rows(logits[0], *args, impl=impl) for impl in (setting.impl, "torch"))
        return require_equal("bonus_rows", got, want)

    calls = [partial(bonus_rows, x, *args, impl=setting.impl) for x in logits]
    return Case("bonus_rows", f"R={requests}, rows of {vocab}", work, calls, check)


def record_case(setting: Setting, trees: Trees) -> Case:
    """Depths of accepted paths and of their branching."""
    args = (trees.path, trees.num_path, trees.parents, trees.num_nodes)

    def record(impl: Impl) -> list[Tensor]:
        totals = torch.zeros(len(COUNTERS), dtype=torch.int64, device=setting.device)
        return [record_walks(*args, totals, impl=impl), totals]

    totals = torch.zeros(len(COUNTERS), dtype=torch.int64, device=setting.device)
    return Case(
        "walk_record", f"{trees.nodes} nodes, R={trees.requests}",
        floor.walk_record(trees.nodes, trees.requests),
        [partial(record_walks, *args, totals, impl=setting.impl)],
        lambda: require_equal("walk_record", record(setting.impl), record("torch")),
    )  # fmt: skip


def slots_case(setting: Setting, trees: Trees) -> Case:
    """Both look-ups of a step that may cross the end of a block; every other request does."""
    device, requests = setting.device, trees.requests
    index = torch.arange(requests, device=device)
    base = STATE_BLOCK * (1 + index % 3) - (index % 2) * (trees.num_path - 1)
    ends = (base + trees.nodes).to(torch.int32)
    tables = [
        torch.arange(1, 1 + requests * COLUMNS, dtype=torch.int32, device=device).view(requests, COLUMNS) + g
        for g in range(GROUPS)
    ]

    def look_up(buffers: SlotBuffers, impl: Impl) -> None:
        locate_states(buffers, ends, impl=impl)
        find_boundaries(buffers, base, trees.num_path, index, impl=impl)

    def found(impl: Impl) -> list[Tensor]:
        buffers = SlotBuffers.allocate(tables, STATE_BLOCK)
        look_up(buffers, impl)
        return [*buffers.working, *buffers.boundary, buffers.boundary_path, buffers.source, buffers.target]

    return Case(
        "state_slots", f"{GROUPS} groups, R={requests}", floor.state_slots(GROUPS, requests),
        [partial(look_up, SlotBuffers.allocate(tables, STATE_BLOCK), setting.impl)],
        lambda: require_equal("state_slots", found(setting.impl), found("torch")),
    )  # fmt: skip


def cases(setting: Setting, wanted: set[str]) -> Iterator[Case]:
    """The cases of this file's kernels."""
    makers: tuple[Callable[[Setting, Trees], Case], ...] = (
        statistics_case, traversal_case, bonus_case, record_case, slots_case,
    )  # fmt: skip
    for name, make in zip(NAMES, makers, strict=True):
        if name in wanted:
            for requests in setting.batches:
                yield make(setting, Trees(setting, setting.main_nodes, requests))
