# SPDX-License-Identifier: Apache-2.0
"""Traversal walk: its exact output law on tiny vocabularies, a float64 walk by recursion, and hostile input.

The law is measured on the implementation itself. Its randomness is one order of each node's children, which
is enumerated, and one uniform number for each tested node, whose threshold is found by bisection."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import KINDS, SIZES, make_batch, make_tree, mixed_batch
from vllm_weaver.kernels.traversal_rows import (
    RowStatistics,
    bonus_rows,
    place_bonus,
    row_statistics,
)
from vllm_weaver.kernels.traversal_walk import (
    Noise,
    TraversalEnd,
    _philox,
    keyed_noise_reference,
    traversal_walk,
    traversal_walk_reference,
)
from vllm_weaver.spec_decode.tree import Tree

IMPLS = ("torch", "triton")
VOCAB = 37
NAN, INF = float("nan"), float("inf")
HIGHEST = 1 - 2.0**-24


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
    "kind, n", [*((k, n) for k in KINDS for n in SIZES[:3]), ("random", 33), ("star", 33)]
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
    tree = Tree.empty(4, 4, "cpu")
    tree.tokens[:] = torch.tensor([3, 5, 6, 7])
    tree.parents[:] = torch.tensor([-1, 0, hostile, 1])
    tree.logprobs[:] = torch.tensor([0.0, -1, -2, -2])
    tree.num_nodes[:] = 4
    Problem.make(tree, [4] * 4, 1).check(device, impl, [2] * 4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [NAN, -INF, INF, -1e30, 300.0])
def test_hostile_logprobs(device: torch.device, value: float, impl: str) -> None:
    """Whatever the drafter says of its nodes: one of them is accepted where p has nothing else."""
    tree = Tree.empty(4, 4, "cpu")
    tree.tokens[:] = torch.tensor([3, 5, 6, 7])
    tree.parents[:] = torch.tensor([-1, 0, 0, 0])
    tree.logprobs[:] = torch.tensor([0.0, value, -2, value])
    tree.num_nodes[:] = 4
    problem = Problem.make(tree, [4] * 4, 1)
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


# --- the law ---------------------------------------------------------------------------------------------

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


# --- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width, vocab", [(1, 1), (37, 37), (40, 37), (8192, 8192), (20001, 20000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics(device: torch.device, dtype: torch.dtype, width: int, vocab: int, impl: str) -> None:
    logits = (torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 4).to(dtype)
    logits[:, vocab:] = 1e9  # the padded tail of a vocabulary has no probability
    logits[1, : vocab // 2] = -INF
    rows = logits[:, :vocab].double()
    found = row_statistics(logits.to(device), vocab, impl=impl)
    assert found.best.tolist() == rows.numpy().argmax(1).tolist()
    assert found.support.tolist() == [vocab, vocab - vocab // 2, vocab, vocab, vocab]
    torch.testing.assert_close(found.logsumexp.cpu().double(), rows.logsumexp(1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_statistics_of_hostile_rows(device: torch.device, impl: str) -> None:
    logits = torch.full((5, 9000), -INF)
    logits[0] = NAN
    logits[2, [10, 8500]] = torch.tensor([NAN, -5.0])
    logits[3, [8300, 8301]] = torch.tensor([INF, 1.0])
    logits[4, [4, 8200]] = 2.0  # a tie across blocks goes to the lower id
    found = row_statistics(logits.to(device), impl=impl)
    assert found.best.tolist() == [0, 0, 8500, 8300, 4]
    assert found.support.tolist() == [0, 0, 1, 2, 2]
    assert found.logsumexp.tolist()[:3] == [-INF, -INF, -5.0]
    assert math.isfinite(found.logsumexp[3]) and abs(found.logsumexp[4] - 2 - math.log(2)) < 1e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab", [1, 37, 4096, 9001])
def test_bonus_rows_and_their_place(device: torch.device, vocab: int, impl: str) -> None:
    logits = torch.randn(6, vocab + 3, generator=torch.Generator().manual_seed(vocab))[:, :vocab]
    excluded = torch.tensor([[0, vocab - 1, 7], [0, 1, 2], [-1, vocab, 2**62], [0, -1, -1]])
    counts = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    final = torch.tensor([5, 0, 3, -1])
    found = bonus_rows(
        logits.to(device), final.to(device), excluded.to(device), counts.to(device), impl=impl
    ).cpu()
    expected = logits[[5, 0, 3, 0]].clone()
    expected[0, [0, vocab - 1]] = -INF
    expected[3] = -INF
    assert found.equal(expected)
    choices = torch.arange(6, device=device)
    place_bonus(choices, final.to(device), torch.tensor([70, 80, 90, 99], device=device), impl=impl)
    assert choices.tolist() == [80, 1, 2, 90, 4, 70]


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
