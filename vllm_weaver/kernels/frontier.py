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
materialised, 8 + W maxima over registers do. What the rounds before left, the W best entries of the frontier
included, is read while the kernel that computes the scores still runs, and children become nodes out of
registers: of a round's chain of loads, the scores and the ids of the 8 best are left."""

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
    ROWS: tl.constexpr,  # a power of two >= n
    BLOCK_P: tl.constexpr,  # a power of two >= P
    BLOCK: tl.constexpr,  # a power of two >= 8 * N
    BLOCK_WIDTH: tl.constexpr,  # a power of two >= width
    EARLY: tl.constexpr,  # everything but scores may be read before the turn
    PDL: tl.constexpr,
):
    if not EARLY:
        take_turn(PDL)
    request = tl.program_id(0).to(tl.int64)
    nodes = request * N
    entries = nodes * CHILDREN
    depth_limit = tl.load(depth_limit_ptr + request)
    first_slot = tl.load(num_nodes_ptr + request)
    room = tl.minimum(tl.minimum(tl.load(node_limit_ptr + request), N) - first_slot, width)
    step = tl.arange(0, A)
    child = tl.arange(0, CHILDREN)

    # The round's nodes.
    index = tl.arange(0, ROWS)
    row = request * n + index
    slot = tl.load(row_places_ptr + row, mask=index < n, other=-1) - D - 1
    known = (slot >= 0) & (slot < N)
    depth = tl.load(depths_ptr + nodes + slot, mask=known, other=0)
    above = tl.load(logprobs_ptr + nodes + slot, mask=known & (depth < depth_limit), other=float("-inf"))
    pool = request * D + tl.load(row_positions_ptr + row, mask=known, other=1) - 1
    path = tl.load(paths_ptr + (nodes + slot)[:, None] * A + step[None, :], mask=known[:, None], other=-1)

    # The best entries of the frontier without their children, and the nodes that these would become.
    at = tl.arange(0, BLOCK)
    waiting = tl.load(frontier_scores_ptr + entries + at, mask=at < N * CHILDREN, other=float("-inf"))
    place = tl.arange(0, BLOCK_WIDTH)
    old_score = tl.full((BLOCK_WIDTH,), float("-inf"), tl.float32)
    old_entry = tl.zeros((BLOCK_WIDTH,), tl.int32)
    for turn in range(width):
        value, where = tl.max(waiting, axis=0, return_indices=True)
        old_score = tl.where(place == turn, value, old_score)
        old_entry = tl.where(place == turn, where, old_entry)
        waiting = tl.where(at == where, float("-inf"), waiting)
    old_found = old_score > float("-inf")
    old_parent = old_entry // CHILDREN
    old_token = tl.load(frontier_tokens_ptr + entries + old_entry, mask=old_found, other=0)
    old_depth = tl.load(depths_ptr + nodes + old_parent, mask=old_found, other=-1) + 1
    old_line = (nodes + old_parent)[:, None] * A + step[None, :]
    old_path = tl.load(paths_ptr + old_line, mask=old_found[:, None], other=-1)

    if EARLY:
        take_turn(PDL)
    candidate = tl.arange(0, BLOCK_P)
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
        value, found_at = tl.max(score, axis=1, return_indices=True)
        best = tl.where(child[None, :] == rank, value[:, None], best)
        chosen = tl.where(child[None, :] == rank, found_at[:, None], chosen)
        score = tl.where(candidate[None, :] == found_at[:, None], float("-inf"), score)
    best += above[:, None]
    found = best > float("-inf")
    token = tl.load(pool_ids_ptr + pool[:, None] * P + chosen, mask=found, other=-1).to(tl.int32)

    # Everyone counts who goes before: higher scores, and of equal ones the lower entries, which the old are.
    line = tl.reshape(best, (ROWS * CHILDREN,))
    order = tl.arange(0, ROWS * CHILDREN)
    earlier = (line[None, :] == line[:, None]) & (order[None, :] < order[:, None])
    before = ((line[None, :] > line[:, None]) | earlier).to(tl.int32)
    turn_new = tl.sum(before, axis=1) + tl.sum((old_score[None, :] >= line[:, None]).to(tl.int32), axis=1)
    turn_new = tl.reshape(turn_new, (ROWS, CHILDREN))
    turn_old = place + tl.sum((line[None, :] > old_score[:, None]).to(tl.int32), axis=1)
    new_taken = found & (turn_new < room)
    old_taken = old_found & (turn_old < room)
    num_taken = tl.sum(old_taken.to(tl.int32), axis=0)
    num_taken += tl.sum(tl.sum(new_taken.to(tl.int32), axis=1), axis=0)

    entry = entries + slot[:, None] * CHILDREN + child[None, :]
    tl.store(frontier_scores_ptr + entry, tl.where(new_taken, float("-inf"), best), mask=known[:, None])
    tl.store(frontier_tokens_ptr + entry, token, mask=found)
    spent = tl.full((BLOCK_WIDTH,), float("-inf"), tl.float32)
    tl.store(frontier_scores_ptr + entries + old_entry, spent, mask=old_taken)

    next_slot = first_slot + turn_old
    node = nodes + next_slot
    tl.store(tokens_ptr + node, old_token.to(tl.int64), mask=old_taken)
    tl.store(parents_ptr + node, old_parent, mask=old_taken)
    tl.store(depths_ptr + node, old_depth, mask=old_taken)
    tl.store(logprobs_ptr + node, old_score, mask=old_taken)
    old_path = tl.where(step[None, :] == old_depth[:, None], (next_slot + D + 1)[:, None], old_path)
    tl.store(paths_ptr + node[:, None] * A + step[None, :], old_path, mask=old_taken[:, None])
    out = request * width + turn_old
    tl.store(next_tokens_ptr + out, old_token, mask=old_taken)
    tl.store(next_positions_ptr + out, tl.minimum(old_depth, D - 1) + 1, mask=old_taken)
    tl.store(next_places_ptr + out, next_slot + D + 1, mask=old_taken)

    new_depth = depth[:, None] + 1 + tl.zeros((ROWS, CHILDREN), tl.int32)
    next_slot = first_slot + turn_new
    node = nodes + next_slot
    tl.store(tokens_ptr + node, token.to(tl.int64), mask=new_taken)
    tl.store(parents_ptr + node, slot[:, None] + tl.zeros((ROWS, CHILDREN), tl.int32), mask=new_taken)
    tl.store(depths_ptr + node, new_depth, mask=new_taken)
    tl.store(logprobs_ptr + node, best, mask=new_taken)
    own = step[None, None, :] == new_depth[:, :, None]
    new_path = tl.where(own, (next_slot + D + 1)[:, :, None], path[:, None, :])
    tl.store(paths_ptr + node[:, :, None] * A + step[None, None, :], new_path, mask=new_taken[:, :, None])
    out = request * width + turn_new
    tl.store(next_tokens_ptr + out, token, mask=new_taken)
    tl.store(next_positions_ptr + out, tl.minimum(new_depth, D - 1) + 1, mask=new_taken)
    tl.store(next_places_ptr + out, next_slot + D + 1, mask=new_taken)

    tl.store(num_nodes_ptr + request, first_slot + num_taken)
    out = request * width + place
    empty = (place >= num_taken) & (place < width)
    tl.store(next_tokens_ptr + out, tl.zeros((BLOCK_WIDTH,), tl.int32), mask=empty)
    tl.store(next_positions_ptr + out, tl.full((BLOCK_WIDTH,), 1, tl.int32), mask=empty)
    tl.store(next_places_ptr + out, tl.full((BLOCK_WIDTH,), -1, tl.int32), mask=empty)


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


def select_nodes(
    growth: Growth, rows: Rows, scores: Tensor, pool_ids: Tensor, width: int, *, early: bool = False
) -> Rows:
    """Publishes the children of `rows` and takes the `width` best entries as nodes; returns these as rows.

    scores fp32 [R, n, P]: −inf for no candidate, never NaN; pool_ids int64 [R, D, P]. Rows without a node
    publish nothing. A request takes fewer when its frontier runs dry or it reaches its node limit. early:
    all but the scores was complete before the launch before this one (see `pdl`)."""
    num_requests, num_slots = growth.tokens.shape
    num_rows, device = rows.places.shape[1], growth.tokens.device
    pool_size = pool_ids.shape[2]
    expect("scores", scores, (num_requests, num_rows, pool_size), device=device, dtypes=(torch.float32,))
    expect("pool_ids", pool_ids, (num_requests, growth.depth, None), device=device, dtypes=(torch.int64,))
    if not scores.is_contiguous() or not pool_ids.is_contiguous():
        raise ValueError("scores and pool_ids must be contiguous")
    taken = Rows.empty(num_requests, width, device)
    block_p = triton.next_power_of_2(pool_size)
    block_rows = triton.next_power_of_2(num_rows)
    elements = block_rows * block_p
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
        EARLY=early,
        num_warps=4 if elements <= 1024 else 8 if elements <= 4096 else 16,
        **launch_options(scores),
    )
    return taken
