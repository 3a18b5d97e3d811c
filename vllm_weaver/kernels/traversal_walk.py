# SPDX-License-Identifier: Apache-2.0
"""Traversal verification of draft trees: which node a sampled request accepts, from the leaves to the root.

The rule ("Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398, Algorithm 3), for a node v
that is to be accepted with probability a(v), a(root) = 1; p(x) is the target's probability of token x at v:

    draw an order of the children of v;  lost = 1 - a(v), outside = a(v) (1 - sum of p over the children),
    mass(x) = a(v) p(x) for each child x
    for each child x in that order:
        q(y) = w(y) / (sum of w over the children that are left, x included), for each child y that is left
        verify x with a(x) = min(1, mass(x) / q(x));  if that accepts x or a node below it, stop
        drop x;  for the children y that are left: mass(y) <- max(mass(y) - q(y), 0)
        divide lost, outside and every mass by their sum
    accept v with probability outside = 1 - lost, else reject v;
    below an accepted v, the bonus token is drawn from p without the children of v

The weights w(y) > 0 are exp(log-probability under the drafter - the best sibling's), at least e^-60, and the
order is a Plackett-Luce draw of these weights: descending log w + Gumbel noise.

**Why the output has the target's law, though the children were chosen and not drawn.** Nothing here supposes
that the drafter drew its tokens from its own distribution. The proposal is the draw made *here*: children x1,
x2, ... without replacement from q, whose support is exactly the set of retained children. A Plackett-Luce
order of the whole set is such a draw, and it always ends with the whole set, so that it agrees with any tree
that is a function of the draft (and of the number of rows that the scheduler left), however its children
were selected. Any weights that do not depend on the target's noise would do; a lone child has q = 1. A
child's subtree is a function of its path, not of the order.

Claim: with a given, v or a node below it is accepted with probability a, and what is then written (the path
below v, the bonus token, and the target's own continuation) has the law of the target at v. It holds for a
leaf: accepted with probability a, bonus token from p. Let it hold for the children. For one draw x from q
and the masses m with sum a: x is accepted with total probability q(x) min(1, m(x) / q(x)) = min(m, q)(x),
with the target's continuation. Still owed: m'(y) = m(y) - min(m, q)(y) = max(m(y) - q(y), 0), off the
children a p(y). No acceptance has the probability r = 1 - sum of min(m, q) = (1 - a) + sum of m'. Given that,
whatever x was (its own m' is 0, for a rejected child has m < q), the next child is drawn from q without x,
and m' / r is owed: the same problem with a' = sum of m' / r. When no child is left, m' / r lies off the
children, proportional to p: v is accepted with probability a' and the bonus token drawn from p without the
children. The root has a = 1. The noise is fresh at every node, since each is entered once, and between steps,
since its key has the root's position, which grows with every step.

How much is accepted: no bonus token is that of a child, so the accepted path is the longest beginning of the
written text that the tree has, as under `target_only`, and no lossless rule can accept a longer one. For a
tree that is a function of the context both therefore accept equally many tokens in the mean; the paper's gain
over other rules is one for trees whose nodes were drawn.

Only p of the nodes' own tokens, and whether p has anything off them, are needed: N + T numbers.

Noise: Philox 4x32-10 with the request's seed as key and the counter (node, root's position, a constant).
Floor: 24·N bytes of tree and statistics a request and two scattered reads a node; at most 2·N rounds of a few
reductions over the node list in registers. The walk of greedy requests (temperature 0) is left to
`greedy_walk`, which follows the best ids."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.ancestors import count_usable_nodes, load_usable_count
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, use_triton
from vllm_weaver.kernels.traversal_rows import LARGEST_LOGIT, RowStatistics, usable_logits

_LEAST_WEIGHT = -60.0
_LEAST_LOGPROB = -1.0e30
_TINY = 1.0e-30
_DOMAIN = 0x54524156  # last word of the counter


class TraversalEnd(NamedTuple):
    """Where each request's walk ended."""

    final_rows: Tensor
    """int64 [R]: the row of the last accepted node, the root's for a greedy request; -1 without rows."""
    excluded: Tensor
    """int64 [R, N]: tokens of that node's children, which the bonus token must not be; then -1."""
    num_excluded: Tensor
    """int32 [R]: how many these are."""


class Noise(NamedTuple):
    """One draw of each kind for every node."""

    order: Tensor
    """float32 [R, N]: Gumbel noise of a child's place among its siblings."""
    accept: Tensor
    """float32 [R, N]: uniform noise in [0, 1) of a node's acceptance."""


def _philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox 4x32-10 of int64 tensors that hold 32-bit words."""
    low = 0xFFFFFFFF

    def high_word(a: Tensor, b: int) -> Tensor:
        return (a * (b >> 16) + (a * (b & 0xFFFF) >> 16)) >> 16

    for _ in range(10):
        a, b = 0xD2511F53, 0xCD9E8D57
        counter = [
            high_word(counter[2], b) ^ counter[1] ^ key[0],
            (counter[2] * b) & low,
            high_word(counter[0], a) ^ counter[3] ^ key[1],
            (counter[0] * a) & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def keyed_noise_reference(seeds: Tensor, root_positions: Tensor, num_slots: int) -> Noise:
    """The noise of R requests with these seeds int64 [R] and root positions int64 [R]."""
    low = 0xFFFFFFFF
    index = torch.arange(num_slots, device=seeds.device).expand(len(seeds), -1)
    position, seed = root_positions[:, None].expand_as(index), seeds[:, None].expand_as(index)
    counter = [index, position & low, (position >> 32) & low, torch.full_like(index, _DOMAIN)]
    words = _philox(counter, [seed & low, (seed >> 32) & low])
    uniform = ((words[0] >> 9).float() + 0.5) * 2.0**-23
    return Noise(-(-uniform.log()).log(), (words[1] >> 8).float() * 2.0**-24)


def traversal_walk_reference(
    choices: Tensor,
    logits: Tensor,
    statistics: RowStatistics,
    row_starts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    logprobs: Tensor,
    num_nodes: Tensor,
    is_greedy: Tensor,
    noise: Noise,
) -> TraversalEnd:
    """The rule in plain PyTorch, with logprobs [R, N], is_greedy bool [R] and the noise in batch order; 2·N
    rounds. Synchronises with the host."""
    num_requests, num_slots = tokens.shape
    device, vocab_size = tokens.device, logits.shape[1]
    index = torch.arange(num_slots, device=device)
    start = row_starts[:-1].to(torch.int64)
    num_rows = row_starts[1:] - row_starts[:-1]
    usable = torch.minimum(count_usable_nodes(parents, num_nodes), num_rows)
    reachable = (index > 0) & (index < usable[:, None]) & ~is_greedy[:, None]
    parent = torch.where(reachable, parents, -1).to(torch.int64)
    above = (start[:, None] + parent.clamp(min=0)).clamp(max=max(0, len(logits) - 1))
    known = reachable & (tokens >= 0) & (tokens < vocab_size)
    logit = usable_logits(logits[above, torch.where(known, tokens, 0)]) if len(logits) else tokens.float()
    known = known & (logit > float("-inf"))
    shifted = torch.where(known, logit - statistics.logsumexp[above], float("-inf"))
    probability = shifted.exp().clamp(max=1)
    scores = torch.nan_to_num(logprobs, nan=_LEAST_LOGPROB).clamp(min=_LEAST_LOGPROB)

    def at(values: Tensor, node: Tensor) -> Tensor:
        return values.gather(1, node[:, None])[:, 0]

    # `scale`: what p is multiplied with off the children; a(v) at first, then divided like the masses.
    scale = torch.zeros(num_requests, num_slots, device=device)
    scale[:, 0] = 1
    lost = torch.zeros_like(scale)
    mass = torch.where(parent == 0, probability, 0)
    done = ~reachable
    current = torch.zeros(num_requests, dtype=torch.int64, device=device)
    final = torch.full_like(current, -1)
    going = num_rows > 0
    for _ in range(2 * num_slots):
        kids = reachable & (parent == current[:, None])
        left = kids & ~done
        row = (start + current).clamp(max=max(0, len(logits) - 1))
        count = (kids & known).sum(1)
        support = statistics.support[row] if len(logits) else count
        outside = (1 - torch.where(kids, probability, 0).sum(1)).clamp(min=_TINY)
        outside = torch.where((support > 0) & (support <= count), 0, outside) * at(scale, current)
        lost_here = at(lost, current)
        opened = left.any(1)

        # Another child: what the node's state will be if the child is rejected, and the child's own.
        best = torch.where(kids, scores, float("-inf")).amax(1, keepdim=True)
        weight = torch.where(kids, (scores - best).clamp(min=_LEAST_WEIGHT), 0)
        child = torch.where(left, weight + noise.order, float("-inf")).argmax(1)
        weight = torch.where(left, weight.exp(), 0)
        proposal = weight / weight.sum(1, keepdim=True).clamp(min=_TINY)
        others = left & (index != child[:, None])
        owed = torch.where(others, (mass - proposal).clamp(min=0), 0)
        total = lost_here + outside + owed.sum(1)
        m, q = at(mass, child), at(proposal, child)
        sure = (m >= q) | ((total <= 0) & (m > 0))
        ratio = torch.where(sure, 1, m / q.clamp(min=_TINY))
        miss = torch.where(sure, 0, (q - m) / q.clamp(min=_TINY))
        total = total.clamp(min=_TINY)

        # No child left: the node itself.
        chosen = (current == 0) | (lost_here <= 0)
        chosen |= at(noise.accept, current) * (outside + lost_here) < outside
        chosen &= going & ~opened
        final = torch.where(chosen, current, final)
        going = going & ~chosen

        here, there = index == current[:, None], index == child[:, None]
        enter = (going & opened)[:, None]
        mass = torch.where(enter & others, owed / total[:, None], mass)
        mass = torch.where(enter & reachable & (parent == child[:, None]), ratio[:, None] * probability, mass)
        scale = torch.where(enter & here, scale / total[:, None], scale)
        scale = torch.where(enter & there, ratio[:, None], scale)
        lost = torch.where(enter & here, lost / total[:, None], lost)
        lost = torch.where(enter & there, miss[:, None], lost)
        done = done | (enter & there)
        down = opened & (m > 0)  # below a child of no mass, nothing can be accepted
        up = torch.where(opened, current, at(parent, current))
        current = torch.where(going, torch.where(down, child, up), current)

    kids = reachable & (parent == final[:, None])
    row = (start + final.clamp(min=0)).clamp(max=max(0, len(logits) - 1))
    names = kids & (tokens >= 0) & (tokens < vocab_size)
    spare = statistics.support[row] > (kids & known).sum(1) if len(logits) else names.any(1)
    names &= spare[:, None]
    order = torch.where(names, index, num_slots + index).argsort(1)
    excluded = torch.where(names, tokens, -1).gather(1, order)
    node = final.clamp(min=0)
    for _ in range(num_slots):
        moving = node > 0
        where = (start + at(parent, node)).where(moving, 0)[moving]
        choices[where] = at(tokens, node)[moving]
        node = torch.where(moving, at(parent, node), node)
    final_rows = torch.where(final >= 0, start + final, -1)
    return TraversalEnd(final_rows, excluded, names.sum(1).to(torch.int32))


@triton.jit
def _traversal_walk_kernel(
    choices_ptr,  # [T] in and out
    logits_ptr,  # [T, V]
    logsumexp_ptr,  # [T]
    support_ptr,  # [T]
    row_starts_ptr,  # [R + 1]
    tokens_ptr,  # [R, N]
    parents_ptr,  # [R, N]
    num_nodes_ptr,  # [R]
    logprobs_ptr,  # [S, N]
    states_ptr,  # [R]
    temperatures_ptr,  # [>= S]
    seeds_ptr,  # [>= S]
    root_positions_ptr,  # [R]
    final_rows_ptr,  # [R] out
    excluded_ptr,  # [R, N] out
    num_excluded_ptr,  # [R] out
    logits_stride,
    tokens_stride,
    parents_stride,
    vocab_size,
    num_states,
    N,
    LARGEST: tl.constexpr,
    LEAST_WEIGHT: tl.constexpr,
    LEAST_LOGPROB: tl.constexpr,
    TINY: tl.constexpr,
    DOMAIN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= N
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    start = tl.load(row_starts_ptr + request).to(tl.int64)
    rows = (tl.load(row_starts_ptr + request + 1) - start).to(tl.int32)
    state = tl.load(states_ptr + request).to(tl.int64)
    known_state = (state >= 0) & (state < num_states)
    state = tl.where(known_state, state, 0)
    is_greedy = (tl.load(temperatures_ptr + state) == 0) | (known_state == 0)
    parents_ptr += request * parents_stride
    nodes = tl.minimum(tl.load(num_nodes_ptr + request), rows)
    usable = load_usable_count(parents_ptr, tl.where(is_greedy, 0, nodes), N, BLOCK)
    reachable = (index > 0) & (index < usable)
    parent = tl.load(parents_ptr + index, mask=reachable, other=-1)
    token = tl.load(tokens_ptr + request * tokens_stride + index, mask=reachable, other=-1)
    above = start + tl.maximum(parent, 0)
    named = reachable & (token >= 0) & (token < vocab_size)
    at = above * logits_stride + tl.maximum(token, 0)
    logit = tl.load(logits_ptr + at, mask=named, other=float("-inf")).to(tl.float32)
    logit = tl.minimum(tl.where(logit == logit, logit, float("-inf")), LARGEST)
    known = named & (logit > float("-inf"))
    logsumexp = tl.load(logsumexp_ptr + above, mask=known, other=0.0)
    probability = tl.where(known, tl.exp(tl.minimum(tl.where(known, logit, 0.0) - logsumexp, 0.0)), 0.0)
    score = tl.load(logprobs_ptr + state * N + index, mask=reachable, other=0.0)
    score = tl.maximum(tl.where(score == score, score, LEAST_LOGPROB), LEAST_LOGPROB)

    seed = tl.load(seeds_ptr + state)
    position = tl.load(root_positions_ptr + request).to(tl.int64)
    zero = index * 0
    low = (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    first, second, _, _ = tl.philox(seed, index, zero + low, zero + high, zero + DOMAIN)
    # Of the words' upper bits, as many as float32 holds: nothing rounds to 0 or 1 that must not be it.
    uniform = ((first >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    order_noise = -tl.log(-tl.log(uniform))
    accept_noise = (second >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08

    scale = tl.where(index == 0, 1.0, 0.0)
    lost = tl.zeros((BLOCK,), tl.float32)
    mass = tl.where(reachable & (parent == 0), probability, 0.0)
    done = tl.where(reachable, 0, 1)
    current = tl.where(rows > 0, 0, -1)
    final = tl.full((), -1, tl.int32)
    spare = tl.full((), 0, tl.int32)
    while current >= 0:
        kids = reachable & (parent == current)
        left = kids & (done == 0)
        count = tl.sum((kids & known).to(tl.int32), axis=0)
        support = tl.load(support_ptr + start + current)
        outside = tl.maximum(1.0 - tl.sum(tl.where(kids, probability, 0.0), axis=0), TINY)
        outside = tl.where((support > 0) & (support <= count), 0.0, outside) * tl.sum(
            tl.where(index == current, scale, 0.0), axis=0
        )
        lost_here = tl.sum(tl.where(index == current, lost, 0.0), axis=0)
        opened = tl.max(left.to(tl.int32), axis=0) > 0

        # Another child: what the node's state will be if the child is rejected, and the child's own.
        best = tl.max(tl.where(kids, score, float("-inf")), axis=0)
        weight = tl.where(kids, tl.maximum(score - tl.where(opened, best, 0.0), LEAST_WEIGHT), 0.0)
        key = tl.where(left, weight + order_noise, float("-inf"))
        child = tl.min(tl.where(left & (key == tl.max(key, axis=0)), index, BLOCK), axis=0)
        weight = tl.where(left, tl.exp(weight), 0.0)
        proposal = weight / tl.maximum(tl.sum(weight, axis=0), TINY)
        others = left & (index != child)
        owed = tl.where(others, tl.maximum(mass - proposal, 0.0), 0.0)
        total = lost_here + outside + tl.sum(owed, axis=0)
        m, q = (
            tl.sum(tl.where(index == child, mass, 0.0), axis=0),
            tl.sum(tl.where(index == child, proposal, 0.0), axis=0),
        )
        sure = (m >= q) | ((total <= 0) & (m > 0))
        ratio = tl.where(sure, 1.0, m / tl.maximum(q, TINY))
        miss = tl.where(sure, 0.0, (q - m) / tl.maximum(q, TINY))
        total = tl.maximum(total, TINY)

        # No child left: the node itself.
        chosen = (current == 0) | (lost_here <= 0)
        chosen = chosen | (
            tl.sum(tl.where(index == current, accept_noise, 0.0), axis=0) * (outside + lost_here) < outside
        )
        chosen = chosen & (opened == 0)
        final = tl.where(chosen, current, final)
        spare = tl.where(chosen & (support > count), 1, spare)

        mass = tl.where(opened & others, owed / total, mass)
        mass = tl.where(opened & reachable & (parent == child), ratio * probability, mass)
        scale = tl.where(opened & (index == current), scale / total, scale)
        scale = tl.where(opened & (index == child), ratio, scale)
        lost = tl.where(opened & (index == current), lost / total, lost)
        lost = tl.where(opened & (index == child), miss, lost)
        done = tl.where(opened & (index == child), 1, done)
        up = tl.sum(tl.where(index == current, parent, 0), axis=0)
        below = tl.where(m > 0, child, current)  # below a child of no mass, nothing can be accepted
        current = tl.where(chosen, -1, tl.where(opened, below, up))

    names = named & (parent == final) & (spare > 0)
    picked = tl.where(names, 1, 0)
    place = tl.cumsum(picked, axis=0) - 1
    num_names = tl.sum(picked, axis=0)
    excluded_ptr += request * N
    unused = (index >= num_names) & (index < N)
    tl.store(excluded_ptr + index, tl.full((BLOCK,), -1, tl.int64), mask=unused)
    tl.store(excluded_ptr + place, token, mask=picked > 0)
    tl.store(num_excluded_ptr + request, num_names)
    tl.store(final_rows_ptr + request, tl.where(final >= 0, start + final, -1))
    node = final
    while node > 0:
        up = tl.sum(tl.where(index == node, parent, 0), axis=0)
        tl.store(choices_ptr + start + up, tl.sum(tl.where(index == node, token, 0), axis=0))
        node = up


def traversal_walk(
    logits: Tensor,
    statistics: RowStatistics,
    row_starts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    logprobs: Tensor,
    states: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    impl: Impl = "auto",
) -> TraversalEnd:
    """Walks the trees of sampled requests; writes the accepted paths' tokens into `statistics.best`.

    Afterwards `statistics.best`, with the bonus tokens placed at `final_rows`, is what `greedy_walk` follows:
    row i of a path holds the token of the next node. Rows of greedy requests are left as they are.

    logits [T, V], any float dtype, rows contiguous: the target's processed logits, temperature and all;
    statistics: their `row_statistics`; row_starts int32 or int64 [R + 1], ascending; tokens int64 [R, N]
    (siblings distinct; ids outside [0, V) are never accepted), parents int32 [R, N], num_nodes int32 [R], 0
    for a request that is no tree; logprobs float32 [S, N], contiguous, cumulative, by request state index;
    states int32 or int64 [R], the requests' state indices (one outside [0, S): as greedy); temperatures
    float32 and seeds int64 [>= S], by state index; root_positions int64 [R]. `ValueError` for shapes, dtypes
    or strides that do not fit."""
    num_requests, num_slots = tokens.shape
    device = tokens.device
    ints, long, whole = (torch.int32, torch.int64), (torch.int64,), (torch.float32,)
    expect("logits", logits, (None, None), device=device)
    expect_dense_last("logits", logits)
    for name, array, dtypes in zip(RowStatistics._fields, statistics, (long, whole, ints[:1]), strict=True):
        expect(f"statistics.{name}", array, (len(logits),), device=device, dtypes=dtypes)
    expect_dense_last("statistics.best", statistics.best)
    expect("row_starts", row_starts, (num_requests + 1,), device=device, dtypes=ints)
    expect("tokens", tokens, (None, None), device=device, dtypes=long)
    expect("parents", parents, (num_requests, num_slots), device=device, dtypes=ints[:1])
    expect("num_nodes", num_nodes, (num_requests,), device=device, dtypes=ints[:1])
    expect("logprobs", logprobs, (None, num_slots), device=device, dtypes=whole)
    if not logprobs.is_contiguous():
        raise ValueError(f"logprobs has strides {logprobs.stride()}; it must be contiguous")
    expect("states", states, (num_requests,), device=device, dtypes=ints)
    expect("temperatures", temperatures, (None,), device=device, dtypes=whole)
    expect("seeds", seeds, (len(temperatures),), device=device, dtypes=long)
    expect("root_positions", root_positions, (num_requests,), device=device, dtypes=long)
    expect_dense_last("tokens", tokens)
    expect_dense_last("parents", parents)
    num_states = min(len(logprobs), len(seeds))
    if num_states < 1:
        raise ValueError("logprobs and seeds are empty; they must hold at least one request state")
    if not use_triton(tokens, impl):
        known = (states >= 0) & (states < num_states)
        state = states.where(known, 0).to(torch.int64)
        return traversal_walk_reference(
            statistics.best, logits, statistics, row_starts, tokens, parents, logprobs[state], num_nodes,
            (temperatures[state] == 0) | ~known,
            keyed_noise_reference(seeds[state], root_positions, num_slots),
        )  # fmt: skip
    end = TraversalEnd(
        torch.empty(num_requests, dtype=torch.int64, device=device),
        torch.empty(num_requests, num_slots, dtype=torch.int64, device=device),
        torch.empty(num_requests, dtype=torch.int32, device=device),
    )
    if num_requests:
        _traversal_walk_kernel[(num_requests,)](
            statistics.best, logits, statistics.logsumexp.contiguous(), statistics.support.contiguous(),
            row_starts.contiguous(), tokens, parents, num_nodes.contiguous(), logprobs, states.contiguous(),
            temperatures.contiguous(), seeds.contiguous(), root_positions.contiguous(), *end,
            logits.stride(0), tokens.stride(0), parents.stride(0), logits.shape[1], num_states, num_slots,
            LARGEST=LARGEST_LOGIT,
            LEAST_WEIGHT=_LEAST_WEIGHT,
            LEAST_LOGPROB=_LEAST_LOGPROB,
            TINY=_TINY,
            DOMAIN=_DOMAIN,
            BLOCK=triton.next_power_of_2(num_slots),
            num_warps=1,
        )  # fmt: skip
    return end
