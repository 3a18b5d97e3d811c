# SPDX-License-Identifier: Apache-2.0
"""Tree builders shared by the tests: parent lists of chosen shapes, and batches of such trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

from vllm_weaver.spec_decode.tree import Tree

KINDS = ("chain", "star", "random")
SIZES = (1, 2, 17, 33, 65, 129)


def make_tree(kind: str, n: int, rng: random.Random) -> list[int]:
    """Parents of `n` nodes, the root (parent -1) included: `chain`, `star`, or `random` (topological,
    ragged)."""
    if kind == "chain":
        return [i - 1 for i in range(n)]
    if kind == "star":
        return [-1] + [0] * (n - 1)
    if kind == "random":
        return [-1] + [
            rng.randrange(max(0, i - 9), i) if rng.random() < 0.7 else rng.randrange(i) for i in range(1, n)
        ]
    raise ValueError(f"unknown kind of tree {kind!r}")


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The path from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def make_batch(
    parent_lists: Sequence[Sequence[int]],
    num_slots: int,
    vocab_size: int,
    rng: random.Random,
    device: object = "cpu",
) -> Tree:
    """A Tree of these parent lists in `num_slots` slots, with random tokens, distinct among siblings."""
    tree = Tree.empty(len(parent_lists), num_slots, "cpu")
    for r, parents in enumerate(parent_lists):
        tree.num_nodes[r] = len(parents)
        used: dict[int, set[int]] = {}
        for i, parent in enumerate(parents):
            taken = used.setdefault(parent, set())
            token = rng.choice([t for t in range(vocab_size) if t not in taken])
            taken.add(token)
            tree.tokens[r, i] = token
            tree.parents[r, i] = parent
            tree.depths[r, i] = tree.depths[r, parent] + 1 if parent >= 0 else 0
            tree.logprobs[r, i] = tree.logprobs[r, parent] - rng.random() if parent >= 0 else 0.0
    return Tree(
        *(getattr(tree, f).to(device) for f in ("tokens", "parents", "depths", "logprobs", "num_nodes"))
    )


def mixed_batch(
    num_slots: int, num_requests: int, vocab_size: int, seed: int, device: object = "cpu"
) -> Tree:
    """Up to 4 requests with trees of different kinds and sizes; the first fills all slots."""
    rng = random.Random(seed)
    shapes = [
        ("random", num_slots),
        ("chain", max(1, num_slots // 2)),
        ("star", max(1, num_slots - 3)),
        ("random", 1),
    ]
    lists = [make_tree(kind, n, rng) for kind, n in shapes[:num_requests]]
    return make_batch(lists, num_slots, vocab_size, rng, device)
