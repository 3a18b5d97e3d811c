# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the small kernels of a step: argmax, walk, trees in and out of storage, ancestor masks.

All but the argmax move a few kilobytes: they cost a launch, and their floor says nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench_lib import kernels_floor as floor
from bench_lib.kernels_common import Case, Setting, Trees, require_equal
from vllm_weaver.kernels.ancestors import ancestor_mask_words
from vllm_weaver.kernels.common import Impl
from vllm_weaver.kernels.greedy_walk import greedy_walk, row_argmax
from vllm_weaver.kernels.tree_step import StepArrays, fill_step, store_trees

NAMES = ("row_argmax", "greedy_walk", "fill_step", "store_trees", "ancestor_masks")
STATES = 16  # requests that the storage has room for


def argmax_case(setting: Setting, trees: Trees) -> Case:
    """The target's choice of every row."""
    vocab = setting.shape.vocab
    torch.manual_seed(trees.requests)
    work = floor.row_argmax(trees.rows, vocab)
    logits = [setting.randn(trees.rows, vocab) for _ in range(setting.copies(work.bytes))]

    def check() -> dict[str, float]:
        got, want = (row_argmax(logits[0], vocab, impl=impl) for impl in (setting.impl, "torch"))
        return require_equal("row_argmax", got, want)

    calls = [partial(row_argmax, x, vocab, impl=setting.impl) for x in logits]
    return Case("row_argmax", f"{trees.rows} rows of {vocab}", work, calls, check)


def walk_case(setting: Setting, trees: Trees) -> Case:
    """The walk along the accepted path; the target chooses another token at its end."""
    vocab = setting.shape.vocab
    targets = torch.full((trees.requests, trees.nodes), -1, dtype=torch.int64, device=setting.device)
    for r, path in enumerate(trees.paths):
        for node, child in zip(path, path[1:], strict=False):
            targets[r, node] = trees.tokens[r, child]
    args = (targets.flatten(), trees.query_start_loc, trees.tokens, trees.parents, trees.num_nodes, vocab)

    def check() -> dict[str, float]:
        got, want = (greedy_walk(*args, impl=impl) for impl in (setting.impl, "torch"))
        require_equal("greedy_walk", got, want)
        return require_equal("greedy_walk: accepted paths", got.path, trees.path)

    calls = [partial(greedy_walk, *args, impl=setting.impl)]
    work = floor.greedy_walk(trees.nodes, trees.requests)
    return Case("greedy_walk", f"{trees.nodes} nodes, R={trees.requests}", work, calls, check)


def stored(trees: Trees, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Storage of the trees: tokens, parents, depths, log-probabilities, nodes; request r under index r."""
    size = (STATES, trees.nodes)
    kept = (
        torch.full(size, -1, device=device),
        torch.full(size, -1, dtype=torch.int32, device=device),
        torch.zeros(size, dtype=torch.int32, device=device),
        torch.zeros(size, device=device),
        torch.zeros(STATES, dtype=torch.int32, device=device),
    )
    arrays = (trees.tokens, trees.parents, trees.depths, -trees.depths.float(), trees.num_nodes)
    for target, source in zip(kept, arrays, strict=True):
        target[: trees.requests] = source
    return kept


def fill_case(setting: Setting, trees: Trees) -> Case:
    """Trees from storage to the rows of a step."""
    device, requests, rows = setting.device, trees.requests, trees.rows
    kept = stored(trees, device)
    storage = (*kept[:3], kept[4])
    indices = torch.arange(requests, device=device)
    limits = torch.full((requests,), trees.nodes, dtype=torch.int32, device=device)
    computed = torch.full((STATES,), 100, dtype=torch.int32, device=device)
    prefill = torch.full((STATES,), 50, dtype=torch.int32, device=device)
    linear = 100 + torch.arange(trees.nodes, device=device).repeat(requests)

    def fill(impl: Impl) -> list[Tensor]:
        step = StepArrays.allocate(requests, trees.nodes, device)
        outputs = [
            linear.clone(),
            torch.zeros_like(linear),
            torch.ones(rows, dtype=torch.int32, device=device),
        ]
        fill_step(
            step, storage, indices, limits, trees.query_start_loc, computed, prefill, *outputs, impl=impl
        )
        return [*vars(step).values(), *outputs]

    step = StepArrays.allocate(requests, trees.nodes, device)
    outputs = (linear.clone(), torch.zeros_like(linear), torch.ones(rows, dtype=torch.int32, device=device))
    calls = [
        partial(
            fill_step, step, storage, indices, limits, trees.query_start_loc, computed, prefill, *outputs,
            impl=setting.impl,
        )
    ]  # fmt: skip
    size = f"{trees.nodes} nodes, R={requests}"
    work = floor.fill_step(trees.nodes, requests)
    return Case(
        "fill_step", size, work, calls, lambda: require_equal("fill_step", fill(setting.impl), fill("torch"))
    )


def store_case(setting: Setting, trees: Trees) -> Case:
    """New trees to storage, their tokens to the scheduler's drafts."""
    requests, device = trees.requests, setting.device
    new = tuple(array[:requests].contiguous() for array in stored(trees, device))
    rows = torch.arange(requests, device=device) + 1
    no_chains = torch.zeros(requests, dtype=torch.int32, device=device)

    def store(
        impl: Impl, kept: tuple[Tensor, ...] | None = None, drafts: Tensor | None = None
    ) -> list[Tensor]:
        kept = stored(trees, device) if kept is None else kept
        drafts = torch.zeros_like(new[0][:, 1:]) if drafts is None else drafts
        store_trees(new, kept, rows, drafts, no_chains, impl=impl)  # type: ignore[arg-type]
        return [*kept, drafts]

    kept, drafts = stored(trees, device), torch.zeros_like(new[0][:, 1:])
    return Case(
        "store_trees", f"{trees.nodes} nodes, R={requests}", floor.store_trees(trees.nodes, requests),
        [partial(store, setting.impl, kept, drafts)],
        lambda: require_equal("store_trees", store(setting.impl), store("torch")),
    )  # fmt: skip


def mask_case(setting: Setting, trees: Trees) -> Case:
    """Ancestor masks of new trees."""
    args = (trees.parents, trees.num_nodes)

    def check() -> dict[str, float]:
        got, want = (ancestor_mask_words(*args, impl=impl) for impl in (setting.impl, "torch"))
        return require_equal("ancestor_masks", got, want)

    work = floor.ancestor_masks(trees.nodes, trees.requests)
    calls = [partial(ancestor_mask_words, *args, impl=setting.impl)]
    return Case("ancestor_masks", f"{trees.nodes} nodes, R={trees.requests}", work, calls, check)


def cases(setting: Setting, wanted: set[str]) -> Iterator[Case]:
    """The cases of this file's kernels."""
    makers = {
        "row_argmax": argmax_case,
        "greedy_walk": walk_case,
        "fill_step": fill_case,
        "store_trees": store_case,
        "ancestor_masks": mask_case,
    }
    sizes = [(setting.main_nodes, requests) for requests in setting.batches]
    largest = (max(setting.nodes), setting.batches[0])
    for name, make in makers.items():
        if name in wanted:
            for nodes, requests in sizes + [largest] * (name != "row_argmax" and largest not in sizes):
                yield make(setting, Trees(setting, nodes, requests))
