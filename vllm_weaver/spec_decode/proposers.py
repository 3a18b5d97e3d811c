# SPDX-License-Identifier: Apache-2.0
"""The three ways to grow a draft tree from one block of a drafter: `weaver`, `ddtree` and `chain`.

All of them answer `propose` with a `Tree` of a batch and never synchronise with the host: the number of
rounds and every shape depend on sizes alone. A request that has fewer candidates than its budget (NaN rows, a
small pool, a depth limit) comes back with fewer nodes. Only finite logits below the vocabulary bound are
candidates, so every token of a tree is in [0, vocab_size).

- weaver ("Trees from Marginals", arXiv 2607.06763): best-first rounds, children scored by the Weaver head.
- ddtree (DDTree, arXiv 2604.12989): the best B nodes when the draft's rows are taken as independent.
- chain: the draft's most likely token at every row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from vllm_weaver.kernels.candidate_pool import candidate_pool
from vllm_weaver.kernels.common import Impl, use_triton
from vllm_weaver.kernels.frontier import CHILDREN, publish_children, take_best
from vllm_weaver.spec_decode.tree import Tree
from vllm_weaver.spec_decode.weaver import WeaverHead, node_rows, pool_logprobs
from vllm_weaver.spec_decode.weaver_growth import WeaverGrowth

_DDTREE_POOL = 64
_RANK_BITS = 7  # a rank of at most 64, plus one: 0 ends a path
_RANKS_PER_KEY = 63 // _RANK_BITS


class TreeProposer(ABC):
    """Grows draft trees for a batch.

    vocab_size: ids at or above it are never proposed, however wide the logits are (padded vocabularies).
    """

    def __init__(self, vocab_size: int, *, impl: Impl = "auto") -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, but is {vocab_size}.")
        self.vocab_size = vocab_size
        self.impl: Impl = impl

    @torch.no_grad()
    def propose(
        self,
        hidden: Tensor,
        draft_hidden: Tensor,
        draft_logits: Tensor,
        root_tokens: Tensor,
        budget: int,
        *,
        max_depth: Tensor | None = None,
        max_nodes: Tensor | None = None,
    ) -> Tree:
        """Trees of at most `budget` nodes besides the root.

        hidden [R, d]: the target's final normed hidden state at the token whose logits gave the root token;
        draft_hidden [R, D, d] and draft_logits [R, D, >= vocab_size]: the draft at its D mask positions
        (hidden states are read by `weaver` only); root_tokens [R]: a root outside [0, vocab_size) yields a
        tree without nodes. max_depth [R] and max_nodes [R] (the root included) limit single requests, for
        example near the length limit. Returns a Tree of budget + 1 slots. `ValueError` for a budget below 1
        and for shapes that do not fit."""
        num_requests, depth = draft_logits.shape[:2]
        if budget < 1:
            raise ValueError(f"The tree budget must be at least 1, but is {budget}.")
        if draft_logits.ndim != 3 or depth < 1 or draft_logits.shape[2] < self.vocab_size:
            raise ValueError(
                f"draft_logits has shape {tuple(draft_logits.shape)}, but must be (requests, at least 1, "
                f"at least {self.vocab_size})."
            )
        if tuple(root_tokens.shape) != (num_requests,):
            raise ValueError(
                f"root_tokens has shape {tuple(root_tokens.shape)}, but must be ({num_requests},)."
            )
        return self._grow(hidden, draft_hidden, draft_logits, root_tokens, budget, max_depth, max_nodes)

    @abstractmethod
    def _grow(
        self,
        hidden: Tensor,
        draft_hidden: Tensor,
        draft_logits: Tensor,
        root_tokens: Tensor,
        budget: int,
        max_depth: Tensor | None,
        max_nodes: Tensor | None,
    ) -> Tree:
        """`propose` with checked arguments."""

    def _limits(
        self,
        draft_logits: Tensor,
        root_tokens: Tensor,
        budget: int,
        max_depth: Tensor | None,
        max_nodes: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Roots int64, −1 where unusable, and limits on depth and nodes int32, each [R]; no nodes without a
        root."""
        depth_limit = torch.full(
            (len(root_tokens),), draft_logits.shape[1], dtype=torch.int32, device=draft_logits.device
        )
        if max_depth is not None:
            depth_limit = torch.minimum(depth_limit, max_depth.to(torch.int32))
        node_limit = torch.full_like(depth_limit, budget + 1)
        if max_nodes is not None:
            node_limit = torch.minimum(node_limit, max_nodes.to(torch.int32)).clamp(min=0)
        usable = (root_tokens >= 0) & (root_tokens < self.vocab_size)
        roots = torch.where(usable, root_tokens, -1).to(torch.int64)
        return roots, depth_limit, node_limit.masked_fill(~usable, 0)

    def _pool(self, draft_logits: Tensor, pool_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """`candidate_pool` of every row: values [R, D, P], ids [R, D, P] and logsumexp [R, D]."""
        flat = draft_logits.flatten(0, 1)
        pools = candidate_pool(flat, pool_size, self.vocab_size, impl=self.impl)
        values, ids, logsumexp = (part.unflatten(0, draft_logits.shape[:2]) for part in pools)
        return values, ids, logsumexp


class ChainProposer(TreeProposer):
    """One chain of the draft's most likely tokens, of at most min(D, budget) nodes besides the root."""

    def _grow(
        self,
        hidden: Tensor,
        draft_hidden: Tensor,
        draft_logits: Tensor,
        root_tokens: Tensor,
        budget: int,
        max_depth: Tensor | None,
        max_nodes: Tensor | None,
    ) -> Tree:
        roots, depth_limit, node_limit = self._limits(draft_logits, root_tokens, budget, max_depth, max_nodes)
        values, ids, logsumexp = self._pool(draft_logits[:, :budget], 1)
        steps = ids.shape[1]
        good = (ids[..., 0] >= 0).cumprod(1).sum(1)
        logprobs = (values[..., 0] - logsumexp).cumsum(1)
        tokens = torch.full((len(roots), budget + 1), -1, dtype=torch.int64, device=roots.device)
        scores = torch.zeros(tokens.shape, dtype=torch.float32, device=roots.device)
        tokens[:, 0] = roots
        tokens[:, 1 : steps + 1] = ids[..., 0]
        scores[:, 1 : steps + 1] = logprobs
        length = torch.minimum(good, depth_limit.clamp(min=0)) + 1
        return Tree.chain(tokens, torch.minimum(length, node_limit), scores)


class DDTreeProposer(TreeProposer):
    """The `budget` most likely nodes under independent rows, in best-first order.

    A node's log-probability is the sum of its tokens' log-softmax values (over the full vocabulary) at rows
    1, 2, …; a pool of min(budget, 64) tokens a row is considered. Best-first search with a heap pops nodes by
    descending log-probability, ties by rank path. As a child and a next sibling never score higher than the
    node itself, the popped nodes are simply the best ones overall. So the search needs no heap: the best
    `budget` nodes of depth t can only be children of the best `budget` nodes of depth t − 1, which takes D
    rounds and one final sort.

    pool_size: a smaller pool, at least 1."""

    def __init__(self, vocab_size: int, pool_size: int | None = None, *, impl: Impl = "auto") -> None:
        super().__init__(vocab_size, impl=impl)
        if pool_size is not None and pool_size < 1:
            raise ValueError(f"candidate_pool_size is {pool_size}, but must be at least 1.")
        self.largest_pool = _DDTREE_POOL if pool_size is None else min(pool_size, _DDTREE_POOL)

    def _grow(
        self,
        hidden: Tensor,
        draft_hidden: Tensor,
        draft_logits: Tensor,
        root_tokens: Tensor,
        budget: int,
        max_depth: Tensor | None,
        max_nodes: Tensor | None,
    ) -> Tree:
        roots, depth_limit, node_limit = self._limits(draft_logits, root_tokens, budget, max_depth, max_nodes)
        num_requests, depth = draft_logits.shape[:2]
        device = draft_logits.device
        pool_size = min(budget, self.largest_pool)
        values, ids, logsumexp = self._pool(draft_logits, pool_size)
        step = torch.where(ids >= 0, values - logsumexp.unsqueeze(-1), float("-inf"))
        num_keys = -(-depth // _RANKS_PER_KEY)

        # One entry a candidate node: the root, then the kept nodes of depth 1, 2, …; `above`: parent's entry.
        beam = torch.zeros(num_requests, 1, dtype=step.dtype, device=device)
        beam_keys = torch.zeros(num_keys, num_requests, 1, dtype=torch.int64, device=device)
        scores, keys, tokens = [beam], [beam_keys], [roots.unsqueeze(1)]
        above = [torch.zeros_like(beam, dtype=torch.int64)]
        depths = [torch.zeros_like(beam, dtype=torch.int32)]
        level_start = 0
        for t in range(depth):
            closed = (depth_limit <= t).unsqueeze(1)
            grown = (beam.unsqueeze(2) + step[:, t].unsqueeze(1)).flatten(1)
            grown = grown.masked_fill(closed, float("-inf"))
            # Entries are in the order of their rank paths, so a stable sort breaks ties as the search does;
            # sorting the kept indices restores that order for the next depth.
            kept = grown.argsort(dim=1, descending=True, stable=True)[:, :budget].sort(dim=1).values
            place, rank = kept // pool_size, kept % pool_size
            above.append(place + level_start)
            level_start += beam.shape[1]
            beam = grown.gather(1, kept)
            beam_keys = beam_keys.gather(2, place.expand(num_keys, -1, -1))
            shift = _RANK_BITS * (_RANKS_PER_KEY - 1 - t % _RANKS_PER_KEY)
            beam_keys[t // _RANKS_PER_KEY] += (rank + 1) << shift
            scores.append(beam)
            keys.append(beam_keys)
            tokens.append(ids[:, t].gather(1, rank))
            depths.append(torch.full_like(kept, t + 1, dtype=torch.int32))

        score = torch.cat(scores, dim=1)
        entries = torch.arange(score.shape[1], device=device).expand(num_requests, -1)
        order = entries
        for key in reversed(torch.cat(keys, dim=2).unbind(0)):  # least significant first, each sort stable
            order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
        order = order.gather(1, score.gather(1, order).argsort(dim=1, descending=True, stable=True))
        position = torch.empty_like(order).scatter_(1, order, entries)

        best = order[:, : budget + 1]
        tree = Tree.empty(num_requests, budget + 1, device)
        size = best.shape[1]
        tree.tokens[:, :size] = torch.cat(tokens, dim=1).gather(1, best)
        tree.parents[:, :size] = position.gather(1, torch.cat(above, dim=1).gather(1, best)).to(torch.int32)
        tree.parents[:, 0] = -1
        tree.depths[:, :size] = torch.cat(depths, dim=1).gather(1, best)
        tree.logprobs[:, :size] = score.gather(1, best).to(torch.float32)
        tree.num_nodes = (tree.logprobs > float("-inf")).sum(1).to(torch.int32)
        return tree.truncate(node_limit)


class WeaverProposer(TreeProposer):
    """Best-first growth in rounds, scored by a Weaver head.

    The root is expanded first. Expanding a node scores the candidate pool of its row with the head and
    publishes the 8 most likely children to the frontier. Each round takes the W = ceil(budget / 16) best
    entries of the frontier, ties to the earlier one, as new nodes and expands them in one batched step of the
    head.

    token_table and residual_table [>= vocab_size, r]: see `WeaverHead`; pool_size: candidates a row, at most
    the checkpoint's `candidate_pool_size`; vocab_size defaults to the rows of token_table.

    Where Triton runs, the kernels of `WeaverGrowth` do all this with the parameters that the head has now;
    elsewhere, plain PyTorch.

    The number of rounds is fixed by sizes. It is enough to fill the budget, or to exhaust the frontier, for
    every row that has at least 8 finite candidates and no `max_depth`; other rows may come back with fewer
    nodes than a search without a bound on rounds would give."""

    def __init__(
        self,
        head: WeaverHead,
        token_table: Tensor,
        residual_table: Tensor,
        pool_size: int | None = None,
        vocab_size: int | None = None,
        *,
        impl: Impl = "auto",
    ) -> None:
        super().__init__(len(token_table) if vocab_size is None else vocab_size, impl=impl)
        largest = head.config.candidate_pool_size
        pool_size = largest if pool_size is None else pool_size
        if not 1 <= pool_size <= largest:
            raise ValueError(
                f"candidate_pool_size is {pool_size}, but must be in [1, {largest}] (checkpoint)."
            )
        for name, table in (("token_table", token_table), ("residual_table", residual_table)):
            if table.ndim != 2 or len(table) < self.vocab_size or table.shape[1] != head.config.d_rank:
                raise ValueError(
                    f"{name} has shape {tuple(table.shape)}, but must be (at least {self.vocab_size}, "
                    f"{head.config.d_rank})."
                )
        self.head = head
        self.token_table = token_table
        self.residual_table = residual_table
        self.pool_size = min(pool_size, self.vocab_size)
        self.growth = (
            WeaverGrowth(head, token_table, residual_table) if use_triton(token_table, impl) else None
        )

    def _grow(
        self,
        hidden: Tensor,
        draft_hidden: Tensor,
        draft_logits: Tensor,
        root_tokens: Tensor,
        budget: int,
        max_depth: Tensor | None,
        max_nodes: Tensor | None,
    ) -> Tree:
        num_requests, depth = draft_logits.shape[:2]
        device = draft_logits.device
        num_slots = budget + 1
        width = min(max(1, -(-budget // 16)), budget)
        rounds = count_rounds(budget, width, min(CHILDREN, self.pool_size), depth)
        pool_logits, pool_ids, _ = self._pool(draft_logits, self.pool_size)
        if self.growth is not None and num_requests:
            grown = self.growth.grow(
                hidden,
                draft_hidden,
                root_tokens,
                pool_logits,
                pool_ids,
                self.vocab_size,
                budget,
                width,
                rounds,
                max_depth,
                max_nodes,
            )
            return Tree(grown.tokens, grown.parents, grown.depths, grown.logprobs, grown.num_nodes)
        roots, depth_limit, node_limit = self._limits(draft_logits, root_tokens, budget, max_depth, max_nodes)
        prefix = self.head.prompt(hidden, draft_hidden)
        cache = self.head.new_node_kv(num_requests, num_slots, device)

        tree = Tree.empty(num_requests, num_slots, device)
        tree.logprobs = tree.logprobs.to(pool_logits.dtype)  # fp64 where the logits are, as in tests
        tree.tokens[:, 0] = roots
        tree.logprobs[:, 0] = 0
        tree.num_nodes.copy_(node_limit.clamp(max=1))
        mask_words = torch.zeros(
            num_requests, num_slots, -(-num_slots // 32), dtype=torch.int32, device=device
        )
        mask_words[:, 0, 0] = 1
        frontier = torch.full(
            (num_requests, num_slots * CHILDREN), float("-inf"), dtype=tree.logprobs.dtype, device=device
        )
        frontier_tokens = torch.full(frontier.shape, -1, dtype=torch.int64, device=device)
        requests = torch.arange(num_requests, device=device).unsqueeze(1)

        def expand(slots: Tensor) -> None:
            at = slots.clamp(min=0).to(torch.int64)
            rows = node_rows(tree.depths.gather(1, at), depth)
            x = self.token_table[tree.tokens.gather(1, at).clamp(min=0)]
            query = self.head.step_nodes(x, rows + 1, slots, mask_words[requests, at], prefix, cache)
            ids = pool_ids[requests, rows]
            logprobs = pool_logprobs(
                pool_logits[requests, rows], ids, self.residual_table[ids.clamp(min=0)], query
            )
            publish_children(
                frontier,
                frontier_tokens,
                logprobs,
                ids,
                slots,
                tree.logprobs,
                tree.depths,
                depth_limit,
            )

        expand(torch.zeros(num_requests, 1, dtype=torch.int32, device=device))
        for index in range(rounds):
            slots = take_best(
                frontier,
                frontier_tokens,
                tree.tokens,
                tree.parents,
                tree.depths,
                tree.logprobs,
                mask_words,
                tree.num_nodes,
                node_limit,
                width,
            )
            if index + 1 < rounds:
                expand(slots)
        tree.logprobs = tree.logprobs.to(torch.float32)
        return tree.truncate(node_limit)


def count_rounds(budget: int, width: int, children: int, depth: int) -> int:
    """Rounds after which a request has `budget` nodes or no candidate left, whatever the candidates are.

    A round takes `width` entries, or all that the frontier has. With `children` entries published per node
    above depth D, a frontier after n nodes holds children · (1 + m) − n entries, where m counts the nodes
    above depth D. The fewest such nodes among n are a path down to depth D − 1 and then one more for each
    `children` leaves. Rounds with that least frontier bound the real ones. Where it runs dry, each round that
    empties the frontier at least moves the shallowest entry one level down, so D more rounds than ceil(budget
    / width) always suffice."""
    certain = math.ceil(budget / width) + min(depth, budget)
    nodes = rounds = 0
    while nodes < budget:
        inner = min(nodes, depth - 1)
        if nodes > inner:  # leaves hang below nodes of depth D − 1, of which the path has one
            inner += max(0, math.ceil((nodes - inner - children) / (children + 1))) if depth > 1 else 0
        frontier = children * (1 + inner) - nodes
        if frontier < 1:
            return certain
        nodes = min(budget, nodes + min(width, frontier))
        rounds += 1
    return min(rounds, certain)
