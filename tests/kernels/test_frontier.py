# SPDX-License-Identifier: Apache-2.0
"""Publishing children and taking the best entries, against plain lists; untouched entries keep their
sentinels."""

import math
import random

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import SIZES, mixed_batch
from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.kernels.frontier import CHILDREN, publish_children, take_best
from vllm_weaver.spec_decode.tree import Tree

IMPLS = ("torch", "triton")
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


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pool", [1, 5, 8, 33, 512])
@pytest.mark.parametrize("n", [2, 33, 129])
def test_publish(device: torch.device, n: int, pool: int, impl: str) -> None:
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
    on_device = [
        t.to(device) for t in (scores, tokens, logprobs, ids, slots, tree.logprobs, tree.depths, max_depth)
    ]
    publish_children(*on_device, impl=impl)
    assert on_device[0].tolist() == expected_scores
    assert on_device[1].tolist() == expected_tokens


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [1, 2, 5, 16])
@pytest.mark.parametrize("n", SIZES)
def test_take(device: torch.device, n: int, width: int, impl: str) -> None:
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
    state = [t.clone().to(device) for t in state]
    slots = take_best(*state, width, impl=impl)
    assert slots.dtype == torch.int32 and slots.tolist() == expected_slots.tolist()
    result = dict(
        zip(("scores", "", "tokens", "parents", "depths", "logprobs", "", "num_nodes"), state, strict=False)
    )
    assert torch.equal(result["scores"].cpu(), expected_scores)
    for name in ("tokens", "parents", "depths", "logprobs", "num_nodes"):
        assert torch.equal(result[name].cpu(), getattr(expected, name)), name
    assert torch.equal(unpack_mask(state[6], n).cpu(), expected_visible)
    assert torch.equal(state[1].cpu(), tokens) and torch.equal(state[8].cpu(), limits)


def test_wrong_arguments_are_named() -> None:
    tree = Tree.empty(2, 5, "cpu")
    scores, tokens = torch.zeros(2, 40), torch.zeros(2, 40, dtype=torch.int64)
    limits = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="slots"):
        slots = torch.zeros(2, 3, dtype=torch.int32)
        ids = torch.zeros(2, 1, 4, dtype=torch.int64)
        publish_children(scores, tokens, torch.zeros(2, 1, 4), ids, slots, tree.logprobs, tree.depths, limits)
    nodes = (tree.tokens, tree.parents, tree.depths, tree.logprobs, tree.mask_words(), tree.num_nodes)
    with pytest.raises(ValueError, match="frontier_scores"):
        take_best(scores[:, :39], tokens, *nodes, limits, 2)
    with pytest.raises(ValueError, match="float64"):
        take_best(scores.double(), tokens, *nodes, limits, 2, impl="triton")
