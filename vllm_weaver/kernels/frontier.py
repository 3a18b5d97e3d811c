# SPDX-License-Identifier: Apache-2.0
"""The frontier of best-first tree growth: publishing the children of new nodes, taking the best as nodes.

    publish:  candidates 0 .. 7 of node i, by log-probability, become entries 8·i .. 8·i + 7 with
              score = node score + log-softmax over the pool of the candidates' scores

    take:     the W best entries, ties to the lower one, become the next nodes and leave the frontier

Layout: the frontier is a pair of arrays [R, 8·N], scores (−inf: no entry) and tokens; an entry's number is 8
times its parent's slot plus the child's rank. As nodes are expanded in the order of their slots, the lower
entry of a tie is also the earlier one. `publish_children` and `take_best` are the plain rules. The kernels
keep a `Growth`: the same arrays, each node's path in place of its ancestor mask, and the rows of the round,
which are what the head reads next.

Floor: a round reads 4·P bytes a new node and 4·8·N bytes a request and writes a few hundred. One program a
request publishes and takes, so a round costs one launch; neither a heap nor a sorted frontier is
materialised, 8 + W maxima over registers do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import expect
from vllm_weaver.kernels.pdl import launch_options, take_turn

CHILDREN = 8
"""Children that an expanded node publishes at most."""
_SELECT_ELEMENTS = 4096  # candidates that a program holds at once


@dataclass
class Rows:
    """The n new nodes of each request in one round, as the head's kernels read them."""

    tokens: Tensor
    """int32 [R, n]; 0 for a row without a node."""
    positions: Tensor
    """int32 [R, n]; RoPE position, which is also one more than the node's pool row; 1 without a node."""
    places: Tensor
    """int32 [R, n]; cache row T + slot; −1 without a node."""

    @classmethod
    def empty(cls, num_requests: int, width: int, device: torch.device) -> Rows:
        """Rows still to be written."""
        return cls(*torch.empty(3, num_requests, width, dtype=torch.int32, device=device).unbind())


@dataclass
class Growth:
    """Trees of R requests that grow in place, N node slots each; tree arrays as in `Tree`."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    logprobs: Tensor
    num_nodes: Tensor
    depth_limit: Tensor
    """int32 [R]; a node at this depth has no children."""
    node_limit: Tensor
    """int32 [R]; 0 for a request without a tree."""
    paths: Tensor
    """int32 [R, N, A]; cache rows from the root to the node, −1 behind."""
    frontier_scores: Tensor
    """float32 [R, 8 · N]."""
    frontier_tokens: Tensor
    """int32 [R, 8 · N]; undefined where the score is −inf."""
    depth: int
    """The draft depth D; the cache holds T = D + 1 prompt rows before the nodes."""


def publish_children(
    frontier_scores: Tensor,
    frontier_tokens: Tensor,
    candidate_logprobs: Tensor,
    candidate_ids: Tensor,
    slots: Tensor,
    logprobs: Tensor,
    depths: Tensor,
    max_depth: Tensor,
) -> None:
    """Publishes the children of the nodes `slots` in place, in plain PyTorch without a host synchronisation.

    frontier_scores float [R, 8·N] and frontier_tokens int64 [R, 8·N] are written; candidate_logprobs float
    and candidate_ids int64 [R, n, P] of the nodes in slots int32 [R, n] (outside [0, N): nothing is written);
    logprobs float and depths int32 [R, N] of all nodes; max_depth int32 [R]: a node at that depth has no
    children. Candidates with a negative id or a log-probability of NaN or −inf are left out; ties go to the
    earlier candidate."""
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
) -> Tensor:
    """Appends the `width` best entries of each request's frontier to its node list; returns their slots int32
    [R, width].

    Written in place: tokens int64, parents and depths int32, logprobs float [R, N] and mask_words int32 [R,
    N, W] at the new slots, num_nodes int32 [R], and the taken entries of frontier_scores. A request takes
    fewer when its frontier runs dry or it reaches max_nodes int32 [R]; the rest of its slots is −1. In plain
    PyTorch without a host synchronisation."""
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
def _start_kernel(
    roots_ptr,  # [R]
    max_depth_ptr,  # [R], if HAS_MAX_DEPTH
    max_nodes_ptr,  # [R], if HAS_MAX_NODES
    tokens_ptr,  # [R, N] out
    parents_ptr,  # [R, N] out
    depths_ptr,  # [R, N] out
    logprobs_ptr,  # [R, N] out
    num_nodes_ptr,  # [R] out
    depth_limit_ptr,  # [R] out
    node_limit_ptr,  # [R] out
    paths_ptr,  # [R, N, A] out, the root's only
    frontier_scores_ptr,  # [R, 8 * N] out
    row_tokens_ptr,  # [R] out
    row_positions_ptr,  # [R] out
    row_places_ptr,  # [R] out
    vocab_size,
    D,
    N,
    HAS_MAX_DEPTH: tl.constexpr,
    HAS_MAX_NODES: tl.constexpr,
    CHILDREN: tl.constexpr,
    A: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= 8 * N
    PDL: tl.constexpr,
):
    take_turn(PDL)
    request = tl.program_id(0).to(tl.int64)
    root = tl.load(roots_ptr + request)
    usable = (root >= 0) & (root < vocab_size)
    depth_limit = tl.full((), 0, tl.int64) + D
    if HAS_MAX_DEPTH:
        depth_limit = tl.minimum(depth_limit, tl.load(max_depth_ptr + request).to(tl.int64))
    node_limit = tl.full((), 0, tl.int64) + N
    if HAS_MAX_NODES:
        node_limit = tl.maximum(tl.minimum(node_limit, tl.load(max_nodes_ptr + request).to(tl.int64)), 0)
    node_limit = tl.where(usable, node_limit, 0)
    tl.store(depth_limit_ptr + request, depth_limit.to(tl.int32))
    tl.store(node_limit_ptr + request, node_limit.to(tl.int32))
    tl.store(num_nodes_ptr + request, tl.minimum(node_limit, 1).to(tl.int32))
    tl.store(row_tokens_ptr + request, tl.where(usable, root, 0).to(tl.int32))
    tl.store(row_positions_ptr + request, 1)
    tl.store(row_places_ptr + request, tl.where(node_limit > 0, D + 1, -1))
    at = tl.arange(0, BLOCK)
    inside = at < N
    planted = (at == 0) & (node_limit > 0)
    tl.store(tokens_ptr + request * N + at, tl.where(planted, root.to(tl.int64), -1), mask=inside)
    tl.store(parents_ptr + request * N + at, tl.full((BLOCK,), -1, tl.int32), mask=inside)
    tl.store(depths_ptr + request * N + at, tl.zeros((BLOCK,), tl.int32), mask=inside)
    tl.store(logprobs_ptr + request * N + at, tl.where(planted, 0.0, float("-inf")), mask=inside)
    entries = frontier_scores_ptr + request * N * CHILDREN
    tl.store(entries + at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=at < N * CHILDREN)
    step = tl.arange(0, A)
    tl.store(paths_ptr + request * N * A + step, tl.where(step == 0, D + 1, -1))


@triton.jit
def _select_kernel(
    scores_ptr,  # [R, n, P]
    pool_ids_ptr,  # [R, D, P]
    row_positions_ptr,  # [R, n]
    row_places_ptr,  # [R, n]
    tokens_ptr,  # [R, N]
    parents_ptr,  # [R, N]
    depths_ptr,  # [R, N]
    logprobs_ptr,  # [R, N]
    num_nodes_ptr,  # [R]
    depth_limit_ptr,  # [R]
    node_limit_ptr,  # [R]
    paths_ptr,  # [R, N, A]
    frontier_scores_ptr,  # [R, 8 * N]
    frontier_tokens_ptr,  # [R, 8 * N]
    next_tokens_ptr,  # [R, width] out
    next_positions_ptr,  # [R, width] out
    next_places_ptr,  # [R, width] out
    n,
    P,
    D,
    N,
    width,
    CHILDREN: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,  # nodes published at once
    BLOCK_P: tl.constexpr,  # a power of two >= P
    BLOCK: tl.constexpr,  # a power of two >= 8 * N
    BLOCK_WIDTH: tl.constexpr,  # a power of two >= width
    PDL: tl.constexpr,
):
    take_turn(PDL)
    request = tl.program_id(0).to(tl.int64)
    nodes = request * N
    entries = nodes * CHILDREN
    candidate = tl.arange(0, BLOCK_P)
    child = tl.arange(0, CHILDREN)
    depth_limit = tl.load(depth_limit_ptr + request)
    first_slot = tl.load(num_nodes_ptr + request)
    room = tl.minimum(tl.load(node_limit_ptr + request), N) - first_slot
    for start in range(0, n, ROWS):
        index = start + tl.arange(0, ROWS)
        row = request * n + index
        slot = tl.load(row_places_ptr + row, mask=index < n, other=-1) - D - 1
        known = (slot >= 0) & (slot < N)
        score = tl.load(
            scores_ptr + row[:, None] * P + candidate[None, :],
            mask=known[:, None] & (candidate < P)[None, :],
            other=float("-inf"),
        )
        top = tl.max(score, axis=1)
        score -= tl.where(top > float("-inf"), top, 0.0)[:, None]
        total = tl.sum(tl.exp(score), axis=1)
        score -= tl.log(tl.where(total > 0, total, 1.0))[:, None]
        best = tl.full((ROWS, CHILDREN), float("-inf"), tl.float32)
        chosen = tl.zeros((ROWS, CHILDREN), tl.int32)
        for rank in tl.static_range(CHILDREN):
            value, place = tl.max(score, axis=1, return_indices=True)
            best = tl.where(child[None, :] == rank, value[:, None], best)
            chosen = tl.where(child[None, :] == rank, place[:, None], chosen)
            score = tl.where(candidate[None, :] == place[:, None], float("-inf"), score)
        open_ = known & (tl.load(depths_ptr + nodes + slot, mask=known, other=0) < depth_limit)
        best += tl.load(logprobs_ptr + nodes + slot, mask=known, other=float("-inf"))[:, None]
        best = tl.where(open_[:, None], best, float("-inf"))
        pool = request * D + tl.load(row_positions_ptr + row, mask=known, other=1) - 1
        found = best > float("-inf")
        token = tl.load(pool_ids_ptr + pool[:, None] * P + chosen, mask=found, other=-1)
        entry = entries + slot[:, None] * CHILDREN + child[None, :]
        tl.store(frontier_scores_ptr + entry, best, mask=known[:, None])
        tl.store(frontier_tokens_ptr + entry, token.to(tl.int32), mask=found)
    tl.debug_barrier()  # the frontier is read back with other threads than wrote it

    at = tl.arange(0, BLOCK)
    scores = tl.load(frontier_scores_ptr + entries + at, mask=at < N * CHILDREN, other=float("-inf"))
    place = tl.arange(0, BLOCK_WIDTH)
    score = tl.full((BLOCK_WIDTH,), float("-inf"), tl.float32)
    entry = tl.zeros((BLOCK_WIDTH,), tl.int32)
    for turn in range(width):
        value, where = tl.max(scores, axis=0, return_indices=True)
        score = tl.where(place == turn, value, score)
        entry = tl.where(place == turn, where, entry)
        scores = tl.where(at == where, float("-inf"), scores)
    taken = (score > float("-inf")) & (place < room)
    parent = entry // CHILDREN
    slot = first_slot + place
    token = tl.load(frontier_tokens_ptr + entries + entry, mask=taken, other=0)
    depth = tl.load(depths_ptr + nodes + parent, mask=taken, other=-1) + 1
    step = tl.arange(0, A)
    path = tl.load(paths_ptr + (nodes + parent)[:, None] * A + step[None, :], mask=taken[:, None], other=-1)
    path = tl.where(step[None, :] == depth[:, None], (slot + D + 1)[:, None], path)
    tl.store(paths_ptr + (nodes + slot)[:, None] * A + step[None, :], path, mask=taken[:, None])
    tl.store(tokens_ptr + nodes + slot, token.to(tl.int64), mask=taken)
    tl.store(parents_ptr + nodes + slot, parent, mask=taken)
    tl.store(depths_ptr + nodes + slot, depth, mask=taken)
    tl.store(logprobs_ptr + nodes + slot, score, mask=taken)
    tl.store(
        frontier_scores_ptr + entries + entry, tl.full((BLOCK_WIDTH,), float("-inf"), tl.float32), mask=taken
    )
    tl.store(num_nodes_ptr + request, first_slot + tl.sum(taken.to(tl.int32), axis=0))
    out = request * width + place
    inside = place < width
    tl.store(next_tokens_ptr + out, token, mask=inside)
    tl.store(next_positions_ptr + out, tl.where(taken, tl.minimum(depth, D - 1) + 1, 1), mask=inside)
    tl.store(next_places_ptr + out, tl.where(taken, slot + D + 1, -1), mask=inside)


def start_growth(
    roots: Tensor,
    num_slots: int,
    depth: int,
    vocab_size: int,
    max_depth: Tensor | None = None,
    max_nodes: Tensor | None = None,
) -> tuple[Growth, Rows]:
    """Trees of a root each (none where it is outside [0, vocab_size)), and the roots as rows to expand.

    roots [R], and the limits max_depth and max_nodes [R] of single requests, are any integers."""
    num_requests, device = len(roots), roots.device
    expect("roots", roots, (None,), device=device)
    for name, limit in (("max_depth", max_depth), ("max_nodes", max_nodes)):
        if limit is not None:
            expect(name, limit, (num_requests,), device=device)
    path_length = triton.next_power_of_2(depth + 1)

    def integers(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=device)

    nodes = (num_requests, num_slots)
    growth = Growth(
        tokens=torch.empty(nodes, dtype=torch.int64, device=device),
        parents=integers(*nodes),
        depths=integers(*nodes),
        logprobs=torch.empty(nodes, dtype=torch.float32, device=device),
        num_nodes=integers(num_requests),
        depth_limit=integers(num_requests),
        node_limit=integers(num_requests),
        paths=integers(*nodes, path_length),
        frontier_scores=torch.empty(num_requests, num_slots * CHILDREN, dtype=torch.float32, device=device),
        frontier_tokens=integers(num_requests, num_slots * CHILDREN),
        depth=depth,
    )
    rows = Rows.empty(num_requests, 1, device)
    _start_kernel[(num_requests,)](
        roots,
        roots if max_depth is None else max_depth.contiguous(),
        roots if max_nodes is None else max_nodes.contiguous(),
        growth.tokens,
        growth.parents,
        growth.depths,
        growth.logprobs,
        growth.num_nodes,
        growth.depth_limit,
        growth.node_limit,
        growth.paths,
        growth.frontier_scores,
        rows.tokens,
        rows.positions,
        rows.places,
        vocab_size,
        depth,
        num_slots,
        HAS_MAX_DEPTH=max_depth is not None,
        HAS_MAX_NODES=max_nodes is not None,
        CHILDREN=CHILDREN,
        A=path_length,
        BLOCK=triton.next_power_of_2(CHILDREN * num_slots),
        **launch_options(roots),
    )
    return growth, rows


def select_nodes(growth: Growth, rows: Rows, scores: Tensor, pool_ids: Tensor, width: int) -> Rows:
    """Publishes the children of `rows` and takes the `width` best entries as nodes; returns these as rows.

    scores fp32 [R, n, P]: −inf for no candidate, never NaN; pool_ids int64 [R, D, P]. Rows without a node
    publish nothing. A request takes fewer when its frontier runs dry or it reaches its node limit."""
    num_requests, num_slots = growth.tokens.shape
    num_rows, device = rows.places.shape[1], growth.tokens.device
    pool_size = pool_ids.shape[2]
    expect("scores", scores, (num_requests, num_rows, pool_size), device=device, dtypes=(torch.float32,))
    expect("pool_ids", pool_ids, (num_requests, growth.depth, None), device=device, dtypes=(torch.int64,))
    if not scores.is_contiguous() or not pool_ids.is_contiguous():
        raise ValueError("scores and pool_ids must be contiguous")
    taken = Rows.empty(num_requests, width, device)
    block_p = triton.next_power_of_2(pool_size)
    block_rows = min(triton.next_power_of_2(num_rows), max(1, _SELECT_ELEMENTS // block_p))
    _select_kernel[(num_requests,)](
        scores,
        pool_ids,
        rows.positions,
        rows.places,
        growth.tokens,
        growth.parents,
        growth.depths,
        growth.logprobs,
        growth.num_nodes,
        growth.depth_limit,
        growth.node_limit,
        growth.paths,
        growth.frontier_scores,
        growth.frontier_tokens,
        taken.tokens,
        taken.positions,
        taken.places,
        num_rows,
        pool_size,
        growth.depth,
        num_slots,
        width,
        CHILDREN=CHILDREN,
        A=growth.paths.shape[2],
        ROWS=block_rows,
        BLOCK_P=block_p,
        BLOCK=triton.next_power_of_2(CHILDREN * num_slots),
        BLOCK_WIDTH=triton.next_power_of_2(width),
        num_warps=4 if block_rows * block_p <= 1024 else 8,
        **launch_options(scores),
    )
    return taken
