# SPDX-License-Identifier: Apache-2.0
"""Trees out to storage and back as rows of a step: against plain Python, with hostile indices."""

from __future__ import annotations

import random

import pytest
import torch

from tests.poison import poisoned_memory  # noqa: F401
from tests.trees import KINDS, SIZES, ancestors, make_batch, make_tree
from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.kernels.tree_step import StepArrays, fill_step, store_trees, unpack_drafts
from vllm_weaver.spec_decode.tree import Tree

IMPLS = ("torch", "triton")
VOCAB = 300
STATES = 7


class Batch:
    """A step of requests (state index, rows that may be nodes, query length, computed, prefill length)."""

    def __init__(self, stored: Tree, requests: list[tuple[int, int, int, int, int]], padding: int) -> None:
        self.stored, self.requests = stored, requests
        slots = stored.num_slots
        self.states = torch.tensor([r[0] for r in requests])
        self.limits = torch.tensor([r[1] for r in requests] + [0] * padding, dtype=torch.int32)
        lengths = torch.tensor([0] + [r[2] for r in requests] + [0] * padding)
        self.starts = lengths.cumsum(0).to(torch.int32)
        self.computed = torch.full((STATES,), 10**6, dtype=torch.int32)
        self.prefill = torch.full((STATES,), -5, dtype=torch.int32)
        for state, _, _, computed, prefill in requests:
            if 0 <= state < STATES:
                self.computed[state], self.prefill[state] = computed, prefill
        rows = int(self.starts[-1])
        base = [r[3] for r in requests for _ in range(r[2])]
        offset = [i for r in requests for i in range(r[2])]
        self.linear = torch.tensor(base) + torch.tensor(offset)
        self.ids = torch.randint(1, VOCAB, (rows,), dtype=torch.int32)
        self.ids[::3] = -1  # placeholders
        self.arrays = StepArrays.allocate(len(requests) + padding, slots, torch.device("cpu"))
        for array in vars(self.arrays).values():
            array.fill_(torch.iinfo(array.dtype).max - 7)

    def run(
        self, device: torch.device, impl: str
    ) -> tuple[StepArrays, torch.Tensor, torch.Tensor, torch.Tensor]:
        step = StepArrays(**{name: array.to(device) for name, array in vars(self.arrays).items()})
        positions, ids = self.linear.to(device), self.ids.to(device)
        shift = torch.zeros_like(positions)
        stored = tuple(array.to(device) for array in self.stored.arrays()[:3]) + (
            self.stored.num_nodes.to(device),
        )
        inputs = (self.states, self.limits, self.starts, self.computed, self.prefill)
        fill_step(step, stored, *(x.to(device) for x in inputs), positions, shift, ids, impl=impl)
        host = StepArrays(**{name: array.cpu() for name, array in vars(step).items()})
        return host, positions.cpu(), shift.cpu(), ids.cpu()

    def check(self, device: torch.device, impl: str) -> None:
        step, positions, shift, ids = self.run(device, impl)
        slots = self.stored.num_slots
        untouched = torch.ones(len(ids), dtype=torch.bool)
        for r in range(len(self.limits)):
            state, limit, length, computed, prefill = (*self.requests, *[(-1, 0, 0, 0, 0)] * 9)[r]
            nodes = 0
            if 0 <= state < STATES and limit > 0:
                nodes = min(max(int(self.stored.num_nodes[state]), 1), 1 if computed < prefill else limit)
            assert step.num_nodes[r] == nodes and step.num_path[r] == min(nodes, 1)
            assert step.path[r].tolist() == [0 if nodes else -1] + [-1] * (slots - 1)
            mask = unpack_mask(step.ancestors[r], slots)
            if nodes == 0:
                assert not mask.any()
                continue
            assert step.base[r] == computed
            if int(self.stored.num_nodes[state]):
                parents = self.stored.parents[state].tolist()
                for i in range(nodes):
                    assert mask[i].nonzero().flatten().tolist() == ancestors(parents, i)
                assert torch.equal(step.tokens[r, :nodes], self.stored.tokens[state, :nodes])
                assert torch.equal(step.parents[r, :nodes], self.stored.parents[state, :nodes])
            assert not mask[nodes:].any()
            start = int(self.starts[r])
            for i in range(length):
                depth = int(self.stored.depths[state, i]) if i < nodes else 0
                token = int(self.stored.tokens[state, i]) if i < nodes else 0
                assert positions[start + i] == computed + depth
                assert shift[start + i] == depth - i
                assert ids[start + i] == (self.ids[start] if i == 0 else token)
                untouched[start + i] = False
        assert torch.equal(positions[untouched], self.linear[untouched])
        assert torch.equal(ids[untouched], self.ids[untouched]) and not shift[untouched].any()


def stored_trees(n: int, kind: str = "random") -> Tree:
    rng = random.Random(n)
    return make_batch([make_tree(kind, max(1, n - r % 3), rng) for r in range(STATES)], n, VOCAB, rng)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_request(device: torch.device, kind: str, n: int, impl: str) -> None:
    Batch(stored_trees(n, kind), [(3, n, n, 40, 40)], padding=0).check(device, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_mixed_batch(device: torch.device, impl: str) -> None:
    """Whole and cut trees, a root alone, a prefill chunk, a request inside its prefill, and padding."""
    stored = stored_trees(17)
    stored.num_nodes[6] = 0
    requests = [
        (5, 17, 17, 100, 60),
        (0, 9, 9, 61, 60),
        (6, 1, 1, 7, 7),
        (2, 1, 12, 30, 30),  # more rows than may be nodes
        (4, 17, 17, 8, 9),  # starts inside its prefill
        (1, 0, 50, 0, 70),
    ]
    Batch(stored, requests, padding=2).check(device, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("state", [-1, STATES, 10**6, -(2**31)])
def test_state_index_out_of_range(device: torch.device, state: int, impl: str) -> None:
    Batch(stored_trees(5), [(state, 5, 5, 100, 60), (1, 5, 5, 100, 60)], padding=1).check(device, impl)


def store(
    tree: Tree, device: torch.device, impl: str, rows: list[int], chains: list[int]
) -> tuple[Tree, torch.Tensor]:
    """What is stored for STATES states that held 3s before, and the drafts."""
    shapes = [(STATES, *a.shape[1:]) for a in tree.arrays()]
    stored = tuple(
        torch.full(shape, 3, dtype=a.dtype, device=device)
        for shape, a in zip(shapes, tree.arrays(), strict=True)
    )
    spread = torch.tensor([[row, 9] for row in rows]).to(device)[:, 0]
    drafts = torch.full((9, 40), -7, device=device)
    where = drafts[2 : 2 + len(rows), 5 : 4 + tree.num_slots]
    flags = torch.tensor(chains, dtype=torch.int32, device=device)
    store_trees(tuple(a.to(device) for a in tree.arrays()), stored, spread, where, flags, impl=impl)
    assert (drafts == -7).sum() == 9 * 40 - where.numel()
    return Tree(*(a.cpu() for a in stored)), where.cpu()


@pytest.mark.parametrize("impl", IMPLS)
def test_store(device: torch.device, impl: str) -> None:
    """Strided state indices; rows out of range keep nothing, nothing else is written; drafts are nodes."""
    tree = stored_trees(33)
    tree = Tree(*(a[:5] for a in tree.arrays()))
    found, drafts = store(tree, device, impl, [2, -1, STATES, 0, 2**40], [0] * 5)
    for new, source in zip(found.arrays(), tree.arrays(), strict=True):
        assert torch.equal(new[[2, 0]], source[[0, 3]])
        assert (new[[1, 3, 4, 5, 6]] == 3).all()
    for row, tokens, parents, count in zip(drafts, tree.tokens, tree.parents, tree.num_nodes, strict=True):
        nodes = slice(1, int(count))
        assert unpack_drafts(row.tolist()) == (tokens[nodes].tolist(), parents[nodes].tolist())
        assert torch.equal(row.to(torch.int32), tokens[1:].to(torch.int32)), "what vLLM's input ids get"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 17, 33])
def test_a_request_that_needs_a_chain_keeps_the_first_children(
    device: torch.device, n: int, kind: str, impl: str
) -> None:
    whole = stored_trees(n, kind)
    tree = Tree(*(a[:4].clone() for a in whole.arrays()))
    tree.num_nodes[2] = 0
    found, drafts = store(tree, device, impl, [5, 1, 2, 0], [1, 0, 7, 1])
    assert torch.equal(found.tokens[1], tree.tokens[1]) and torch.equal(found.parents[1], tree.parents[1])
    for state, r in ((5, 0), (2, 2), (0, 3)):
        path, parents = [0] if tree.num_nodes[r] else [], tree.parents[r, : int(tree.num_nodes[r])].tolist()
        while path and path[-1] in parents[1:]:
            path.append(parents.index(path[-1], 1))
        count = len(path)
        assert found.num_nodes[state] == count
        assert found.tokens[state].tolist() == tree.tokens[r, path].tolist() + [-1] * (n - count)
        parents_of_chain = list(range(-1, count - 1))
        assert found.parents[state].tolist() == parents_of_chain + [-1] * (n - count)
        assert found.depths[state].tolist() == list(range(count)) + [0] * (n - count)
        assert torch.equal(found.logprobs[state, :count], tree.logprobs[r, path])
        assert unpack_drafts(drafts[r].tolist()) == (tree.tokens[r, path[1:]].tolist(), parents_of_chain[1:])
        assert (drafts[r, max(0, count - 1) :] == -1).all()


def test_arguments_are_checked() -> None:
    batch = Batch(stored_trees(5), [(1, 5, 5, 100, 60)], padding=0)
    batch.limits = batch.limits[:0]
    with pytest.raises(ValueError, match=r"limits has shape \[0\]; it must be \[1\]"):
        batch.run(torch.device("cpu"), "torch")
