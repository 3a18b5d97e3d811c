# SPDX-License-Identifier: Apache-2.0
"""The exact law of what a traversal walk writes, on a vocabulary of four tokens: it is the target's.

It is measured on the implementation itself. Its randomness is one order of each node's children, which is
enumerated, and one uniform number for each tested node, whose threshold is found by search."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from vllm_weaver.kernels.traversal_rows import bonus_rows, row_statistics
from vllm_weaver.kernels.traversal_walk import Noise, TraversalEnd, traversal_walk_reference

INF = float("inf")
HIGHEST = 1 - 2.0**-24

# parents, tokens, cumulative log-probabilities of the nodes; `cut`: tokens that the target keeps of a row
LAWS: dict[str, tuple[list[int], list[int], list[float], int]] = {
    "chain": ([-1, 0, 1, 2], [0, 1, 2, 0], [0.0, -0.5, -1.0, -1.5], 4),
    "lone child": ([-1, 0], [0, 3], [0.0, 0.0], 4),
    "two children": ([-1, 0, 0], [0, 1, 2], [0.0, -0.2, -1.7], 4),
    "certain draft": ([-1, 0, 0], [0, 1, 2], [0.0, 0.0, -200.0], 4),
    "all children": ([-1, 0, 0, 0, 0], [0, 3, 1, 0, 2], [0.0, -0.7, -1.0, -1.4, -2.5], 4),
    "uneven": ([-1, 0, 0, 1, 1, 2, 3], [0, 1, 2, 0, 3, 1, 2], [0.0, -0.4, -1.2, -0.9, -1.9, -1.3, -1.0], 4),
    "deep": ([-1, 0, 1, 1, 2, 2, 0], [0, 2, 1, 0, 3, 1, 0], [0.0, -0.3, -0.5, -1.5, -0.9, -1.4, -2.0], 4),
    "top-k": ([-1, 0, 0, 1, 1, 2], [0, 1, 2, 0, 3, 1], [0.0, -0.4, -1.2, -0.9, -1.9, -1.3], 2),
    "top-1": ([-1, 0, 0, 1, 2, 2], [0, 1, 2, 0, 3, 1], [0.0, -0.4, -1.2, -0.9, -1.9, -1.3], 1),
    "no token": ([-1, 0, 0, 2, 2], [0, -1, 2, 4, 1], [0.0, -0.4, -1.2, -1.3, -1.9], 4),
}  # fmt: skip


def target_row(context: tuple[int, ...], cut: int, seed: int) -> Tensor:
    """Logits of a made-up target of four tokens after `context`."""
    generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**31)
    row = torch.randn(4, generator=generator) * 1.5
    return row.masked_fill(row < row.topk(cut).values[-1], -INF)


def order_laws(logprobs: list[float], kids: list[int]) -> list[tuple[tuple[int, ...], float]]:
    """Every order of the children and its Plackett-Luce probability."""
    best = max(logprobs[k] for k in kids)
    weight = {k: math.exp(max(logprobs[k] - best, -60)) for k in kids}
    found = []
    for order in itertools.permutations(kids):
        left, probability = sum(weight.values()), 1.0
        for i, k in enumerate(order):
            probability *= weight[k] / sum(weight[j] for j in order[i:])
        assert left > 0
        found.append((order, probability))
    return found


@pytest.mark.parametrize("name", LAWS)
def test_exact_law_is_the_targets(name: str, request: pytest.FixtureRequest) -> None:
    for seed in range(5 if request.config.getoption("--all") else 1):
        check_law(name, seed)


def check_law(name: str, seed: int) -> None:
    parents, tokens, logprobs, cut = LAWS[name]
    nodes = len(parents)
    kids = [[i for i, p in enumerate(parents) if p == v] for v in range(nodes)]
    contexts: list[tuple[int, ...]] = [()]
    for node in range(1, nodes):
        contexts.append((*contexts[parents[node]], tokens[node]))
    logits = torch.stack([target_row(context, cut, seed) for context in contexts])
    choices = [order_laws(logprobs, children) for children in kids if children] or [[((), 1.0)]]
    combinations = list(itertools.product(*choices))
    weights = torch.tensor([math.prod(p for _, p in orders) for orders in combinations], dtype=torch.float64)
    assert abs(weights.sum() - 1) < 1e-12
    count = len(combinations)
    order = torch.zeros(count, nodes)
    for c, orders in enumerate(combinations):
        for sequence, _ in orders:
            best = max(logprobs[k] for k in sequence)
            for rank, k in enumerate(sequence):
                order[c, k] = -100.0 * rank - max(logprobs[k] - best, -60.0)

    def run(order: Tensor, accept: Tensor) -> tuple[Tensor, Tensor, TraversalEnd]:
        requests = len(order)
        starts = torch.arange(requests + 1) * nodes
        batch = logits.repeat(requests, 1)
        statistics = row_statistics(batch)
        end = traversal_walk_reference(
            statistics.best, batch, statistics, starts, torch.tensor(tokens).repeat(requests, 1),
            torch.tensor(parents, dtype=torch.int32).repeat(requests, 1),
            torch.tensor(logprobs).repeat(requests, 1), torch.full((requests,), nodes, dtype=torch.int32),
            torch.zeros(requests, dtype=torch.bool), Noise(order, accept),
        )  # fmt: skip
        return end.final_rows - starts[:-1], batch, end

    def threshold(rejected: Tensor, tested: Tensor) -> Tensor:
        """The acceptance probability of `tested` [count]: how large a uniform number is still accepted. Each
        of four rounds tries 64 numbers at once."""
        low, width = torch.zeros(count, dtype=torch.float64), 1.0
        for _ in range(4):
            width /= 64
            tried = (low[:, None] + width * torch.arange(64)).clamp(max=HIGHEST).float()
            accept = torch.where(rejected, HIGHEST, 0.0).repeat_interleave(64, 0)
            accept[torch.arange(64 * count), tested.repeat_interleave(64)] = tried.flatten()
            taken = run(order.repeat_interleave(64, 0), accept)[0].view(count, 64) == tested[:, None]
            low += (taken.sum(1) - 1).clamp(min=0) * width
        return torch.where(low > 1 - 2.0**-22, 1.0, low)

    # Which node is tested next, given that those before it were rejected, and how likely it is accepted.
    law = torch.zeros(count, nodes, dtype=torch.float64)
    bonus: dict[int, Tensor] = {}
    remaining = torch.ones(count, dtype=torch.float64)
    rejected = torch.zeros(count, nodes, dtype=torch.bool)
    rows = torch.arange(count)
    for _ in range(nodes):
        tested, batch, end = run(order, torch.where(rejected, HIGHEST, 0.0))
        drawn = bonus_rows(batch, end.final_rows, end.excluded, end.num_excluded).double().softmax(1)
        bonus.update((int(v), drawn[c]) for c, v in enumerate(tested))
        probability = threshold(rejected, tested)
        law[rows, tested] += torch.where(rejected[rows, tested], 0.0, remaining * probability)
        remaining = torch.where(rejected[rows, tested], remaining, remaining * (1 - probability))
        rejected[rows, tested] = True
    assert float((weights * remaining).sum()) < 1e-6, "the root accepts what nothing else does"

    length = max(map(len, contexts)) + 1
    written: dict[tuple[int, ...], float] = {}
    for node, probability in enumerate((weights[:, None] * law).sum(0).tolist()):
        if probability == 0:
            continue
        for ending in itertools.product(range(4), repeat=length - len(contexts[node])):
            chance, sequence = probability, contexts[node]
            for i, token in enumerate(ending):
                row = bonus[node] if i == 0 else target_row(sequence, cut, seed).double().softmax(0)
                chance *= float(row[token])
                sequence = (*sequence, token)
            written[sequence] = written.get(sequence, 0.0) + chance
    for sequence in itertools.product(range(4), repeat=length):
        expected = math.prod(
            float(target_row(sequence[:i], cut, seed).double().softmax(0)[token])
            for i, token in enumerate(sequence)
        )
        assert abs(written.get(sequence, 0.0) - expected) < 2e-6, sequence
