# SPDX-License-Identifier: Apache-2.0
"""The frontier of best-first tree growth: publishing the children of new nodes, taking the best as nodes.

    publish:  candidates 0 .. 7 of node i, by log-probability, become entries 8·i .. 8·i + 7 with
              score = node score + log-probability

    take:     the W best entries, ties to the lower one, become the next nodes and leave the frontier

Layout: the frontier is a pair of arrays [R, 8·N], scores (−inf: no entry) and tokens; an entry's number is 8
times its parent's slot plus the child's rank. As nodes are expanded in the order of their slots, the lower
entry of a tie is also the earlier one. Nodes themselves are the arrays of a Tree plus their ancestor bit
masks, all written in place.

Floor: publish reads 12·P bytes a node and writes 96; take reads 4·8·N bytes a request and writes W nodes. One
program a node, and one a request: neither a heap nor a sorted frontier is materialised, W maxima over
registers do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect, use_triton

CHILDREN = 8
"""Children that an expanded node publishes at most."""
_LONG = (torch.int64,)
_INT = (torch.int32,)


def publish_children_reference(
    frontier_scores: Tensor,
    frontier_tokens: Tensor,
    candidate_logprobs: Tensor,
    candidate_ids: Tensor,
    slots: Tensor,
    logprobs: Tensor,
    depths: Tensor,
    max_depth: Tensor,
) -> None:
    """The rule of `publish_children` in plain PyTorch, without a host synchronisation."""
    num_slots = logprobs.shape[1]
    missing = max(0, CHILDREN - candidate_ids.shape[-1])
    usable = (candidate_ids >= 0) & (candidate_logprobs > float("-inf"))  # false for NaN
    candidates = candidate_logprobs.masked_fill(~usable, float("-inf"))
    best, order = torch.sort(candidates, dim=-1, descending=True, stable=True)
    ids = torch.nn.functional.pad(candidate_ids.gather(-1, order)[..., :CHILDREN], (0, missing), value=-1)
    best = torch.nn.functional.pad(best[..., :CHILDREN], (0, missing), value=float("-inf"))
    known = (slots >= 0) & (slots < num_slots)
    node = torch.where(known, slots, 0).to(torch.int64)
    expandable = known & (depths.gather(1, node) < max_depth.unsqueeze(1))
    scores = logprobs.gather(1, node).unsqueeze(-1) + best
    dead = ~(expandable.unsqueeze(-1) & (scores > float("-inf")))
    scores, ids = scores.masked_fill(dead, float("-inf")), ids.masked_fill(dead, -1)
    for row in range(slots.shape[1]):  # a skipped row must not overwrite what another row publishes
        entry = node[:, row, None] * CHILDREN + torch.arange(CHILDREN, device=slots.device)
        keep = known[:, row, None]
        for target, source in ((frontier_scores, scores), (frontier_tokens, ids)):
            new = torch.where(keep, source[:, row].to(target.dtype), target.gather(1, entry))
            target.scatter_(1, entry, new)


def take_best_reference(
    frontier_scores: Tensor,
    frontier_tokens: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logprobs: Tensor,
    mask_words: Tensor,
    num_nodes: Tensor,
    max_nodes: Tensor,
    width: int,
) -> Tensor:
    """The rule of `take_best` in plain PyTorch, without a host synchronisation."""
    num_slots, num_words = mask_words.shape[1:]
    best, entry = torch.sort(frontier_scores, dim=1, descending=True, stable=True)
    best, entry = best[:, :width], entry[:, :width]
    offset = torch.arange(best.shape[1], device=tokens.device)
    room = max_nodes.clamp(max=num_slots) - num_nodes
    # Entries come before free places in the order, so the taken ones are a leading part of the row.
    taken = (best > float("-inf")) & (offset < room.unsqueeze(1))
    slots = torch.where(taken, num_nodes.unsqueeze(1) + offset, -1)
    parent = entry // CHILDREN
    own_word = torch.arange(num_words, device=tokens.device) == (slots // 32).unsqueeze(-1)
    own_bit = (torch.ones_like(slots) << (slots % 32)).to(torch.int32).unsqueeze(-1)
    words = mask_words.gather(1, parent.unsqueeze(-1).expand(-1, -1, num_words))
    words = words | torch.where(own_word, own_bit, 0)
    values = {
        tokens: frontier_tokens.gather(1, entry),
        parents: parent,
        depths: depths.gather(1, parent) + 1,
        logprobs: best,
    }
    for row in range(slots.shape[1]):  # one node at a time: a request without an entry must write nothing
        keep = taken[:, row, None]
        at = slots[:, row, None].clamp(min=0).to(torch.int64)
        for target, value in values.items():
            new = torch.where(keep, value[:, row, None].to(target.dtype), target.gather(1, at))
            target.scatter_(1, at, new)
        wide = at.unsqueeze(-1).expand(-1, -1, num_words)
        mask_words.scatter_(
            1, wide, torch.where(keep.unsqueeze(-1), words[:, row, None], mask_words.gather(1, wide))
        )
        spent = entry[:, row, None]
        frontier_scores.scatter_(1, spent, frontier_scores.gather(1, spent).masked_fill(keep, float("-inf")))
    num_nodes += taken.sum(1).to(num_nodes.dtype)
    return torch.nn.functional.pad(slots, (0, width - slots.shape[1]), value=-1).to(torch.int32)


@triton.jit
def _publish_kernel(
    frontier_scores_ptr,  # [R, 8 * N]
    frontier_tokens_ptr,  # [R, 8 * N]
    candidate_logprobs_ptr,  # [R, n, P]
    candidate_ids_ptr,  # [R, n, P]
    slots_ptr,  # [R, n]
    logprobs_ptr,  # [R, N]
    depths_ptr,  # [R, N]
    max_depth_ptr,  # [R]
    n,
    N,
    P,
    CHILDREN: tl.constexpr,
    BLOCK_P: tl.constexpr,  # a power of two >= P
):
    row = tl.program_id(0).to(tl.int64)
    request = row // n
    slot = tl.load(slots_ptr + row)
    if (slot >= 0) & (slot < N):
        at = tl.arange(0, BLOCK_P)
        logprob = tl.load(candidate_logprobs_ptr + row * P + at, mask=at < P, other=float("-inf"))
        ids = tl.load(candidate_ids_ptr + row * P + at, mask=at < P, other=-1)
        logprob = tl.where((ids >= 0) & (logprob > float("-inf")), logprob, float("-inf"))
        node_score = tl.load(logprobs_ptr + request * N + slot)
        expandable = tl.load(depths_ptr + request * N + slot) < tl.load(max_depth_ptr + request)
        child = tl.arange(0, CHILDREN)
        scores = tl.full((CHILDREN,), float("-inf"), tl.float32)
        tokens = tl.full((CHILDREN,), -1, tl.int64)
        for rank in range(CHILDREN):
            best = tl.max(logprob, axis=0)
            first = tl.min(tl.where(logprob == best, at, BLOCK_P), axis=0)
            token = tl.max(tl.where(at == first, ids, -1), axis=0)
            score = node_score + best
            live = expandable & (score > float("-inf"))
            scores = tl.where((child == rank) & live, score, scores)
            tokens = tl.where((child == rank) & live, token, tokens)
            logprob = tl.where(at == first, float("-inf"), logprob)
        entry = (request * N + slot) * CHILDREN + child
        tl.store(frontier_scores_ptr + entry, scores)
        tl.store(frontier_tokens_ptr + entry, tokens)


@triton.jit
def _take_kernel(
    frontier_scores_ptr,  # [R, 8 * N]
    frontier_tokens_ptr,  # [R, 8 * N]
    tokens_ptr,  # [R, N]
    parents_ptr,  # [R, N]
    depths_ptr,  # [R, N]
    logprobs_ptr,  # [R, N]
    mask_words_ptr,  # [R, N, W]
    num_nodes_ptr,  # [R]
    max_nodes_ptr,  # [R]
    slots_ptr,  # [R, width] out
    N,
    W,
    width,
    CHILDREN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= 8 * N
    BLOCK_WIDTH: tl.constexpr,  # a power of two >= width
    WORDS: tl.constexpr,  # a power of two >= W
):
    request = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    entries = request * N * CHILDREN
    scores = tl.load(frontier_scores_ptr + entries + at, mask=at < N * CHILDREN, other=float("-inf"))
    first_slot = tl.load(num_nodes_ptr + request)
    limit = tl.minimum(tl.load(max_nodes_ptr + request), N)
    place = tl.arange(0, BLOCK_WIDTH)
    word = tl.arange(0, WORDS)
    slots = tl.full((BLOCK_WIDTH,), -1, tl.int32)
    slot = first_slot
    for index in range(width):
        best = tl.max(scores, axis=0)
        if (best > float("-inf")) & (slot < limit):
            entry = tl.min(tl.where(scores == best, at, BLOCK), axis=0)
            parent = entry // CHILDREN
            node = request * N + slot
            above = request * N + parent
            tl.store(tokens_ptr + node, tl.load(frontier_tokens_ptr + entries + entry))
            tl.store(parents_ptr + node, parent)
            tl.store(depths_ptr + node, tl.load(depths_ptr + above) + 1)
            tl.store(logprobs_ptr + node, best)
            words = tl.load(mask_words_ptr + above * W + word, mask=word < W, other=0)
            bit = tl.full((), 1, tl.int32) << (slot % 32)
            words = tl.where(word == slot // 32, words | bit, words)
            tl.store(mask_words_ptr + node * W + word, words, mask=word < W)
            tl.store(frontier_scores_ptr + entries + entry, float("-inf"))
            scores = tl.where(at == entry, float("-inf"), scores)
            slots = tl.where(place == index, slot, slots)
            slot += 1
    tl.store(slots_ptr + request * width + place, slots, mask=place < width)
    tl.store(num_nodes_ptr + request, slot)


def publish_children(
    frontier_scores: Tensor,
    frontier_tokens: Tensor,
    candidate_logprobs: Tensor,
    candidate_ids: Tensor,
    slots: Tensor,
    logprobs: Tensor,
    depths: Tensor,
    max_depth: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """Publishes the children of the nodes `slots` in place.

    frontier_scores float [R, 8·N] and frontier_tokens int64 [R, 8·N] are written; candidate_logprobs float
    and candidate_ids int64 [R, n, P] of the nodes in slots int32 [R, n] (outside [0, N): nothing is written);
    logprobs float and depths int32 [R, N] of all nodes; max_depth int32 [R]: a node at that depth has no
    children. Candidates with a negative id or a log-probability of NaN or −inf are left out; ties go to the
    earlier candidate. All tensors contiguous; fp32 for Triton. `ValueError` for wrong shapes, dtypes or
    devices."""
    num_requests, num_slots = logprobs.shape
    num_rows, pool_size = candidate_ids.shape[1:]
    device = logprobs.device
    rows = (num_requests, num_rows)
    expect("frontier_scores", frontier_scores, (num_requests, CHILDREN * num_slots), device=device)
    expect(
        "frontier_tokens", frontier_tokens, (num_requests, CHILDREN * num_slots), device=device, dtypes=_LONG
    )
    expect("candidate_logprobs", candidate_logprobs, (*rows, pool_size), device=device)
    expect("candidate_ids", candidate_ids, (*rows, pool_size), device=device, dtypes=_LONG)
    expect("slots", slots, rows, device=device, dtypes=_INT)
    expect("depths", depths, (num_requests, num_slots), device=device, dtypes=_INT)
    expect("max_depth", max_depth, (num_requests,), device=device, dtypes=_INT)
    arrays = (
        frontier_scores,
        frontier_tokens,
        candidate_logprobs,
        candidate_ids,
        slots,
        logprobs,
        depths,
        max_depth,
    )
    if not use_triton(logprobs, impl):
        publish_children_reference(*arrays)
        return
    _expect_kernel_arrays(arrays)
    _publish_kernel[(num_requests * num_rows,)](
        *arrays,
        num_rows,
        num_slots,
        pool_size,
        CHILDREN=CHILDREN,
        BLOCK_P=triton.next_power_of_2(pool_size),
    )


def take_best(
    frontier_scores: Tensor,
    frontier_tokens: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logprobs: Tensor,
    mask_words: Tensor,
    num_nodes: Tensor,
    max_nodes: Tensor,
    width: int,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Appends the `width` best entries of each request's frontier to its node list; returns their slots int32
    [R, width].

    Written in place: tokens int64, parents and depths int32, logprobs float [R, N] and mask_words int32 [R,
    N, W] at the new slots, num_nodes int32 [R], and the taken entries of frontier_scores. A request takes
    fewer when its frontier runs dry or it reaches max_nodes int32 [R]; the rest of its slots is −1. All
    tensors contiguous; fp32 for Triton. `ValueError` for wrong shapes, dtypes or devices."""
    num_requests, num_slots = tokens.shape
    device = tokens.device
    nodes = (num_requests, num_slots)
    expect("frontier_scores", frontier_scores, (num_requests, CHILDREN * num_slots), device=device)
    expect(
        "frontier_tokens", frontier_tokens, (num_requests, CHILDREN * num_slots), device=device, dtypes=_LONG
    )
    expect("tokens", tokens, nodes, device=device, dtypes=_LONG)
    expect("parents", parents, nodes, device=device, dtypes=_INT)
    expect("depths", depths, nodes, device=device, dtypes=_INT)
    expect("logprobs", logprobs, nodes, device=device)
    expect("mask_words", mask_words, (*nodes, None), device=device, dtypes=_INT)
    expect("num_nodes", num_nodes, (num_requests,), device=device, dtypes=_INT)
    expect("max_nodes", max_nodes, (num_requests,), device=device, dtypes=_INT)
    arrays = (
        frontier_scores,
        frontier_tokens,
        tokens,
        parents,
        depths,
        logprobs,
        mask_words,
        num_nodes,
        max_nodes,
    )
    if not use_triton(tokens, impl):
        return take_best_reference(*arrays, width)
    _expect_kernel_arrays(arrays)
    slots = torch.empty(num_requests, width, dtype=torch.int32, device=device)
    _take_kernel[(num_requests,)](
        *arrays,
        slots,
        num_slots,
        mask_words.shape[2],
        width,
        CHILDREN=CHILDREN,
        BLOCK=triton.next_power_of_2(CHILDREN * num_slots),
        BLOCK_WIDTH=triton.next_power_of_2(width),
        WORDS=triton.next_power_of_2(mask_words.shape[2]),
    )
    return slots


def _expect_kernel_arrays(arrays: tuple[Tensor, ...]) -> None:
    for index, array in enumerate(arrays):
        if not array.is_contiguous() or array.dtype == torch.float64:
            raise ValueError(
                f"argument {index} is {array.dtype} with strides {array.stride()}; "
                "the Triton kernel needs contiguous arrays and fp32 numbers"
            )
