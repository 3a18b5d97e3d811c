# SPDX-License-Identifier: Apache-2.0
"""Mixed verify steps for the tests of the tree kernels: packed rows, their trees, and who may write where."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.trees import KINDS, SIZES, ancestors, make_tree
from vllm_weaver.kernels.ancestors import ancestor_mask_words

PADDING_ROWS = 3  # rows after the last request, as in a replayed graph

Part = tuple[str, int, int]
"""(kind of tree or "prefill", tree nodes or chunk length, placeholder rows after the nodes)."""


@dataclass(frozen=True)
class Step:
    """A step of R requests; tensors on the test's device, `trees` None for requests that are no tree."""

    trees: list[list[int] | None]
    starts: list[int]
    num_slots: int
    query_start_loc: Tensor
    num_nodes: Tensor
    parents: Tensor
    ancestors: Tensor

    @property
    def num_rows(self) -> int:
        return self.starts[-1] + PADDING_ROWS

    def node_rows(self) -> list[int]:
        """Rows of valid tree nodes."""
        return [self.starts[r] + i for r, tree in enumerate(self.trees) if tree for i in range(len(tree))]

    def placeholder_rows(self) -> list[int]:
        """Rows of tree requests that are no node."""
        return [
            row
            for r, tree in enumerate(self.trees)
            if tree
            for row in range(self.starts[r] + len(tree), self.starts[r + 1])
        ]

    def foreign_rows(self) -> list[int]:
        """Rows that a tree kernel must leave alone: prefill chunks and padding."""
        tree_rows = {*self.node_rows(), *self.placeholder_rows()}
        return [row for row in range(self.num_rows) if row not in tree_rows]

    def random_paths(self, rng: random.Random) -> tuple[list[list[int]], Tensor, Tensor]:
        """An accepted path for every tree (a root-to-node path, deep nodes preferred): as lists, and as the
        path int32 [R, N] and num_path int32 [R] tensors; empty for requests that are no tree."""
        paths = [
            max((ancestors(t, rng.randrange(len(t))) for _ in range(3)), key=len) if t else []
            for t in self.trees
        ]
        device = self.parents.device
        table = torch.tensor([p + [-1] * (self.num_slots - len(p)) for p in paths], dtype=torch.int32)
        lengths = torch.tensor([len(p) for p in paths], dtype=torch.int32)
        return paths, table.to(device), lengths.to(device)


def make_step(parts: list[Part], device: torch.device, seed: int = 0, spare_slots: int = 2) -> Step:
    """The step of these requests, in this order; every tree has `spare_slots` node slots to spare."""
    rng = random.Random(seed)
    trees = [None if kind == "prefill" else make_tree(kind, n, rng) for kind, n, _ in parts]
    num_slots = max(n + extra for kind, n, extra in parts if kind != "prefill") + spare_slots
    starts = [0]
    for _, n, extra in parts:
        starts.append(starts[-1] + n + extra)
    # Slots without a node hold what a reused buffer would: parents that look like a tree.
    rows = [tree or [-1] for tree in trees]
    parents = torch.tensor([row + [0] * (num_slots - len(row)) for row in rows], dtype=torch.int32)
    num_nodes = torch.tensor([len(t or []) for t in trees], dtype=torch.int32)
    return Step(
        trees,
        starts,
        num_slots,
        torch.tensor(starts, dtype=torch.int32, device=device),
        num_nodes.to(device),
        parents.to(device),
        ancestor_mask_words(parents, num_nodes, impl="torch").to(device),
    )


BATCHES: dict[str, list[Part]] = {
    **{f"{kind}-{n}": [(kind, n, 0)] for n in SIZES for kind in KINDS if n > 2 or kind == "chain"},
    "random-257": [("random", 257, 0)],
    "batch-2": [("random", 17, 4), ("chain", 5, 0)],
    "batch-3-prefill-first": [("prefill", 7, 0), ("random", 33, 0), ("star", 9, 2)],
    "batch-4-mixed": [("chain", 1, 35), ("prefill", 1, 0), ("random", 20, 0), ("random", 34, 3)],
}
"""Parts by readable id: every size as chain, star and random tree, the widest tree, and mixed batches."""


HOSTILE_PATHS: dict[str, tuple[list[int], int, int]] = {
    "nothing-accepted": ([0, 1, 2], 0, 0),
    "negative-length": ([0, 1, 2], -3, 0),
    "root-only": ([0, 1, 2], 1, 1),
    "length-beyond-slots": ([0, 1, 2], 2**31 - 1, 3),
    "minus-one-inside": ([0, 1, -1, 3], 4, 2),
    "placeholder-node": ([0, 1, 6], 3, 2),
    "past-the-rows": ([0, 1, 2, 8], 4, 3),
    "huge": ([0, 2**31 - 1, 2], 3, 1),
    "back-to-the-root": ([0, 1, 0], 3, 2),
    "repeated": ([0, 1, 1], 3, 2),
    "not-from-the-root": ([1, 2, 3], 3, 0),
    "all-minus-one": ([-1, -1], 2, 0),
}
"""A path, its claimed length and how many of its entries may be used, for a chain of 6 nodes in 8 rows."""

HOSTILE_PARTS: list[Part] = [("chain", 6, 2), ("chain", 3, 0)]
"""The step that `HOSTILE_PATHS` are about; its second request has the sound path [0, 1]."""


def hostile_path_tensors(path: list[int], claimed: int, step: Step) -> tuple[Tensor, Tensor]:
    """path int32 [2, N] and num_path int32 [2] for `HOSTILE_PARTS`."""
    table = torch.full((2, step.num_slots), -1, dtype=torch.int32)
    table[0, : len(path)] = torch.tensor(path, dtype=torch.int32)
    table[1, :2] = torch.tensor([0, 1], dtype=torch.int32)
    device = step.parents.device
    return table.to(device), torch.tensor([claimed, 2], dtype=torch.int32, device=device)


def poison(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer full of NaN."""
    return torch.full(shape, torch.nan, device=device, dtype=dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Bitwise equality, NaN included."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.view(words), right.view(words))
