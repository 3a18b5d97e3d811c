# SPDX-License-Identifier: Apache-2.0
"""Publishing children and taking the best entries, against plain lists; untouched entries keep their
sentinels. Then the kernels against these rules."""

import math
import random

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import SIZES, mixed_batch
from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.kernels.frontier import (
    CHILDREN,
    Growth,
    publish_children,
    select_nodes,
    start_growth,
    take_best,
)
from vllm_weaver.spec_decode.tree import Tree

SENTINEL = -123.0


def candidates(rows: int, pool: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities on a coarse grid, so that ties are common, with hostile entries, and ids."""
    rng = random.Random(seed)
    logprobs = [[[-rng.randrange(40) / 8 for _ in range(pool)] for _ in range(rows)] for _ in range(4)]
    ids = [[[rng.randrange(1000) for _ in range(pool)] for _ in range(rows)] for _ in range(4)]
    for r in range(4):
        for i in range(rows):
            for p in range(pool):
                if rng.random() < 0.2:
                    logprobs[r][i][p] = rng.choice([math.nan, -math.inf])
                elif rng.random() < 0.1:
                    ids[r][i][p] = -1
    return torch.tensor(logprobs), torch.tensor(ids)


@pytest.mark.parametrize("pool", [1, 5, 8, 33, 512])
@pytest.mark.parametrize("n", [2, 33, 129])
def test_publish(n: int, pool: int) -> None:
    tree = mixed_batch(n, 4, 300, seed=n)
    tree.logprobs = (tree.logprobs * 8).round() / 8  # sums on a grid are exact in fp32
    rng = random.Random(pool)
    slots = torch.tensor([[rng.randrange(int(count)), -1, n] for count in tree.num_nodes], dtype=torch.int32)
    slots[2, 1] = (slots[2, 0] + 1) % n
    logprobs, ids = candidates(3, pool, seed=n + pool)
    max_depth = torch.tensor([200, 3, 1, 0], dtype=torch.int32)
    scores = torch.full((4, CHILDREN * n), SENTINEL)
    tokens = torch.full((4, CHILDREN * n), -77)
    expected_scores, expected_tokens = scores.tolist(), tokens.tolist()
    for r in range(4):
        for i, slot in enumerate(slots[r].tolist()):
            if not 0 <= slot < n:
                continue
            usable = [
                (-lp, p, token)
                for p, (lp, token) in enumerate(zip(logprobs[r, i].tolist(), ids[r, i].tolist(), strict=True))
                if token >= 0 and lp > -math.inf
            ]
            best = (
                sorted(usable)[:CHILDREN]
                if tree.depths[r, slot] < max_depth[r] and slot < tree.num_nodes[r]
                else []
            )
            for k in range(CHILDREN):
                entry = slot * CHILDREN + k
                live = k < len(best)
                expected_scores[r][entry] = float(tree.logprobs[r, slot]) - best[k][0] if live else -math.inf
                expected_tokens[r][entry] = best[k][2] if live else -1
    publish_children(scores, tokens, logprobs, ids, slots, tree.logprobs, tree.depths, max_depth)
    assert scores.tolist() == expected_scores
    assert tokens.tolist() == expected_tokens


@pytest.mark.parametrize("width", [1, 2, 5, 16])
@pytest.mark.parametrize("n", SIZES)
def test_take(n: int, width: int) -> None:
    """Four requests: free places, a node limit, a frontier that runs dry, and no room at all."""
    rng = random.Random(n + width)
    grown = [max(1, n // 3), max(1, n // 2), 1, n]
    tree = mixed_batch(n, 4, 300, seed=n)
    tree = Tree.chain(tree.tokens.clamp(min=0), torch.tensor(grown))
    words = tree.mask_words()
    scores = torch.full((4, CHILDREN * n), -math.inf)
    for r in range(4):
        open_ = range(grown[r] * CHILDREN) if r != 2 else rng.sample(range(CHILDREN), 3)
        for entry in open_:
            scores[r, entry] = -rng.randrange(30) / 4
    tokens = torch.arange(4 * CHILDREN * n).reshape(4, -1) + 1000
    limits = torch.tensor([2**31 - 1, grown[1] + 1, n, n], dtype=torch.int32)

    expected = Tree(
        *(t.clone() for t in (tree.tokens, tree.parents, tree.depths, tree.logprobs, tree.num_nodes))
    )
    expected_scores, expected_slots = scores.clone(), torch.full((4, width), -1)
    expected_visible = unpack_mask(words, n)
    for r in range(4):
        order = sorted(
            (e for e in range(CHILDREN * n) if scores[r, e] > -math.inf), key=lambda e: (-scores[r, e], e)
        )
        for j, entry in enumerate(order[: max(0, min(width, n - grown[r], int(limits[r]) - grown[r]))]):
            slot, parent = grown[r] + j, entry // CHILDREN
            expected.tokens[r, slot] = tokens[r, entry]
            expected.parents[r, slot] = parent
            expected.depths[r, slot] = tree.depths[r, parent] + 1
            expected.logprobs[r, slot] = scores[r, entry]
            expected.num_nodes[r] += 1
            expected_visible[r, slot] = expected_visible[r, parent]
            expected_visible[r, slot, slot] = True
            expected_scores[r, entry] = -math.inf
            expected_slots[r, j] = slot
    state = [
        scores,
        tokens,
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.logprobs,
        words,
        tree.num_nodes,
        limits,
    ]
    state = [t.clone() for t in state]
    slots = take_best(*state, width)
    assert slots.dtype == torch.int32 and slots.tolist() == expected_slots.tolist()
    result = dict(
        zip(("scores", "", "tokens", "parents", "depths", "logprobs", "", "num_nodes"), state, strict=False)
    )
    assert torch.equal(result["scores"], expected_scores)
    for name in ("tokens", "parents", "depths", "logprobs", "num_nodes"):
        assert torch.equal(result[name], getattr(expected, name)), name
    assert torch.equal(unpack_mask(state[6], n), expected_visible)
    assert torch.equal(state[1], tokens) and torch.equal(state[8], limits)


def ancestor_words(growth: Growth) -> torch.Tensor:
    """The ancestor masks that the paths stand for."""
    offset = growth.depth + 1
    words = torch.zeros(*growth.tokens.shape, -(-growth.tokens.shape[1] // 32), dtype=torch.int64)
    for r, count in enumerate(growth.num_nodes.tolist()):
        for node in range(count):
            path = [place - offset for place in growth.paths[r, node].tolist() if place >= 0]
            assert path[-1] == node and len(path) == growth.depths[r, node] + 1
            for slot in path:
                words[r, node, slot // 32] |= 1 << slot % 32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "budget, width, pool, depth", [(1, 1, 8, 3), (16, 1, 5, 4), (33, 3, 32, 2), (40, 16, 512, 15)]
)
def test_kernels_grow_as_the_plain_rules(
    device: torch.device, budget: int, width: int, pool: int, depth: int, ties: bool
) -> None:
    """Random scores over several rounds: four requests, of which one has no root and two have limits."""
    n, vocab = budget + 1, 1000
    generator = torch.Generator().manual_seed(budget)
    pool_ids = torch.stack([torch.randperm(vocab, generator=generator)[:pool] for _ in range(4 * depth)])
    pool_ids = pool_ids.view(4, depth, pool)
    roots = torch.tensor([5, vocab, 0, 999])
    max_depth, max_nodes = torch.tensor([99, 99, 1, depth]), torch.tensor([99, 99, 99, 6], dtype=torch.int32)
    growth, rows = start_growth(roots.to(device), n, depth, vocab, max_depth.to(device), max_nodes.to(device))
    tree = Tree.empty(4, n, "cpu")
    tree.tokens[:, 0], tree.logprobs[:, 0] = torch.tensor([5, -1, 0, 999]), 0.0
    tree.num_nodes.copy_(torch.tensor([1, 0, 1, 1]))
    node_limit = torch.tensor([n, 0, n, min(n, 6)], dtype=torch.int32)
    depth_limit = torch.tensor([depth, depth, 1, depth], dtype=torch.int32)
    words = torch.zeros(4, n, -(-n // 32), dtype=torch.int32)
    words[:, 0, 0] = 1
    frontier, tokens = torch.full((4, CHILDREN * n), -math.inf), torch.full((4, CHILDREN * n), -1)
    slots = torch.tensor([[0], [-1], [0], [0]], dtype=torch.int32)
    for _ in range(4):
        scores = torch.randn(4, slots.shape[1], pool, generator=generator) * 2
        if ties:
            scores = torch.where(scores > 1, 0.0, -math.inf)
        scores[3, :, 0] = -math.inf
        at = slots.clamp(min=0).long()
        pool_rows = tree.depths.gather(1, at).clamp(max=depth - 1)
        assert torch.equal(rows.places.cpu(), torch.where(slots >= 0, slots + depth + 1, -1))
        live = slots >= 0
        assert torch.equal(rows.tokens.cpu()[live], tree.tokens.gather(1, at)[live].int())
        assert torch.equal(rows.positions.cpu()[live], pool_rows[live].int() + 1)
        logprobs = torch.log_softmax(scores.clamp(min=-1e30), -1).masked_fill(scores.isinf(), -math.inf)
        ids = pool_ids[torch.arange(4)[:, None], pool_rows]
        publish_children(frontier, tokens, logprobs, ids, slots, tree.logprobs, tree.depths, depth_limit)
        slots = take_best(
            frontier, tokens, tree.tokens, tree.parents, tree.depths, tree.logprobs, words,
            tree.num_nodes, node_limit, width,
        )  # fmt: skip
        scores[~live] = math.nan  # never read
        rows = select_nodes(growth, rows, scores.to(device), pool_ids.to(device), width)
    tree = tree.truncate(node_limit)
    grown = Growth(*(v.cpu() if isinstance(v, torch.Tensor) else v for v in vars(growth).values()))
    for name in ("tokens", "parents", "depths", "num_nodes"):
        assert torch.equal(getattr(grown, name), getattr(tree, name)), name
    torch.testing.assert_close(grown.logprobs, tree.logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(ancestor_words(grown)[tree.valid()], words[tree.valid()])
    torch.testing.assert_close(grown.frontier_scores[[0, 2, 3]], frontier[[0, 2, 3]], rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_named() -> None:
    roots = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="max_depth"):
        start_growth(roots, 5, 3, 9, torch.zeros(3))
    growth, rows = start_growth(roots, 5, 3, 9)
    with pytest.raises(ValueError, match="scores"):
        select_nodes(growth, rows, torch.zeros(2, 2, 4), torch.zeros(2, 3, 4, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="pool_ids"):
        select_nodes(growth, rows, torch.zeros(2, 1, 4), torch.zeros(2, 4, 4, dtype=torch.int64), 2)
