# SPDX-License-Identifier: Apache-2.0
"""Traversal walk: against a walk by recursion in float64, with hostile trees, ids, rows and noise."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import make_batch, make_tree, mixed_batch
from vllm_weaver.kernels.traversal_rows import (
    RowStatistics,
    bonus_rows,
    row_statistics,
)
from vllm_weaver.kernels.traversal_walk import (
    Noise,
    TraversalEnd,
    _philox,
    keyed_noise_reference,
    traversal_walk,
)
from vllm_weaver.spec_decode.tree import Tree

IMPLS = ("torch", "triton")
VOCAB = 37
NAN, INF = float("nan"), float("inf")


# --- a walk in float64 -----------------------------------------------------------------------------------


@dataclass
class Hand:
    """One request's walk by the rule of the module, in float64; `rows` are the target's logits by node."""

    rows: list[list[float]]
    tokens: list[int]
    parents: list[int]
    logprobs: list[float]
    order: list[float]
    accept: list[float]
    final: int = field(init=False)

    def __post_init__(self) -> None:
        self.kids = [[i for i, p in enumerate(self.parents) if p == v] for v in range(len(self.parents))]
        found = self.verify(0, 1.0)
        assert found is not None
        self.final = found

    def probability(self, node: int, token: int) -> float:
        row = self.rows[node]
        if not 0 <= token < len(row):
            return 0.0
        best = max(row)
        return math.exp(row[token] - best) / sum(math.exp(v - best) for v in row)

    def verify(self, node: int, a: float) -> int | None:
        p = {k: self.probability(node, self.tokens[k]) for k in self.kids[node]}
        best = max((self.logprobs[k] for k in p), default=0.0)
        w = {k: max(self.logprobs[k] - best, -60.0) for k in p}
        mass = {k: a * v for k, v in p.items()}
        lost, outside = 1 - a, a * max(0.0, 1 - sum(p.values()))
        left = sorted(p, key=lambda k: -(w[k] + self.order[k]))
        while left:
            weights = {k: math.exp(w[k]) for k in left}
            q = {k: v / sum(weights.values()) for k, v in weights.items()}
            child, *left = left
            found = self.verify(child, min(1.0, mass[child] / q[child])) if mass[child] > 0 else None
            if found is not None:
                return found
            mass = {k: max(mass[k] - q[k], 0.0) for k in left}
            total = lost + outside + sum(mass.values())
            lost, outside = lost / total, outside / total
            mass = {k: v / total for k, v in mass.items()}
        return node if node == 0 or self.accept[node] < outside else None

    def path(self) -> list[int]:
        path = [self.final]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]


@dataclass
class Problem:
    """A batch: what the kernel is given, in batch order."""

    tree: Tree
    logits: Tensor
    starts: Tensor
    states: Tensor
    temperatures: Tensor
    seeds: Tensor
    stored: Tensor

    @classmethod
    def make(cls, tree: Tree, rows: list[int], seed: int, before: int = 0, sharp: float = 2.0) -> Problem:
        """Random logits that often agree with the tree; `rows` of each request, `before` rows of nobody."""
        generator = torch.Generator().manual_seed(seed)
        count = len(rows)
        starts = torch.tensor([before, *(before + torch.tensor(rows).cumsum(0)).tolist()])
        logits = torch.randn(int(starts[-1]), VOCAB, generator=generator) * sharp
        for r in range(count):
            for i in range(1, min(rows[r], int(tree.num_nodes[r]))):
                token = int(tree.tokens[r, i])
                if 0 <= token < VOCAB and 0 <= int(tree.parents[r, i]) < i:
                    logits[starts[r] + int(tree.parents[r, i]), token] += 3
        states = torch.randperm(count + 3, generator=generator)[:count].to(torch.int32)
        stored = torch.full((count + 3, tree.num_slots), NAN)
        stored[states.long()] = tree.logprobs
        temperatures = torch.ones(count + 3)
        seeds = torch.randint(-(2**62), 2**62, (count + 3,), generator=generator)
        return cls(tree, logits, starts, states, temperatures, seeds, stored)

    def positions(self) -> Tensor:
        return 1000 + torch.arange(len(self.states)) * 2**33

    def noise(self) -> Noise:
        return keyed_noise_reference(self.seeds[self.states.long()], self.positions(), self.tree.num_slots)

    def walk(self, device: torch.device, impl: str) -> tuple[Tensor, TraversalEnd]:
        """Choices and end."""
        tree = self.tree
        logits = self.logits.to(device)
        statistics = row_statistics(logits, impl=impl)
        end = traversal_walk(
            logits,
            statistics,
            *(
                array.to(device)
                for array in (
                    self.starts, tree.tokens, tree.parents, tree.num_nodes, self.stored, self.states,
                    self.temperatures, self.seeds, self.positions(),
                )
            ),
            impl=impl,
        )  # fmt: skip
        return statistics.best, end

    def hand(self, r: int, nodes: int) -> Hand:
        noise, tree = self.noise(), self.tree
        rows = self.logits[self.starts[r] : self.starts[r] + nodes].double().tolist()
        return Hand(
            rows,
            tree.tokens[r, :nodes].tolist(),
            tree.parents[r, :nodes].tolist(),
            tree.logprobs[r, :nodes].tolist(),
            noise.order[r].tolist(),
            noise.accept[r].tolist(),
        )

    def check(self, device: torch.device, impl: str, nodes: list[int]) -> list[int]:
        """Compares with the walk by hand over the first `nodes` nodes of each request; path lengths."""
        before = row_statistics(self.logits, impl="torch").best
        choices, end = self.walk(device, impl)
        expected, lengths = before.clone(), []
        for r, count in enumerate(nodes):
            start = int(self.starts[r])
            if count == 0:
                assert (int(end.final_rows[r]), int(end.num_excluded[r])) == (-1, 0)
                assert (end.excluded[r] == -1).all()
                continue
            hand = self.hand(r, count)
            path = hand.path()
            lengths.append(len(path))
            assert int(end.final_rows[r]) == start + hand.final, f"final row of request {r}"
            for node in path[1:]:
                expected[start + hand.parents[node]] = hand.tokens[node]
            names = [hand.tokens[k] for k in hand.kids[hand.final] if 0 <= hand.tokens[k] < VOCAB]
            assert int(end.num_excluded[r]) == len(names)
            assert sorted(end.excluded[r].tolist()) == sorted(
                [-1] * (self.tree.num_slots - len(names)) + names
            )
            assert (end.excluded[r, : len(names)] >= 0).all()
        assert choices.tolist() == expected.tolist()
        return lengths


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "kind, n", [("random", 1), ("chain", 2), ("chain", 17), ("star", 17), ("random", 33), ("star", 33)]
)
def test_one_tree(device: torch.device, kind: str, n: int, impl: str) -> None:
    rng = random.Random(n)
    if kind == "star" and n > VOCAB:
        n = VOCAB  # siblings have different tokens
    tree = make_batch([make_tree(kind, n, rng)], n, VOCAB, rng)
    Problem.make(tree, [n], n).check(device, impl, [n])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(2))
def test_batch_with_ragged_rows(device: torch.device, seed: int, impl: str) -> None:
    """Rows of others lie between the requests' trees; one request has no rows, one fewer than nodes."""
    tree = mixed_batch(18, 4, VOCAB, seed)
    rows = [int(tree.num_nodes[0]) - 7, int(tree.num_nodes[1]) + 5, int(tree.num_nodes[2]), 0]
    problem = Problem.make(tree, rows, seed, before=5)
    nodes = [min(rows[r], int(tree.num_nodes[r])) for r in range(3)]
    lengths = problem.check(device, impl, [*nodes, 0])
    assert max(lengths) > 1, "nothing was accepted: the test shows nothing"


@pytest.mark.parametrize("impl", IMPLS)
def test_greedy_requests_and_no_trees_are_left_alone(device: torch.device, impl: str) -> None:
    tree = mixed_batch(17, 4, VOCAB, 3)
    tree.num_nodes[1] = 0
    problem = Problem.make(tree, [17, 4, 14, 1], 3)
    problem.temperatures[problem.states[0].long()] = 0
    problem.states[2] = -1
    choices, end = problem.walk(device, impl)
    assert choices.tolist() == row_statistics(problem.logits).best.tolist()
    assert end.final_rows.tolist() == problem.starts[:-1].tolist()
    assert end.num_excluded.tolist() == [0, 0, 0, 0] and (end.excluded == -1).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hostile", [-1, VOCAB, 2**62, -(2**63)], ids=lambda v: f"id={v}")
def test_hostile_ids_are_never_accepted(device: torch.device, hostile: int, impl: str) -> None:
    tokens = torch.tensor([[3, hostile, 7, hostile]]).expand(5, -1).contiguous()
    parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32).expand(5, -1).contiguous()
    depths = torch.tensor([[0, 1, 1, 2]], dtype=torch.int32).expand(5, -1).contiguous()
    tree = Tree(tokens, parents, depths, -depths.float(), torch.full((5,), 4, dtype=torch.int32))
    problem = Problem.make(tree, [4] * 5, 1)
    choices, end = problem.walk(device, impl)
    assert ((choices >= 0) & (choices < VOCAB)).all()
    node = end.final_rows.cpu() - problem.starts[:-1]
    assert set(node.tolist()) <= {0, 2}
    assert end.num_excluded.cpu().tolist() == [1 if n == 0 else 0 for n in node.tolist()]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hostile", [-1, -9, 2, 3, 2**31 - 1, -(2**31)], ids=lambda v: f"parent={v}")
def test_hostile_parents_end_the_tree(device: torch.device, hostile: int, impl: str) -> None:
    tree = Tree.empty(2, 4, "cpu")
    tree.tokens[:] = torch.tensor([3, 5, 6, 7])
    tree.parents[:] = torch.tensor([-1, 0, hostile, 1])
    tree.logprobs[:] = torch.tensor([0.0, -1, -2, -2])
    tree.num_nodes[:] = 4
    Problem.make(tree, [4] * 2, 1).check(device, impl, [2] * 2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [NAN, -INF, INF, -1e30, 300.0])
def test_hostile_logprobs(device: torch.device, value: float, impl: str) -> None:
    """Whatever the drafter says of its nodes: one of them is accepted where p has nothing else."""
    tree = Tree.empty(2, 4, "cpu")
    tree.tokens[:] = torch.tensor([3, 5, 6, 7])
    tree.parents[:] = torch.tensor([-1, 0, 0, 0])
    tree.logprobs[:] = torch.tensor([0.0, value, -2, value])
    tree.num_nodes[:] = 4
    problem = Problem.make(tree, [4] * 2, 1)
    problem.logits[::4] = -INF
    problem.logits[::4, [5, 6, 7]] = torch.tensor([1.0, 2.0, 3.0])
    _, end = problem.walk(device, impl)
    assert (end.final_rows.cpu() > problem.starts[:-1]).all() and (end.num_excluded == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_hostile_rows(device: torch.device, impl: str) -> None:
    """A row of nothing but NaN or -inf rejects its children and excludes nothing; +inf is a certainty."""
    tree = Tree.empty(4, 3, "cpu")
    tree.tokens[:] = torch.tensor([3, 5, 6])
    tree.parents[:] = torch.tensor([-1, 0, 0])
    tree.logprobs[:] = torch.tensor([0.0, -1, -2])
    tree.num_nodes[:] = 3
    problem = Problem.make(tree, [3] * 4, 1)
    problem.logits[0] = NAN
    problem.logits[3] = -INF
    problem.logits[6, 6] = INF
    problem.logits[9] = NAN
    problem.logits[9, 11] = 0
    choices, end = problem.walk(device, impl)
    assert end.final_rows.tolist() == [0, 3, 8, 9]
    assert end.num_excluded.tolist() == [0, 0, 0, 2]
    assert [choices[i].item() for i in (0, 3, 6, 9)] == [0, 0, 6, 11]


def test_implementations_agree_on_many_requests(device: torch.device) -> None:
    """The same noise, the same decisions: 10 requests, with chains and ties among log-probabilities."""
    rng = random.Random(5)
    lists = [make_tree(("random", "chain", "star")[r % 3], rng.randrange(1, 10), rng) for r in range(10)]
    tree = make_batch(lists, 9, VOCAB, rng)
    tree.logprobs[:] = tree.logprobs.round()
    problem = Problem.make(tree, [len(parents) for parents in lists], 8, sharp=1.0)
    (choices, end), (found, found_end) = (problem.walk(device, impl) for impl in IMPLS)
    assert choices.equal(found) and all(a.equal(b) for a, b in zip(end, found_end, strict=True))
    assert len({int(f) for f in end.final_rows.cpu() - problem.starts[:-1]}) > 2


# --- noise -----------------------------------------------------------------------------------------------


def test_philox_gives_the_published_words() -> None:
    """Known answers of Random123 (kat_vectors, philox4x32 10)."""
    for word, expected in (
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        filled = torch.tensor([word])
        assert [w.item() for w in _philox([filled] * 4, [filled] * 2)] == expected


def test_noise_differs_by_seed_position_and_node() -> None:
    seeds = torch.tensor([0, 1, 1 << 32, -(2**63), 0, 0])
    positions = torch.tensor([0, 0, 0, 0, 1, 1 << 32])
    for values in keyed_noise_reference(seeds, positions, 4096):
        assert values.isfinite().all() and len(values.unique()) > 0.99 * values.numel()
        centred = values - values.mean(1, keepdim=True)
        correlation = torch.corrcoef(centred) - torch.eye(len(seeds))
        assert correlation.abs().max() < 0.06
    noise = keyed_noise_reference(seeds, positions, 4096)
    assert (noise.accept >= 0).all() and (noise.accept < 1).all()
    assert abs(noise.accept.mean() - 0.5) < 0.01 and abs(noise.order.mean() - 0.5772) < 0.03
    assert abs(torch.corrcoef(torch.stack([noise.accept[0], noise.order[0]]))[0, 1]) < 0.06


def test_wrong_arguments_are_named() -> None:
    tree = Tree.chain(torch.zeros(2, 3), torch.tensor([3, 3]))
    problem = Problem.make(tree, [3, 3], 0)
    statistics = row_statistics(problem.logits)
    given = [
        problem.logits, statistics, problem.starts, tree.tokens, tree.parents, tree.num_nodes, problem.stored,
        problem.states, problem.temperatures, problem.seeds, problem.positions(),
    ]  # fmt: skip
    for index, name, wrong in (
        (1, "statistics.support", RowStatistics(statistics.best, statistics.logsumexp, statistics.best)),
        (2, "row_starts", problem.starts[:-1]),
        (6, "logprobs", problem.stored[:, :2]),
        (6, "logprobs has strides", problem.stored.T.contiguous().T),
        (9, "seeds", problem.seeds.float()),
        (10, "root_positions", problem.positions().int()),
    ):
        with pytest.raises(ValueError, match=name):
            traversal_walk(*[wrong if i == index else value for i, value in enumerate(given)])
    with pytest.raises(ValueError, match="vocab_size is 99"):
        row_statistics(problem.logits, 99)
    with pytest.raises(ValueError, match="num_excluded"):
        bonus_rows(problem.logits, problem.starts[:-1], tree.tokens, tree.num_nodes[:1])
